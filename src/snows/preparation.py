"""Before a run: a copy of the caller's model to work on, its samples and its graph. The original is never touched."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import prune as torch_prune

from .calibration import Samples, read_samples
from .errors import ArgumentError, InputError, SnowsWarning
from .graph import Graph, capture

_EXAMPLE_SAMPLES = 8


@dataclass(frozen=True)
class Prepared:
    graph: Graph
    samples: Samples
    device: torch.device
    absorbed: dict[str, Tensor]  # masks of torch.nn.utils.prune modules, by parameter name


def as_device(device: torch.device | str | None) -> torch.device | None:
    try:
        return None if device is None else torch.device(device)
    except RuntimeError as error:
        raise ArgumentError(f"device {device!r} is not known; expected 'cpu', 'cuda', 'mps' …") from error


def move(model: nn.Module, device: torch.device | None, dtype: torch.dtype | None = None) -> nn.Module:
    """Put the module itself on a device; None leaves it where it is."""
    try:
        return model.to(device=device, dtype=dtype)
    except (RuntimeError, AssertionError, NotImplementedError) as error:  # torch's kinds for a device that is not there
        line = str(error).strip().splitlines()[0]
        raise InputError(f"the model cannot be moved to the device {str(device)!r}: {line}") from error


def prepare(model: nn.Module, calibration: Any, device: torch.device | str | None, seed: int) -> Prepared:
    """Copy, read, shuffle, capture."""
    work, absorbed = _working_copy(model, as_device(device))
    first = next((p for p in work.parameters() if p.is_floating_point()), None)
    if first is None:
        raise InputError(f"{type(model).__name__} has no parameters; there is nothing to prune")
    samples = read_samples(calibration, model).shuffled(seed).to(first.device, first.dtype)
    graph = capture(work, *samples.call_arguments(0, _EXAMPLE_SAMPLES))
    return Prepared(graph, samples, first.device, absorbed)


def with_weights(model: nn.Module, weights: Mapping[str, Tensor]) -> nn.Module:
    """A new module of the same class with these weights, in the model's own dtype, device and mode."""
    result = _copy(model)
    _absorb_pruning(result)
    parameters = dict(result.named_parameters(remove_duplicate=False))
    with torch.no_grad():
        for name, weight in weights.items():
            parameters[name].copy_(weight)
    return result


def _working_copy(model: nn.Module, device: torch.device | None) -> tuple[nn.Module, dict[str, Tensor]]:
    """A copy in eval mode, in float32 at least, without gradients; and the masks it came with."""
    bad = [n for n, p in model.named_parameters() if p.is_floating_point() and not torch.isfinite(p).all()]
    if bad:
        raise InputError(f"the model's weights contain NaN or infinity (in {', '.join(bad[:3])}); load them anew")
    if model.training:
        warnings.warn(
            "the model is in train mode; it is run in eval mode (dropout off, batch norm statistics as they are)",
            SnowsWarning,
            stacklevel=4,
        )
    work = _copy(model)
    masks = _absorb_pruning(work)
    half = any(p.dtype in (torch.float16, torch.bfloat16) for p in work.parameters())
    work = move(work, device, torch.float32 if half else None).eval()
    for parameter in work.parameters():
        parameter.requires_grad_(False)
        if parameter.ndim == 4:  # the layout convolution kernels are fastest in
            parameter.data = parameter.data.to(memory_format=torch.channels_last)
    return work, masks


def _copy(model: nn.Module) -> nn.Module:
    # Reparametrized modules hold tensors that are results, not leaves, which deepcopy refuses: those are cloned.
    results = (t for m in model.modules() for t in vars(m).values() if isinstance(t, Tensor) and not t.is_leaf)
    memo: dict[int, Any] = {id(tensor): tensor.detach().clone() for tensor in results}
    try:
        return copy.deepcopy(model, memo)
    except Exception as error:  # deepcopy runs the user's own code
        raise InputError(f"{type(model).__name__} cannot be copied: {error}") from error


def _absorb_pruning(model: nn.Module) -> dict[str, Tensor]:
    """Make torch.nn.utils.prune masks permanent in this copy, and return them by parameter name."""
    masks = {}
    for module_name, module in model.named_modules():
        for buffer, value in list(module.named_buffers(recurse=False)):
            name = buffer.removesuffix("_mask")
            if name != buffer and hasattr(module, f"{name}_orig"):
                torch_prune.remove(module, name)
                masks[f"{module_name}.{name}" if module_name else name] = value.bool()
    return masks
