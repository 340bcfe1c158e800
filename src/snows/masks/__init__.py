"""Mask methods, one file each, and masks that the caller brings. They know weights, statistics and patterns.

The names come from here at once, everything else with torch when it is asked for.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from .names import NAMES

if TYPE_CHECKING:
    from .base import (
        Choice,
        LayerMethod,
        MaskMethod,
        Network,
        NetworkMethod,
        Reads,
        as_method,
        best_masks,
        default_spread,
        require_pattern,
    )

__all__ = [
    "NAMES",
    "Choice",
    "LayerMethod",
    "MaskMethod",
    "Network",
    "NetworkMethod",
    "Reads",
    "as_method",
    "best_masks",
    "default_spread",
    "require_pattern",
]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(".base", __name__), name)
