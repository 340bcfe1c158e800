"""What the words of a command line mean: names resolved, defaults filled in, files read."""

from __future__ import annotations

import tomllib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import wraps
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..devices.distributed.launch import is_first
from ..errors import ArgumentError, InputError, SnowsError, quoted
from ..listeners.progress import open_progress
from ..reading import is_folder, look, read_text

if TYPE_CHECKING:
    from torch import nn

    from ..data.sources import Data, DataConfig
    from ..evaluation.metrics import Metric
    from ..recipe import Recipe

EMBEDDED_MODEL, EMBEDDED_DATA = "resnet20-fashion", "fashion"
_LARGEST_CONFIG = 1 << 13  # bytes; the memory for keys with dots grows with the square of their length
_OWN_ZEROS = "weights"  # the word of --mask for the zeros of the weights
_LARGEST = 1e30  # of mean and std; pixels are between 0 and 1


@dataclass(frozen=True)
class Request:
    """The options that commands share, with defaults filled in."""

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
    ) -> Request:
        from ..devices.device import best_device

        name = model or EMBEDDED_MODEL
        if data is None and name == EMBEDDED_MODEL:
            data = EMBEDDED_DATA
        count = samples or (1000 if data == EMBEDDED_DATA else 3000)
        return cls(
            name, data, weights, count, seed, device or str(best_device()), quiet or not is_first(), read_config(config)
        )

    @property
    def is_embedded(self) -> bool:
        return self.model_name == EMBEDDED_MODEL

    @property
    def default_pattern(self) -> str:
        return "1:4" if self.is_embedded else "2:4"

    def model(self, pretrained: bool = True) -> nn.Module:
        from ..data.models import build_model
        from ..devices.device import as_device, move

        device = as_device(self.device)
        return move(build_model(self.model_name, self.weights, pretrained), device)

    def require_data(self) -> str:
        """The name of the data. Call it early: an error costs the user nothing then."""
        if self.data_name is None:
            from ..data.sources import HELP

            raise ArgumentError(f"--data is needed for the model {self.model_name}: {HELP}")
        return self.data_name

    def data(self) -> Data:
        return self.load(self.require_data(), self.samples)

    def load(self, name: str, samples: int | None) -> Data:
        """The named data, normalized as --config says, or else as the model's library knows."""
        from ..data.sources import load_data

        config = self.data_config()
        if config.mean is None and name.startswith(("folder:", "npz:")):
            config = self._normalized_as_known(config)
        return load_data(name, samples, self.seed, config)

    def _normalized_as_known(self, config: DataConfig) -> DataConfig:
        from ..data.models import known_normalization

        known = known_normalization(self.model_name)
        if known is None:
            return config
        return replace(config, mean=known[0], std=known[1], origin=self.model_name)

    def model_and_data(self) -> tuple[nn.Module, Data]:
        self.require_data()
        with self.step("reading the model and the data"):
            return self.model(), self.data()

    def random_samples(self, model: nn.Module) -> Any:
        from ..data.models import random_inputs

        size = self.data_config().size
        return random_inputs(model, 16, size if "size" in self.config.get("data", {}) else None)

    def recipe(self, name: str | None, effort: str | None) -> Recipe:
        """The recipe that was named, or that of the effort. The embedded network, a first try, takes "fast"."""
        from ..recipe import as_recipe

        if name is not None and name.endswith(".json"):
            chosen = _read_recipe(Path(name))
        else:
            chosen = as_recipe(name, effort or ("fast" if self.is_embedded else "default"))
        return chosen.replace(**self.config.get("recipe", {}))

    def data_config(self) -> DataConfig:
        from ..data.sources import DataConfig

        given = self.config.get("data", {})
        unknown = set(given) - {"mean", "std", "size"}
        if unknown:
            raise ArgumentError(f"--config: [data] has {', '.join(sorted(unknown))}; expected mean, std and size")
        mean, std = _numbers(given, "mean"), _numbers(given, "std")
        if (mean is None) != (std is None):
            raise ArgumentError("--config: [data] has one of mean and std; expected both or neither")
        size = given.get("size", 224)
        if not isinstance(size, int) or not 1 <= size <= 4096:
            raise ArgumentError(f"--config: [data] size is {size!r}; expected a whole number of pixels")
        return DataConfig(mean, std, size)

    @contextmanager
    def step(self, description: str) -> Iterator[None]:
        """Show what is being done, unless the user wants no progress."""
        with open_progress(description, shown=not self.quiet):
            yield


