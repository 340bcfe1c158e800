"""What the terminal says of timings."""

from __future__ import annotations

from io import StringIO
from typing import Any

from rich.console import Console

from snows.cli.bench_table import print_bench
from snows.timing.benchmark import Benchmark, LayerBenchmark, LayerTiming, NetworkTiming
from snows.timing.clock import Timing

MACHINE = {"device": "cpu", "cpu": "Chip", "threads": 2, "versions": {"torch": "2"}}


def timing(milliseconds: float, spread: float = 0.0) -> Timing:
    return Timing(milliseconds / 1e3, (milliseconds - spread) / 1e3, (milliseconds + spread) / 1e3, 5)


def layer(name: str, dense: Timing | None, sparse: Timing | None, **more: Any) -> LayerBenchmark:
    timings = () if dense is None or sparse is None else (LayerTiming(1, "CSR, MKL", "eager", dense, sparse),)
    return LayerBenchmark(
        name, f"{name}.weight", (8, 8), 0.9, None if timings else "it is wide", timings=timings, **more
    )


def shown(*layers: LayerBenchmark, **more: Any) -> str:
    found = Benchmark("Net", MACHINE, "float32", (1,), layers, more.pop("network", ()), **more)
    console = Console(file=StringIO(), width=160, markup=False, highlight=False)
    print_bench(found, console)
    return console.file.getvalue()  # type: ignore[attr-defined]


def test_faster_slower_unclear() -> None:
    text = shown(
        layer("quick", timing(4), timing(2)),
        layer("lame", timing(2), timing(4)),
        layer("noisy", timing(4, 2), timing(2, 1)),
        layer("twin", timing(4), timing(2), timed_as="quick"),
        layer("wide", None, None, elsewhere={"TensorRT": None, "XNNPACK": "no"}, never=("it is deep",)),
    )
    assert "Net on Chip, 2 threads; float32; torch 2" in text
    assert "quick and 1 alike" in text
    assert "2.00, faster" in text
    assert "0.50, slower" in text
    assert "2.00, unclear" in text
    assert "not sparse here: wide: it is wide" in text
    assert "TensorRT can take 1 of 5 layers; not timed" in text
    assert "XNNPACK can take" not in text
    assert "wide: it is deep" in text
    assert "prune 2 of 5 layers: quick, twin" in text


def test_the_whole_network_and_what_was_left_out() -> None:
    rows = (
        NetworkTiming("torch", "eager", "dense", 1, timing(300)),
        NetworkTiming("openvino", "float32", "all", 1, None, "RuntimeError: no"),
    )
    flops = {"dense": 2e9, "sparse": 1e9, "attention": 0, "reduction": 2.0}
    text = shown(layer("lame", timing(2), timing(4)), network=rows, flops=flops, not_timed=("one", "two"))
    assert "300 (300–300)" in text
    assert "RuntimeError: no" in text
    assert "Fastest whole network at batch 1: torch, eager, weights dense" in text
    assert "the time limit left out 2: one, two" in text
    assert "2 G dense, 1 G sparse, 2.00 times fewer. That is no time" in text
    assert "No layer that was timed was faster sparse here" in text
