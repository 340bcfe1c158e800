"""Whether an exported file still is the network: its outputs, and its zeros."""

from __future__ import annotations

import torch
from torch import Tensor

from ..errors import InputError, first_line
from ..results.probe import difference
from .base import Saved, Written, call_tensors

BATCHES = (1, 2, 3)  # an export that froze its batch size fails at two of them


def check_outputs(saved: Saved, written: Written, what: str) -> dict[int, float]:
    """The largest difference from the model's own outputs, as a share of the largest output, by batch size."""
    found = {}
    if written.run is None:
        return {}
    for batch in BATCHES:
        call = saved.inputs(batch)
        expected = call_tensors(saved.model, call)
        try:
            outputs = written.run(call)
        except Exception as error:  # each engine has its own kinds
            raise InputError(f"{what} does not run on {batch} of the stored inputs: {first_line(error)}") from error
        if len(outputs) != len(expected):
            raise InputError(f"{what} gives {len(outputs)} outputs; the model gives {len(expected)}")
        # Formats in half precision are compared in it.
        expected = [value.to(output.dtype) for output, value in zip(outputs, expected, strict=True)]
        wrong = difference(saved.model, outputs, expected)
        if wrong is not None:
            raise InputError(f"{what} gives {wrong}, on {batch} of the stored inputs")
        found[batch] = max(map(_relative, outputs, expected), default=0.0)
    return found


def check_zeros(saved: Saved, written: Written, what: str) -> int:
    """How many weights the masks remove; each of them must be zero in the file."""
    constants = written.constants
    taken: dict[str, Tensor] = {}  # by constant, the weight that it is
    for name, kept in saved.masks.items():
        weight = saved.weight(name)
        # Converters store equal weights once.
        free = [key for key in constants if key not in taken or torch.equal(taken[key], weight)]
        place = next((key for key in _by_name(name, free) if _has_zeros(constants[key], weight, kept)), None)
        if place is None:
            raise InputError(f"{what} holds no weight with the zeros of {name}")
        taken[place] = weight
    return sum(int((~kept).sum()) for kept in saved.masks.values())


def _by_name(name: str, constants: list[str]) -> list[str]:
    """Constants that may be this weight: that of the same name first. Converters rename and transpose."""
    return sorted(constants, key=lambda key: key != name)


def _has_zeros(constant: Tensor, weight: Tensor, kept: Tensor) -> bool:
    """Whether a constant is zero wherever the mask removes, and not everywhere, unless the weight is."""
    if constant.numel() != kept.numel() or bool(constant.any()) != bool(weight.any()):
        return False
    ways = [constant.reshape(kept.shape)]
    if kept.ndim == 2:
        ways.append(constant.reshape(kept.shape[1], kept.shape[0]).T)
    return any(not bool(way[~kept].any()) for way in ways)


def _relative(output: Tensor, expected: Tensor) -> float:
    if not output.numel() or not output.is_floating_point():
        return 0.0
    distance = float((output.double() - expected.double()).abs().max())
    return distance / max(float(expected.double().abs().max()), torch.finfo(torch.float64).tiny)
