"""Model libraries for tests, imported so that they work beside the CPU build of torch; absent ones skip the test."""

from __future__ import annotations

import importlib
import warnings
from functools import cache
from importlib.util import find_spec
from types import ModuleType
from typing import Any

import pytest

_OPERATORS = ("nms", "qnms")
_declared: list[Any] = []  # a torch.library.Library takes its operators with it when it goes


def library(name: str) -> ModuleType:
    """The named library, or a skipped test that says it is not installed."""
    if find_spec(name) is None:
        pytest.skip(f"{name} is not installed (pip install 'snows[models]')")
    return _imported(name)


@cache
def _imported(name: str) -> ModuleType:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # what libraries say about themselves and each other while being imported
        if find_spec("torchvision") is not None:
            _mend_torchvision()  # timm and transformers import it where it is installed
        return importlib.import_module(name)


def _mend_torchvision() -> None:
    """Declare the two operators of torchvision's compiled part that its import needs, where that part is unusable.

    Only a CUDA build of it is published for the pinned version; without its libraries no operator is registered. The
    classifiers use none of them.
    """
    import torch

    try:
        importlib.import_module("torchvision")
    except RuntimeError as error:
        if "torchvision::nms" not in str(error):
            raise
        declared = torch.library.Library("torchvision", "DEF")
        for operator in _OPERATORS:
            declared.define(f"{operator}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
        _declared.append(declared)
        importlib.import_module("torchvision")
