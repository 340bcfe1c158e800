"""Single layers, dense and sparse."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from ..errors import a_type, first_line
from ..exports.rules import NOT_CALLED, input_shapes, owner
from ..graph.capture import Call
from .benchmark import LayerTiming
from .clock import time_in_turns
from .kernels import Kernel
from .modes import modes_of
from .possibilities import sparsity

_TOLERANCE = {torch.float32: 1e-4, torch.float64: 1e-9}  # of the largest output; half precision 1e-2
_DENSE = "dense"
_MODES = ("eager", "graph")  # a single layer has nothing to compile


@dataclass(frozen=True)
class LayerCase:
    """A layer as the network calls it.

    module  on the device, with pruned weights
    kernels the sparse kernels that take it; if none does, the reason
    shapes  of its input, by batch size
    """

    parameter: str
    module: nn.Module
    kernels: tuple[Kernel, ...]
    reason: str | None
    shapes: Mapping[int, tuple[int, ...]]

    @property
    def name(self) -> str:
        return self.parameter.removesuffix(".weight")

    @property
    def weight(self) -> Tensor:
        return self.module.get_parameter("weight").detach()

    @property
    def key(self) -> tuple[Any, ...]:
        """Layers that are alike in this take the same time."""
        options = [getattr(self.module, name, None) for name in ("stride", "padding", "dilation", "groups")]
        shapes = tuple(sorted(self.shapes.items()))
        return type(self.module), tuple(self.weight.shape), str(options), shapes, round(sparsity(self.weight), 1)


def find_cases(
    model: nn.Module, parameters: Iterable[str], calls: Mapping[int, Call], kernels: Iterable[Kernel]
) -> dict[str, LayerCase]:
    """The pruned layers, by the names of their weights, with the inputs that they get at each batch size."""
    shapes = {batch: input_shapes(model, call) for batch, call in calls.items()}
    cases = {}
    for parameter in parameters:
        module = owner(model, parameter)
        sizes = {batch: found[module] for batch, found in shapes.items() if module in found}
        taking, reason = _choose(module, parameter, kernels)
        if taking and len(sizes) < len(calls):
            taking, reason = (), NOT_CALLED
        cases[parameter] = LayerCase(parameter, module, taking, reason, sizes)
    return cases


def _choose(module: nn.Module, parameter: str, kernels: Iterable[Kernel]) -> tuple[tuple[Kernel, ...], str | None]:
    if not parameter.endswith("weight") or not hasattr(module, "weight"):
        return (), f"it is part of {a_type(module)}"
    refusals = {kernel: kernel.refusal(module) for kernel in kernels}
    taking = tuple(kernel for kernel, refusal in refusals.items() if refusal is None)
    reasons = [refusal for refusal in refusals.values() if refusal is not None]
    if taking:
        return taking, None
    return (), reasons[-1] if reasons else "torch has no sparse kernels on this device"


def time_layer(case: LayerCase, batch: int, seconds: float) -> list[LayerTiming]:
    """Dense and sparse in turns, in every mode. Raises RuntimeError if no sparse kernel runs."""
    weight = case.weight
    x = torch.randn(case.shapes[batch], dtype=weight.dtype, device=weight.device)
    if x.ndim == 4 and weight.device.type == "cuda":
        x = x.contiguous(memory_format=torch.channels_last)
    modes = {name: mode for name, mode in modes_of(weight.device).items() if name in _MODES}
    found = []
    with torch.no_grad():
        dense = copy.deepcopy(case.module)
        sparse = _running(case.kernels, dense, x)
        for name, mode in modes.items():
            calls = {what: mode(partial(module, x)) for what, module in {_DENSE: dense, **sparse}.items()}
            timed = time_in_turns(calls, weight.device, seconds / len(modes))
            found += [LayerTiming(batch, kernel, name, timed[_DENSE], timed[kernel]) for kernel in sparse]
    return found


def _running(kernels: Iterable[Kernel], dense: nn.Module, x: Tensor) -> dict[str, nn.Module]:
    """The layer with each kernel that runs and computes the same."""
    found, failures = {}, []
    for kernel in kernels:
        try:
            module = kernel.pack(dense)
            _check(dense(x), module(x))
            found[kernel.name] = module
        except Exception as error:  # each library has its own kinds
            failures.append(failure(error))
    if not found:
        raise RuntimeError("; ".join(failures))
    return found


def _check(expected: Tensor, found: Tensor) -> None:
    """A kernel that computes something else is not timed."""
    distance = float((found - expected).abs().max())
    if not distance <= _TOLERANCE.get(expected.dtype, 1e-2) * float(expected.abs().max()):
        raise RuntimeError(f"the sparse kernel's outputs are {distance:.3g} from the dense ones")


def failure(error: BaseException) -> str:
    """Why something did not run, as one sentence."""
    return f"{type(error).__name__}: {first_line(error)}"
