"""`snows prune`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, NoReturn

import pytest
import torch
from safetensors.torch import save_file

import snows
from snows.data.weights import read_state
from snows.events import LayerSolved
from snows.listeners.base import Progress

from ..conftest import Outcome, Snows, assert_error
from .helpers import MODEL, PRUNE, same, weights


def test_quiet_and_json(run: Snows, tmp_path: Path) -> None:
    quiet = run(*PRUNE, "--quiet", "--out", tmp_path / "out")
    assert quiet == Outcome(0, "", "")
    assert (tmp_path / "out" / "model.safetensors").is_file()
    outcome = run(*PRUNE, "--json", "--seed", 0)
    assert outcome.err == ""
    stored = json.loads((tmp_path / "out" / "report.json").read_text())
    times = {"seconds", "source", "layers", "phases"}
    assert {k: v for k, v in outcome.data.items() if k not in times} == {
        k: v for k, v in stored.items() if k not in times
    }
    assert outcome.data["samples"] == 48
    assert outcome.data["pattern"] == "2:4"
    assert outcome.data["evaluation"] == []
    table = run(*PRUNE)
    assert "Nothing was saved: pass --out DIR to keep the result." in table.out


def test_patterns_layers_exclusions_and_horizon(run: Snows) -> None:
    data = run(
        *PRUNE, "--json", "--pattern", "1:4, 2=0.5, 6=dense", "--layers", "*", "--exclude", "0", "--horizon", "1",
        "--mask", "wanda", "--seed", "5",
    ).data  # fmt: skip
    assert {layer["name"]: (layer["pattern"], layer["sparsity"]) for layer in data["layers"]} == {
        "2": ("0.5", 0.5),
        "4": ("1:4", 0.75),
    }
    assert {layer["name"]: layer["reason"] for layer in data["dense_layers"]} == {
        "0": "excluded",
        "6": "its pattern is 'dense'",
    }
    assert {layer["horizon"] for layer in data["layers"]} == {1}
    assert data["recipe"]["horizon"] == 1
    assert (data["mask"], data["seed"]) == ("wanda", 5)


def test_masks_of_every_kind(run: Snows, tmp_path: Path) -> None:
    masks = {}
    for mask in ("magnitude", "random", "wanda"):
        out = tmp_path / mask
        assert run(*PRUNE, "--quiet", "--mask", mask, "--out", out).status == 0
        masks[mask] = read_state(out / "masks.safetensors")
    assert not same(masks["magnitude"], masks["random"])
    # a file of masks says everything
    given = tmp_path / "given"
    file = tmp_path / "random" / "masks.safetensors"
    assert run(*PRUNE, "--quiet", "--mask", file, "--out", given).status == 0
    assert same(read_state(given / "masks.safetensors"), masks["random"])
    assert same(weights(given), weights(tmp_path / "random"))
    report = json.loads((given / "report.json").read_text())
    assert (report["pattern"], report["mask"]) == ("given", "given")
    # so do the zeros of the weights
    zeros = run("prune", "net.py:sparse", *PRUNE[2:], "--mask", "weights", "--json").data
    assert [(layer["name"], layer["sparsity"]) for layer in zeros["layers"]] == [("2", 0.5)]
    # and weights may come from a file
    sparse = ("--weights", tmp_path / "random" / "model.safetensors", "--mask", "weights", "--json")
    assert {layer["name"] for layer in run(*PRUNE, *sparse).data["layers"]} == {"2", "4"}
    torch.save({name.removesuffix(".weight"): mask.byte() for name, mask in masks["random"].items()}, tmp_path / "m.pt")
    found = run(*PRUNE, "--mask", tmp_path / "m.pt", "--json").data
    assert (found["pattern"], found["mask"]) == ("given", "given")
    save_file({"2": torch.full((16, 16), 0.5)}, tmp_path / "halves.safetensors")
    assert_error(run(*PRUNE, "--mask", tmp_path / "halves.safetensors"), 2, "expected a bool tensor or one of 0 and 1")


def test_recipes_by_name_by_file_and_from_the_config(run: Snows, tmp_path: Path) -> None:
    start = ("prune", "net.py:model", "--data", "net.py:calibration", "--json", "--layers", "2")
    paper = run(*start, "--recipe", "paper").data
    assert paper["recipe"]["start"] == "masked"
    assert paper["recipe"]["damping"] == 1e-4
    default = run(*start).data
    assert default["recipe"] == json.loads(json.dumps(snows.Recipe().__dict__))
    config = tmp_path / "run.toml"
    config.write_text("[recipe]\nsweeps = 2\ncg_steps = 1\n")
    mixed = run(*start, "--recipe", "fast.json", "--config", config).data
    assert (mixed["recipe"]["horizon"], mixed["recipe"]["sweeps"], mixed["recipe"]["cg_steps"]) == (2, 2, 1)
    assert [solve["sweep"] for solve in mixed["layers"][0]["solves"]] == [0, 1]


def test_the_seed_decides(run: Snows, tmp_path: Path) -> None:
    for name, seed in (("a", 1), ("b", 1), ("c", 2)):
        assert run(*PRUNE, "--quiet", "--mask", "random", "--seed", seed, "--out", tmp_path / name).status == 0
    assert same(weights(tmp_path / "a"), weights(tmp_path / "b"))
    assert not same(weights(tmp_path / "a"), weights(tmp_path / "c"))


@pytest.mark.parametrize("data", ["x", "loader", "dataset", "batches", "labelled"])
def test_the_number_of_samples(data: str, run: Snows) -> None:
    """Whatever the factory gives, the first ones are used."""
    found = run("prune", "net.py:model", "--data", f"net.py:{data}", *PRUNE[4:], "--samples", 30, "--json").data
    assert found["samples"] == 30
    assert bool(found["evaluation"]) == (data in ("x", "labelled"))  # the rest of a tensor evaluates


def test_warnings_are_lines_on_standard_error(run: Snows) -> None:
    outcome = run(*PRUNE, "--json", "--exclude", "fc9")
    assert outcome.err.count("\n") == 1  # though the command prunes twice
    assert outcome.err.startswith("warning: exclude='fc9' fits no layer")
    assert outcome.data["warnings"]


def test_names_are_not_read_as_markup(run: Snows) -> None:
    words = ("net.py:bracketed", "--data", "net.py:calibration", "--pattern", "[[]/red]=2:4")
    for command in (("prune", *words, "--recipe", "fast.json"), ("inspect", *words)):
        outcome = run(*command)
        assert outcome.status == 0, outcome.err
        assert "/red]" in outcome.out


# What is run, reported and said


def test_only_networks_that_are_shown_are_made(run: Snows, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[dict[str, Any]] = []
    prune = snows.prune

    def counted(*arguments: Any, **options: Any) -> snows.Result:
        calls.append(options)
        return prune(*arguments, **options)

    def stop(*arguments: Any, **options: Any) -> snows.Result:
        calls.append(options)
        raise snows.InputError("stop")

    monkeypatch.setattr("snows.api.prune", counted)
    assert run(*MODEL, "--data", "net.py:calibration", *PRUNE[4:]).status == 0
    assert ["solver" in options for options in calls] == [False]
    assert run(*MODEL, "--data", "net.py:unlabelled", *PRUNE[4:]).status == 0
    assert ["solver" in options for options in calls] == [False, True, False]
    # the embedded network has a third row, K=0; without test data that is not made either
    monkeypatch.setattr("snows.api.prune", stop)
    calls.clear()
    run("prune", "--data", "net.py:gray")
    assert [(options.get("solver", "newton"), options["horizon"]) for options in calls] == [("newton", None)]


def test_the_saved_report_has_the_warnings_of_the_data(run: Snows, tmp_path: Path) -> None:
    words = ("net.py:images", "--data", "net.py:pixels", "--samples", 32, "--recipe", "fast.json")
    outcome = run("prune", *words, "--out", tmp_path / "out")
    assert "mask only" in outcome.shown
    assert outcome.err.count("look unnormalized") == 1
    report = json.loads((tmp_path / "out" / "report.json").read_text())
    assert [warning.split(" (")[0] for warning in report["warnings"]] == ["the calibration images look unnormalized"]


def interrupt_after(solves: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ctrl-C, pressed after that many solved layers."""
    seen = 0

    def pressed(self: Progress, event: snows.Event) -> None:
        nonlocal seen
        seen += isinstance(event, LayerSolved)
        if seen == solves:
            raise KeyboardInterrupt

    monkeypatch.setattr(Progress, "__call__", pressed)


