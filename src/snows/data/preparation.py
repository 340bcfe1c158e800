"""Before a run: a copy of the user's model, the samples in one table, and the graph of the network.

The user's model is never changed. It may come with masks of its own:

- A module of torch.nn.utils.prune holds the dense weight (`weight_orig`) and its mask (`weight_mask`).
- A module of NVIDIA's ASP (apex.contrib.sparsity) holds the masked weight, its mask (`__weight_mma_mask`) and, if masks
  may be computed again, the removed values (`__weight_mma_pruned_p`).

Such a model is captured with its masks applied. If a layer's mask is given, by the model or by the user, the layer then
gets its dense weight back, and the kept weights are re-adjusted towards it. If masks are chosen anew, the masked
weights are the reference.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import prune as torch_prune

from ..caller import ONE_AT_A_TIME, cpu_by_default
from ..devices.device import as_device, device_of, existing, move, require_usable_device
from ..devices.memory import Memory, memory_limits
from ..devices.weights import Room, bytes_of_run
from ..errors import InputError, SnowsWarning, a_type
from ..graph import Graph, capture
from ..graph.comparison import compare_at_sizes
from .dataset import can_be_shared, read_in_shares
from .samples import Samples, read_samples
from .tensors import spoilt
from .usable import copied, require_usable
from .weights import mask_names, stowed_name

_EXAMPLE_SAMPLES = 8
_HOST = torch.device("cpu")


@dataclass(frozen=True)
class OwnMask:
    """A mask that the model came with, and the weight before masking if the model still holds it."""

    kept: Tensor
    dense: Tensor


@dataclass(frozen=True)
class Prepared:
    """What a run works with.

    model      a copy of the model in eval mode, with its masks applied; on the device, unless its weights do not fit
    graph      the captured network, with the parameters of `model` until a run replaces them
    samples    the calibration samples, shuffled
    device     where to work
    own_masks  masks that the model came with, by parameter name
    dtypes     those of the caller's parameters, by name
    """

    model: nn.Module
    graph: Graph
    samples: Samples
    device: torch.device
    own_masks: dict[str, OwnMask]
    dtypes: dict[str, torch.dtype]

    def compare_at_sizes(self, largest: int, samples: Samples | None = None) -> None:
        """Compare the graph with the model up to this batch size, where forward depends on it."""
        first = next(p for p in self.model.parameters() if p.is_floating_point())
        samples = (samples or self.samples).to(first.device, first.dtype)
        compare_at_sizes(self.model, self.graph, largest, samples.call_arguments)

    def take_dense(self, names: Iterable[str]) -> None:
        """Give these layers their dense weights back, if the model came with them."""
        for name in self.own_masks.keys() & set(names):
            masked = self.graph.parameters[name]
            self.graph.parameters[name] = torch.empty_like(masked).copy_(self.own_masks[name].dense)


@dataclass(frozen=True)
class _Remembered:
    """What was prepared, its warnings, and the samples: an id is only unique while its object lives."""

    prepared: Prepared
    caught: list[warnings.WarningMessage]
    calibration: object


@dataclass(frozen=True)
class _Memory:
    """What was prepared for one model, by the other arguments of `prepare`."""

    model: nn.Module
    remembered: dict[tuple[object, ...], _Remembered]


_MEMORY: ContextVar[_Memory | None] = ContextVar("_MEMORY", default=None)


@contextmanager
def capturing_once(model: nn.Module) -> Iterator[None]:
    """Inside, this model is prepared once for the same samples. Neither may change meanwhile."""
    with ONE_AT_A_TIME:
        token = _MEMORY.set(_Memory(model, {}))
        try:
            yield
        finally:
            _MEMORY.reset(token)


def limits_for(model: nn.Module, device: torch.device | str | None, memory: int | None, processes: int = 1) -> Memory:
    """What a run with this model may use of a device, if the caller gave it so much `memory`."""
    require_usable(model)
    return memory_limits(device_of(model, device), memory, processes, bytes_of_run(model))


def prepare(
    model: nn.Module,
    calibration: Any,
    device: torch.device | str | None,
    seed: int,
    with_labels: bool = False,
    in_shares: bool = False,
    room: int | None = None,
) -> Prepared:
    """Copy the model, read and shuffle the samples, capture the network.

    `in_shares`: a sample of a Dataset is only read when it is needed, as each of several ranks needs its share.
    `room`: bytes on the device for copies of weights, which rest outside of it. None: all weights are on the device.
    """
    require_usable(model)
    require_usable_device(device_of(model, device))
    with cpu_by_default():
        return _prepare_once(model, _Wanted(calibration, device, seed, with_labels, in_shares, room))


@dataclass(frozen=True)
class _Wanted:
    """What `prepare` is asked for, beside the model."""

    calibration: Any
    device: torch.device | str | None
    seed: int
    with_labels: bool
    in_shares: bool
    room: int | None

    @property
    def key(self) -> tuple[object, ...]:
        """The same for what is prepared alike, as long as the calibration lives."""
        at_rest = self.room is not None
        return id(self.calibration), str(self.device), self.seed, self.with_labels, self.in_shares, at_rest


def _prepare_once(model: nn.Module, wanted: _Wanted) -> Prepared:
    """From the memory, inside `capturing_once`."""
    memory = _MEMORY.get()
    if memory is None or memory.model is not model:
        return _prepare(model, wanted)
    if wanted.key not in memory.remembered:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always", SnowsWarning)
            prepared = _prepare(model, wanted)
        memory.remembered[wanted.key] = _Remembered(prepared, caught, wanted.calibration)
    known = memory.remembered[wanted.key]
    for warning in known.caught:  # every run is warned, not only the first
        warnings.warn(warning.message, warning.category, stacklevel=2)
    return replace(known.prepared, graph=known.prepared.graph.with_own_parameters())  # a run may replace parameters


def _prepare(model: nn.Module, wanted: _Wanted) -> Prepared:
    calibration = wanted.calibration
    copies = None if wanted.room is None else Room(existing(device_of(model, wanted.device)), wanted.room)
    place = as_device(wanted.device) if copies is None else _HOST  # weights that rest there are captured there, too
    work, own_masks, dtypes = _working_copy(model, place, shares=copies is not None)
    first = next((p for p in work.parameters() if p.is_floating_point()), None)
    if first is None:
        raise InputError(f"{type(model).__name__} has no parameters; there is nothing to prune")
    in_shares = wanted.in_shares and not wanted.with_labels and can_be_shared(calibration)
    read = read_in_shares(calibration, model) if in_shares else read_samples(calibration, model, wanted.with_labels)
    samples = read.shuffled(wanted.seed).to(first.device, first.dtype)
    with ONE_AT_A_TIME:
        graph = capture(work, *samples.call_arguments(0, _EXAMPLE_SAMPLES))
    if copies is None:
        return Prepared(work, graph, samples, first.device, own_masks, dtypes)
    graph.leave_parameters(copies)
    return Prepared(work, graph, samples.to(copies.device, first.dtype), copies.device, own_masks, dtypes)


def with_weights(model: nn.Module, weights: Mapping[str, Tensor], handed_over: bool = False) -> nn.Module:
    """A copy of the model with these weights, in the model's own dtype, device and mode.

    Masks of torch.nn.utils.prune become plain zeros. ASP's buffers stay, and are made to fit the new weights. Tensors
    that are `handed_over` are not copied where they are like those of the model.
    """
    own = dict(model.named_parameters()) if handed_over else {}
    result = copied(model, {own[name]: weight for name, weight in weights.items() if name in own})
    _own_masks(result)
    parameters = dict(result.named_parameters(remove_duplicate=False))
    buffers = dict(result.named_buffers())
    with torch.no_grad():
        for name, weight in weights.items():
            parameters[name].copy_(weight)
            mask = buffers.get(mask_names(name)[1])
            if mask is not None and bool(parameters[name][mask == 0].any()):  # the mask has changed
                mask.copy_(parameters[name] != 0)
    return result


def _working_copy(
    model: nn.Module, device: torch.device | None, shares: bool
) -> tuple[nn.Module, dict[str, OwnMask], dict[str, torch.dtype]]:
    """A copy in eval mode, in float32 or float64, without gradients; the masks it came with; the dtypes it had.

    If it `shares` weights with the model, it has no copies of those that stay as they are.
    """
    bad = spoilt(model)
    if bad:
        raise InputError(f"the model's weights contain NaN or infinity (in {', '.join(bad[:3])}); load them anew")
    if model.training:
        warnings.warn(
            "the model is in train mode; it is run in eval mode (dropout off, batch norm statistics as they are)",
            SnowsWarning,
            stacklevel=4,
        )
    work = copied(model, {parameter: parameter.detach() for parameter in model.parameters()} if shares else {})
    _without_cache(work)
    masks = _own_masks(work)
    dtypes = {name: parameter.dtype for name, parameter in work.named_parameters(remove_duplicate=False)}
    half = any(p.dtype in (torch.float16, torch.bfloat16) for p in work.parameters())
    work = move(work, device, torch.float32 if half else None).eval()
    for parameter in work.parameters():
        parameter.requires_grad_(False)
        if parameter.ndim == 4:  # the fastest layout for convolutions
            parameter.data = parameter.data.to(memory_format=torch.channels_last)
    return work, masks, dtypes


def _without_cache(model: nn.Module) -> None:
    """Stop models of Hugging Face from returning keys and values, which only generating text needs."""
    for module in model.modules():
        config: Any = getattr(module, "config", None)
        if getattr(config, "use_cache", False) is True:
            config.use_cache = False


def _own_masks(model: nn.Module) -> dict[str, OwnMask]:
    """The masks a model came with, by parameter name. Those of torch.nn.utils.prune are made permanent in the model."""
    return {
        f"{module_name}.{name}" if module_name else name: mask
        for module_name, module in model.named_modules()
        for name, mask in (*_torch_masks(module), *_asp_masks(module))
    }


def _torch_masks(module: nn.Module) -> Iterator[tuple[str, OwnMask]]:
    hooks = [hook for hook in module._forward_pre_hooks.values() if isinstance(hook, torch_prune.BasePruningMethod)]
    for name in [hook._tensor_name for hook in hooks]:
        kept = getattr(module, mask_names(name)[0]) != 0
        dense = getattr(module, f"{name}_orig").detach().clone()
        torch_prune.remove(module, name)
        yield name, OwnMask(kept, dense)


def _asp_masks(module: nn.Module) -> Iterator[tuple[str, OwnMask]]:
    buffers = dict(module.named_buffers(recurse=False))
    for name, weight in module.named_parameters(recurse=False):
        by_asp = mask_names(name)[1]
        if by_asp not in buffers:
            continue
        removed = buffers.get(stowed_name(by_asp), torch.zeros_like(weight))
        for what, buffer in (("mask", buffers[by_asp]), ("removed weights", removed)):
            if buffer.shape != weight.shape:
                raise InputError(
                    f"the {what} that the model holds for {a_type(module)} (in {by_asp}) has shape "
                    f"{tuple(buffer.shape)}; the weight has shape {tuple(weight.shape)}"
                )
        yield name, OwnMask(buffers[by_asp] != 0, weight.detach() + removed.to(weight.device))
