"""`snows evaluate`."""

from __future__ import annotations

from pathlib import Path

from ..conftest import Outcome, Snows, assert_error
from .helpers import PRUNE


def test_evaluation_with_and_without_labels_and_a_pruned_network(run: Snows, tmp_path: Path) -> None:
    assert run(*PRUNE, "--quiet", "--out", tmp_path / "out").status == 0
    start = ("evaluate", "net.py:model", "--data")
    pruned = ("--pruned", tmp_path / "out")
    plain = run(*start, "net.py:labelled", "--json").data
    assert [set(row) for row in plain] == [{"network", "top1", "top5", "loss"}]
    assert plain[0]["top1"] == 1
    both = run(*start, "net.py:labelled", *pruned, "--json").data
    assert [row["network"] for row in both] == ["dense", "pruned"]
    assert set(both[1]) == {"network", "top1", "top5", "loss", "agreement", "kl"}
    assert both[0]["agreement"] == 1
    assert both[1]["agreement"] == both[1]["top1"] < 1  # the labels are the dense network's own choices
    without = run(*start, "net.py:unlabelled", *pruned, "--json").data
    assert without == [{k: row[k] for k in ("network", "agreement", "kl")} for row in both]
    table = run(*start, "net.py:labelled", *pruned)
    assert "48 samples" in table.out
    assert "pruned" in table.out
    assert run(*start, "net.py:labelled", "--quiet") == Outcome(0, "", "")
    assert_error(run(*start, "net.py:unlabelled"), 1, "the data has no labels: pass --pruned DIR")
    assert_error(run(*start, "net.py:calibration"), 1, "no samples are left to evaluate on")
    assert_error(run(*start, "net.py:labelled", "--pruned", tmp_path / "no"), 1, "there is no file")
    wrong = run("evaluate", "net.py:images", "--data", "net.py:labelled", *pruned)
    assert_error(wrong, 1, "model.safetensors does not fit Sequential: ")


def test_a_loader_and_a_metric_of_ones_own(run: Snows, tmp_path: Path) -> None:
    """A segmentation network: no class scores for a sample, test samples in a DataLoader, labels within its batches."""
    words = ("net.py:segmenter", "--data", "net.py:scenes", "--metric", "net.py:pixel_accuracy")
    pruned = run("prune", *words, "--pattern", "2:4", "--recipe", "fast.json", "--json", "--out", tmp_path / "out").data
    rows = pruned["evaluation"]
    assert [row["network"] for row in rows][:2] == ["dense", "mask only"]
    assert [set(row) for row in rows] == [{"network", "pixels", "images of 120"}] * 3
    assert rows[0]["pixels"] == 1
    assert 0.3 < rows[1]["pixels"] < rows[2]["pixels"] < 1
    assert {row["images of 120"] for row in rows} == {20}
    found = run("evaluate", *words, "--pruned", tmp_path / "out", "--json").data
    assert found == [rows[0], {**rows[2], "network": "pruned"}]
    table = run("evaluate", *words)
    assert "20 samples" in table.out
    assert "pixels" in table.out
    plain = run("evaluate", "net.py:model", "--data", "net.py:pairs", "--metric", "net.py:error", "--json").data
    assert plain == [{"network": "dense", "error": 0.0}]
