"""The files of a saved result, and the manifest with their checksums."""

from __future__ import annotations

import hashlib
import json
import stat
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from ..errors import InputError
from ..reading import is_file, look, open_file, read_bytes, read_json

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


def model_file(folder: Path) -> Path:
    """The file of the weights: the compact one if there is no other."""
    return folder / (COMPACT if is_file(folder / COMPACT) and look(folder / MODEL) is None else MODEL)


def recorded_source(folder: Path) -> str | None:
    """The name that the model was built from, if it has one."""
    source = read_json(folder / REPORT).get("source")
    return source if isinstance(source, str) else None


def render_manifest(files: Mapping[str, Any], versions: Mapping[str, Any]) -> str:
    """The text of a manifest. Its last entry is the SHA-256 of the others, written without spaces, sorted by name."""
    content = {"schema": SCHEMA, "versions": dict(versions), "files": {name: files[name] for name in sorted(files)}}
    canonical = json.dumps(content, sort_keys=True, separators=(",", ":"))
    return json.dumps({**content, "sha256": hashlib.sha256(canonical.encode()).hexdigest()}, indent=2) + "\n"


def file_facts(path: Path) -> dict[str, Any]:
    """Size and SHA-256, as a manifest holds them."""
    with open_file(path) as stream:
        checksum = hashlib.file_digest(stream, "sha256").hexdigest()
        return {"bytes": stream.tell(), "sha256": checksum}


def read_manifest(folder: Path) -> dict[str, Any]:
    """Size and checksum by file name. Raises InputError if the manifest is not as it was written."""
    path = folder / MANIFEST
    manifest = read_json(path)
    files, versions = manifest.get("files"), manifest.get("versions")
    # The text is compared, so that changes which mean nothing in JSON are found, too.
    if (
        not isinstance(files, dict)
        or not isinstance(versions, dict)
        or render_manifest(files, versions).encode() != read_bytes(path)
    ):
        raise InputError(f"{path} is damaged: it is not as it was written")
    return files


def damage(folder: Path, name: str, written: Any) -> str | None:
    """How a file differs from what the manifest lists for it; None if it does not."""
    path = folder / name
    if name not in FILES or not isinstance(written, dict):  # such a file is not even opened
        return f"{folder / MANIFEST} lists {name!r}, which is no file of snows"
    try:
        found = look(path)
        if found is None:
            return f"{path} is missing"
        if stat.S_ISREG(found.st_mode) and found.st_size != written.get("bytes"):
            return f"{path} has {found.st_size} bytes, and had {written.get('bytes')} when it was written"
        facts = file_facts(path)
    except (InputError, OSError) as error:
        return str(error)
    return None if facts == written else f"{path} is damaged: its checksum is not that of the manifest"


def require_unchanged(folder: Path, names: Iterable[str]) -> None:
    """Refuse files that are not what the manifest lists. Folders of old versions have no manifest, and pass."""
    if look(folder / MANIFEST) is None:
        return
    listed = read_manifest(folder)
    for name in names:
        problem = damage(folder, name, listed[name]) if name in listed else f"{folder / MANIFEST} lists no {name}"
        if problem is not None:
            raise InputError(f"{problem}; restore the folder from a copy, or save the result again")
