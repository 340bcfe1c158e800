"""Layers to prune from a file that `snows.bench` wrote."""

from __future__ import annotations

import json
from pathlib import Path

from ..errors import ArgumentError, InputError

KIND = "snows.bench/1"
SUFFIX = ".json"  # no layer or glob ends so


def read_layer_list(path: str | Path) -> tuple[str, ...]:
    """The layers that were faster sparse."""
    file = Path(path)
    if not file.is_file():
        raise InputError(f"layers is {path}, and there is no such file; expected one that snows bench wrote")
    try:
        found = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise InputError(f"cannot read {path}: {error}") from error
    names = found.get("prune") if isinstance(found, dict) and found.get("kind") == KIND else None
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise InputError(f"{path} was not written by snows bench; expected its file with the kind {KIND}")
    if not names:
        raise ArgumentError(f"{path} names no layer: none was faster sparse on the machine that it is of")
    return tuple(names)
