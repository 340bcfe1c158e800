"""Files and folders that are written completely or not at all, even in a crash."""

from __future__ import annotations

import errno
import os
import re
import shutil
import stat
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from itertools import takewhile
from pathlib import Path

import safetensors

from ..errors import InputError
from ..reading import entries, is_folder, look

_ASIDE = "-old"  # ends the hidden name of a folder that is being replaced
_RANDOM = "[a-z0-9_]{8}"  # what tempfile puts behind a name


class CannotWriteError(InputError):
    """A place cannot be written to."""


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
        raise CannotWriteError(f"cannot write {path}: {error.strerror}") from error
    finally:
        if unfinished is not None:
            Path(unfinished).unlink(missing_ok=True)  # only there after a failure


def write_or_rescue(path: Path, data: bytes) -> None:
    """The same; where it fails, the file is written to a temporary folder, and the error says where."""

    def write(folder: Path) -> None:
        (folder / path.name[-100:]).write_bytes(data)

    try:
        write_whole(path, data)
    except CannotWriteError as error:
        raise rescued(error, write) from error


def next_to(path: Path, ending: str) -> Path:
    """A path in the same folder that is named after this one: "sparse" and "-onnx" make "sparse-onnx"."""
    named = path if path.name not in ("", "..") else path.resolve()  # "." and ".." have names, too
    return named.parent / (named.name + ending)


def rescued(error: InputError, write: Callable[[Path], None]) -> InputError:
    """The error, and where `write` has put the work that would be lost otherwise."""
    try:
        place = Path(tempfile.mkdtemp(prefix="snows-rescued-"))
    except OSError:
        return error
    try:
        write(place)
        _flush(place)
    except BaseException as another:
        shutil.rmtree(place, ignore_errors=True)
        if isinstance(another, Exception):  # the first one says what to do
            return error
        raise
    return InputError(f"{error}; what was to be written is in {place}")


def make_folders(folder: Path) -> None:
    """Make a folder and those that it lies in, from the outside: with a thousand of them Path.mkdir gives up."""
    for missing in reversed(list(takewhile(lambda each: not each.exists(), folder.parents))):
        missing.mkdir(exist_ok=True)
    folder.mkdir(exist_ok=True)


def check_writable(path: Path) -> None:
    """Refuse, before any work, a file or folder that could not be written in the end. Leaves nothing behind."""
    place = _behind_links(path)
    if os.path.ismount(place):
        raise CannotWriteError(f"cannot write to {path}: it is a mount point; choose a folder inside of it")
    made = [folder for folder in place.parents if look(folder) is None]
    nearest = place.parents[len(made)]
    if not is_folder(nearest):
        raise CannotWriteError(f"cannot write to {path}: {nearest} is no folder")
    try:
        make_folders(place.parent)
        _require_movable(place)
        trial = Path(tempfile.mkdtemp(prefix=f".{place.name}-", dir=place.parent))
        trial.rename(trial.with_name(f"{trial.name}{_ASIDE}")).rmdir()
    except OSError as error:
        raise CannotWriteError(f"cannot write to {path}: {error.strerror}") from error
    finally:
        for folder in made:
            with suppress(OSError):
                folder.rmdir()


def _require_movable(place: Path) -> None:
    """In folders such as /tmp only the owner of an entry may rename it."""
    folder, there = place.parent.stat(), look(place)
    own = os.geteuid() if hasattr(os, "geteuid") else 0
    if there is not None and folder.st_mode & stat.S_ISVTX and own not in (0, folder.st_uid, there.st_uid):
        raise PermissionError(errno.EPERM, "it belongs to another user")


@contextmanager
def new_folder(directory: Path) -> Iterator[Path]:
    """A temporary folder to fill, which takes the place of `directory` at the end, when it is safely on the disk."""
    place = _behind_links(directory)
    before = _content(place)
    try:
        make_folders(place.parent)
        unfinished = Path(tempfile.mkdtemp(prefix=f".{place.name}-", dir=place.parent))
    except OSError as error:
        raise CannotWriteError(f"cannot write to {directory.parent}: {error.strerror}") from error
    try:
        yield unfinished
        _flush(unfinished)
        if _content(place) != before:
            raise CannotWriteError(f"cannot write to {directory}: something else was written there meanwhile")
        _move_to(unfinished, place)
    except (OSError, safetensors.SafetensorError) as error:
        reason = getattr(error, "strerror", None) or error
        raise CannotWriteError(f"cannot write to {directory}: {reason}") from error
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)


def _behind_links(path: Path) -> Path:
    """The place that a link points to, whether or not something is there."""
    look(path)  # refuses a loop of links
    return Path(os.path.realpath(path))


def _content(place: Path) -> list[Path]:
    return sorted(place.rglob("*")) if is_folder(place) else []


def mend(directory: Path) -> None:
    """Finish a replacement that was cut off between its two renames, when the folder had hidden names only.

    Raises:
        InputError: That is so, and the names cannot be changed here.
    """
    place = _behind_links(directory)
    if look(place) is not None or not is_folder(place.parent):
        return
    # The whole name, as "out-v2" is another folder. What is empty is a trial of `check_writable` that was killed.
    put_aside = re.compile(rf"\.{re.escape(place.name)}-{_RANDOM}{_ASIDE}")
    try:
        beside = entries(place.parent)
    except InputError:  # no permission to look
        return
    for old in beside:
        if not (put_aside.fullmatch(old.name) and is_folder(old) and entries(old)):
            continue
        new = old.with_name(old.name.removesuffix(_ASIDE))
        whole = new if is_folder(new) else old
        try:
            os.replace(whole, place)
        except OSError as error:
            raise InputError(
                f"{directory} is not there: saving it was interrupted, and its content is in {whole}, which cannot be "
                f"renamed ({error.strerror})"
            ) from error
        if whole != old:
            _discard(old)
        return


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
    old = unfinished.with_name(f"{unfinished.name}{_ASIDE}")
    os.replace(place, old)
    try:
        os.replace(unfinished, place)
    except BaseException:
        os.replace(old, place)
        raise
    _flush_folder(place.parent)
    _discard(old)


def _discard(old: Path) -> None:
    """Remove what was replaced, under a name that `mend` does not take: a kill may leave a part of it."""
    gone = old.with_name(old.name.removesuffix(_ASIDE))
    with suppress(OSError):
        os.replace(old, gone)
    shutil.rmtree(gone, ignore_errors=True)
