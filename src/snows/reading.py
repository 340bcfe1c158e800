"""The one reader of files that strangers may have written.

Only regular files are opened, so that nothing waits for a FIFO or reads a device that never ends. How many bytes are
read, and what packed data may grow to, is limited before anything is read.
"""

from __future__ import annotations

import json
import os
import stat
from io import BufferedReader
from pathlib import Path
from typing import Any

from .errors import ArgumentError, InputError, shown

LARGEST_TEXT = 16 << 20  # bytes of JSON; the report of a large network has one
MOST_DIMENSIONS = 16
_SMALL = 256 << 20  # bytes that packed data may always grow to
_LARGEST_RATIO = 100  # unpacked to packed, beyond that
_KINDS = ((stat.S_ISDIR, "a folder"), (stat.S_ISFIFO, "a FIFO"), (stat.S_ISSOCK, "a socket"))
_FLAGS = os.O_RDONLY | sum(getattr(os, name, 0) for name in ("O_NONBLOCK", "O_NOCTTY", "O_CLOEXEC", "O_BINARY"))


def as_path(given: object, name: str) -> Path:
    """The path that an argument of this name gives."""
    if isinstance(given, str | os.PathLike) and str(given).strip():
        return Path(given)
    raise ArgumentError(f"{name} is {shown(given)}; expected the path of a folder")


def look(path: Path) -> os.stat_result | None:
    """What is at a path, behind links; None if nothing is. Raises InputError where that cannot be known."""
    try:
        return path.stat()
    except (FileNotFoundError, NotADirectoryError):
        return None
    except (OSError, ValueError) as error:  # no permission, a loop of links, a name that is too long or has a NUL
        raise InputError(f"cannot read {path}: {_reason(error)}") from error


def is_file(path: Path) -> bool:
    found = look(path)
    return found is not None and stat.S_ISREG(found.st_mode)


def is_folder(path: Path) -> bool:
    found = look(path)
    return found is not None and stat.S_ISDIR(found.st_mode)


def entries(folder: Path) -> list[Path]:
    """What is in a folder, by name."""
    try:
        return sorted(folder.iterdir())
    except OSError as error:
        raise InputError(f"cannot read {folder}: {_reason(error)}") from error


def open_file(path: Path, largest: int | None = None) -> BufferedReader:
    """Open a regular file of at most `largest` bytes.

    Raises:
        InputError: There is no such file, it is something else, it is larger, or it may not be read.
    """
    found = look(path)
    if found is None:
        raise InputError(f"there is no file {path}")
    _require_regular(path, found.st_mode)  # before it is opened, which may have effects on a device
    try:
        stream = os.fdopen(os.open(path, _FLAGS), "rb")
    except OSError as error:
        raise InputError(f"cannot read {path}: {_reason(error)}") from error
    try:
        opened = os.fstat(stream.fileno())
        _require_regular(path, opened.st_mode)
        _require_small(path, opened.st_size, largest)
    except BaseException:
        stream.close()
        raise
    return stream


def read_bytes(path: Path, largest: int | None = None) -> bytes:
    """The content of a regular file of at most `largest` bytes."""
    with open_file(path, largest) as stream:
        size = os.fstat(stream.fileno()).st_size if largest is None else largest
        try:
            content = stream.read(size + 1)  # files of the system may be longer than they say
        except OSError as error:
            raise InputError(f"cannot read {path}: {_reason(error)}") from error
    if content is None:  # nothing to read yet, in a file of the system
        raise InputError(f"cannot read {path}: it holds nothing yet")
    _require_small(path, len(content), size)
    return content


def read_text(path: Path, largest: int = LARGEST_TEXT) -> str:
    try:
        return read_bytes(path, largest).decode("utf-8")
    except UnicodeDecodeError as error:
        raise InputError(f"cannot read {path}: it is no text in UTF-8 ({error.reason})") from error


def read_json(path: Path) -> dict[str, Any]:
    """The JSON object in a file."""
    try:
        data = json.loads(read_text(path))
    except (ValueError, RecursionError) as error:  # an error of ours, no JSON, or nested too deep
        if isinstance(error, InputError):
            raise
        raise InputError(f"cannot read {path}: {error}") from error
    if not isinstance(data, dict):
        raise InputError(f"cannot read {path}: expected a JSON object")
    return data


def is_bomb(packed: int, unpacked: int) -> bool:
    """Whether so few bytes should not become so many."""
    return unpacked > max(_SMALL, _LARGEST_RATIO * packed)


def check_unpacked(path: Path, packed: int, unpacked: int) -> None:
    """Refuse a small file whose content would fill the memory."""
    if is_bomb(packed, unpacked):
        raise InputError(
            f"{path} has {packed:,} bytes, which would become {unpacked:,} in memory; expected at most "
            f"{_LARGEST_RATIO} times as many; if you trust it, store it without compression"
        )


def _require_regular(path: Path, mode: int) -> None:
    if not stat.S_ISREG(mode):
        kind = next((name for test, name in _KINDS if test(mode)), "a device")
        raise InputError(f"{path} is {kind}; expected a regular file")


def _require_small(path: Path, size: int, largest: int | None) -> None:
    if largest is not None and size > largest:
        raise InputError(f"{path} has more than {largest:,} bytes; expected a smaller file")


def _reason(error: OSError | ValueError) -> str:
    return getattr(error, "strerror", None) or str(error)
