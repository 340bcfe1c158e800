"""What the terminal says of timings."""

from __future__ import annotations

from io import StringIO
from typing import Any

from rich.console import Console

from snows.cli.bench_table import print_bench
from snows.timing.benchmark import Benchmark, LayerBenchmark, LayerTiming, NetworkTiming
from snows.timing.clock import Timing
from snows.timing.possibilities import RULES

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
        layer("wide", None, None, never=("it is deep",)),
    )
    assert "Net on Chip, 2 threads; float32; torch 2" in text
    assert "quick and 1 alike" in text
    assert "2.00, faster" in text
    assert "0.50, slower" in text
    assert "2.00, unclear" in text
    assert "not sparse here: wide: it is wide" in text
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
    assert "Nothing that was timed was faster sparse here: pruning makes this network smaller at most" in text


def test_layers_that_run_elsewhere_are_grouped_by_engine_and_rule() -> None:
    tensorrt, xnnpack, csr = "TensorRT on an NVIDIA GPU", "XNNPACK on a CPU", "torch CSR on a CPU"
    text = shown(
        layer("a", timing(4), timing(2), elsewhere={tensorrt: None, xnnpack: "it is long", csr: None}),
        layer("b", timing(4), timing(2), elsewhere={tensorrt: None, xnnpack: "it is long", csr: None}),
        layer("c", None, None, elsewhere={tensorrt: "it is odd", xnnpack: "it is long", csr: "it is round"}),
    )
    lines = text.splitlines()
    first = next(i for i, line in enumerate(lines) if "elsewhere" in line)
    assert lines[first].startswith(f"  elsewhere: {tensorrt} takes 2:4, input channels in multiples of 4")
    assert lines[first].endswith(": 2 of 3 layers (a, b); not timed")
    assert lines[first + 1 : first + 4] == [
        "    not c: it is odd",
        f"  elsewhere: {xnnpack} takes {RULES[xnnpack]}: 0 of 3 layers; not timed",
        "    not a, b, c: it is long",
    ]
    assert "takes linear layers and 1x1 convolutions" not in text  # that is here, and was timed


def network(engine: str, dense: Timing, sparse: Timing) -> tuple[NetworkTiming, ...]:
    return NetworkTiming(engine, "mode", "dense", 1, dense), NetworkTiming(engine, "mode", "sparse", 1, sparse)


LAME, QUICK = (timing(2), timing(4)), (timing(4), timing(2))
SMALLER = "Nothing was faster sparse here: pruning makes this network smaller at most, not faster."


def test_the_advice_looks_at_the_whole_network_first() -> None:
    """No layer of torch gains, and still OpenVINO may."""
    text = shown(layer("a", *LAME), network=(*network("torch", timing(8), timing(9)), *network("openvino", *QUICK)))
    way = "The whole network was faster sparse than dense in openvino, mode, batch 1, weights sparse: 2.00 times"
    assert text.splitlines()[-2:] == [
        way,
        "No single layer was faster sparse in torch, so that there is no list of layers to prune.",
    ]
    assert "not faster" not in text
    text = shown(layer("a", *QUICK), network=network("openvino", *QUICK))
    assert text.splitlines()[-2:] == [way, "If speed in torch is the goal, prune 1 of 1 layers: a"]


def test_the_advice_where_little_gains() -> None:
    only_layers = "Only single layers were faster sparse; the whole network was not, in any way that was timed."
    text = shown(layer("a", *QUICK), network=network("torch", *LAME))
    assert text.splitlines()[-2:] == [only_layers, "If speed in torch is the goal, prune 1 of 1 layers: a"]
    assert only_layers not in shown(layer("a", *QUICK), network=network("torch", *LAME)[:1])  # dense only
    assert shown(layer("a", *LAME), network=network("torch", *LAME)).splitlines()[-1] == SMALLER
    unclear = network("openvino", timing(4, 2), timing(2, 1))
    assert shown(layer("a", *LAME), network=unclear).splitlines()[-1] == SMALLER
    text = shown(layer("a", None, None), network=network("onnxruntime", *LAME)[:1])
    assert text.splitlines()[-1].startswith("Nothing sparse was timed, so that nothing says whether")


def test_a_gain_that_a_dense_network_in_another_engine_beats() -> None:
    rows = (*network("torch", *QUICK), *network("openvino", timing(1), timing(1)))
    text = shown(layer("a", *QUICK), network=rows)
    assert "Fastest whole network at batch 1: openvino, mode, weights dense" in text
    assert text.splitlines()[-2].endswith(
        "torch, mode, batch 1, weights sparse: 2.00 times (dense weights in openvino, mode, are faster still)"
    )
