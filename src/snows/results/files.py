"""Files and folders that are written completely or not at all, even in a crash."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import safetensors

from ..errors import InputError


def write_whole(path: Path, data: bytes) -> None:
    """Write a temporary file beside `path`, flush it to the disk, and rename it."""
    unfinished = None
    try:
        handle, unfinished = tempfile.mkstemp(prefix=f".{path.name[:60]}-", dir=path.parent)
        with os.fdopen(handle, "wb") as stream:
            stream.write(data)
            stream.flush()
            os.fsync(stream.fileno())
        os.chmod(unfinished, 0o644)  # temporary files are readable for their owner only
        os.replace(unfinished, path)
        _flush_folder(path.parent)
    except OSError as error:
        raise InputError(f"cannot write {path}: {error.strerror}") from error
    finally:
        if unfinished is not None:
            Path(unfinished).unlink(missing_ok=True)  # only there after a failure


@contextmanager
def new_folder(directory: Path) -> Iterator[Path]:
    """A temporary folder to fill, which takes the place of `directory` at the end, when it is safely on the disk."""
    place = directory.resolve()  # the folder behind a link
    try:
        place.parent.mkdir(parents=True, exist_ok=True)
        unfinished = Path(tempfile.mkdtemp(prefix=f".{place.name}-", dir=place.parent))
    except OSError as error:
        raise InputError(f"cannot write to {directory.parent}: {error.strerror}") from error
    try:
        yield unfinished
        _flush(unfinished)
        _move_to(unfinished, place)
    except (OSError, safetensors.SafetensorError) as error:
        raise InputError(f"cannot write to {directory}: {getattr(error, 'strerror', None) or error}") from error
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)


def _flush(folder: Path) -> None:
    """Make the files readable for everybody. Until this returns, a power cut may lose what was written."""
    folder.chmod(0o755)
    for path in folder.iterdir():
        if path.is_dir():  # exports may have folders inside
            _flush(path)
            continue
        path.chmod(0o644)
        with path.open("rb+") as stream:
            os.fsync(stream.fileno())
    _flush_folder(folder)


def _flush_folder(folder: Path) -> None:
    """A renamed file can be lost in a crash until its folder is on the disk."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    except OSError:
        pass  # some file systems cannot flush folders
    finally:
        os.close(handle)


def _move_to(unfinished: Path, place: Path) -> None:
    """Rename. A folder that is there already is put aside first, and put back after a failure."""
    if not place.is_dir():
        os.replace(unfinished, place)
        _flush_folder(place.parent)
        return
    old = unfinished.with_name(f"{unfinished.name}-old")
    os.replace(place, old)
    try:
        os.replace(unfinished, place)
    except BaseException:
        os.replace(old, place)
        raise
    _flush_folder(place.parent)
    shutil.rmtree(old, ignore_errors=True)
