"""`snows.compare`: mask methods x patterns, each without and with SNOWS, on one model and its data."""

from __future__ import annotations

import dataclasses
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

from ..api import prune
from ..data.preparation import as_device, prepare
from ..data.samples import read_samples
from ..devices.memory import as_bytes
from ..errors import ArgumentError, InputError, SnowsError, SnowsWarning
from ..events import Event
from ..masks import as_method
from ..masks.given import is_mask_file
from ..patterns.base import PatternRules
from ..plan import Names, make_plan
from ..recipe import Recipe, as_recipe
from ..results.folder import Folder, cell_name, describe, digest
from ..results.report import finite
from ..version import __version__
from .classes import evaluate, reference
from .table import Comparison, ComparisonInterrupted, Row

_DENSE = "dense.json"
_READ_AT_ONCE = 256
_OUT_OF_MEMORY = "out of memory; use fewer samples or a shorter horizon"


@dataclass(frozen=True)
class Cell:
    """One network to be made."""

    mask: str
    method: Any
    source: str  # what the mask's name stands for: a cell on disk is of this very mask
    pattern: Any  # None: the mask says everything
    snows: bool

    @property
    def row(self) -> Row:
        return Row(self.mask, "given" if self.pattern is None else str(PatternRules.parse(self.pattern)), self.snows)

    @property
    def file(self) -> str:
        return cell_name(self.mask, str(self.row.pattern), self.snows)


def compare(
    model: nn.Module,
    calibration: Any,
    patterns: Any,
    masks: Any,
    *,
    test: Tensor | None = None,
    test_labels: Tensor | None = None,
    labels: Literal["model", "given"] = "model",
    layers: Names = None,
    exclude: Names = None,
    horizon: int | None = None,
    recipe: Recipe | str = "default",
    device: torch.device | str | None = None,
    seed: int = 0,
    permute: bool = False,
    memory: int | str | None = None,
    out: str | Path | None = None,
    progress: bool = True,
) -> Comparison:
    """Prune with every mask to every pattern, without and with SNOWS, and put the networks side by side.

    model, calibration, layers, exclude, horizon, recipe, device, seed, permute, memory
                 as in `snows.prune`; the calibration data is read once, so all networks see the same samples
    patterns     one, or a list of them, each as in `snows.prune`
    masks        one, a list, or {name: mask}, each as in `snows.prune`; masks that say everything take no pattern
    test         samples to evaluate on, with `test_labels` where there are any
    labels       "given": mask methods that use labels take those of the calibration data; "model": the model's own
    out          a folder that keeps every finished cell at once. The same call goes on where it was stopped, and more
                 patterns and masks may be added; a folder made with other settings is refused
    progress     a progress bar on standard error

    A network that cannot be made is a row with its error, and the others go on.
    """
    cells = plan_cells(patterns, masks)
    chosen = as_recipe(recipe)
    if horizon is not None:
        chosen = chosen.replace(horizon=horizon)
    _check_arguments(model, test, test_labels, labels)
    if test is None:
        warnings.warn(
            "there are no test samples: only sparsity, time and memory are compared; "
            "give some, with or without labels, to see how good the networks are",
            SnowsWarning,
            stacklevel=2,
        )
    options: dict[str, Any] = {
        "layers": _name_list(layers), "exclude": _name_list(exclude), "recipe": chosen, "labels": labels,
        "device": device, "seed": seed, "permute": permute, "memory": as_bytes(memory),
    }  # fmt: skip
    task = _Task(model, _read_once(calibration), test, test_labels, options)
    settings = task.describe()
    folder = None if out is None else Folder(Path(out), settings)
    rows = {} if folder is None else _finished(folder, cells)
    pending = [cell for cell in cells if cell.file not in rows]
    if pending:
        task.check_fit([cell.pattern for cell in pending])

    def add(file: str, row: Row, source: str) -> None:
        rows[file] = row
        if folder is not None and row.error is None:
            folder.keep(file, {"source": source, **dataclasses.asdict(row)})

    def so_far() -> Comparison:
        found = [rows[file] for file in (_DENSE, *(cell.file for cell in cells)) if file in rows]
        return Comparison(settings, tuple(found), len(cells) - len(pending))

    try:
        with _progress_bar(progress, len(cells), len(cells) - len(pending)) as (show, step):
            if _DENSE not in rows:  # first, so that test data that does not fit is said before the work
                show("dense")
                add(_DENSE, Row(None, None, False, **task.figures(model)), "")
            for cell in pending:
                show(cell.row.name)
                add(cell.file, _with_drop(task.run(cell, show), rows[_DENSE]), cell.source)
                step()
    except KeyboardInterrupt as stop:
        raise ComparisonInterrupted(so_far()) from stop
    found = so_far()
    if folder is not None:
        folder.write("comparison.json", found.to_json())
        folder.write("comparison.md", found.to_markdown())
    return found


