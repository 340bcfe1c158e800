"""What formats are made from, and what they give back."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from ..errors import InputError, SnowsError, first_line
from ..graph.capture import Call, resized


@dataclass(frozen=True)
class Saved:
    """A saved result that was verified.

    folder  where it lies
    model   the pruned network on the CPU, in eval mode
    masks   by parameter name, True where a weight is kept
    call    arguments of the model: the stored inputs
    """

    folder: Path
    model: nn.Module
    masks: dict[str, Tensor]
    call: Call

    @property
    def name(self) -> str:
        """The model's class, for messages."""
        return type(self.model).__name__

    def inputs(self, samples: int) -> Call:
        """The stored inputs as a batch of this size; some are repeated if there are too few."""
        return resized(self.call, samples)

    def weight(self, name: str) -> Tensor:
        """The pruned weight of this parameter name."""
        return self.model.get_parameter(name).detach()


@dataclass(frozen=True)
class Written:
    """What a format has written, and how it is read back.

    run        runs the file that was written; None if nothing here can, which a note explains
    constants  the numbers in the file, by their names there
    facts      what a user of the file has to know, such as the opset, for the report
    notes      one sentence each
    """

    run: Callable[[Call], list[Tensor]] | None
    constants: Mapping[str, Tensor]
    facts: Mapping[str, Any] = field(default_factory=dict)
    notes: tuple[str, ...] = ()


def tensors_of(value: Any) -> list[Tensor]:
    """All tensors in nested arguments or outputs."""
    return [leaf for leaf in pytree.tree_leaves(value) if isinstance(leaf, Tensor)]


def call_tensors(module: Callable[..., Any], call: Call) -> list[Tensor]:
    """The outputs of a module or function of torch."""
    with torch.no_grad():
        return tensors_of(module(*call[0], **call[1]))


@contextmanager
def blamed_on(what: str) -> Iterator[None]:
    """Errors of other libraries as one sentence that says what was being done. Errors of the disk stay as they are."""
    try:
        yield
    except (SnowsError, OSError, MemoryError):
        raise
    except Exception as error:  # each library has its own kinds
        raise InputError(f"{what}: {first_line(error)}") from error
