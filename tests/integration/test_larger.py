"""Networks whose weights do not fit: they rest outside of the device, and nothing changes.

Both places are the CPU here. `TwoDevices` fails where tensors of the two meet, as real devices do.
"""

from __future__ import annotations

import contextlib
import copy
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn.utils import prune as prune_by_torch
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

import snows
from snows import run
from snows.data.streams import Stream
from snows.devices import weights
from snows.devices.memory import Memory
from snows.devices.weights import Resting, Room
from snows.graph import capture
from tests import transformers
from tests.networks import example, make

SAMPLES = 40
RECIPE = snows.Recipe(horizon=2, sweeps=2, cg_steps=3, finish_steps=0)
K0 = RECIPE.replace(horizon=0, sweeps=1)
aten: Any = torch.ops.aten


class TwoDevices(TorchDispatchMode):
    """At rest is what `mark` was called with, and what is computed from such tensors alone."""

    between_devices = (aten.copy_.default,)

    def __init__(self) -> None:
        super().__init__()
        self.resting: dict[int, StorageWeakRef] = {}

    def mark(self, tensor: Tensor) -> Tensor:
        reference = StorageWeakRef(tensor.untyped_storage())
        self.resting[reference.cdata] = reference
        return tensor

    def __contains__(self, tensor: Tensor) -> bool:
        reference = self.resting.get(tensor.untyped_storage()._cdata)
        return reference is not None and not reference.expired()

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = function(*args, **(kwargs or {}))
        read, made = ([x for x in pytree.tree_leaves(y) if isinstance(x, Tensor)] for y in ((args, kwargs), result))
        if any(isinstance(tensor, FakeTensor) for tensor in (*read, *made)):
            return result
        resting = [tensor for tensor in read if tensor in self]
        if resting and len(resting) == len(read):
            for tensor in made:
                self.mark(tensor)
        elif any(tensor.ndim for tensor in resting) and function not in self.between_devices:
            raise AssertionError(f"{function} reads tensors of two devices")
        return result


@pytest.fixture
def two_devices(monkeypatch: pytest.MonkeyPatch) -> TwoDevices:
    mode = TwoDevices()
    init, on_disk = Resting.__init__, weights.on_disk

    def resting(self: Resting, room: Room, tensors: Any) -> None:
        init(self, room, tensors)
        for tensor in self.tensors.values():
            mode.mark(tensor)

    def copied(self: Room, tensor: Tensor) -> Tensor:
        with _disable_current_modes():
            return tensor.clone()

    monkeypatch.setattr(Resting, "__init__", resting)
    monkeypatch.setattr(Room, "_is_here", lambda self, tensor: tensor not in mode)
    monkeypatch.setattr(Room, "_copied", copied)
    monkeypatch.setattr(weights, "on_disk", lambda tensor: mode.mark(on_disk(tensor)))
    return mode


def limited(monkeypatch: pytest.MonkeyPatch, room: int | None) -> None:
    """So much room for weights, and plenty for all else."""
    for place in ("snows.run", "snows.evaluation.inspection"):
        monkeypatch.setattr(f"{place}.limits_for", lambda *_: Memory(1 << 34, 0, room))


def networks() -> dict[str, tuple[nn.Module, Tensor]]:
    made = {name: (make(name), example(name, SAMPLES)) for name in ("conv-bn", "residual", "attention", "depthwise")}
    made["language"] = transformers.build(transformers.Language).double(), transformers.token_samples(SAMPLES)
    return made


def all_weights(model: nn.Module) -> Tensor:
    return torch.cat([parameter.detach().flatten() for parameter in model.parameters()])


def prune(name: str, **options: Any) -> snows.Result:
    model, data = networks()[name]
    return snows.prune(model, data, options.pop("pattern", "2:4"), progress=False, **{"recipe": K0, **options})


