"""`snows.bench` on small saved results."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

import snows
from snows.errors import ArgumentError, InputError
from snows.events import Event, Working
from snows.timing import benchmarking, kernels
from tests.exported import calibration, images, save


@pytest.fixture(scope="module")
def pruned(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save(tmp_path_factory.mktemp("results") / "pruned", images(), calibration())


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(benchmarking, "_SECONDS", 0.01)
    monkeypatch.setattr(benchmarking, "_NETWORK_SECONDS", 0.01)


def bench(folder: Path, **options: object) -> snows.Benchmark:
    given = {"batches": (1, 2), "engines": (), "device": "cpu", "progress": False, **options}
    return snows.bench(folder, images(), **given)  # type: ignore[arg-type]


def test_every_layer_is_timed_or_says_why_not(pruned: Path) -> None:
    found = bench(pruned)
    layers = {layer.name: layer for layer in found.layers}
    assert set(layers) == {name.removesuffix(".weight") for name in snows.load_masks(pruned)}
    for name in ("5", "9", "11"):  # 1x1 convolution and linear layers
        assert [timing.batch for timing in layers[name].timings] == [1, 2]
        assert layers[name].reason is None
        assert all(timing.sparse.measurements >= 5 for timing in layers[name].timings)
    assert "convolutions of 1x1" in str(layers["0"].reason)
    assert not layers["0"].timings
    assert layers["9"].sparsity == 0.5
    assert found.flops is not None
    assert found.flops["reduction"] > 1.2
    assert found.machine["versions"]["torch"] == torch.__version__
    assert found.machine["cpu"]
    assert found.not_timed == ()


def test_the_whole_network_in_every_engine(pruned: Path) -> None:
    found = bench(pruned, engines=None, modes=["eager"])
    rows = [(row.engine, row.weights, row.batch) for row in found.network if row.timing is not None]
    assert {("onnxruntime", "dense", 2), ("openvino", "dense", 1), ("openvino", "sparse", 2)} <= set(rows)
    assert {("torch", "dense", 1), ("torch", "sparse", 2)} <= set(rows)
    assert [row.reason for row in found.network if row.timing is None] == []


def test_a_listener_hears_what_is_timed(pruned: Path) -> None:
    seen: list[Event] = []
    bench(pruned, engines=["torch"], modes=["eager"], progress=[False, seen.append])
    pieces = [event for event in seen if isinstance(event, Working)]
    assert [event.done for event in pieces] == list(range(pieces[0].total))
    assert {"9, batch 2", "the whole network, torch, eager, batch 1"} <= {event.what for event in pieces}


def test_layers_that_are_alike_are_timed_once(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 4)).eval()
    folder = save(tmp_path / "pruned", model, torch.randn(16, 8, generator=torch.Generator().manual_seed(0)))
    first, second, third = snows.bench(folder, model, batches=[3], engines=[], device="cpu", progress=False).layers
    assert (first.timed_as, second.timed_as, third.timed_as) == (None, "0", None)
    assert second.timings == first.timings != third.timings


def test_a_layer_that_is_faster_is_packed_alone(pruned: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(snows.timing.benchmark.LayerBenchmark, "pays", lambda layer, batch: layer.name == "9")
    found = bench(pruned, engines=["torch"], modes=["eager"])
    assert found.prune == ("9",)
    weights = [row.weights for row in found.network if row.batch == 1]
    assert weights == ["dense", "sparse", "sparse where it pays"]


def test_a_kernel_that_computes_something_else_is_not_timed(pruned: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def wrong(module: nn.Module) -> nn.Module:
        packed = kernels.csr(module)
        packed.weight.values().mul_(1.1)
        return packed

    kernel = kernels.Kernel("wrong", kernels.csr_refusal, wrong)
    monkeypatch.setattr(benchmarking, "kernels_of", lambda device: (kernel,))
    found = {layer.name: layer for layer in bench(pruned).layers}
    assert "the sparse kernel's outputs are" in str(found["9"].reason)
    assert found["9"].timings == ()


def test_an_engine_that_fails_is_a_row_with_the_reason(pruned: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*words: object) -> None:
        raise RuntimeError("no such luck\nmore")

    monkeypatch.setattr("snows.timing.engines.onnx_file.write", fails)
    (row,) = bench(pruned, engines=["onnxruntime"], batches=[1]).network
    assert (row.timing, row.reason) == (None, "RuntimeError: no such luck")


def test_what_there_is_no_time_for_is_listed(pruned: Path) -> None:
    found = bench(pruned, limit=1e-9, engines=["torch"])
    assert "5, batch 1" in found.not_timed
    assert "the whole network, torch, eager, batch 2" in found.not_timed
    assert {layer.reason for layer in found.layers if layer.name in ("5", "9", "11")} == {"there was no time left"}
    assert found.network == ()
    assert found.prune == ()


def test_the_users_model_and_folder_stay(pruned: Path) -> None:
    model, names = images().train(), sorted(path.name for path in pruned.iterdir())
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    state = torch.random.get_rng_state()
    snows.bench(pruned, model, batches=[1], engines=[], device="cpu", progress=False)
    assert model.training
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
    assert torch.equal(torch.random.get_rng_state(), state)
    assert sorted(path.name for path in pruned.iterdir()) == names


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"batches": ()}, "expected batch sizes of 1 or more"),
        ({"batches": (0,)}, "expected batch sizes of 1 or more"),
        ({"limit": 0}, "expected a number of seconds above 0"),
        ({"engines": ["tensorrt"]}, "the engine 'tensorrt' is not known; expected torch, onnxruntime, openvino"),
        ({"modes": ["graph"]}, "the mode 'graph' is not known on cpu; expected eager, compiled"),
        ({"dtype": "bfloat16"}, "the dtype 'bfloat16' cannot be timed on cpu"),
        ({"device": "gpu"}, "device 'gpu' is not known"),
    ],
)
def test_bad_arguments(pruned: Path, options: dict[str, object], words: str) -> None:
    with pytest.raises(ArgumentError, match=words):
        bench(pruned, **options)


def test_a_folder_that_is_no_result(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="cannot be used: there is no"):
        bench(tmp_path)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_both_kinds_of_half_precision(pruned: Path, dtype: torch.dtype) -> None:
    found = bench(pruned, device="cuda", dtype=dtype, engines=["torch"], modes=["eager"])
    assert found.dtype == str(dtype).removeprefix("torch.")
    assert [layer.kernel for layer in found.layers if layer.name == "9"] == ["2:4, cuSPARSELt"]
    assert [row.reason for row in found.network if row.timing is None] == []


def test_layers_that_torch_does_not_call_stay_as_they_are(tmp_path: Path) -> None:
    """The fast path of a transformer's encoder takes the weights of its layers, and none that are packed."""
    encoder = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
    model = nn.Sequential(nn.Linear(4, 8), encoder, nn.Linear(8, 8)).eval()
    folder = save(tmp_path / "pruned", model, torch.randn(16, 5, 4, generator=torch.Generator().manual_seed(0)))
    options = {"batches": [1], "engines": ["torch"], "modes": ["eager"], "device": "cpu", "progress": False}
    found = snows.bench(folder, model, **options)  # type: ignore[arg-type]
    reasons = {layer.name: layer.reason for layer in found.layers}
    assert reasons["1.linear1"] == reasons["1.self_attn.out_proj"] == "its module is not called with one tensor"
    assert reasons["0"] is reasons["2"] is None
    assert [(row.weights, row.reason) for row in found.network if row.weights != "sparse where it pays"] == [
        ("dense", None), ("sparse", None),
    ]  # fmt: skip