def test_an_interrupted_run_says_that_nothing_is_kept(
    run: Snows, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    interrupt_after(1, monkeypatch)
    outcome = run(*PRUNE, "--out", tmp_path / "out")
    assert outcome.status == 130
    assert outcome.err.splitlines() == ["interrupted; nothing was saved; --resume DIR keeps finished layers"]
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("solves", "words"),
    [
        (0, "no layer was finished; {} holds nothing to continue from"),
        (1, "1 layer solve is kept in {}; the same command continues"),
        (2, "2 layer solves are kept in {}; the same command continues"),
    ],
)
def test_an_interrupted_run_says_what_resume_keeps(
    solves: int, words: str, run: Snows, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    command = (*PRUNE, "--resume", tmp_path / "state", "--out", tmp_path / "out")
    with monkeypatch.context() as during:
        interrupt_after(solves, during)
        outcome = run(*command)
    assert outcome.status == 130
    assert outcome.err.splitlines() == [f"interrupted; {words.format(tmp_path / 'state')}"]
    again = run(*command)
    assert (f"{solves} solves were finished before" in again.shown) == (solves > 0)
    if solves:
        assert run(*PRUNE, "--quiet", "--out", tmp_path / "whole").status == 0
        assert same(weights(tmp_path / "out"), weights(tmp_path / "whole"))


def test_an_interrupted_evaluation(run: Snows, monkeypatch: pytest.MonkeyPatch) -> None:
    def pressed(*_: Any, **__: Any) -> NoReturn:
        raise KeyboardInterrupt

    monkeypatch.setattr("snows.evaluation.classes.evaluate", pressed)
    outcome = run("evaluate", "net.py:model", "--data", "net.py:labelled")
    assert (outcome.status, outcome.err) == (130, "interrupted\n")