@pytest.mark.parametrize("name", list(networks()))
@pytest.mark.parametrize("recipe", [K0, RECIPE], ids=["K=0", "K=2"])
@pytest.mark.parametrize("room", [0, 600, 4000])
def test_weights_at_rest_change_nothing(
    name: str, recipe: snows.Recipe, room: int, two_devices: TwoDevices, monkeypatch: pytest.MonkeyPatch
) -> None:
    limited(monkeypatch, None)
    plain = prune(name, recipe=recipe)
    assert not two_devices.resting
    limited(monkeypatch, room)
    with two_devices:
        larger = prune(name, recipe=recipe)
    assert two_devices.resting
    assert torch.equal(all_weights(plain.model), all_weights(larger.model))
    assert plain.masks.keys() == larger.masks.keys()
    assert all(torch.equal(plain.masks[layer], larger.masks[layer]) for layer in plain.masks)
    assert [layer.solves[-1].loss for layer in plain.report.layers] == [
        layer.solves[-1].loss for layer in larger.report.layers
    ]
    assert larger.report.operations is None  # it would read all weights at once


@pytest.mark.parametrize("mask", ["random", "wanda", "sparsegpt", "obc+exchange"])
def test_masks_of_methods(mask: str, two_devices: TwoDevices, monkeypatch: pytest.MonkeyPatch) -> None:
    limited(monkeypatch, None)
    plain = prune("residual", mask=mask, recipe=RECIPE)
    limited(monkeypatch, 600)
    with two_devices:
        larger = prune("residual", mask=mask, recipe=RECIPE)
    assert torch.equal(all_weights(plain.model), all_weights(larger.model))


@pytest.mark.parametrize("mask", ["weights", "given", "own"])
def test_masks_of_the_caller(mask: str, monkeypatch: pytest.MonkeyPatch) -> None:
    dense, data = networks()["residual"]
    pruned = snows.prune(dense, data, "2:4", solver=None, progress=False)
    model, chosen = {
        "weights": (pruned.model, "weights"),
        "given": (dense, pruned.masks),
        "own": (copy.deepcopy(dense), "weights"),
    }[mask]
    if mask == "own":
        prune_by_torch.custom_from_mask(model.conv2, "weight", pruned.masks["conv2.weight"])
    results, said = [], "every weight that the mask removes is already zero"
    for room in (None, 600):
        limited(monkeypatch, room)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always", snows.SnowsWarning)
            results.append(snows.prune(model, data, mask=chosen, recipe=RECIPE, progress=False))
        assert [str(each.message).startswith(said) for each in caught] == [True] * (mask == "weights")
    assert torch.equal(all_weights(results[0].model), all_weights(results[1].model))


@pytest.mark.parametrize("pattern", ["0.5", "0.5 erk", "0.5 lamp", "0.5 uniform", "0.5 owl"])
def test_budgets(pattern: str, two_devices: TwoDevices, monkeypatch: pytest.MonkeyPatch) -> None:
    limited(monkeypatch, None)
    plain = prune("residual", pattern=pattern)
    limited(monkeypatch, 600)
    larger = prune("residual", pattern=pattern)
    assert torch.equal(all_weights(plain.model), all_weights(larger.model))


@pytest.mark.parametrize("solver", ["newton", None])
def test_a_run_goes_on_from_its_folder(
    solver: Any, tmp_path: Path, two_devices: TwoDevices, monkeypatch: pytest.MonkeyPatch
) -> None:
    limited(monkeypatch, 600)
    whole = prune("residual", recipe=RECIPE, solver=solver)
    first = prune("residual", recipe=RECIPE, solver=solver, resume=tmp_path)
    for file in sorted(tmp_path.rglob("sweep*-layer*"))[-2:]:
        file.unlink()
    with two_devices:
        again = prune("residual", recipe=RECIPE, solver=solver, resume=tmp_path)
    assert again.report.recalled_solves
    for result in (first, again):
        assert torch.equal(all_weights(whole.model), all_weights(result.model))


