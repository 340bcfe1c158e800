"""`snows.verify`: is a saved result still what was written, and does it hold what its report says?"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ..caller import cpu_by_default
from ..data.compact import nonzero_where_removed
from ..data.tensors import widened
from ..data.usable import copied, require_module, require_unwrapped
from ..data.weights import fill, fitted, read_state, read_tensors
from ..errors import ArgumentError, InputError, SnowsError, first_line, one_line
from ..patterns import Pattern, parse_pattern
from ..reading import as_path, entries, is_folder, look, read_json, read_text
from ..recipe import Recipe
from . import probe
from .files import mend
from .manifest import (
    COMPACT,
    FILES,
    MANIFEST,
    MASKS,
    MODEL,
    PROBE,
    RECIPE,
    REPORT,
    damage,
    model_file,
    read_manifest,
)
from .recorded import recorded_model
from .report import SCHEMA as REPORT_SCHEMA

_BEGINNINGS = (*"0123456789.-+", "dense")  # of patterns of the package
_LAYER_KEYS = {"parameter", "shape", "pattern", "weights", "kept"}


@dataclass(frozen=True)
class Verification:
    """What `snows.verify` has found.

    Attributes:
        findings: One sentence for everything that is wrong.
        notes: One sentence for everything else worth knowing, such as a check that was not possible.
        files: How many files have the checksums of the manifest.
        layers: How many layers have the pattern, mask and weights that the report says.
        ok: Whether nothing is wrong.

    Example:
        >>> import snows
        >>> snows.Verification(findings=("model.safetensors is missing",)).ok
        False
    """

    findings: tuple[str, ...]
    notes: tuple[str, ...] = ()
    files: int = 0
    layers: int = 0

    def __post_init__(self) -> None:
        for field in ("findings", "notes"):  # they quote names from files
            object.__setattr__(self, field, tuple(one_line(text) for text in getattr(self, field)))

    @property
    def ok(self) -> bool:
        return not self.findings


@cpu_by_default()
def verify(directory: str | Path, model: nn.Module | None = None) -> Verification:
    """Check a saved result: that every byte is as it was written, then what the files say.

    Checked are the pattern and the number of kept weights of each layer, exact zeros where its mask removes, shapes,
    types and finite values; and, if there is a model to run, its answers to the stored inputs.

    Args:
        directory: A folder that `Result.save` or `snows prune --out` wrote.
        model: The model to run. It is not changed. Default: a new model of the name that the folder records, unless
            that is code ("file.py:factory"), which is never run.

    Returns:
        A `Verification` with one sentence for everything that is wrong.

    Raises:
        InputError: There is no such folder.

    Example:
        >>> import tempfile, torch, snows
        >>> model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.ReLU(), torch.nn.Linear(8, 2)).eval()
        >>> result = snows.prune(model, torch.randn(64, 8), "2:4", layers="0", progress=False)
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     snows.verify(result.save(f"{folder}/pruned"), model)
        Verification(findings=(), notes=(), files=6, layers=1)
    """
    folder = as_path(directory, "directory")
    if model is not None:
        require_module(model, "model")
        require_unwrapped(model)
    mend(folder)
    if not is_folder(folder):
        raise InputError(f"there is no folder {folder}")
    findings, notes, files = _check_files(folder)
    if findings:
        return Verification(tuple(findings), (*notes, "the contents were not looked at"))
    try:
        contents = _Contents.read(folder)
    except (OSError, ValueError) as error:  # errors of ours about files are ValueErrors
        return Verification((str(error),), tuple(notes), files)
    wrong_layers = [wrong for layer in contents.layers if (wrong := list(contents.check_layer(layer)))]
    findings = [finding for wrong in wrong_layers for finding in wrong] + contents.check_others()
    notes += contents.infinite_buffers()
    if not findings:
        wrong, not_run = _check_probe(folder, model, contents.state)
        findings += wrong
        notes += not_run
    return Verification(tuple(findings), tuple(notes), files, len(contents.layers) - len(wrong_layers))


def _check_files(folder: Path) -> tuple[list[str], list[str], int]:
    """Findings, notes, and the number of files in the manifest."""
    path = folder / MANIFEST
    if look(path) is None:
        return [f"there is no {path}, so nothing tells whether the files are whole"], [], 0
    try:
        files = read_manifest(folder)
    except (InputError, OSError) as error:
        return [str(error)], [], 0
    findings = [text for name in files if (text := damage(folder, name, files[name])) is not None]
    needed = (MASKS, REPORT, RECIPE, COMPACT if COMPACT in files else MODEL)
    findings += [f"{path} lists no {name}" for name in needed if name not in files]
    others = sorted(entry.name for entry in entries(folder) if entry.name not in {MANIFEST, *files})
    findings += [f"{folder / name} was not written with the other files" for name in others if name in FILES]
    return findings, [f"{folder / name} is no file of snows" for name in others if name not in FILES], len(files)


@dataclass(frozen=True)
class _Contents:
    """What the files of a folder say: the layers of the report, the weights and the masks."""

    layers: list[dict[str, Any]]
    state: dict[str, Tensor]
    masks: dict[str, Tensor]

    @classmethod
    def read(cls, folder: Path) -> _Contents:
        report = read_json(folder / REPORT)
        if report.get("schema") != REPORT_SCHEMA:
            raise InputError(
                f"{folder / REPORT} has schema {report.get('schema')!r}; this version of snows reads {REPORT_SCHEMA}"
            )
        layers = report.get("layers")
        if not isinstance(layers, list) or not all(isinstance(y, dict) and set(y) >= _LAYER_KEYS for y in layers):
            raise InputError(f"{folder / REPORT} does not list the layers with {', '.join(sorted(_LAYER_KEYS))}")
        Recipe.from_json(read_text(folder / RECIPE))
        return cls(layers, read_state(model_file(folder)), read_state(folder / MASKS))

    def check_layer(self, layer: Mapping[str, Any]) -> Iterator[str]:
        """What is wrong with a layer of the report."""
        name = str(layer["parameter"])
        if name not in self.state or name not in self.masks:
            yield f"{name} is in the report, but has no {'mask' if name in self.state else 'weight'}"
            return
        weight, mask = self.state[name], self.masks[name]
        if list(weight.shape) != layer["shape"] or list(mask.shape) != layer["shape"]:
            yield (
                f"{name} has shape {layer['shape']} in the report, its weight {list(weight.shape)} and its mask "
                f"{list(mask.shape)}"
            )
            return
        if not weight.is_floating_point() or mask.dtype != torch.bool:
            yield f"the weight of {name} is {weight.dtype} and its mask {mask.dtype}; expected floats and bools"
            return
        yield from _check_mask(name, mask, layer)
        yield from _check_weight(name, weight, mask)

    def check_others(self) -> list[str]:
        """What is wrong besides the layers of the report."""
        reported = {str(layer["parameter"]) for layer in self.layers}
        findings = [f"{name} has a mask, but is not in the report" for name in self.masks if name not in reported]
        return findings + [
            f"{name} has NaN values"
            for name, tensor in self.state.items()
            if name not in reported and tensor.is_floating_point() and bool(widened(tensor).isnan().any())
        ]

    def infinite_buffers(self) -> list[str]:
        """Notes on infinite values outside of pruned layers: attention masks may have them on purpose."""
        return [
            f"{name} has infinite values"
            for name, tensor in self.state.items()
            if name not in self.masks and tensor.is_floating_point() and bool(widened(tensor).isinf().any())
        ]


def _check_mask(name: str, mask: Tensor, layer: Mapping[str, Any]) -> Iterator[str]:
    kept = int(mask.sum())
    if (kept, mask.numel()) != (layer["kept"], layer["weights"]):
        yield f"{name} keeps {kept} of {mask.numel()} weights; the report says {layer['kept']} of {layer['weights']}"
    try:
        pattern = _pattern(layer["pattern"])
    except ArgumentError as error:
        yield f"{name} has an impossible pattern in the report: {str(error)[:300]}"
        return
    if pattern is None:
        return
    if (refusal := pattern.refusal(mask.shape)) is not None:
        yield f"{name} cannot be {pattern}: {refusal}"
    elif groups := pattern.violations(mask):
        yield f"{name} keeps more than {pattern} allows in {groups} groups"


def _pattern(text: object) -> Pattern | None:
    """The pattern of a layer; None if its mask was given, or if the pattern is none of the package's own.

    Raises ArgumentError if it is written as one of ours and cannot be one.
    """
    if text == "given":
        return None
    if isinstance(text, str) and not text.lstrip().startswith(_BEGINNINGS):
        return None  # a class of somebody else's
    pattern = parse_pattern(text)
    if pattern is None:
        raise ArgumentError(f"{text!r} means that nothing is removed")
    return pattern


def _check_weight(name: str, weight: Tensor, mask: Tensor) -> Iterator[str]:
    if left := int(nonzero_where_removed(weight, mask).sum()):
        yield f"{name} is not exactly zero at {left} of the weights that its mask removes"
    if not bool(torch.isfinite(widened(weight)).all()):
        yield f"{name} has NaN or infinite weights"


def _check_probe(folder: Path, model: nn.Module | None, state: dict[str, Tensor]) -> tuple[list[str], list[str]]:
    """Findings and notes of running the model on the stored inputs."""
    if look(folder / PROBE) is None:
        return [], ["no probe is stored, so no outputs were compared"]
    ready = _recorded(folder) if model is None else copied(model)
    try:
        call, recorded = probe.read(*read_tensors(folder / PROBE))
    except InputError as error:
        return [str(error)], []
    except ValueError as error:
        return [f"cannot read {folder / PROBE}: {error}"], []
    if isinstance(ready, str):
        return [], [f"the probe was not run: {ready}"]
    try:
        _fill_exactly(ready, state, str(model_file(folder)))
        outputs = probe.answer(ready, call)
    except SnowsError as error:
        return [str(error)], []
    except Exception as error:  # the model's own code
        return [f"{type(ready).__name__} does not run on the stored inputs: {first_line(error)}"], []
    wrong = probe.difference(ready, outputs, recorded)
    return ([] if wrong is None else [f"the model gives {wrong}, on the stored inputs"]), []


def _recorded(folder: Path) -> nn.Module | str:
    """The model of the recorded name, without weights; or why it is not built."""
    try:
        return recorded_model(folder)
    except SnowsError as error:
        return str(error)


def _fill_exactly(model: nn.Module, state: dict[str, Tensor], origin: str) -> None:
    """As `fill`, but in the types of the file: the module may be in another precision."""
    fill(model, state, origin)
    model.load_state_dict(fitted(state, model.state_dict()), strict=False, assign=True)
