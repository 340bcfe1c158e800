"""snows: prune a trained network without retraining and without labels.

    result = snows.prune(model, calibration, "2:4")

Importing is quick and touches no accelerator: torch is loaded with the first name that needs it.
"""

from __future__ import annotations

import random as _random
from importlib import import_module
from typing import TYPE_CHECKING, Any

from .errors import ArgumentError, CaptureError, InputError, SnowsError, SnowsWarning
from .masks.names import CLASSES
from .version import __version__

if TYPE_CHECKING:
    from .api import prune
    from .evaluation.attention import attention_map
    from .evaluation.classes import evaluate
    from .evaluation.comparison import compare
    from .evaluation.inspection import Inspection, inspect
    from .evaluation.language import perplexity, token_windows
    from .evaluation.table import Comparison
    from .evaluation.tolerance import Sensitivity, sensitivity
    from .evaluation.transfer import linear_probe
    from .events import Event
    from .exports.exporting import Exported, export
    from .masks import Choice, LayerMethod, NetworkMethod
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
    from .patterns import NM, Pattern, Unstructured
    from .recipe import Recipe
    from .results.report import Report
    from .results.result import Result
    from .results.storage import load, load_masks
    from .results.verification import Verification, verify
    from .timing.benchmark import Benchmark
    from .timing.benchmarking import bench
    from .training.frozen import freeze, unfreeze
    from .training.retraining import retrain

_HOME = {
    "Benchmark": "timing.benchmark",
    "Choice": "masks",
    "Comparison": "evaluation.table",
    "Event": "events",
    "Exported": "exports.exporting",
    "Inspection": "evaluation.inspection",
    "LayerMethod": "masks",
    "NM": "patterns",
    "NetworkMethod": "masks",
    "Pattern": "patterns",
    "Recipe": "recipe",
    "Report": "results.report",
    "Result": "results.result",
    "Sensitivity": "evaluation.tolerance",
    "Unstructured": "patterns",
    "Verification": "results.verification",
    "attention_map": "evaluation.attention",
    "bench": "timing.benchmarking",
    "check_mask_method": "masks.check",
    "compare": "evaluation.comparison",
    "evaluate": "evaluation.classes",
    "export": "exports.exporting",
    "freeze": "training.frozen",
    "inspect": "evaluation.inspection",
    "linear_probe": "evaluation.transfer",
    "load": "results.storage",
    "load_masks": "results.storage",
    "perplexity": "evaluation.language",
    "prune": "api",
    "retrain": "training.retraining",
    "sensitivity": "evaluation.tolerance",
    "token_windows": "evaluation.language",
    "unfreeze": "training.frozen",
    "verify": "results.verification",
    **{name: f"masks.{module}" for module, name in CLASSES.items()},
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
    "Benchmark",
    "CaptureError",
    "Choice",
    "Comparison",
    "Event",
    "Exchange",
    "Exported",
    "InputError",
    "Inspection",
    "LayerMethod",
    "Magnitude",
    "NetworkMethod",
    "Pattern",
    "Random",
    "Recipe",
    "Report",
    "Result",
    "Sensitivity",
    "SnowsError",
    "SnowsWarning",
    "SparseGPT",
    "Unstructured",
    "Verification",
    "Wanda",
    "WoodFisher",
    "__version__",
    "attention_map",
    "bench",
    "check_mask_method",
    "compare",
    "evaluate",
    "export",
    "freeze",
    "inspect",
    "linear_probe",
    "load",
    "load_masks",
    "perplexity",
    "prune",
    "retrain",
    "sensitivity",
    "token_windows",
    "unfreeze",
    "verify",
]


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'snows' has no attribute {name!r}")
    random_numbers = _random.getstate()  # are the caller's, and some of what is imported draws from them
    try:
        return getattr(import_module(f".{_HOME[name]}", __name__), name)
    finally:
        _random.setstate(random_numbers)


def __dir__() -> list[str]:
    return __all__
