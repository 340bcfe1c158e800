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
    from .attention import attention_map
    from .bakeoff import compare
    from .cascade import Event
    from .evaluation import evaluate
    from .inspection import inspect
    from .language import perplexity, token_windows
    from .masks.alps import ALPS
    from .masks.cap import CAP
    from .masks.cbs import CBS
    from .masks.check import check_mask_method
    from .masks.chita import CHITA
    from .masks.exchange import Exchange
    from .masks.falcon import FALCON
    from .masks.magnitude import Magnitude
    from .masks.obc import OBC
    from .masks.random import Random
    from .masks.sparsegpt import SparseGPT
    from .masks.wanda import Wanda
    from .masks.woodfisher import WoodFisher
    from .patterns import NM, Unstructured
    from .recipe import Recipe
    from .storage import load
    from .transfer import linear_probe
    from .verification import verify

_HOME = {
    "ALPS": "masks.alps",
    "CAP": "masks.cap",
    "CBS": "masks.cbs",
    "CHITA": "masks.chita",
    "Event": "cascade",
    "Exchange": "masks.exchange",
    "FALCON": "masks.falcon",
    "Magnitude": "masks.magnitude",
    "NM": "patterns",
    "OBC": "masks.obc",
    "Random": "masks.random",
    "Recipe": "recipe",
    "Result": "api",
    "SparseGPT": "masks.sparsegpt",
    "Unstructured": "patterns",
    "Wanda": "masks.wanda",
    "WoodFisher": "masks.woodfisher",
    "attention_map": "attention",
    "check_mask_method": "masks.check",
    "compare": "bakeoff",
    "evaluate": "evaluation",
    "inspect": "inspection",
    "linear_probe": "transfer",
    "load": "storage",
    "perplexity": "language",
    "prune": "api",
    "token_windows": "language",
    "verify": "verification",
}

__all__ = [
    "ALPS",
    "CAP",
    "CBS",
    "CHITA",
    "FALCON",
    "NM",
    "OBC",
    "ArgumentError",
    "CaptureError",
    "Event",
    "Exchange",
    "InputError",
    "Magnitude",
    "Random",
    "Recipe",
    "Result",
    "SnowsError",
    "SnowsWarning",
    "SparseGPT",
    "Unstructured",
    "Wanda",
    "WoodFisher",
    "__version__",
    "attention_map",
    "check_mask_method",
    "compare",
    "evaluate",
    "inspect",
    "linear_probe",
    "load",
    "perplexity",
    "prune",
    "token_windows",
    "verify",
]


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'snows' has no attribute {name!r}")
    return getattr(import_module(f".{_HOME[name]}", __name__), name)


def __dir__() -> list[str]:
    return __all__
