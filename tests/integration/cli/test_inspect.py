"""`snows inspect`."""

from __future__ import annotations

from pathlib import Path

from ..conftest import Outcome, Snows, assert_error


def test_inspection(run: Snows) -> None:
    start = ("inspect", "net.py:model", "--data", "net.py:calibration")
    table = run(*start, "--recipe", "fast.json")
    assert (table.status, table.err) == (0, "")
    for part in ("Sequential", "16x16", "2:4", "): first layer", "GiB", "1 sweep:"):
        assert part in table.out
    data = run(*start, "--pattern", "1:4", "--horizon", 1, "--exclude", "4", "--samples", 500, "--json").data
    layers = {layer["name"]: layer for layer in data["layers"]}
    assert layers["2"]["pattern"] == "1:4"
    assert layers["2"]["horizon"] == 1
    assert layers["2"]["shape"] == [16, 16]
    assert layers["4"]["reason"] == "excluded"
    assert data["samples"] == 500
    assert data["seconds"] > 0
    assert data["memory_bytes"] > 0
    assert run(*start, "--quiet") == Outcome(0, "", "")


def test_it_plans_for_the_samples_that_there_are(run: Snows, tmp_path: Path) -> None:
    start = ("inspect", "net.py:model", "--data", "net.py:calibration", "--json")
    assert run(*start).data["samples"] == 48
    assert run(*start, "--samples", 96).data["samples"] == 96
    assert run("inspect", "--json").data["samples"] == 1000
    (tmp_path / "c.toml").write_text("[data]\nsize = 12\n")
    assert run("inspect", "net.py:images", "--config", tmp_path / "c.toml", "--json").data["samples"] == 3000


def test_inspection_where_nothing_can_be_pruned(run: Snows) -> None:
    start = ("inspect", "net.py:nothing_between", "--data", "net.py:calibration")
    data = run(*start, "--json").data
    assert [layer["reason"].split(" (")[0] for layer in data["layers"]] == ["first layer", "last layer"]
    assert {layer["pattern"] for layer in data["layers"]} == {None}
    table = run(*start)
    assert table.status == 0
    assert "): first layer" in table.out
    # pruning it is a failure that says the same
    assert_error(run("prune", *start[1:]), 1, "no layer can be pruned: 0: first layer")


def test_inspection_without_data_takes_random_images(run: Snows, tmp_path: Path) -> None:
    (tmp_path / "c.toml").write_text("[data]\nsize = 12\n")
    data = run("inspect", "net.py:images", "--config", tmp_path / "c.toml", "--json").data
    assert [layer["name"] for layer in data["layers"] if layer["pattern"]] == ["2", "4"]


def test_names_of_layers_are_whole_in_a_narrow_terminal(run: Snows) -> None:
    start = ("inspect", "net.py:long_names", "--data", "net.py:calibration", "--recipe", "fast.json")
    table = run(*start, columns=80).out
    names = [f"backbone_of_the_vision_transformer_encoder_layers.{place}" for place in (2, 4)]
    assert all(name in table for name in names)
    assert "Too wide for this terminal: curvature, K, memory, shape; --json shows them." in table
    assert max(len(line) for line in table.splitlines()) <= 80
    assert "Too wide" not in run(*start, columns=120).out
