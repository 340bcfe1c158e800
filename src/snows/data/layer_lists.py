"""Layers to prune from a file that `snows.bench` wrote."""

from __future__ import annotations

from pathlib import Path

from ..errors import ArgumentError, InputError
from ..reading import look, read_json

KIND = "snows.bench/1"
SUFFIX = ".json"  # no layer or glob ends so


def is_layer_list(file: Path) -> bool:
    """Whether snows bench wrote the file."""
    try:
        return read_json(file).get("kind") == KIND
    except InputError:
        return False


def read_layer_list(path: str | Path, argument: str = "layers") -> tuple[str, ...]:
    """The layers that were faster sparse. `argument` is the one that names the file."""
    file = Path(path)
    if look(file) is None:
        raise InputError(f"{argument} is {path}, and there is no such file; expected one that snows bench wrote")
    found = read_json(file)
    names = found.get("prune") if found.get("kind") == KIND else None
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise InputError(
            f"{argument} is {path}, which snows bench did not write; expected its file with the kind {KIND}"
        )
    if not names:
        raise ArgumentError(
            f"{argument} is {path}, which names no layer: none was faster sparse on the machine that it is of"
        )
    return tuple(names)
