"""Networks whose weights do not fit: they rest outside of the device, and nothing changes.

Both places are the CPU here. `TwoDevices` fails where tensors of the two meet, as real devices do.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

import snows
from snows.data.streams import Stream
from snows.devices import weights
from snows.devices.memory import Memory
from snows.devices.weights import Resting, Room
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
