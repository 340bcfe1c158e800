"""Results on disk: plain safetensors and JSON, written whole or not at all."""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

import safetensors
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from .errors import InputError
from .version import __version__

if TYPE_CHECKING:
    from .api import Result

MODEL, MASKS, REPORT, PAGE, RECIPE = (
    "model.safetensors",
    "masks.safetensors",
    "report.json",
    "report.html",
    "recipe.json",
)


def save(result: Result, directory: Path) -> Path:
    """Write everything beside the directory first and move it there at the end; an existing one is never touched."""
    refuse_existing(directory)
    try:
        directory.parent.mkdir(parents=True, exist_ok=True)
        unfinished = Path(tempfile.mkdtemp(prefix=f".{directory.name}-", dir=directory.parent))
    except OSError as error:
        raise InputError(f"cannot write to {directory.parent}: {error.strerror}") from error
    try:
        # Tied weights share memory, which the format does not know: each name gets its own copy.
        state = {name: tensor.detach().cpu().clone().contiguous() for name, tensor in result.model.state_dict().items()}
        save_file(state, unfinished / MODEL, metadata={"format": "pt", "snows": __version__})
        save_file({name: mask.contiguous() for name, mask in result.masks.items()}, unfinished / MASKS)
        report = {"source": result.source, **result.report.to_dict()}
        (unfinished / REPORT).write_text(json.dumps(report, indent=2, allow_nan=False), encoding="utf-8")
        result.report.to_html(unfinished / PAGE)
        (unfinished / RECIPE).write_text(result.recipe.to_json(), encoding="utf-8")
        unfinished.chmod(0o755)
        for file in unfinished.iterdir():  # readable like any other file, whatever wrote it
            file.chmod(0o644)
        if directory.is_dir():
            directory.rmdir()  # it is empty: see above
        os.replace(unfinished, directory)
    except (OSError, safetensors.SafetensorError) as error:
        raise InputError(f"cannot write to {directory}: {getattr(error, 'strerror', None) or error}") from error
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)
    return directory


def refuse_existing(directory: Path) -> None:
    if directory.exists() and (not directory.is_dir() or any(directory.iterdir())):
        raise InputError(f"{directory} exists and is not empty; choose another folder or remove it first")


def load(directory: str | Path, model: nn.Module | None = None) -> nn.Module:
    """Read a saved result: into `model`, or into a new module of the recorded name.

    A recorded `file.py:factory` is run to make that module: for a folder of unknown origin, pass `model`.
    """
    folder = Path(directory)
    state = read_state(folder / MODEL)
    if model is None:
        source = _recorded_source(folder)
        if source is None:
            raise InputError(
                f"{folder} does not record which model it was made from; pass load(..., model=...) a module"
            )
        from .models import build_model

        model = build_model(source, pretrained=False)
    fill(model, state, str(folder / MODEL))
    return model


def _recorded_source(folder: Path) -> str | None:
    try:
        report = json.loads((folder / REPORT).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:  # no JSON, or no text at all
        raise InputError(f"cannot read {folder / REPORT}: {error}") from error
    if not isinstance(report, dict):
        raise InputError(f"cannot read {folder / REPORT}: expected a JSON object")
    source = report.get("source")
    return source if isinstance(source, str) else None


def read_state(path: Path) -> dict[str, Tensor]:
    """A state dict from .safetensors, or from .pt/.pth files that hold nothing but tensors."""
    if not path.is_file():
        raise InputError(f"there is no file {path}")
    try:
        if path.suffix == ".safetensors":
            return load_file(path)
        state = torch.load(path, map_location="cpu", weights_only=True)
    except (safetensors.SafetensorError, OSError, EOFError) as error:
        raise InputError(f"cannot read {path}: {error}") from error
    except Exception as error:  # unpickling raises many kinds
        raise InputError(
            f"{path} is not a file of plain tensors ({(str(error) or type(error).__name__).splitlines()[0][:200]}); "
            "save its state dict with torch.save(model.state_dict(), ...) or as safetensors"
        ) from error
    for key in ("state_dict", "model"):
        if isinstance(state, dict) and isinstance(state.get(key), dict):
            state = state[key]
    if not isinstance(state, dict) or not all(isinstance(k, str) and isinstance(v, Tensor) for k, v in state.items()):
        raise InputError(f"{path} holds no state dict; save one with torch.save(model.state_dict(), ...)")
    return state


def fill(model: nn.Module, state: dict[str, Tensor], origin: str) -> None:
    """Strictly, but for counters that old files lack."""
    own = model.state_dict()
    missing = [name for name in own if name not in state and not name.endswith("num_batches_tracked")]
    extra = [name for name in state if name not in own]
    wrong = [name for name in state if name in own and state[name].shape != own[name].shape]
    problems = [
        f"{what} {', '.join(names[:3])}" + (f" and {len(names) - 3} more" if len(names) > 3 else "")
        for what, names in (("it lacks", missing), ("it has no place for", extra), ("other shapes in", wrong))
        if names
    ]
    if problems:
        raise InputError(f"{origin} does not fit {type(model).__name__}: {'; '.join(problems)}")
    model.load_state_dict(state, strict=False)
