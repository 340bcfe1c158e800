"""Results on disk: plain safetensors and JSON, written whole or not at all, with a manifest of checksums."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import safetensors
import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from ..data.compact import pack_masks, pack_state
from ..data.weights import fill, read_state
from ..errors import InputError
from ..version import __version__
from .files import flush_folder
from .probe import record

if TYPE_CHECKING:
    from .result import Result

MODEL, COMPACT, MASKS, PROBE, REPORT, PAGE, RECIPE, MANIFEST = (
    "model.safetensors",
    "model.compact.safetensors",
    "masks.safetensors",
    "probe.safetensors",
    "report.json",
    "report.html",
    "recipe.json",
    "manifest.json",
)
FILES = frozenset({MODEL, COMPACT, MASKS, PROBE, REPORT, PAGE, RECIPE, MANIFEST})
SCHEMA = "snows.result/1"


def save(result: Result, directory: Path, compact: bool = False, force: bool = False) -> Path:
    """Write everything beside the directory first and move it there at the end, when it is safely on the disk.

    An existing folder is never touched, unless `force` is given and it holds a result of ours and nothing else.
    """
    refuse_existing(directory, force)
    place = directory.resolve()  # of a link, the folder behind it
    try:
        place.parent.mkdir(parents=True, exist_ok=True)
        unfinished = Path(tempfile.mkdtemp(prefix=f".{place.name}-", dir=place.parent))
    except OSError as error:
        raise InputError(f"cannot write to {directory.parent}: {error.strerror}") from error
    try:
        _write_files(result, unfinished, compact)
        _move_to(unfinished, place)
    except (OSError, safetensors.SafetensorError) as error:
        raise InputError(f"cannot write to {directory}: {getattr(error, 'strerror', None) or error}") from error
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)
    return directory


def refuse_existing(directory: Path, force: bool = False) -> None:
    """A folder with something in it is not written to; with `force`, it is if all of it is ours."""
    if not directory.exists() or (directory.is_dir() and not any(directory.iterdir())):
        return
    if not force:
        raise InputError(f"{directory} exists and is not empty; choose another folder or remove it first")
    if not directory.is_dir() or not _is_result(directory):
        raise InputError(f"{directory} was not written by snows; choose another folder or remove it first")
    others = sorted(path.name for path in directory.iterdir() if path.name not in FILES)
    if others:
        raise InputError(
            f"{directory} holds more than a result of snows ({', '.join(others[:3])}), which would be lost; "
            "choose another folder or remove it first"
        )


def render_manifest(files: Mapping[str, Any], versions: Mapping[str, Any]) -> str:
    """The text of a manifest. Its last entry is the SHA-256 of the others, written without spaces, sorted by name."""
    content = {"schema": SCHEMA, "versions": dict(versions), "files": {name: files[name] for name in sorted(files)}}
    canonical = json.dumps(content, sort_keys=True, separators=(",", ":"))
    return json.dumps({**content, "sha256": hashlib.sha256(canonical.encode()).hexdigest()}, indent=2) + "\n"


def file_facts(path: Path) -> dict[str, Any]:
    """Size and SHA-256, as a manifest holds them."""
    with path.open("rb") as stream:
        found = hashlib.file_digest(stream, "sha256").hexdigest()
        return {"bytes": stream.tell(), "sha256": found}


def _write_files(result: Result, folder: Path, compact: bool) -> None:
    masks = {name: mask.cpu().bool() for name, mask in result.masks.items()}
    state, tied = _exact_state(result.model, masks)
    about = {"format": "pt", "snows": __version__}
    if compact:
        packed, how = pack_state(state, masks, tied)
        save_file(packed, folder / COMPACT, metadata={**about, **how})
    else:
        save_file(state, folder / MODEL, metadata=about)
    packed, how = pack_masks(masks)
    save_file(packed, folder / MASKS, metadata={**about, **how})
    probe = None if result.probe is None else record(result.model, result.probe)
    if probe is not None:
        save_file(probe[0], folder / PROBE, metadata={**about, **probe[1]})
    report = {"source": result.source, **result.report.to_dict()}
    (folder / REPORT).write_text(json.dumps(report, indent=2, allow_nan=False), encoding="utf-8")
    result.report.to_html(folder / PAGE)
    (folder / RECIPE).write_text(result.recipe.to_json(), encoding="utf-8")
    facts = {path.name: file_facts(path) for path in folder.iterdir()}
    versions = {"snows": __version__, "torch": str(torch.__version__)}
    (folder / MANIFEST).write_text(render_manifest(facts, versions), encoding="utf-8")
    folder.chmod(0o755)
    for path in folder.iterdir():
        path.chmod(0o644)  # readable like any other file, whatever wrote it
        _to_disk(path)
    flush_folder(folder)


def _exact_state(model: nn.Module, masks: Mapping[str, Tensor]) -> tuple[dict[str, Tensor], dict[str, str]]:
    """The state dict on the CPU, with +0.0 wherever a mask removes; and which names are tied to an earlier one.

    Tied weights share memory, which the format does not know: each name gets its own copy.
    """
    own = {name: tensor.detach() for name, tensor in model.state_dict().items()}
    seen: dict[object, str] = {}
    tied: dict[str, str] = {}
    for name, tensor in own.items():
        memory = (tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride()) if tensor.numel() else name
        if seen.setdefault(memory, name) != name:
            tied[name] = seen[memory]
    kept = {tied.get(name, name): mask for name, mask in masks.items()}
    state: dict[str, Tensor] = {}
    for name, tensor in own.items():
        state[name] = tensor.cpu().clone().contiguous()
        mask = kept.get(tied.get(name, name))
        if mask is None:
            continue
        if bool(state[name][~mask].any()):
            raise InputError(
                f"{name} is not zero where its mask removes it, so the result was changed after pruning; multiply it "
                "by its mask first"
            )
        state[name][~mask] = 0  # and not -0.0, which a negative weight times zero is
    return state, tied


def _move_to(unfinished: Path, place: Path) -> None:
    """Rename; what was there is put aside first, back again after a failure, and removed at the end."""
    if not place.is_dir():
        os.replace(unfinished, place)
        flush_folder(place.parent)
        return
    old = unfinished.with_name(f"{unfinished.name}-old")
    os.replace(place, old)
    try:
        os.replace(unfinished, place)
    except BaseException:
        os.replace(old, place)
        raise
    flush_folder(place.parent)
    shutil.rmtree(old, ignore_errors=True)


def _to_disk(file: Path) -> None:
    """Until this returns, a power cut may lose what was written."""
    with file.open("rb+") as stream:
        os.fsync(stream.fileno())


def _is_result(directory: Path) -> bool:
    """Whether snows wrote the folder: by its manifest, or by its report where it is older than manifests."""
    try:
        return str(read_json(directory / MANIFEST).get("schema")).startswith("snows.result/")
    except InputError:
        pass
    try:
        report = read_json(directory / REPORT)
    except InputError:
        return False
    versions = report.get("versions")
    return isinstance(versions, dict) and "snows" in versions and isinstance(report.get("layers"), list)


def read_json(path: Path) -> dict[str, Any]:
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:  # not there, no JSON, or no text at all
        raise InputError(f"cannot read {path}: {error}") from error
    if not isinstance(data, dict):
        raise InputError(f"cannot read {path}: expected a JSON object")
    return data


def load(directory: str | Path, model: nn.Module | None = None) -> nn.Module:
    """Read a saved result: into `model`, or into a new module of the recorded name.

    A recorded `file.py:factory` is run to make that module: for a folder of unknown origin, pass `model`.
    """
    folder = Path(directory)
    file = model_file(folder)
    state = read_state(file)
    if model is None:
        source = recorded_source(folder)
        if source is None:
            raise InputError(
                f"{folder} does not record which model it was made from; pass load(..., model=...) a module"
            )
        from ..data.models import build_model

        model = build_model(source, pretrained=False)
    fill(model, state, str(file))
    return model


def model_file(folder: Path) -> Path:
    """The dense file; the compact one where that is what there is."""
    return folder / (COMPACT if (folder / COMPACT).is_file() and not (folder / MODEL).exists() else MODEL)


def recorded_source(folder: Path) -> str | None:
    """The name that the model was built from, if it has one."""
    source = read_json(folder / REPORT).get("source")
    return source if isinstance(source, str) else None
