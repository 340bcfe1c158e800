"""`snows.verify`: is a saved result still what was written, and does it hold what its report says?"""

from __future__ import annotations

import copy
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ..data.compact import nonzero_where_removed
from ..data.weights import fill, fitted, read_state, read_tensors
from ..errors import InputError, SnowsError
from ..patterns.base import NM, parse_pattern
from ..recipe import Recipe
from . import probe
from .report import SCHEMA as REPORT_SCHEMA
from .storage import (
    COMPACT,
    FILES,
    MANIFEST,
    MASKS,
    MODEL,
    PROBE,
    RECIPE,
    REPORT,
    file_facts,
    model_file,
    read_json,
    recorded_source,
    render_manifest,
)


@dataclass(frozen=True)
class Verification:
    """What was found: one sentence for everything that is wrong, and one for everything worth knowing besides."""

    findings: tuple[str, ...]
    notes: tuple[str, ...] = ()
    files: int = 0  # whose checksums are those of the manifest
    layers: int = 0  # whose pattern, mask and weights are as reported

    @property
    def ok(self) -> bool:
        return not self.findings


def verify(directory: str | Path, model: nn.Module | None = None) -> Verification:
    """Check a saved result: that every byte is as written, then what the files say.

    The pattern and the number of kept weights of each layer, exact zeros where its mask removes, shapes, types and
    finite values; and, where the model can be built, its answers to the stored inputs. It is built from the recorded
    name, but a recorded `file.py:factory` is not run: pass `model`, which is left as it is.
    """
    folder = Path(directory)
    if not folder.is_dir():
        raise InputError(f"there is no folder {folder}")
    findings, notes, listed = _check_files(folder)
    if findings:
        return Verification(tuple(findings), (*notes, "the contents were not looked at"))
    try:
        report, state, masks = _read_contents(folder)
    except (OSError, ValueError) as error:  # every error of ours on purpose about files is a ValueError
        return Verification((str(error),), tuple(notes), listed)
    layers = 0
    for entry in report["layers"]:
        wrong = list(_check_layer(entry, state, masks))
        findings += wrong
        layers += not wrong
    findings += _check_whole(report, state, masks)
    notes += [f"{name} has infinite values" for name in _infinite(state) if name not in masks]
    if not findings:
        wrong, note = _check_probe(folder, model, state)
        findings += wrong
        notes += note
    return Verification(tuple(findings), tuple(notes), listed, layers)


def _check_files(folder: Path) -> tuple[list[str], list[str], int]:
    """Findings, notes and the number of files that are exactly those of the manifest."""
    path = folder / MANIFEST
    try:
        manifest = read_json(path)
        files, versions = manifest.get("files"), manifest.get("versions")
        whole = isinstance(files, dict) and isinstance(versions, dict)
        # Compared as text: that finds what changes no value, too.
        if not whole or render_manifest(files, versions).encode() != path.read_bytes():  # type: ignore[arg-type]
            return [f"{path} is damaged: it is not as it was written"], [], 0
    except (InputError, OSError) as error:
        return (
            [str(error) if path.exists() else f"there is no {path}, so nothing tells whether the files are whole"],
            [],
            0,
        )
    assert isinstance(files, dict)
    findings = [text for name in files if (text := _check_file(folder, name, files[name])) is not None]
    findings += [
        f"{path} lists no {name}"
        for name in (MASKS, REPORT, RECIPE, COMPACT if COMPACT in files else MODEL)
        if name not in files
    ]
    others = sorted(entry.name for entry in folder.iterdir() if entry.name not in {MANIFEST, *files})
    findings += [f"{folder / name} was not written with the other files" for name in others if name in FILES]
    notes = [f"{folder / name} is no file of snows" for name in others if name not in FILES]
    return findings, notes, len(files)


def _check_file(folder: Path, name: str, written: Any) -> str | None:
    """What is wrong with a file of the manifest. Names that snows does not write are not opened."""
    path = folder / name
    if name not in FILES or not isinstance(written, dict):
        return f"{folder / MANIFEST} lists {name!r}, which is no file of snows"
    if not path.is_file():
        return f"{path} is missing"
    try:
        found = file_facts(path)
    except OSError as error:
        return f"cannot read {path}: {error.strerror}"
    if found["bytes"] != written.get("bytes"):
        return f"{path} has {found['bytes']} bytes, and had {written.get('bytes')} when it was written"
    return None if found == written else f"{path} is damaged: its checksum is not that of the manifest"