def test_weights_in_half_precision(two_devices: TwoDevices, monkeypatch: pytest.MonkeyPatch) -> None:
    model, data = networks()["conv-bn"]
    results = []
    for room in (None, 600):
        limited(monkeypatch, room)
        with two_devices:
            results.append(snows.prune(model.bfloat16(), data, "2:4", recipe=K0, progress=False))
    assert all(parameter.dtype == torch.bfloat16 for parameter in results[1].model.parameters())
    assert torch.equal(all_weights(results[0].model), all_weights(results[1].model))


def test_the_callers_model_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """A run has no copy of the weights that stay as they are, and changes none."""
    model, data = networks()["residual"]
    model.train()
    before = copy.deepcopy(model)
    shared: list[bool] = []
    prepare = run.prepare

    def watch(*arguments: Any) -> Any:
        prepared = prepare(*arguments)
        own = dict(model.named_parameters())
        tensors = prepared.graph.parameters.tensors
        shared.extend(tensors[n].data_ptr() == p.data_ptr() for n, p in own.items() if n in tensors and p.ndim != 4)
        return prepared

    monkeypatch.setattr(run, "prepare", watch)
    limited(monkeypatch, 600)
    with pytest.warns(snows.SnowsWarning, match="train mode"):
        snows.prune(model, data, "2:4", recipe=K0, progress=False)
    assert shared
    assert all(shared)
    assert model.training
    assert [p.requires_grad for p in model.parameters()] == [p.requires_grad for p in before.parameters()]
    for old, new in zip(before.state_dict().values(), model.state_dict().values(), strict=True):
        assert torch.equal(old, new)


def test_streams_stop_where_weights_no_longer_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    """Between two pruned layers others stay dense."""
    stops: list[int] = []
    move = Stream._move
    monkeypatch.setattr(Stream, "_move", lambda self, stop: stops.append(stop) or move(self, stop))
    found = []
    for room in (None, 1 << 30, 600):
        stops.clear()
        limited(monkeypatch, room)
        result = prune("language", layers="blocks.1.mlp.2")
        found.append((len(stops), all_weights(result.model)))
    assert found[0][0] == found[1][0] == 1 < found[2][0]
    assert torch.equal(found[0][1], found[2][1])


def test_a_forward_that_depends_on_the_batch_size_is_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    class Branching(nn.Sequential):
        def forward(self, x: Tensor) -> Tensor:
            y: Tensor = super().forward(x)
            return y if x.shape[0] < 16 else -y

    torch.manual_seed(0)
    model = Branching(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 2)).eval()
    limited(monkeypatch, 200)
    with pytest.raises(snows.CaptureError, match="does not give the model's own outputs on 16 samples"):
        snows.prune(model, torch.randn(40, 4), "2:4", recipe=K0, progress=False)


def test_permuted_channels(monkeypatch: pytest.MonkeyPatch) -> None:
    limited(monkeypatch, None)
    plain = prune("residual", permute=True)
    limited(monkeypatch, 600)
    larger = prune("residual", permute=True)
    assert torch.equal(all_weights(plain.model), all_weights(larger.model))


