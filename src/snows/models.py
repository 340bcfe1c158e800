"""Models by name: the embedded one, those of torchvision, timm and Hugging Face, or the user's own factory."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

from torch import nn

from . import embedded
from .errors import ArgumentError, InputError
from .storage import fill, read_state

HELP = f"{embedded.MODEL}, torchvision:NAME, timm:NAME, hf:NAME or file.py:factory"


def build_model(name: str, weights: Path | None = None, pretrained: bool = True) -> nn.Module:
    """The named model in eval mode. `weights` replaces the pretrained ones, which may need a download."""
    fetch = pretrained and weights is None
    library, _, rest = name.rpartition(":")
    if name == embedded.MODEL:
        model: Any = embedded.model(pretrained=fetch)
    elif library == "torchvision" and rest:
        model = _fetched(name, lambda: _torchvision(rest, fetch))
    elif library == "timm" and rest:
        model = _fetched(name, lambda: _import("timm").create_model(rest, pretrained=fetch))
    elif library == "hf" and rest:
        model = _fetched(name, lambda: _hugging_face(rest, fetch))
    elif library.endswith(".py") and rest:
        model = call_factory(library, rest)
    else:
        raise ArgumentError(f"model {name!r} is not known; expected {HELP}")
    if not isinstance(model, nn.Module):
        raise InputError(f"{name} gave a {type(model).__name__}; expected an nn.Module")
    if weights is not None:
        fill(model, read_state(weights), str(weights))
    return model.eval()


def _torchvision(name: str, fetch: bool) -> Any:
    models = _import("torchvision.models")
    return models.get_model(name, weights="DEFAULT" if fetch else None)


def _hugging_face(name: str, fetch: bool) -> Any:
    transformers = _import("transformers")
    if fetch:
        return transformers.AutoModelForImageClassification.from_pretrained(name)
    return transformers.AutoModelForImageClassification.from_config(transformers.AutoConfig.from_pretrained(name))


def _fetched(name: str, build: Any) -> Any:
    try:
        return build()
    except InputError:
        raise
    except Exception as error:  # network, unknown name, missing file: each library has its own kinds
        line = (str(error).strip().splitlines() or [type(error).__name__])[0][:200]
        raise InputError(
            f"{name} cannot be built: {line} (where pretrained weights cannot be fetched, pass a file with --weights)"
        ) from error


def _import(module: str) -> Any:
    library = module.partition(".")[0]
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise InputError(f"{library} is needed for this model; install it with: pip install {library}") from error
    except RuntimeError as error:  # a build that does not fit the installed torch
        raise InputError(f"{library} is installed but does not import: {error}") from error


def call_factory(file: str, function: str) -> Any:
    """Run the user's own code: `function` of `file`, without arguments."""
    path = Path(file)
    if not path.is_file():
        raise InputError(f"there is no file {file}")
    factory = getattr(_load_module(path), function, None)
    if not callable(factory):
        raise InputError(f"{file} has no function {function!r}")
    try:
        return factory()
    except Exception as error:  # the user's own code
        raise InputError(f"{function} of {file} failed: {type(error).__name__}: {error}") from error


def _load_module(path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(f"snows_user_{path.stem}", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # pickling and dataclasses look it up there
    try:
        spec.loader.exec_module(module)
    except Exception as error:  # the user's own code
        raise InputError(f"{path} cannot be run: {type(error).__name__}: {error}") from error
    return module
