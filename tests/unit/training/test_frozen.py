"""Zeros stay zero, however a network is trained; and the same loops regrow them without a guard."""

from __future__ import annotations

import copy
import io
import pickle
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import snows
from snows import ArgumentError, InputError, SnowsWarning
from snows.training import frozen
from tests.saved import quick

STEPS = 200
Masks = dict[str, Tensor]


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(2, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU(), nn.Conv2d(4, 4, 3), nn.ReLU(), nn.Flatten(),
        nn.Linear(64, 8), nn.ReLU(), nn.Linear(8, 3),
    )  # fmt: skip


def masks_of(model: nn.Module) -> Masks:
    torch.manual_seed(1)
    return {n: torch.rand_like(p.float()) < 0.4 for n, p in model.named_parameters() if p.ndim > 1}


def masked(dtype: torch.dtype = torch.float32) -> tuple[nn.Module, Masks]:
    model = network().to(dtype)
    masks = masks_of(model)
    with torch.no_grad():
        for name, kept in masks.items():
            model.get_parameter(name).mul_(kept)
    return model, masks


def regrown(model: nn.Module, masks: Masks) -> int:
    """How many removed weights are not exactly zero."""
    return sum(int(model.get_parameter(name)[~kept].count_nonzero()) for name, kept in masks.items())


def batches(steps: int = STEPS, dtype: torch.dtype = torch.float32) -> Iterator[tuple[Tensor, Tensor]]:
    torch.manual_seed(2)
    for _ in range(steps):
        yield torch.randn(8, 2, 6, 6, dtype=dtype), torch.randint(0, 3, (8,))


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, weight_decay=0.01)


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=0.01, weight_decay=0.1)


def plain(make: Callable[[nn.Module], torch.optim.Optimizer]) -> Callable[[nn.Module], None]:
    def train(model: nn.Module) -> None:
        optimizer = make(model)
        dtype = next(model.parameters()).dtype
        for x, y in batches(dtype=dtype):
            optimizer.zero_grad()
            F.cross_entropy(model(x).float(), y).backward()
            optimizer.step()

    return train


def autocast(model: nn.Module) -> None:
    optimizer = sgd(model)
    for x, y in batches():
        optimizer.zero_grad()
        with torch.autocast("cpu", torch.bfloat16):
            loss = F.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()


def scaled(model: nn.Module) -> None:
    """With a scale that overflows at first: such steps are skipped."""
    optimizer, scaler = adamw(model), torch.amp.GradScaler("cpu", init_scale=2.0**40, growth_interval=20)
    skipped = 0
    for x, y in batches(2 * STEPS):
        before = scaler.get_scale()
        optimizer.zero_grad()
        with torch.autocast("cpu", torch.float16):
            loss = F.cross_entropy(model(x), y)
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
        skipped += scaler.get_scale() < before
    assert 0 < skipped < STEPS


def accumulated(model: nn.Module) -> None:
    optimizer = sgd(model)
    for step, (x, y) in enumerate(batches(4 * STEPS)):
        (F.cross_entropy(model(x), y) / 4).backward()
        if step % 4 == 3:
            optimizer.step()
            optimizer.zero_grad()


def compiled(model: nn.Module, backend: str = "aot_eager") -> None:
    program = torch.compile(model, backend=backend)
    optimizer = sgd(model)
    for x, y in batches():
        optimizer.zero_grad()
        F.cross_entropy(program(x), y).backward()
        optimizer.step()


def by_hand(model: nn.Module) -> None:
    """No optimizer: weights are written in place."""
    for x, y in batches():
        model.zero_grad()
        F.cross_entropy(model(x), y).backward()
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.grad is not None:
                    parameter -= 0.05 * parameter.grad


def lbfgs(model: nn.Module) -> None:
    optimizer = torch.optim.LBFGS(model.parameters(), lr=0.1, max_iter=4)
    for x, y in batches():

        def loss(x: Tensor = x, y: Tensor = y) -> Tensor:
            optimizer.zero_grad()
            loss = F.cross_entropy(model(x), y)
            loss.backward()
            return loss

        optimizer.step(loss)


