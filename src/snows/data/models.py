"""Models by name: the embedded one, those of torchvision, timm and Hugging Face, or the user's own factory."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn

from ..caller import cpu_by_default
from ..errors import ArgumentError, InputError, a_type, first_line, quoted
from . import embedded
from .weights import fill, read_state

HELP = f"{embedded.MODEL}, torchvision:NAME, timm:NAME, hf:NAME, hf:FOLDER or file.py:factory"
_RANDOM_TOKENS = 64  # in one sample


@cpu_by_default()
@torch.random.fork_rng(devices=())  # weights that are made and then replaced take no random numbers of the caller's
def build_model(name: str, weights: Path | None = None, pretrained: bool = True) -> nn.Module:
    """The named model in eval mode.

    weights     a file to fill it with
    pretrained  whether to fetch pretrained weights, which may need a download, if there is no such file
    """
    fetch = pretrained and weights is None
    library, _, rest = name.rpartition(":")
    if name == embedded.MODEL:
        model: Any = embedded.model(pretrained=fetch)
    elif library == "torchvision" and rest:
        model = _built(name, lambda: _torchvision(rest, fetch))
    elif library == "timm" and rest:
        model = _built(name, lambda: _import("timm").create_model(rest, pretrained=fetch))
    elif library == "hf" and rest:
        model = _built(name, lambda: _hugging_face(rest, fetch))
    elif is_code(name):
        model = call_factory(library, rest)
    else:
        raise ArgumentError(f"model {name!r} is not known; expected {HELP}")
    if not isinstance(model, nn.Module):
        raise InputError(f"{name} gave {a_type(model)}; expected an nn.Module")
    if weights is not None:
        fill(model, read_state(weights), str(weights))
    return model.eval()


def known_normalization(name: str) -> tuple[tuple[float, ...], tuple[float, ...]] | None:
    """Mean and standard deviation of the pixels that the named model was trained on, as its library knows them."""
    library, _, rest = name.rpartition(":")
    find = {"torchvision": _of_torchvision, "timm": _of_timm, "hf": _of_hugging_face}.get(library)
    if find is None:
        return None
    try:
        mean, std = find(rest)
        return tuple(float(value) for value in mean), tuple(float(value) for value in std)
    except Exception:  # each library has its own kinds for what it does not know; building the model says what is wrong
        return None


def _of_torchvision(name: str) -> tuple[Any, Any]:
    views = _import("torchvision.models").get_model_weights(name).DEFAULT.transforms()
    return views.mean, views.std


def _of_timm(name: str) -> tuple[Any, Any]:
    configuration = _import("timm").get_pretrained_cfg(name)
    return configuration.mean, configuration.std


def _of_hugging_face(name: str) -> tuple[Any, Any]:
    configuration, _ = _import("transformers").ImageProcessingMixin.get_image_processor_dict(name)
    return configuration["image_mean"], configuration["image_std"]


def is_code(name: str) -> bool:
    """Whether to build the named model means to run the user's own code."""
    library, _, rest = name.rpartition(":")
    return library.endswith(".py") and rest != ""


def _torchvision(name: str, fetch: bool) -> Any:
    models = _import("torchvision.models")
    return models.get_model(name, weights="DEFAULT" if fetch else None)


def _hugging_face(name: str, fetch: bool) -> Any:
    """An image classifier or a causal language model, by its name on the hub or from a local folder."""
    transformers = _import("transformers")
    config = transformers.AutoConfig.from_pretrained(name)
    kind = _kind_of(config, transformers, name)
    for part in (config, config.get_text_config()):
        part.use_cache = False  # keys and values would be further outputs
    return kind.from_pretrained(name, config=config) if fetch else kind.from_config(config)


def _kind_of(config: Any, transformers: Any, name: str) -> Any:
    """The class that builds the model: what the checkpoint was saved as, or else what its configuration allows."""
    kinds = {
        transformers.AutoModelForImageClassification: transformers.MODEL_FOR_IMAGE_CLASSIFICATION_MAPPING,
        transformers.AutoModelForCausalLM: transformers.MODEL_FOR_CAUSAL_LM_MAPPING,
    }
    possible = {kind: _class_names(mapping[type(config)]) for kind, mapping in kinds.items() if type(config) in mapping}
    saved_as = set(config.architectures or ())
    for kind, names in possible.items():
        if saved_as & names:
            return kind
    if transformers.AutoModelForImageClassification in possible or not saved_as:  # a backbone: it gets a new classifier
        for kind in possible:
            return kind
    raise InputError(
        f"hf:{name} is a {', '.join(sorted(saved_as)) or config.model_type}; expected an image classifier or a causal "
        "language model (file.py:factory takes any module)"
    )


def _class_names(classes: Any) -> set[str]:
    return {kind.__name__ for kind in (classes if isinstance(classes, list | tuple) else [classes])}


def random_inputs(model: nn.Module, samples: int, size: int | None = None) -> Tensor:
    """Random inputs of the kind that the model takes: tokens for a language model, images for others.

    Images have `size` pixels a side, or the size in the model's configuration, or 224.
    """
    generator = torch.Generator().manual_seed(0)
    config: Any = getattr(model, "config", None)
    if getattr(model, "main_input_name", None) == "input_ids":  # a language model of Hugging Face
        return torch.randint(0, config.get_text_config().vocab_size, (samples, _RANDOM_TOKENS), generator=generator)
    if size is None:
        own = getattr(config, "image_size", None)
        size = own if isinstance(own, int) else 224
    return torch.randn(samples, 3, size, size, generator=generator)


def _built(name: str, build: Callable[[], Any]) -> Any:
    try:
        return build()
    except InputError:
        raise
    except Exception as error:  # each library has its own kinds
        raise InputError(
            f"{name} cannot be built: {first_line(error)} "
            "(if pretrained weights cannot be fetched, pass a file with --weights)"
        ) from error


def _import(module: str) -> Any:
    library = module.partition(".")[0]
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise InputError(f"{library} is needed for this model; install it with: pip install {library}") from error
    except RuntimeError as error:  # a build that does not fit the installed torch
        raise InputError(f"{library} is installed but does not import: {error}") from error


def load_function(file: str, function: str) -> Callable[..., Any]:
    """Run the user's own file, and give one of its functions."""
    path = Path(file)
    if not path.is_file():
        raise InputError(f"there is no file {file}")
    found = getattr(_load_module(path), function, None)
    if not callable(found):
        raise InputError(f"{file} has no function {function!r}")
    return found  # type: ignore[no-any-return]  # it is the user's


def call_factory(file: str, function: str) -> Any:
    """Run the user's own code: call `function` of `file` without arguments."""
    factory = load_function(file, function)
    try:
        return factory()
    except Exception as error:  # the user's own code
        raise InputError(f"{function} of {file} failed: {quoted(error)}") from error


def _load_module(path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(f"snows_user_{path.stem}", path)
    if spec is None or spec.loader is None:
        raise InputError(f"{path} is not a Python file")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # pickling and dataclasses look it up there
    try:
        spec.loader.exec_module(module)
    except Exception as error:  # the user's own code
        raise InputError(f"{path} cannot be run: {quoted(error)}") from error
    return module