@pytest.mark.parametrize("moves", [True, False])
def test_what_the_network_makes_is_made_on_the_device(moves: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """A capture on the CPU names it wherever forward makes a tensor. Tensors without values tell devices apart."""

    class Making(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 2)

        def forward(self, x: Tensor) -> Tensor:
            places = torch.arange(x.shape[0], device=x.device)[:, None].float()
            x = self.first(x) + places.to(x.device, torch.float32) + torch.full((x.shape[0], 1), 2.0, device=x.device)
            return self.second(x + torch.tensor(3.0))

    device, fake = torch.device("cuda"), FakeTensorMode(allow_non_fake_inputs=True)
    monkeypatch.setattr(Room, "_copied", lambda self, tensor: torch.empty(tensor.shape, device=device))
    graph = capture(Making().eval(), (torch.randn(4, 4),), {})
    room = Room(device, 1000)
    if moves:
        graph.leave_parameters(room)
    else:
        graph.parameters = Resting(room, graph.parameters)
    with fake, contextlib.nullcontext() if moves else pytest.raises(RuntimeError, match="on the same device"):
        (output,) = graph.run([torch.zeros(5, 4, device=device)])
        assert (output.device.type, output.shape) == ("cuda", (5, 2))


def test_a_device_that_is_not_there(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(snows.InputError, match="there is no device 'cuda:99'"):
        prune("conv-bn", device="cuda:99", memory=1000)


@pytest.mark.gpu
@pytest.mark.parametrize("name", list(networks()))
@pytest.mark.parametrize("recipe", [K0, RECIPE], ids=["K=0", "K=2"])
def test_on_a_gpu(name: str, recipe: snows.Recipe, monkeypatch: pytest.MonkeyPatch) -> None:
    recipe = recipe.replace(precision="full")
    for place in (None, 600):
        monkeypatch.setattr("snows.run.limits_for", lambda *_, place=place: Memory(1 << 30, 1 << 30, place))
        result = prune(name, recipe=recipe, device="cuda")
        if place is None:
            plain = result
    assert {parameter.device.type for parameter in result.model.parameters()} == {"cpu"}
    torch.testing.assert_close(all_weights(plain.model), all_weights(result.model), rtol=1e-6, atol=1e-9)
    assert all(torch.equal(plain.masks[layer], result.masks[layer]) for layer in plain.masks)


@pytest.mark.gpu
@pytest.mark.parametrize("mask", ["wanda", "random"])
@pytest.mark.parametrize("pattern", ["2:4", "0.5 owl"])
def test_masks_and_budgets_on_a_gpu(mask: str, pattern: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    results = []
    for place in (None, 600):
        monkeypatch.setattr("snows.run.limits_for", lambda *_, place=place: Memory(1 << 30, 1 << 30, place))
        results.append(prune("residual", mask=mask, pattern=pattern, device="cuda", resume=tmp_path / str(place)))
        again = prune("residual", mask=mask, pattern=pattern, device="cuda", resume=tmp_path / str(place))
        assert torch.equal(all_weights(results[-1].model), all_weights(again.model))
    torch.testing.assert_close(*(all_weights(result.model) for result in results), rtol=1e-6, atol=1e-9)


# What needs all weights at once


@pytest.mark.parametrize(
    ("needed", "options"),
    [
        ("gradients", {"mask": "woodfisher"}),
        ("losses", {"mask": "falcon", "pattern": "0.5"}),
        ("measurements", {"pattern": "0.5 measured"}),
    ],
)
def test_methods_of_the_whole_network_are_refused(
    needed: str, options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    limited(monkeypatch, 600)
    with pytest.raises(snows.InputError, match=r"of the whole network need all weights on the device at once"):
        prune("residual", **options)


def test_the_last_stage_is_left_out_and_refused_if_it_was_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    limited(monkeypatch, 600)
    with pytest.raises(snows.ArgumentError, match=r"finish_steps is 5, but the last stage needs all weights"):
        prune("residual", recipe=RECIPE.replace(finish_steps=5))
    auto = {"finish_steps": 5, "finish_rate": 1e-3}
    monkeypatch.setattr("snows.solve.settings._LastStage.choices", lambda *_, **__: auto)
    with pytest.warns(snows.SnowsWarning, match="there is no last stage: the last stage needs all weights"):
        result = prune("residual", recipe=RECIPE.replace(finish_steps="auto", finish_rate="auto"))
    assert result.report.finish is None


def test_a_small_budget_is_enough() -> None:
    """Without any of the above: by `memory=` alone."""
    plain, larger = prune("language"), prune("language", memory="20kB")
    torch.testing.assert_close(all_weights(plain.model), all_weights(larger.model), rtol=1e-6, atol=1e-9)
    assert all(torch.equal(plain.masks[layer], larger.masks[layer]) for layer in plain.masks)
