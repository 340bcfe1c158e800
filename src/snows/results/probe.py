"""A few inputs that are saved with a model, and its answers: later it must still give the same ones."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from ..data.tensors import widened
from ..data.usable import copied
from ..devices.device import placed
from ..errors import a_type

SAMPLES = 2
_INPUT, _OUTPUT, _CALL = "input.", "output.", "snows.probe"
# Relative to the largest output: other machines sum in another order.
_TOLERANCE = {torch.float64: 1e-9, torch.float32: 1e-4, torch.float16: 2e-2, torch.bfloat16: 1e-1}

Call = tuple[tuple[Any, ...], dict[str, Any]]


def first_samples(args: tuple[Any, ...], kwargs: dict[str, Any], dtype: torch.dtype) -> Call:
    """The arguments of a call, copied to the CPU, floats in the model's dtype."""
    call: Call = pytree.tree_map_only(Tensor, _copied, placed((args, kwargs), torch.device("cpu"), dtype))
    return call


def _copied(tensor: Tensor) -> Tensor:
    return tensor.detach().clone(memory_format=torch.contiguous_format)


def record(model: nn.Module, call: Call) -> tuple[dict[str, Tensor], dict[str, str]] | None:
    """Tensors and metadata of a probe file; None if the call cannot be written as JSON or the model does not run."""
    inputs: list[Tensor] = []
    try:
        words = json.dumps(_describe(list(call), inputs))
        outputs = answer(model, call)
    except Exception:  # from the user's own code; a result without a probe is better than none
        return None
    tensors = {f"{_INPUT}{index}": tensor for index, tensor in enumerate(inputs)}
    tensors |= {f"{_OUTPUT}{index}": tensor for index, tensor in enumerate(outputs)}
    copies = {name: tensor.detach().clone().contiguous() for name, tensor in tensors.items()}
    return (copies, {_CALL: words}) if outputs else None


def read(tensors: Mapping[str, Tensor], metadata: Mapping[str, str]) -> tuple[Call, list[Tensor]]:
    """The call and the recorded outputs of a probe file. Raises ValueError if it holds none."""
    try:
        args, kwargs = _rebuild(json.loads(metadata[_CALL]), tensors)
        outputs = [tensors[f"{_OUTPUT}{i}"] for i in range(sum(name.startswith(_OUTPUT) for name in tensors))]
        return (tuple(args), dict(kwargs)), outputs
    except (KeyError, TypeError, AttributeError, RecursionError) as error:
        raise ValueError(f"it holds no call of a model ({error})") from error


def answer(model: nn.Module, call: Call) -> list[Tensor]:
    """All output tensors of the model on the CPU. A copy is run, so the model keeps its device and its mode."""
    ready = copied(model).cpu().eval()
    with torch.no_grad():
        outputs = ready(*call[0], **call[1])
    return [leaf for leaf in pytree.tree_leaves(outputs) if isinstance(leaf, Tensor)]


def difference(model: nn.Module, outputs: list[Tensor], recorded: list[Tensor]) -> str | None:
    """How the outputs differ from the recorded ones, beyond rounding; None if they do not."""
    if [tensor.shape for tensor in outputs] != [tensor.shape for tensor in recorded]:
        return "outputs of other shapes"
    coarsest = max([_tolerance(tensor) for tensor in (*model.parameters(), *recorded)], default=0.0)
    for new, old in zip(map(widened, outputs), map(widened, recorded), strict=True):
        if not old.numel() or torch.equal(new, old):
            continue
        if not torch.equal(new.isnan(), old.isnan()):
            return "outputs that are NaN in other places"
        new, old = (tensor.nan_to_num(0.0).double() for tensor in (new, old))
        distance, scale = float((new - old).abs().max()), float(old.abs().max())
        if not distance <= coarsest * scale:
            return f"outputs that are {distance:.3g} apart, where the largest is {scale:.3g}"
    return None


def _tolerance(tensor: Tensor) -> float:
    return _TOLERANCE.get(tensor.dtype, 0.0)


def _describe(value: Any, tensors: list[Tensor]) -> Any:
    """Nested arguments as JSON. Each container is an object that names its kind; tensors are numbered."""
    if isinstance(value, Tensor):
        tensors.append(value)
        return {"tensor": len(tensors) - 1}
    if type(value) in (list, tuple):
        return {type(value).__name__: [_describe(entry, tensors) for entry in value]}
    if type(value) is dict:
        return {"dict": [[str(key), _describe(entry, tensors)] for key, entry in value.items()]}
    if value is None or isinstance(value, bool | int | float | str):
        return value
    raise TypeError(f"an argument is {a_type(value)}")


def _rebuild(words: Any, tensors: Mapping[str, Tensor]) -> Any:
    if not isinstance(words, dict):
        return words
    ((kind, content),) = words.items()
    if kind == "tensor":
        return tensors[f"{_INPUT}{content}"]
    if kind == "dict":
        return {key: _rebuild(entry, tensors) for key, entry in content}
    entries = [_rebuild(entry, tensors) for entry in content]
    return tuple(entries) if kind == "tuple" else entries
