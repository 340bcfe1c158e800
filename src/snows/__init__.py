"""snows: prune a trained network without retraining and without labels.

    result = snows.prune(model, calibration, "2:4")

Importing is quick and touches no accelerator: torch is loaded with the first name that needs it.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from .errors import ArgumentError, CaptureError, InputError, SnowsError, SnowsWarning
from .version import __version__

if TYPE_CHECKING:
    from .api import Result, prune
    from .cascade import Event
    from .evaluation import evaluate
    from .inspection import inspect
    from .masks.magnitude import Magnitude
    from .masks.random import Random
    from .masks.wanda import Wanda
    from .patterns import NM, Unstructured
    from .recipe import Recipe
    from .storage import load

_HOME = {
    "Event": "cascade",
    "Magnitude": "masks.magnitude",
    "NM": "patterns",
    "Random": "masks.random",
    "Recipe": "recipe",
    "Result": "api",
    "Unstructured": "patterns",
    "Wanda": "masks.wanda",
    "evaluate": "evaluation",
    "inspect": "inspection",
    "load": "storage",
    "prune": "api",
}

__all__ = [
    "NM",
    "ArgumentError",
    "CaptureError",
    "Event",
    "InputError",
    "Magnitude",
    "Random",
    "Recipe",
    "Result",
    "SnowsError",
    "SnowsWarning",
    "Unstructured",
    "Wanda",
    "__version__",
    "evaluate",
    "inspect",
    "load",
    "prune",
]


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'snows' has no attribute {name!r}")
    return getattr(import_module(f".{_HOME[name]}", __name__), name)


def __dir__() -> list[str]:
    return __all__
