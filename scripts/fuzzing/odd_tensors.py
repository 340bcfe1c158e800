"""Every kind of tensor, and numbers at the limits of their types, as weights and as masks."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save
from torch import Tensor, nn

import snows
from snows.data import weights
from snows.masks.given import given_masks
from snows.plan import make_plan

from .world import Case

FLOATS = [torch.float64, torch.float32, torch.float16, torch.bfloat16]
LIMITS = [0.0, -0.0, 1.0, 6e4, 7e4, 1e-8, 3e38, 1e300, float("inf"), float("nan"), 5e-324]


def odd_tensor(rng: random.Random, shape: tuple[int, ...]) -> Tensor:
    """Any kind of tensor that torch has a name for, of this shape if the kind has one."""
    whole = [torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.uint16, torch.uint32, torch.uint64]
    small = [torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e8m0fnu, torch.float8_e4m3fnuz]
    plain = torch.full(shape, rng.choice(LIMITS), dtype=torch.float64)
    kinds: list[Callable[[], Tensor]] = [
        lambda: plain,
        lambda: plain.to(rng.choice([*FLOATS, *small])),
        lambda: torch.randint(0, rng.choice([2, 100]), shape).to(rng.choice(whole)),
        lambda: torch.rand(shape) > 0.5,
        lambda: torch.randn(shape, dtype=rng.choice([torch.complex64, torch.complex128])),
        lambda: torch.randn(shape).to_sparse(),
        lambda: torch.randn(4, 4).to_sparse_csr(),
        lambda: torch.empty(shape, device="meta"),
        lambda: torch.nested.nested_tensor([torch.ones(2), torch.ones(3)], layout=torch.jagged),
        lambda: torch.nested.nested_tensor([torch.ones(2), torch.ones(3)]),
        lambda: torch.quantize_per_tensor(torch.ones(shape), 0.1, 0, torch.quint8),
        lambda: torch.zeros(shape, dtype=torch.uint8).view(torch.bits8),
        lambda: torch.ones(1).expand(10**6, 10**6),
        lambda: torch.ones([1] * rng.choice([16, 17, 64, 65, 5000])),
        lambda: torch.ones(0, *shape),
        lambda: torch.randn(*shape[:-1], shape[-1] * 2)[..., ::2],
        lambda: torch.randn(shape, dtype=torch.complex64).conj().imag,
        lambda: nn.Parameter(torch.randn(shape)),
        lambda: torch.randn(shape).requires_grad_() * 2,
    ]
    return rng.choice(kinds)()


def odd_state(case: Case) -> dict[str, Tensor]:
    """The model's state dict with one or two odd tensors in it, perhaps under the names of other tools."""
    rng, state = case.random, dict(case.world.model.state_dict())
    for name in rng.sample(sorted(state), rng.choice([1, 1, 2])):
        tensor = odd_tensor(rng, tuple(state[name].shape))
        if rng.random() < 0.2:  # a weight in two parts
            state[f"{name}_orig"] = state.pop(name)
            name = f"{name}_mask"
        state[name] = tensor
    return state


def write_state(case: Case, state: dict[str, Tensor]) -> Path:
    if case.random.random() < 0.4:
        try:
            return case.write("w.safetensors", save({name: tensor.contiguous() for name, tensor in state.items()}))
        except Exception:  # the format does not hold every kind
            pass
    path = case.folder / "w.pt"
    try:
        torch.save(state, path)
    except Exception as error:
        raise snows.InputError("torch itself cannot save it") from error
    return path


def odd_tensors_as_weights(case: Case) -> None:
    """Whatever fills a model is what the file holds: no cast, nothing that becomes infinite."""
    path = write_state(case, odd_state(case))
    model = case.fresh_model().to(case.random.choice(FLOATS))
    weights.fill(model, weights.read_state(path), str(path))
    given = weights.fitted(weights.read_state(path), model.state_dict())
    for name, own in model.state_dict().items():
        value = given[name]
        if not value.is_floating_point():
            raise TypeError(f"{name} was cast from {value.dtype}")
        wide = value.double()
        if not torch.equal(wide.isfinite(), own.isfinite()):
            raise ValueError(f"{name} became infinite")
        if not torch.equal(wide.to(own.dtype).nan_to_num(), own.nan_to_num()):
            raise ValueError(f"{name} was changed")


def odd_tensors_as_masks(case: Case) -> None:
    state = odd_state(case)
    if case.random.random() < 0.5:
        state = {"2.weight": odd_tensor(case.random, (8, 8))}
    mask: Any = state if case.random.random() < 0.5 else write_state(case, state)
    world = case.world.prepared
    found = given_masks(mask, world)
    for name, kept in (found or {}).items():
        if kept.dtype != torch.bool or kept.shape != world.graph.parameters[name].shape:
            raise TypeError(f"the mask of {name} is {kept.dtype} {tuple(kept.shape)}")
    make_plan(world.graph, None, 1, masks=found)


TARGETS: dict[Callable[[Case], None], int] = {odd_tensors_as_weights: 5, odd_tensors_as_masks: 5}
