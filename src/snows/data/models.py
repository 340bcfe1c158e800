"""Models by name: the embedded one, those of torchvision, timm and Hugging Face, or the user's own factory."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn

from ..errors import ArgumentError, InputError
from . import embedded
from .weights import fill, read_state

HELP = f"{embedded.MODEL}, torchvision:NAME, timm:NAME, hf:NAME, hf:FOLDER or file.py:factory"
_TOKENS = 64  # in a window of random ones


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
    """An image classifier or a causal language model, by its name on the hub or from a local folder."""
    transformers = _import("transformers")
    config = transformers.AutoConfig.from_pretrained(name)
    kind = _kind_of(config, transformers, name)
    for part in (config, config.get_text_config()):
        part.use_cache = False  # a cache would be a further output, made of keys and values
    return kind.from_pretrained(name, config=config) if fetch else kind.from_config(config)


def _kind_of(config: Any, transformers: Any, name: str) -> Any:
    """The class that builds the model: what the checkpoint was saved as, or else what its configuration can be."""
    kinds = {
        transformers.AutoModelForImageClassification: transformers.MODEL_FOR_IMAGE_CLASSIFICATION_MAPPING,
        transformers.AutoModelForCausalLM: transformers.MODEL_FOR_CAUSAL_LM_MAPPING,
    }
    possible = {kind: _class_names(mapping[type(config)]) for kind, mapping in kinds.items() if type(config) in mapping}
    saved_as = set(config.architectures or ())
    for kind, names in possible.items():
        if saved_as & names:
            return kind
    if transformers.AutoModelForImageClassification in possible or not saved_as:  # a backbone gets a new classifier
        for kind in possible:
            return kind
    raise InputError(
        f"hf:{name} is a {', '.join(sorted(saved_as)) or config.model_type}; expected an image classifier or a causal "
        "language model (file.py:factory takes any module)"
    )


def _class_names(classes: Any) -> set[str]:
    return {kind.__name__ for kind in (classes if isinstance(classes, list | tuple) else [classes])}


def random_inputs(model: nn.Module, samples: int, size: int | None = None) -> Tensor:
    """Noise of the kind that the model takes: tokens for a language model, else images (224 pixels if unsaid)."""
    generator = torch.Generator().manual_seed(0)
    config: Any = getattr(model, "config", None)
    if getattr(model, "main_input_name", None) == "input_ids":  # as models of Hugging Face say it
        return torch.randint(0, config.get_text_config().vocab_size, (samples, _TOKENS), generator=generator)
    if size is None:
        own = getattr(config, "image_size", None)
        size = own if isinstance(own, int) else 224
    return torch.randn(samples, 3, size, size, generator=generator)


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
