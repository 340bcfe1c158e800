"""What files take on disk, and compressed."""

from __future__ import annotations

import zlib
from dataclasses import dataclass
from pathlib import Path

_PIECE = 1 << 22
_LEVEL = 6  # what zip and gzip do unless told otherwise


@dataclass(frozen=True)
class FileSize:
    """The bytes of a file, and of the same file compressed as in a zip archive."""

    bytes: int
    zipped: int


def file_sizes(folder: Path) -> dict[str, FileSize]:
    """All files in a folder and its folders, by their path inside."""
    paths = sorted(path for path in folder.rglob("*") if path.is_file())
    return {path.relative_to(folder).as_posix(): _size(path) for path in paths}


def total_bytes(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


def _size(path: Path) -> FileSize:
    packer, zipped = zlib.compressobj(_LEVEL), 0
    with path.open("rb") as stream:
        while piece := stream.read(_PIECE):
            zipped += len(packer.compress(piece))
    return FileSize(path.stat().st_size, zipped + len(packer.flush()))