class Mixing(torch.optim.Optimizer):
    """Gives every weight of a matrix a part of the whole gradient, as Muon and Shampoo do."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__(model.parameters(), {})

    def step(self, closure: Any = None) -> None:
        with torch.no_grad():
            for parameter in self.param_groups[0]["params"]:
                parameter -= 0.001 * (parameter.grad + parameter.grad.mean())


LOOPS: dict[str, Callable[[nn.Module], None]] = {
    "SGD, momentum, weight decay": plain(sgd),
    "AdamW": plain(adamw),
    "fused AdamW": plain(lambda model: torch.optim.AdamW(model.parameters(), lr=0.01, fused=True)),
    "Adafactor": plain(lambda model: torch.optim.Adafactor(model.parameters(), lr=0.01)),
    "an optimizer that mixes": plain(Mixing),
    "LBFGS": lbfgs,
    "bfloat16 autocast": autocast,
    "float16 autocast, GradScaler": scaled,
    "gradient accumulation": accumulated,
    "torch.compile": compiled,
    "in place, by hand": by_hand,
}


@pytest.mark.parametrize("name", LOOPS)
def test_zeros_stay_zero(name: str) -> None:
    model, masks = masked()
    start = copy.deepcopy(model.state_dict())
    LOOPS[name](snows.freeze(model, masks))
    assert regrown(model, masks) == 0
    moved = [name for name in masks if not torch.equal(model.get_parameter(name), start[name])]
    assert moved == list(masks)  # the kept weights are trained
    assert model.state_dict().keys() == start.keys()


@pytest.mark.parametrize("name", LOOPS)
def test_without_a_guard_they_regrow(name: str) -> None:
    """The other half of the test above: a guard that does nothing would be noticed."""
    model, masks = masked()
    LOOPS[name](model)
    assert regrown(model, masks) > 1000 * 0.1


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # of torch's compiler
@pytest.mark.parametrize("guarded", [True, False])
def test_torch_compile_with_the_compiler_that_makes_kernels(guarded: bool) -> None:
    model, masks = masked()
    compiled(snows.freeze(model, masks) if guarded else model, "inductor")
    assert (regrown(model, masks) == 0) is guarded


@pytest.mark.parametrize(
    ("part", "loop"), [("_without_removed", "in place, by hand"), ("hold", "an optimizer that mixes")]
)
def test_every_part_of_the_guard_is_needed(part: str, loop: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(frozen._Guard, part, lambda self, gradient=None: gradient)
    model, masks = masked()
    LOOPS[loop](snows.freeze(model, masks))
    assert regrown(model, masks) > 0


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision(dtype: torch.dtype) -> None:
    model, masks = masked(dtype)
    plain(sgd)(snows.freeze(model, masks))
    assert regrown(model, masks) == 0


def test_momentum_from_before_the_freeze() -> None:
    model, masks = masked()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.99)
    for frozen_now in (False, True):
        if frozen_now:
            with pytest.warns(SnowsWarning, match=r"weights that the masks remove were not zero in the Sequential"):
                snows.freeze(model, masks)
        for x, y in batches(5):
            optimizer.zero_grad()
            F.cross_entropy(model(x), y).backward()
            optimizer.step()
    assert regrown(model, masks) == 0


@pytest.mark.parametrize("assign", [False, True])
def test_loading_dense_weights(assign: bool) -> None:
    model, masks = masked()
    snows.freeze(model, masks)
    dense = network()
    model.load_state_dict(copy.deepcopy(dense.state_dict()), assign=assign)
    assert regrown(model, masks) == 0
    for name, kept in masks.items():
        assert torch.equal(model.get_parameter(name), dense.get_parameter(name) * kept)
    by_hand(model)
    assert regrown(model, masks) == 0


def test_loading_into_a_part() -> None:
    model, masks = masked()
    snows.freeze(model, masks)
    model.get_submodule("0").load_state_dict(network().get_submodule("0").state_dict())
    assert regrown(model, masks) == 0


@pytest.mark.parametrize("how", ["deepcopy", "pickle", "torch.save"])
@pytest.mark.parametrize("loop", ["in place, by hand", "an optimizer that mixes"])
def test_copies_are_frozen(how: str, loop: str) -> None:
    model, masks = masked()
    snows.freeze(model, masks)
    if how == "deepcopy":
        other = copy.deepcopy(model)
    elif how == "pickle":
        other = pickle.loads(pickle.dumps(model))
    else:
        file = io.BytesIO()
        torch.save(model, file)
        file.seek(0)
        other = torch.load(file, weights_only=False)
    before = copy.deepcopy(model.state_dict())
    LOOPS[loop](other)
    assert regrown(other, masks) == 0
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())  # its own, only
    LOOPS[loop](model)
    assert regrown(model, masks) == 0


def test_unfreezing_leaves_plain_parameters() -> None:
    model, masks = masked()
    plain(adamw)(snows.freeze(model, masks))
    before = copy.deepcopy(model.state_dict())
    assert snows.unfreeze(model) is model
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert not any(module._load_state_dict_post_hooks for module in model.modules())
    assert not any(parameter._backward_hooks for parameter in model.parameters())
    assert type(model.get_parameter("0.weight")) is nn.Parameter
    plain(sgd)(model)
    assert regrown(model, masks) > 0


def test_a_weight_that_is_trained_later() -> None:
    model, masks = masked()
    model.requires_grad_(False)
    snows.freeze(model, masks)
    assert not any(parameter.requires_grad for parameter in model.parameters())
    by_hand(model.requires_grad_(True))
    assert regrown(model, masks) == 0


def test_other_models_are_left_alone() -> None:
    model, masks = masked()
    snows.freeze(model, masks)
    other, _ = masked()
    plain(sgd)(other)
    assert regrown(other, masks) > 0


def test_a_second_mask_replaces_the_first() -> None:
    model, masks = masked()
    snows.freeze(snows.freeze(model, masks), {"8.weight": torch.ones(3, 8)})
    plain(sgd)(model)
    assert int(model.get_parameter("8.weight").count_nonzero()) == 24
    assert regrown(model, {name: kept for name, kept in masks.items() if name != "8.weight"}) == 0


def test_tied_weights() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4))
    model[2].weight = model[0].weight
    kept = torch.eye(4) == 1
    with pytest.warns(SnowsWarning, match="12 weights"):
        snows.freeze(model, {"0.weight": kept})
    assert model[2].weight is model[0].weight
    model.load_state_dict(
        {f"{i}.{name}": value for i in (0, 2) for name, value in nn.Linear(4, 4).state_dict().items()}
    )
    assert regrown(model, {"2.weight": kept}) == 0
    with pytest.raises(InputError, match=r"0\.weight and 2\.weight are one tied weight, and their masks differ"):
        snows.freeze(model, {"0.weight": kept, "2.weight": ~kept})


def test_a_wrapped_model() -> None:
    """Names are those from before DataParallel and torch.compile."""
    model, masks = masked()
    snows.freeze(nn.DataParallel(model), masks)
    snows.freeze(torch.compile(model), masks)  # type: ignore[type-var]
    snows.freeze(torch.compile(nn.DataParallel(model)), masks)  # type: ignore[type-var]
    snows.freeze(nn.DataParallel(torch.compile(model)), masks)  # type: ignore[arg-type]
    plain(sgd)(model)
    assert regrown(model, masks) == 0


def test_a_frozen_network_is_pruned_and_captured_as_before() -> None:
    model, masks = masked()
    x = torch.randn(16, 2, 6, 6)
    again = [quick(network, x, 0.5).model for network in (model.eval(), snows.freeze(model, masks))]
    assert all(torch.equal(a, b) for a, b in zip(*(m.state_dict().values() for m in again), strict=True))
    program = torch.export.export(model, (x,))
    assert torch.equal(program.module()(x), model(x))


def test_the_masks_of_a_folder(tmp_path: Path) -> None:
    model = network()
    masks = masks_of(model)
    result = quick(model.eval(), torch.randn(16, 2, 6, 6), None, mask=masks)
    folder = result.save(tmp_path / "pruned")
    assert all(torch.equal(kept, masks[name]) for name, kept in snows.load_masks(folder).items())
    again = snows.freeze(snows.load(folder, network()), folder)
    plain(sgd)(again)
    assert regrown(again, masks) == 0


@pytest.mark.parametrize(
    ("masks", "error", "message"),
    [
        ({"first.weight": torch.ones(1)}, ArgumentError,
         "the masks name 'first.weight', which is no parameter of Sequential; its parameters are 0.weight, 0.bias"),
        ({"8.weight": torch.ones(8, 3)}, InputError,
         "the mask of '8.weight' has shape (8, 3); the parameter has shape (3, 8)"),
        ({"8.weight": torch.full((3, 8), 0.5)}, ArgumentError,
         "the mask of '8.weight' is torch.float32 with values other than 0 and 1; expected bools"),
        ({"8.weight": [[True]]}, ArgumentError, "the mask of '8.weight' is a list; expected a tensor of bools"),
        ({}, ArgumentError, "masks is empty; expected {parameter name: tensor} or the folder of a saved result"),
        (3, ArgumentError, "masks is an int; expected"),
        ("nowhere", InputError, "there is no folder nowhere; expected one that"),
    ],
)  # fmt: skip
def test_what_is_refused(masks: Any, error: type[Exception], message: str) -> None:
    model, _ = masked()
    before = copy.deepcopy(model.state_dict())
    with pytest.raises(error, match=re.escape(message)):
        snows.freeze(model, masks)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


def test_no_module_and_no_floats() -> None:
    with pytest.raises(ArgumentError, match=r"model is a Tensor; expected an nn\.Module"):
        snows.freeze(torch.ones(2), {})  # type: ignore[type-var]
    model = nn.Linear(2, 2)
    model.weight = nn.Parameter(torch.ones(2, 2, dtype=torch.int8), requires_grad=False)
    with pytest.raises(InputError, match=r"'weight' is torch\.int8; expected a weight that can be trained"):
        snows.freeze(model, {"weight": torch.ones(2, 2)})


def test_a_parameter_that_is_gone() -> None:
    model, masks = masked()
    snows.freeze(model, masks)
    optimizer = sgd(model)
    weight = model[8].weight
    del model[8].weight
    model[8].weight = weight.detach() + 0  # as FSDP leaves views of a flat parameter
    with pytest.raises(InputError, match=r"the frozen parameter 'weight' of a Linear is gone; call snows\.unfreeze"):
        optimizer.step()
