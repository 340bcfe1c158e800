"""Figures by a function of the user, for networks that are no classifiers."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

from torch import Tensor, nn
from torch.utils import _pytree as pytree

from ..data.batches import Call
from ..errors import ArgumentError, a_type
from .running import evaluating, run

Metric = Callable[[Iterator[tuple[Any, Any]]], Any]


def measured(model: nn.Module, samples: Iterable[Call], metric: Metric) -> dict[str, float]:
    """What the metric makes of the model's outputs and the labels, batch by batch."""
    check_metric(metric)
    with evaluating(model):
        figures = metric((_on_cpu(run(model, call)), _on_cpu(call.labels)) for call in samples)
    if not isinstance(figures, Mapping):
        figures = {_name_of(metric): figures}
    return {str(name): _number(value, metric) for name, value in figures.items()}


def check_metric(metric: Any) -> None:
    if not callable(metric):
        raise ArgumentError(f"metric is {a_type(metric)}; expected a function of pairs (outputs, labels)")
    try:
        inspect.signature(metric).bind(())
    except TypeError as error:
        raise ArgumentError(
            f"metric {_name_of(metric)} cannot be called with one argument ({error}); expected a function that takes "
            "an iterator of pairs (outputs, labels), one for each batch, and returns a number or {name: number}"
        ) from error
    except ValueError:  # built-in functions have no signature
        return


def _on_cpu(values: Any) -> Any:
    return pytree.tree_map(lambda leaf: leaf.cpu() if isinstance(leaf, Tensor) else leaf, values)


def _number(value: Any, metric: Metric) -> float:
    try:
        return float(value)
    except (TypeError, ValueError, RuntimeError) as error:
        shape = f" of shape {tuple(value.shape)}" if isinstance(value, Tensor) else ""
        raise ArgumentError(
            f"metric {_name_of(metric)} returned {a_type(value)}{shape}; expected a number or {{name: number}}"
        ) from error


def _name_of(metric: Any) -> str:
    return str(getattr(metric, "__name__", type(metric).__name__))