@dataclass(frozen=True)
class _Task:
    """What is the same for all cells."""

    model: nn.Module
    data: Any
    test: Tensor | None
    test_labels: Tensor | None
    options: dict[str, Any]  # of `prune`

    def describe(self) -> dict[str, Any]:
        """The settings: what decides the rows, besides masks and patterns."""
        with _silently():
            samples = read_samples(self.data, self.model).count
        place = as_device(self.options["device"]) or _place(self.model)
        on_cuda = place.type == "cuda" and torch.cuda.is_available()
        return {
            "model": type(self.model).__name__,
            "weights": digest(self.model.state_dict()),
            "calibration": digest(self.data),
            "samples": samples,
            "test": None if self.test is None else digest([self.test, self.test_labels]),
            "test_samples": 0 if self.test is None else len(self.test),
            "test_labels": self.test_labels is not None,
            **self.options,
            "recipe": dataclasses.asdict(self.options["recipe"]),
            "device": torch.cuda.get_device_name(place) if on_cuda else str(place),
            "versions": {"snows": __version__, "torch": str(torch.__version__)},
        }

    def check_fit(self, patterns: list[Any]) -> None:
        """What many cells would stumble over (names of no layer, a model that cannot be captured) is said at once."""
        options = self.options
        with _silently(), torch.random.fork_rng(devices=[]), torch.inference_mode(False), torch.enable_grad():
            with_labels = options["labels"] == "given"
            graph = prepare(self.model, self.data, options["device"], options["seed"], with_labels).graph
            for pattern in patterns:
                rules = None if pattern is None else PatternRules.parse(pattern)
                make_plan(graph, rules, 0, options["layers"], options["exclude"])

    def run(self, cell: Cell, show: Callable[[str], None]) -> Row:
        """A row in any case."""

        def tell(event: Event) -> None:
            show(f"{cell.row.name}: {event}")

        options = {key: value for key, value in self.options.items() if (key, value) != ("labels", "model")}
        try:
            solver: Literal["newton"] | None = "newton" if cell.snows else None
            result = prune(
                self.model, self.data, cell.pattern, mask=cell.method, solver=solver, progress=tell, **options
            )
            return dataclasses.replace(
                cell.row,
                **self.figures(result.model),
                sparsity=result.report.sparsity,
                network_sparsity=result.report.network_sparsity,
                seconds=result.report.seconds,
                peak_memory_bytes=result.report.peak_memory_bytes,
            )
        except SnowsError as error:
            return dataclasses.replace(cell.row, error=" ".join(str(error).split()))
        except (torch.OutOfMemoryError, MemoryError):
            pass  # only outside of this block is what filled the memory let go
        torch.cuda.empty_cache()
        return dataclasses.replace(cell.row, error=_OUT_OF_MEMORY)

    def figures(self, network: nn.Module) -> dict[str, Any]:
        if self.test is None:
            return {}
        return dict(finite(evaluate(network, self.test, self.test_labels, self.expected)))

    @cached_property
    def expected(self) -> nn.Module | Tensor:
        assert self.test is not None
        return reference(self.model, self.test)


