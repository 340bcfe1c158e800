"""Files that are there whole or not at all, also after a crash."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

from ..errors import InputError


def write_whole(path: Path, data: bytes) -> None:
    """Whoever looks finds the old file or the new one, on disk: written beside, flushed, then moved."""
    unfinished = None
    try:
        handle, unfinished = tempfile.mkstemp(prefix=f".{path.name[:60]}-", dir=path.parent)
        with os.fdopen(handle, "wb") as stream:
            stream.write(data)
            stream.flush()
            os.fsync(stream.fileno())
        os.chmod(unfinished, 0o644)  # readable like any other file, whatever wrote it
        os.replace(unfinished, path)
        flush_folder(path.parent)
    except OSError as error:
        raise InputError(f"cannot write {path}: {error.strerror}") from error
    finally:
        if unfinished is not None:
            Path(unfinished).unlink(missing_ok=True)  # there only after a failure


def flush_folder(folder: Path) -> None:
    """A file moved into a folder is there after a crash only once the folder itself is on disk."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    except OSError:
        pass  # some file systems cannot flush folders
    finally:
        os.close(handle)
