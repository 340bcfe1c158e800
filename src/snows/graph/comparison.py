"""A captured graph against the model itself, and what is said of a model that does not give one answer."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from ..devices.weights import device_of_weights
from ..errors import CaptureError, InputError, first_line
from .graph import Graph

CAPTURED_SAMPLES = 2  # one sample would freeze the batch dimension
_TOLERANCE = 1e-3  # of the largest output; convolution algorithms differ by batch size in float32
_BATCH_SIZE_ADVICE = (
    "take the batch size from x.shape[0]; len(x), int(…), constants and branches on the batch size stay as they are at "
    "the size the model was captured with"
)


def require_running(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Run the model itself, so that a wrong input is not reported as a failed capture."""
    name = type(model).__name__
    try:
        with torch.no_grad():
            outputs = tensors(model(*args, **kwargs))
    except Exception as error:  # the user's forward may raise anything
        shapes = [tuple(tensor.shape) for tensor in tensors((args, kwargs))]
        raise InputError(f"{name} does not run on the data (inputs of shape {shapes}): {first_line(error)}") from error
    sparse = next((output.layout for output in outputs if output.layout != torch.strided), None)
    if sparse is not None:
        raise InputError(f"{name} gives a sparse output ({sparse}); expected dense ones, such as those of to_dense()")
    _require_finite(name, outputs)


def compare_at_sizes(
    model: nn.Module, graph: Graph, largest: int, call: Callable[[int, int], tuple[tuple[Any, ...], dict[str, Any]]]
) -> None:
    """Compare with the model at batch sizes up to `largest`, where capture assumed something of sizes.

    `call` gives the arguments for the samples from one number to another.
    """
    if graph.assumptions:
        for size in [*_powers_of_two(4, largest), largest]:
            compare_with_model(model, graph, *call(0, size))


def compare_with_model(model: nn.Module, graph: Graph, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Raise CaptureError if the graph does not give the model's own outputs."""
    name, leaves = type(model).__name__, pytree.tree_leaves((args, kwargs))
    samples = next(leaf.shape[0] for leaf in leaves if isinstance(leaf, Tensor) and leaf.ndim)
    expected = _run_twice(model, args, kwargs, samples)
    try:
        with torch.no_grad():
            device = device_of_weights(graph.parameters)  # which need not be the model's
            moved = pytree.tree_map_only(Tensor, lambda leaf: leaf.to(device), leaves)
            results = tensors(graph.run(moved))
    except RuntimeError as error:
        raise CaptureError(
            f"{name} only runs at the batch size it was captured with ({first_line(error)}); {_BATCH_SIZE_ADVICE}"
        ) from error
    same = len(expected) == len(results) and all(
        a.shape == b.shape and close(a, b.to(a.device))
        for a, b in zip(expected, results, strict=True)
        if a.is_floating_point()
    )
    if not same:
        raise CaptureError(
            f"the captured graph of {name} does not give the model's own outputs on {samples} samples; "
            f"{_BATCH_SIZE_ADVICE}"
        )


def _require_finite(name: str, outputs: Iterable[Tensor]) -> None:
    if any(output.is_floating_point() and not output.isfinite().all() for output in outputs):
        raise InputError(
            f"{name} gives NaN or infinity on the data; expected finite outputs: look at its weights, and at how the "
            "data is normalized"
        )


def _run_twice(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], samples: int) -> list[Tensor]:
    """The model's outputs, which must be the same both times."""
    name = type(model).__name__
    before = [tensor.clone() for tensor in tensors((args, kwargs))]
    try:
        with torch.no_grad():
            first, second = (tensors(model(*args, **kwargs)) for _ in range(2))
    except Exception as error:  # the user's forward may raise anything
        raise CaptureError(
            f"{name} runs on {CAPTURED_SAMPLES} samples, but not on {samples} ({first_line(error)}); "
            f"{_BATCH_SIZE_ADVICE}"
        ) from error
    _require_finite(name, first)
    if not _same(first, second):
        reason = (
            "dropout always on, noise, or a state that every call changes; make its forward deterministic first"
            if _same(before, tensors((args, kwargs)))
            else "forward changes its input in place; let it work on a copy, x = x.clone()"
        )
        raise CaptureError(f"{name} gives different outputs for the same input in eval mode: {reason}")
    return first


def tensors(values: Any) -> list[Tensor]:
    return [leaf for leaf in pytree.tree_leaves(values) if isinstance(leaf, Tensor)]


def close(a: Tensor, b: Tensor) -> bool:
    """Whether they are the same but for rounding."""
    if not a.numel():
        return True
    return float((a - b).abs().max()) <= _TOLERANCE * max(float(a.abs().max()), 1e-6)


def _same(some: Iterable[Tensor], others: Iterable[Tensor]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(some, others, strict=True))


def _powers_of_two(first: int, end: int) -> list[int]:
    sizes = []
    while first < end:
        sizes.append(first)
        first *= 2
    return sizes