def _read_contents(folder: Path) -> tuple[dict[str, Any], dict[str, Tensor], dict[str, Tensor]]:
    report = read_json(folder / REPORT)
    if report.get("schema") != REPORT_SCHEMA:
        raise InputError(
            f"{folder / REPORT} has schema {report.get('schema')!r}; this version of snows reads {REPORT_SCHEMA}"
        )
    layers = report.get("layers")
    keys = {"parameter", "shape", "pattern", "weights", "kept"}
    if not isinstance(layers, list) or not all(isinstance(layer, dict) and keys <= set(layer) for layer in layers):
        raise InputError(f"{folder / REPORT} does not list the layers with {', '.join(sorted(keys))}")
    Recipe.from_json((folder / RECIPE).read_text(encoding="utf-8"))
    return report, read_state(model_file(folder)), read_state(folder / MASKS)


def _check_layer(entry: dict[str, Any], state: dict[str, Tensor], masks: dict[str, Tensor]) -> Iterator[str]:
    name = str(entry["parameter"])
    if name not in state or name not in masks:
        yield f"{name} is in the report, but has no {'mask' if name in state else 'weight'}"
        return
    weight, mask = state[name], masks[name]
    if list(weight.shape) != entry["shape"] or list(mask.shape) != entry["shape"]:
        yield (
            f"{name} has shape {entry['shape']} in the report, its weight {list(weight.shape)} and its mask "
            f"{list(mask.shape)}"
        )
        return
    if not weight.is_floating_point() or mask.dtype != torch.bool:
        yield f"the weight of {name} is {weight.dtype} and its mask {mask.dtype}; expected floats and bools"
        return
    kept = int(mask.sum())
    if (kept, mask.numel()) != (entry["kept"], entry["weights"]):
        yield f"{name} keeps {kept} of {mask.numel()} weights; the report says {entry['kept']} of {entry['weights']}"
    pattern = parse_pattern(entry["pattern"]) if re.fullmatch(r"\d+:\d+", str(entry["pattern"])) else None
    if isinstance(pattern, NM):
        if pattern.refusal(mask.shape) is not None:
            yield f"{name} cannot be {pattern}: {pattern.refusal(mask.shape)}"
        elif wrong := pattern.violations(mask):
            yield f"{name} keeps more than {pattern} allows in {wrong} groups"
    if left := int(nonzero_where_removed(weight, mask).sum()):
        yield f"{name} is not exactly zero at {left} of the weights that its mask removes"
    if not bool(torch.isfinite(probe.widened(weight)).all()):
        yield f"{name} has NaN or infinite weights"


def _check_whole(report: dict[str, Any], state: dict[str, Tensor], masks: dict[str, Tensor]) -> list[str]:
    """What no single layer shows."""
    reported = {str(layer["parameter"]) for layer in report["layers"]}
    findings = [f"{name} has a mask, but is not in the report" for name in masks if name not in reported]
    return findings + [
        f"{name} has NaN values"
        for name, tensor in state.items()
        if name not in reported and tensor.is_floating_point() and bool(probe.widened(tensor).isnan().any())
    ]


def _infinite(state: dict[str, Tensor]) -> list[str]:
    """By name. Buffers may well be so: -inf is how many attention masks say "not this one"."""
    return [
        name
        for name, tensor in state.items()
        if tensor.is_floating_point() and bool(probe.widened(tensor).isinf().any())
    ]


def _check_probe(folder: Path, model: nn.Module | None, state: dict[str, Tensor]) -> tuple[list[str], list[str]]:
    """Findings and notes of running the model on the stored inputs."""
    if not (folder / PROBE).exists():
        return [], ["no probe is stored, so no outputs were compared"]
    try:
        call, recorded = probe.read(*read_tensors(folder / PROBE))
        ready = _build(folder) if model is None else copy.deepcopy(model)
    except ValueError as error:
        return [f"cannot read {folder / PROBE}: {error}"], []
    if isinstance(ready, str):
        return [], [f"the probe was not run: {ready}"]
    try:
        _fill_exactly(ready, state, str(model_file(folder)))
        found = probe.answer(ready, call)
    except SnowsError as error:
        return [str(error)], []
    except Exception as error:  # the model's own code
        line = (str(error).strip().splitlines() or [type(error).__name__])[0]
        return [f"{type(ready).__name__} does not run on the stored inputs: {line}"], []
    wrong = probe.difference(ready, found, recorded)
    return ([] if wrong is None else [f"the model gives {wrong}, on the stored inputs"]), []


def _build(folder: Path) -> nn.Module | str:
    """The model of the recorded name, without weights; or why it is not built."""
    source = recorded_source(folder)
    if source is None:
        return "the result does not record which model it was made from; give one"
    if source.rpartition(":")[0].endswith(".py"):
        return f"{source} is code, and code that a folder names is not run; give the model if you trust it"
    from ..data.models import build_model

    try:
        return build_model(source, pretrained=False)
    except SnowsError as error:
        return str(error)


def _fill_exactly(model: nn.Module, state: dict[str, Tensor], origin: str) -> None:
    """As `fill` does, but in the types of the file: the module may be of another precision."""
    fill(model, state, origin)
    model.load_state_dict(fitted(state, model.state_dict()), strict=False, assign=True)
