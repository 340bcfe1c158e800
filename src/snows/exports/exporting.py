"""`snows.export`: a saved result in the format of an engine, checked against the model before it is there."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from importlib import import_module
from pathlib import Path
from typing import Any

from torch import nn

from ..caller import cpu_by_default
from ..data.samples import check_flag
from ..errors import InputError
from ..reading import as_path, entries, is_file, is_folder, look, read_json
from ..results.files import check_writable, mend, new_folder, next_to
from ..results.manifest import MANIFEST
from ..version import __version__
from .base import Written, blamed_on
from .checks import check_outputs, check_zeros
from .formats import find_format
from .reading import read_saved
from .sizes import FileSize, file_sizes

ABOUT = "export.json"
_SCHEMA = "snows.export/1"


@dataclass(frozen=True)
class Exported:
    """What `snows.export` has written and checked. The same is in `export.json` of the folder.

    Attributes:
        format: The format's name.
        folder: Where the files are.
        files: Bytes of every file, and its bytes compressed as in a zip archive, by its path in the folder.
        differences: By batch size, how far the outputs are from the model's own on the stored inputs, at most, as a
            share of the largest output. Empty where nothing here can run the format; a note says so.
        removed: How many weights the masks remove. All of them are zero in the file.
        facts: What the format has to say: the opset, the layers that its kernels take, a command.
        notes: What to know before using the files, one sentence each.

    Example:
        >>> import snows
        >>> snows.Exported("onnx", "pruned-onnx", {}, {1: 0.0, 2: 1e-7}, 32).removed
        32
    """

    format: str
    folder: str
    files: dict[str, FileSize]
    differences: dict[int, float]
    removed: int
    facts: dict[str, Any] = field(default_factory=dict)
    notes: tuple[str, ...] = ()

    def to_dict(self) -> dict[str, Any]:
        """The same as plain data for JSON."""
        return asdict(self)


@cpu_by_default()
def export(
    directory: str | Path,
    to: str,
    model: nn.Module | None = None,
    *,
    out: str | Path | None = None,
    force: bool = False,
) -> Exported:
    """Write a saved result in the format of an engine.

    The result must pass `snows.verify`. What was written is read back, run on the stored inputs at three batch sizes
    and compared with the model, and each removed weight must be zero in it. The folder appears at the end, complete.

    Args:
        directory: A folder that `Result.save` or `snows prune --out` wrote.
        to: "onnx", "tensorrt", "openvino", "coreml", "torch-2:4", "torch-export", "hf" or "safetensors".
        model: The model that was pruned, with any weights. It is not changed. Default: a new model of the name that the
            folder records, unless that is code ("file.py:factory"), which is never run.
        out: A folder that does not exist, or is empty. Default: the name of the result and the format.
        force: Replace the folder if it holds an export and nothing else.

    Returns:
        An `Exported`: the files with their sizes, and what was checked.

    Raises:
        ArgumentError: The format is not known.
        InputError: The result is damaged, a package is missing, the format cannot take the model, or what was written
            is not the model.

    Example:
        >>> import tempfile, torch, snows
        >>> model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.ReLU(), torch.nn.Linear(8, 2)).eval()
        >>> result = snows.prune(model, torch.randn(64, 8), "2:4", layers="0", progress=False)
        >>> with tempfile.TemporaryDirectory() as place:
        ...     exported = snows.export(result.save(f"{place}/pruned"), "safetensors", model)
        >>> exported.removed, sorted(exported.files)
        (32, ['model.compact.safetensors', 'model.safetensors'])
    """
    form = find_format(to)
    check_flag("force", force)
    folder = as_path(directory, "directory")
    place = as_path(out, "out") if out is not None else next_to(folder, f"-{to.replace(':', 'of')}")
    _refuse_existing(place, force)
    check_writable(place)
    saved = read_saved(folder, model)
    writer = import_module(f".{form.module}", __package__)
    with new_folder(place) as unfinished:
        with blamed_on(f"{to} cannot take {saved.name}"):
            written: Written = writer.write(saved, unfinished)
            removed = check_zeros(saved, written, f"the {to} export")
            differences = check_outputs(saved, written, f"the {to} export")
        exported = Exported(
            to, str(place), file_sizes(unfinished), differences, removed, dict(written.facts), written.notes
        )
        made_from = read_json(folder / MANIFEST)["sha256"]
        about = {"schema": _SCHEMA, "snows": __version__, "result_sha256": made_from, **exported.to_dict()}
        (unfinished / ABOUT).write_text(json.dumps(about, indent=2, allow_nan=False) + "\n", encoding="utf-8")
    return exported


def _refuse_existing(place: Path, force: bool) -> None:
    """Refuse a place that is taken. With `force`, a folder that holds an export and nothing else is accepted."""
    mend(place)
    if look(place) is None or (is_folder(place) and not entries(place)):
        return
    if not force:
        raise InputError(f"{place} exists; choose another folder, or say that it may be replaced (--force)")
    if not is_folder(place) or not is_file(place / ABOUT):
        raise InputError(f"{place} is no export of snows, so it is not replaced; choose another folder")
    about = read_json(place / ABOUT)
    files = about.get("files") if about.get("schema") == _SCHEMA else None
    known = {Path(name) for name in (*files, ABOUT)} if isinstance(files, dict) else set()
    known |= {folder for name in known for folder in name.parents}
    others = [str(path.relative_to(place)) for path in sorted(place.rglob("*")) if path.relative_to(place) not in known]
    if others:
        raise InputError(f"{place} holds more than an export ({', '.join(others[:3])}), which would be lost")