def read_config(path: Path | None) -> dict[str, Any]:
    """The tables of a TOML file."""
    if path is None:
        return {}
    text = read_text(path, _LARGEST_CONFIG)
    try:
        config = tomllib.loads(text)
    except (ValueError, RecursionError) as error:  # no TOML, or nested too deep
        raise ArgumentError(f"--config: {path} is not valid TOML: {error}") from error
    unknown = set(config) - {"data", "recipe"}
    if unknown or not all(isinstance(part, dict) for part in config.values()):
        raise ArgumentError(f"--config: {path} has {', '.join(config)}; expected the tables [data] and [recipe]")
    return config


def read_mask(mask: str) -> Any:
    """A file of masks, or of pruned weights, as {name: tensor}; any other word stays as it is, if it is known."""
    from ..data.weights import read_state
    from ..masks.base import as_method
    from ..masks.given import is_mask_file

    if is_mask_file(mask):
        return read_state(Path(mask))
    if mask != _OWN_ZEROS:
        as_method(mask)
    return mask


def read_pattern(pattern: str | None, mask: str, default: str) -> str | None:
    """The pattern that masks are chosen for, if it has the right form. Given masks, and zeros, need none."""
    from ..masks.given import is_mask_file
    from ..patterns import PatternRules

    if pattern is None:
        return None if mask == _OWN_ZEROS or is_mask_file(mask) else default
    PatternRules.parse(pattern)
    return pattern


def read_metric(name: str | None) -> Metric | None:
    """The function that `file.py:metric` names, checked before anything else takes time. Its failures are named."""
    if name is None:
        return None
    from ..data.models import is_code, load_function
    from ..evaluation.metrics import check_metric

    file, _, function = name.rpartition(":")
    if not is_code(name):
        raise ArgumentError(f"--metric is {name!r}; expected file.py:metric")
    metric = load_function(file, function)
    check_metric(metric)

    @wraps(metric)
    def named(pairs: Iterator[tuple[Any, Any]]) -> Any:
        try:
            return metric(pairs)
        except SnowsError:
            raise
        except Exception as error:  # the user's own code
            raise InputError(f"{function} of {file} failed: {quoted(error)}") from error

    return named


def split_patterns(texts: list[str]) -> list[str]:
    """Patterns are separated by commas. So are the rules of a pattern that names layers: such a text is one pattern."""
    from ..patterns import PatternRules

    patterns = []
    for text in texts:
        parts = [part.strip() for part in text.split(",")]
        names_layers = any(glob != "*" for part in parts for glob, _ in PatternRules.parse(part).rules)
        patterns += [text] if names_layers else parts
    return patterns


def require_new_json(out: Path | None, *suffixes: str, otherwise: str = "remove it") -> None:
    """Before any work: `--out FILE.json` can be written, and overwrites nothing. Nor do files of other suffixes."""
    from ..results.files import check_writable

    if out is None:
        return
    if out.suffix != ".json":
        raise ArgumentError(f"--out is {out}; expected a file that ends in .json")
    if not is_folder(out.parent):
        raise ArgumentError(f"--out is {out}, but there is no folder {out.parent}")
    for path in (out, *map(out.with_suffix, suffixes)):
        if look(path) is not None:
            raise ArgumentError(f"{path} exists; choose another name, or {otherwise}")
        check_writable(path)


def _read_recipe(path: Path) -> Recipe:
    from ..recipe import Recipe

    return Recipe.from_json(read_text(path))


def _numbers(table: dict[str, Any], key: str) -> tuple[float, ...] | None:
    if key not in table:
        return None
    values = table[key] if isinstance(table[key], list) else [table[key]]
    if not all(isinstance(value, int | float) and abs(value) <= _LARGEST for value in values):  # refuses NaN, too
        raise ArgumentError(f"--config: [data] {key} is {table[key]!r}; expected a number or a list of numbers")
    return tuple(float(value) for value in values)