@contextmanager
def _silently() -> Iterator[None]:
    """Without warnings that each cell gives again."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", SnowsWarning)
        yield


def _place(model: nn.Module) -> torch.device:
    first = next(model.parameters(), None)
    return torch.device("cpu") if first is None else first.device


def plan_cells(patterns: Any, masks: Any) -> list[Cell]:
    """Every network to be made, by pattern, then by mask, without SNOWS before with. Wrong names are refused."""
    named = _named_masks(masks)
    several = patterns if isinstance(patterns, list | tuple) else [] if patterns is None else [patterns]
    rules = {str(PatternRules.parse(pattern)): pattern for pattern in several}
    methods = {name: mask for name, mask in named.items() if not _says_everything(mask)}
    for mask in methods.values():
        as_method(mask)
    if methods and not rules:
        raise ArgumentError(f"no pattern is given for the mask {next(iter(methods))}; expected some, such as '2:4'")
    wanted = [(pattern, name) for pattern in rules.values() for name in methods]
    wanted += [(None, name) for name in named if name not in methods]
    return [
        Cell(name, named[name], describe(named[name]), pattern, snows)
        for pattern, name in wanted
        for snows in (False, True)
    ]


def _named_masks(masks: Any) -> dict[str, Any]:
    if isinstance(masks, Mapping):
        if any(isinstance(mask, Tensor) for mask in masks.values()):
            raise ArgumentError("masks is one {name: bool tensor}; put it into a list, or give it a name: {'mine': …}")
        named = {str(name): mask for name, mask in masks.items()}
    else:
        named = {}
        for mask in masks if isinstance(masks, list | tuple) else [masks]:
            name = _name(mask)
            if name in named and not isinstance(mask, str):
                raise ArgumentError(
                    f"two masks are called {name!r}; give them names: masks={{'first': …, 'second': …}}"
                )
            named[name] = mask
    if not named:
        raise ArgumentError("no mask is given; expected some, such as 'magnitude'")
    return named


def _says_everything(mask: Any) -> bool:
    """Whether a mask is given as it is, rather than chosen by a method."""
    return isinstance(mask, Mapping | nn.Module) or is_mask_file(mask) or (isinstance(mask, str) and mask == "weights")


def _name(mask: Any) -> str:
    if isinstance(mask, str) or is_mask_file(mask):
        return str(mask)
    return "given" if isinstance(mask, Mapping | nn.Module) else describe(mask)


def _check_arguments(model: Any, test: Any, test_labels: Any, labels: str) -> None:
    if not isinstance(model, nn.Module):
        raise ArgumentError(f"model is a {type(model).__name__}; expected an nn.Module")
    for name, value in (("test", test), ("test_labels", test_labels)):
        if value is not None and not isinstance(value, Tensor):
            raise ArgumentError(f"{name} is a {type(value).__name__}; expected a tensor, or nothing")
    if test is None and test_labels is not None:
        raise ArgumentError("test_labels are given without test; expected the samples they belong to")
    if labels not in ("model", "given"):
        raise ArgumentError(f"labels is {labels!r}; expected 'model' or 'given'")


def _name_list(names: Names) -> list[str] | None:
    """As `snows.prune` reads them; an iterator would be empty for the second cell."""
    if names is None:
        return None
    several = [names] if isinstance(names, str) else names
    return [part.strip() for name in several for part in str(name).split(",") if part.strip()]


def _read_once(calibration: Any) -> Any:
    """The same samples for all cells, also of a loader that shuffles. What cannot be read is refused later."""
    if isinstance(calibration, Tensor | Mapping):
        return calibration
    if isinstance(calibration, Dataset):
        calibration = DataLoader(calibration, batch_size=_READ_AT_ONCE)
    if isinstance(calibration, Iterable) and not isinstance(calibration, Iterator | str | bytes):
        return list(calibration)
    return calibration


def _finished(folder: Folder, cells: list[Cell]) -> dict[str, Row]:
    """Rows of an earlier run, by file."""
    folder.check()
    rows = {}
    for file, source, mask in [(_DENSE, "", ""), *((cell.file, cell.source, cell.mask) for cell in cells)]:
        stored = folder.cell(file)
        if stored is None:
            continue
        if stored.pop("source", None) != source:
            raise InputError(f"{folder.path} has cells of another mask {mask!r}; give this one another name")
        try:
            rows[file] = Row(**stored)
        except TypeError as error:
            raise InputError(f"{folder.path} has no comparison in {file}: {error}; remove that file") from error
    return rows


def _with_drop(row: Row, dense: Row) -> Row:
    if row.top1 is None or dense.top1 is None:
        return row
    return dataclasses.replace(row, drop=dense.top1 - row.top1)


@contextmanager
def _progress_bar(shown: bool, total: int, done: int) -> Iterator[tuple[Callable[[str], None], Callable[[], None]]]:
    """A bar over cells on standard error: how to say what is being done, and how to count one."""
    columns = (TextColumn("{task.description}", markup=False), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True, disable=not shown) as bar:
        task = bar.add_task("", total=total, completed=done)

        def show(what: str) -> None:
            bar.update(task, description=what)

        yield show, lambda: bar.advance(task)
