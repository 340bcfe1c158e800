"""The forms in which users have their data: a tensor, a Dataset, a DataLoader, batches, dicts."""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn
from torch.utils import _pytree as pytree
from torch.utils.data import DataLoader, Dataset

from ..errors import ArgumentError, InputError, a_type, with_article
from .tensors import is_8_bit_float, unusable
from .usable import signature_of

LABEL_KEYS = {"labels", "label", "target", "targets", "y"}


@dataclass(frozen=True)
class Call:
    """One call of a model.

    args, kwargs  the arguments
    labels        what the user's data says about these samples, as it is; None: nothing
    count         the number of samples
    """

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    labels: Any
    count: int


def calls(data: Any, model: nn.Module, labels: Any = None, batch: int = 256) -> Iterator[Call]:
    """The calls of a model that run all samples.

    labels  a table with one row for each sample; None: those within the batches, where there are any
    batch   samples in one call at most, where the data can be cut
    """
    signature = signature_of(model)
    if labels is not None:
        _check_labels(labels)
    first = 0
    for given in batches_of(data, "evaluation", batch):
        own = labels_of(given)
        args, kwargs = call_arguments(given, signature, "evaluation")
        require_usable((args, kwargs), "evaluation")
        count = sample_count((args, kwargs), "an evaluation batch")
        if labels is not None:
            if first + count > len(labels):
                raise InputError(f"there are {first + count} samples or more and {len(labels)} labels")
            own = labels[first : first + count]
        yield from _cut(Call(args, kwargs, own, count), batch)
        first += count
    if labels is not None and first != len(labels):
        raise InputError(f"there are {first} samples and {len(labels)} labels")
    if not first:
        raise InputError("there are no samples to evaluate on")


def _check_labels(labels: object) -> None:
    """A table of labels, one row for each sample."""
    problem = unusable(labels) if isinstance(labels, Tensor) else None
    rows = has_rows(labels) or isinstance(labels, list | tuple) or hasattr(labels, "__array__")
    if not rows or problem is not None:
        what = f"a tensor that is {problem}" if problem is not None else a_type(labels)
        raise ArgumentError(f"labels are {what}; expected a tensor with one row for each sample")


def _cut(call: Call, size: int) -> Iterator[Call]:
    """The call in parts of at most `size` samples. It stays whole if something in it is not one row a sample."""
    leaves = pytree.tree_leaves((call.args, call.kwargs, call.labels))
    if call.count <= size or any(has_rows(leaf) and len(leaf) != call.count for leaf in leaves):
        yield call
        return
    for begin in range(0, call.count, size):
        rows = slice(begin, min(begin + size, call.count))
        args, kwargs, labels = pytree.tree_map(
            lambda leaf, rows=rows: leaf[rows] if has_rows(leaf) else leaf, (call.args, call.kwargs, call.labels)
        )
        yield Call(args, kwargs, labels, rows.stop - rows.start)


def batches_of(data: Any, what: str, size: int) -> Iterator[Any]:
    """The batches of whatever holds them. Those of a Dataset have `size` samples. `what` is for messages."""
    if isinstance(data, Tensor | Mapping):
        return iter([data])
    if isinstance(data, Dataset):
        return iter(DataLoader(data, batch_size=size))
    if isinstance(data, Iterator):
        raise InputError(
            f"the {what} data is a one-shot generator; give something that can be read again "
            "(a tensor, a list of batches, a Dataset or a DataLoader)"
        )
    if isinstance(data, Iterable) and not isinstance(data, str | bytes):
        return iter(data)
    raise InputError(
        f"the {what} data is {a_type(data)}; expected a tensor, a Dataset, a DataLoader or a re-iterable of batches"
    )


def call_arguments(batch: Any, signature: inspect.Signature, what: str) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """How the model is called: a tensor is its argument, a dict gives keywords, a tuple's first item is the input."""
    if isinstance(batch, Tensor):
        _refuse_missing(signature, what)
        return (batch,), {}
    if isinstance(batch, Mapping):
        return (), _keywords(batch, signature, what)
    if isinstance(batch, list | tuple) and batch:
        first = batch[0]
        if isinstance(first, list | tuple):
            return tuple(first), {}
        return call_arguments(first, signature, what)
    raise InputError(
        f"{with_article(what)} batch is {a_type(batch)}; expected a tensor, a tuple with the input first, or a dict"
    )


def _refuse_missing(signature: inspect.Signature, what: str) -> None:
    """Refuse a single input where the model cannot be called without others."""
    kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    parameters = signature.parameters.values()
    needed = [p.name for p in parameters if p.kind in kinds and p.default is p.empty]
    if len(needed) > 1:
        entries = ", ".join(f"{name!r}: …" for name in needed)
        raise InputError(
            f"the model needs {len(needed)} inputs ({', '.join(needed)}), but {with_article(what)} batch gives one: "
            "the first item of a tuple is the input, and the others are labels; give each batch as a dict "
            f"{{{entries}}}"
        )


def labels_of(batch: Any) -> Any:
    """What a batch has as labels: the second item of a tuple, or the entry of a dict with such a name."""
    if isinstance(batch, Mapping):
        return next((value for key, value in batch.items() if key in LABEL_KEYS), None)
    if isinstance(batch, list | tuple) and len(batch) > 1:
        return batch[1]
    if isinstance(batch, list | tuple) and batch and isinstance(batch[0], Mapping):
        return labels_of(batch[0])
    return None


def sample_count(inputs: Any, batch: str) -> int:
    """How many samples the inputs of one call have."""
    counts = {leaf.shape[0] for leaf in pytree.tree_leaves(inputs) if has_rows(leaf)}
    if not counts:
        raise InputError(f"{batch} has no tensor with a batch dimension")
    if len(counts) > 1:
        raise InputError(f"the inputs of {batch} have {sorted(counts)} samples; expected one number")
    return int(counts.pop())


def require_usable(inputs: Any, what: str) -> None:
    """Refuse tensors that hold no plain numbers: sparse ones, those of the device meta, 8-bit floats …"""
    for leaf in pytree.tree_leaves(inputs):
        if not isinstance(leaf, Tensor):
            continue
        problem = f"of {leaf.dtype}" if is_8_bit_float(leaf) else unusable(leaf)
        if problem is not None:
            raise InputError(
                f"a tensor of the {what} data is {problem}; expected dense tensors with values, such as those of "
                "x.to_dense() or x.float()"
            )


def has_rows(leaf: Any) -> bool:
    return isinstance(leaf, Tensor) and leaf.ndim > 0


def _keywords(batch: Mapping[Any, Any], signature: inspect.Signature, what: str) -> dict[str, Any]:
    """A dict without its labels, unless the model requires an argument of that name."""
    parameters = signature.parameters
    required = {name for name, p in parameters.items() if p.default is p.empty}
    inputs = {str(k): v for k, v in batch.items() if k in required or k not in LABEL_KEYS}
    takes_any = any(p.kind is p.VAR_KEYWORD for p in parameters.values())
    unknown = [] if takes_any else sorted(set(inputs) - set(parameters))
    if unknown:
        raise InputError(
            f"{with_article(what)} batch has the keys {', '.join(unknown)}, which the model's forward does not take "
            f"(it takes {', '.join(sorted(parameters))})"
        )
    return inputs
