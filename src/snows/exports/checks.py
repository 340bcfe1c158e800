"""Whether an exported file still is the network: its outputs, and its zeros."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

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
    free = dict(written.constants)
    for name, kept in saved.masks.items():
        place = next((key for key in _candidates(name, free) if _has_zeros(free[key], kept)), None)
        if place is None:
            raise InputError(f"{what} holds no weight with the zeros of {name}")
        del free[place]
    return sum(int((~kept).sum()) for kept in saved.masks.values())


def _candidates(name: str, constants: Mapping[str, Tensor]) -> Iterator[str]:
    """Constants that may be this weight: that of the same name first. Converters rename and transpose."""
    if name in constants:
        yield name
    yield from (key for key in constants if key != name)


def _has_zeros(constant: Tensor, kept: Tensor) -> bool:
    """Whether a constant is zero wherever the mask removes, and not everywhere."""
    if constant.numel() != kept.numel() or not bool(constant.any()):
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
