"""What the command line's words mean: names resolved, defaults filled in, files read."""

from __future__ import annotations

import tomllib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console

from ..errors import ArgumentError, InputError

if TYPE_CHECKING:
    from torch import nn

    from ..data.sources import Data, DataConfig
    from ..recipe import Recipe

EMBEDDED_MODEL, EMBEDDED_DATA = "resnet20-fashion", "fashion"
_LARGEST = 1e30  # of mean and std; pixels are between 0 and 1


@dataclass(frozen=True)
class Setting:
    """What the command line's words mean: names resolved, defaults filled in, files read."""

    model_name: str
    data_name: str | None
    weights: Path | None
    samples: int
    seed: int
    device: str
    quiet: bool
    config: dict[str, Any] = field(default_factory=dict)

    @classmethod
    def read(
        cls,
        model: str | None,
        data: str | None,
        weights: Path | None,
        samples: int | None,
        seed: int,
        config: Path | None,
        device: str | None,
        quiet: bool,
    ) -> Setting:
        import torch

        name = model or EMBEDDED_MODEL
        if data is None and name == EMBEDDED_MODEL:
            data = EMBEDDED_DATA
        if device is None:
            accelerator = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
            device = accelerator.type if accelerator is not None else "cpu"
        count = samples or (1000 if data == EMBEDDED_DATA else 3000)
        return cls(name, data, weights, count, seed, device, quiet, _read_config(config))

    @property
    def is_embedded(self) -> bool:
        return self.model_name == EMBEDDED_MODEL

    @property
    def default_pattern(self) -> str:
        return "1:4" if self.is_embedded else "2:4"

    def model(self, pretrained: bool = True) -> nn.Module:
        from ..data.models import build_model
        from ..data.preparation import as_device, move

        device = as_device(self.device)
        return move(build_model(self.model_name, self.weights, pretrained), device)

    def require_data(self) -> str:
        """The name of the data, asked for before anything is read."""
        if self.data_name is None:
            from ..data.sources import HELP

            raise ArgumentError(f"--data is needed for the model {self.model_name}: {HELP}")
        return self.data_name

    def data(self) -> Data:
        from ..data.sources import load_data

        return load_data(self.require_data(), self.samples, self.seed, self._data_config())

    def random_samples(self, model: nn.Module) -> Any:
        from ..data.models import random_inputs

        size = self._data_config().size
        return random_inputs(model, 16, size if "size" in self.config.get("data", {}) else None)

    def recipe(self, name: str) -> Recipe:
        from ..recipe import EMBEDDED, Recipe, as_recipe

        if name.endswith(".json"):
            if not Path(name).is_file():
                raise InputError(f"there is no file {name}")
            try:
                chosen = Recipe.from_json(Path(name).read_text(encoding="utf-8"))
            except (OSError, UnicodeDecodeError) as error:
                raise InputError(f"{name} cannot be read: {error}") from error
        else:
            chosen = EMBEDDED if name == "default" and self.is_embedded else as_recipe(name)
        return chosen.replace(**self.config.get("recipe", {}))

    @contextmanager
    def step(self, what: str) -> Iterator[None]:
        """A spinner on standard error while something takes its time."""
        if self.quiet:
            yield
            return
        with Console(stderr=True).status(what):
            yield

    def _data_config(self) -> DataConfig:
        from ..data.sources import DataConfig

        given = self.config.get("data", {})
        unknown = set(given) - {"mean", "std", "size"}
        if unknown:
            raise ArgumentError(f"--config: [data] has {', '.join(sorted(unknown))}; expected mean, std and size")

        def numbers(key: str) -> tuple[float, ...] | None:
            value = given.get(key)
            if value is None:
                return None
            values = value if isinstance(value, list) else [value]
            if not all(isinstance(v, int | float) and abs(v) <= _LARGEST for v in values):  # no NaN, either
                raise ArgumentError(f"--config: [data] {key} is {value!r}; expected a number or a list of numbers")
            return tuple(float(v) for v in values)

        if ("mean" in given) != ("std" in given):
            raise ArgumentError("--config: [data] has one of mean and std; expected both or neither")
        size = given.get("size", 224)
        if not isinstance(size, int) or not 1 <= size <= 4096:
            raise ArgumentError(f"--config: [data] size is {size!r}; expected a whole number of pixels")
        return DataConfig(numbers("mean"), numbers("std"), size)


def _read_config(path: Path | None) -> dict[str, Any]:
    if path is None:
        return {}
    try:
        config = tomllib.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise InputError(f"there is no file {path}") from error
    except OSError as error:
        raise InputError(f"{path} cannot be read: {error.strerror}") from error
    except (ValueError, RecursionError) as error:  # no TOML, no text, or nested too deep
        raise ArgumentError(f"--config: {path} is not valid TOML: {error}") from error
    unknown = set(config) - {"data", "recipe"}
    if unknown or not all(isinstance(part, dict) for part in config.values()):
        raise ArgumentError(f"--config: {path} has {', '.join(config)}; expected the tables [data] and [recipe]")
    return config


def read_masks(mask: str) -> Any:
    """A method's name as it is; a file of masks, or of pruned weights, as {name: tensor}."""
    from ..data.weights import read_state
    from ..masks.given import is_mask_file

    return read_state(Path(mask)) if is_mask_file(mask) else mask
