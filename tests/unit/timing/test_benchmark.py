"""What a benchmark says of its timings, and its file."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

import snows
from snows.data.layer_lists import read_layer_list
from snows.errors import InputError
from snows.timing.benchmark import Benchmark, LayerBenchmark, LayerTiming, NetworkTiming
from snows.timing.clock import Timing
from tests.saved import strict


def timing(milliseconds: float, spread: float = 0.0) -> Timing:
    return Timing(milliseconds / 1e3, (milliseconds - spread) / 1e3, (milliseconds + spread) / 1e3, 5)


def layer(name: str, *timings: LayerTiming) -> LayerBenchmark:
    return LayerBenchmark(name, f"{name}.weight", (8, 8), 0.5, None, timings=timings)


def eager(batch: int, dense: Timing, sparse: Timing) -> LayerTiming:
    return LayerTiming(batch, "2:4", "eager", dense, sparse)


FOUND = Benchmark(
    "Net", {"device": "cpu"}, "float32", (1, 8),
    (
        layer("fast", eager(1, timing(2), timing(3)), eager(8, timing(4), timing(2))),
        # Sparse as a graph beats dense eager, but not dense as a graph.
        layer("graph", eager(1, timing(4), timing(9)), LayerTiming(1, "2:4", "graph", timing(2), timing(3))),
        layer("unclear", eager(1, timing(4, 1), timing(3, 1))),
        layer("untimed"),
    ),
    (),
)  # fmt: skip


def test_it_is_shown_in_a_line() -> None:
    assert repr(FOUND) == "<Benchmark: Net in float32, 1 of 4 layers faster sparse>"


def test_the_best_ways_are_compared() -> None:
    fast, graph, unclear, untimed = FOUND.layers
    assert graph.fastest(1) == (timing(2), timing(3))
    assert untimed.fastest(1) is None
    assert [entry.pays(1) for entry in (fast, graph, unclear, untimed)] == [False] * 4
    assert fast.pays(8)
    assert FOUND.prune == ("fast",)


def test_the_kernel_that_is_fastest_at_the_largest_batch() -> None:
    slow, quick = LayerTiming(8, "a", "eager", timing(4), timing(3)), LayerTiming(8, "b", "eager", timing(4), timing(2))
    small = LayerTiming(1, "a", "eager", timing(1), timing(0.5))
    assert layer("x", small, slow, quick).kernel == "b"
    assert layer("x").kernel is None


def test_the_fastest_way_of_the_whole_network() -> None:
    rows = [
        NetworkTiming("torch", "eager", "sparse", 1, timing(3)),
        NetworkTiming("openvino", "float32", "dense", 1, timing(2)),
        NetworkTiming("torch", "compiled", "all", 1, None, "it failed"),
    ]
    found = replace(FOUND, network=tuple(rows))
    assert found.fastest(1) == rows[1]
    assert found.fastest(8) is None


def test_ways_in_which_the_whole_network_gains() -> None:
    rows = [
        NetworkTiming("torch", "eager", "dense", 1, timing(4)),
        NetworkTiming("torch", "eager", "sparse", 1, timing(5)),
        NetworkTiming("torch", "eager", "sparse where it pays", 1, timing(2)),
        NetworkTiming("torch", "eager", "sparse", 8, timing(1)),  # nothing to compare with
        NetworkTiming("torch", "compiled", "all", 1, None, "it failed"),
        NetworkTiming("openvino", "float32", "dense", 1, timing(3, 1)),
        NetworkTiming("openvino", "float32", "sparse", 1, timing(2, 1)),  # within the spread
    ]
    found = replace(FOUND, network=tuple(rows))
    assert found.gains(1) == ((rows[2], 2.0),)
    assert found.gains(8) == ()
    assert found.sparse_network
    assert not replace(FOUND, network=tuple(row for row in rows if row.weights == "dense")).sparse_network


def test_the_file_is_json_that_prune_reads(tmp_path: Path) -> None:
    file = tmp_path / "bench.json"
    FOUND.save(file)
    data = strict(file.read_text())
    assert data["pays_at"] == {"1": [], "8": ["fast"]}
    assert data["layers"][0]["timings"][0]["dense"]["median"] == 0.002
    assert read_layer_list(file) == ("fast",)
    assert snows.Benchmark is Benchmark


def test_a_file_that_cannot_be_written_is_one_sentence(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"cannot write .*nothing/bench.json"):
        FOUND.save(tmp_path / "nothing" / "bench.json")
