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
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

from ..api import prune
from ..caller import Stoppable, own_surroundings
from ..data.preparation import capturing_once, limits_for, prepare
from ..data.samples import check_flag, check_labels, check_seed, read_samples
from ..data.usable import require_usable
from ..devices.device import as_device, device_of
from ..devices.distributed.group import apart, current_ranks
from ..devices.distributed.ranks import Ranks
from ..devices.memory import as_bytes, one_out_of_memory
from ..errors import ArgumentError, InputError, SnowsError, SnowsWarning, a_type
from ..events import DistillStep, Event, LayerStarted, Listener, Working
from ..listeners.progress import Listeners, listening
from ..patterns import PatternRules
from ..plan import Names, as_names, make_plan
from ..reading import as_path
from ..recipe import Effort, Recipe, as_recipe
from ..results.folder import Folder, digest, versions
from ..results.report import finite
from .cells import Cell, plan_cells
from .classes import evaluate, reference
from .table import Comparison, ComparisonInterrupted, Row, kept_networks

_DENSE = "dense.json"
_READ_AT_ONCE = 256
_OUT_OF_MEMORY = "out of memory; use fewer samples or a shorter horizon"


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
    recipe: Recipe | str | None = None,
    effort: Effort = "default",
    device: torch.device | str | None = None,
    seed: int = 0,
    permute: bool = False,
    memory: int | str | None = None,
    out: str | Path | None = None,
    progress: Listeners = True,
) -> Comparison:
    """Prune with every mask to every pattern, without and with SNOWS, and put the networks side by side.

    Args:
        model, layers, exclude, horizon, recipe, effort, device, seed, permute, memory, progress: As for `snows.prune`.
        calibration: As for `snows.prune`. It is read once, so all networks see the same samples.
        patterns: One pattern or a list of them, each as for `snows.prune`.
        masks: One mask, a list, or {name: mask}, each as for `snows.prune`. Complete masks take no pattern.
        test: Samples to evaluate the networks on. They should not be among the calibration samples.
        test_labels: Their labels. Without labels the networks are only compared with the dense one.
        labels: Which labels mask methods with a loss use: "model", the network's own predictions, or "given", those of
            the calibration data.
        out: A folder that keeps every finished network's figures. The same call continues where it was stopped, also
            with more patterns and masks. A folder made with other settings is refused.

    Returns:
        A row of figures for each network, the dense one first. A network that cannot be made is a row with its error,
        and the others go on.

    Raises:
        ArgumentError: An option is not understood.
        InputError: The samples do not fit the model, or the folder holds something else.
        CaptureError: torch.export cannot capture the model.
        ComparisonInterrupted: Ctrl-C was pressed (it is a KeyboardInterrupt); its `comparison` holds what was finished.

    Example:
        >>> import snows, torch
        >>> model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.ReLU(), torch.nn.Linear(16, 4)).eval()
        >>> x, test = torch.randn(64, 8), torch.randn(32, 8)
        >>> found = snows.compare(model, x, "2:4", ["magnitude", "wanda"], layers="*", test=test, progress=False)
        >>> [row.name for row in found.rows if not row.snows]
        ['dense', 'magnitude, 2:4, without SNOWS', 'wanda, 2:4, without SNOWS']
    """
    cells = plan_cells(patterns, masks)
    chosen = as_recipe(recipe, effort)
    if horizon is not None:
        chosen = chosen.replace(horizon=horizon)
    _check_arguments(model, test, test_labels, labels)
    check_seed(seed)
    check_flag("permute", permute)
    if test is None:
        warnings.warn(
            "there are no test samples: only sparsity, time and memory are compared; "
            "give some, with or without labels, to see how good the networks are",
            SnowsWarning,
            stacklevel=2,
        )
    options: dict[str, Any] = {
        "layers": as_names(layers, "layers"), "exclude": as_names(exclude, "exclude"), "recipe": chosen,
        "labels": labels, "device": as_device(device), "seed": seed, "permute": permute, "memory": as_bytes(memory),
    }  # fmt: skip
    place, ranks = device_of(model, device), current_ranks()
    shown = progress if ranks.is_first else False
    with listening(shown, "dense") as notify, own_surroundings(place, notify), capturing_once(model):
        task = _Task(model, _read_once(calibration), test, test_labels, options)
        table = _open_table(task, cells, out, ranks)
        with Stoppable(lambda: kept_networks(table.comparison(), out, "out=DIR", "call")):
            try:
                task.check_fit([cell.pattern for cell in table.pending])
                if table.folder is not None:
                    table.folder.require_writable()
                _fill(table, task, notify, ranks)
            except KeyboardInterrupt:
                raise ComparisonInterrupted(table.comparison()) from None
    table.write()
    return table.comparison()


@dataclass(frozen=True)
class _Task:
    """What all cells have in common."""

    model: nn.Module
    data: Any
    test: Tensor | None
    test_labels: Tensor | None
    options: dict[str, Any]  # of `prune`

    def settings(self) -> dict[str, Any]:
        """Everything that decides the rows, apart from masks and patterns."""
        with _without_warnings():
            samples = read_samples(self.data, self.model).count
        device = device_of(self.model, self.options["device"])
        on_cuda = device.type == "cuda" and torch.cuda.is_available()
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
            "device": torch.cuda.get_device_name(device) if on_cuda else str(device),
            "versions": versions(),
        }

    def check_fit(self, patterns: list[Any]) -> None:
        """Refuse at once what every cell would fail at: a model that cannot be captured, names of no layer."""
        if not patterns:
            return
        options = self.options
        with _without_warnings():
            with_labels = options["labels"] == "given"
            room = limits_for(self.model, options["device"], options["memory"]).room
            graph = prepare(self.model, self.data, options["device"], options["seed"], with_labels, room=room).graph
            for pattern in patterns:
                rules = None if pattern is None else PatternRules.parse(pattern)
                make_plan(graph, rules, 0, options["layers"], options["exclude"])

    def run(self, cell: Cell, working: Callable[[str], None]) -> Row:
        """Make one network, and say where it is. A failure is a row, too."""

        def describe(event: Event) -> None:
            if isinstance(event, LayerStarted | DistillStep):
                working(str(event))

        working("")
        solver: Literal["newton"] | None = "newton" if cell.snows else None
        try:
            result = prune(
                self.model, self.data, cell.pattern, mask=cell.method, solver=solver, progress=describe, **self.options
            )
            with one_out_of_memory():
                figures = self.figures(result.model)
            return dataclasses.replace(
                cell.row,
                **figures,
                sparsity=result.report.sparsity,
                network_sparsity=result.report.network_sparsity,
                seconds=result.report.seconds,
                peak_memory_bytes=result.report.peak_memory_bytes,
            )
        except SnowsError as error:
            return dataclasses.replace(cell.row, error=" ".join(str(error).split()))
        except torch.OutOfMemoryError:
            pass  # the memory is only freed outside this block
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


@dataclass(frozen=True)
class _Table:
    """Finished rows by file name, and the folder that keeps them."""

    settings: dict[str, Any]
    cells: list[Cell]
    pending: list[Cell]  # at the beginning of this call
    rows: dict[str, Row]
    folder: Folder | None

    def add(self, file: str, row: Row, source: str) -> None:
        self.rows[file] = row
        if self.folder is not None and row.error is None:
            self.folder.keep(file, {"source": source, **dataclasses.asdict(row)})

    def comparison(self) -> Comparison:
        files = [_DENSE, *(cell.file for cell in self.cells)]
        found = tuple(self.rows[file] for file in files if file in self.rows)
        return Comparison(self.settings, found, len(self.cells) - len(self.pending))

    def write(self) -> None:
        if self.folder is not None:
            self.folder.write("comparison.json", self.comparison().to_json())
            self.folder.write("comparison.md", self.comparison().to_markdown())


def _open_table(task: _Task, cells: list[Cell], out: str | Path | None, ranks: Ranks) -> _Table:
    """Only the first of several ranks has the folder."""
    settings = task.settings()
    folder = None if out is None or not ranks.is_first else Folder(as_path(out, "out"), settings)
    rows = ranks.from_first(lambda: {} if folder is None else _finished(folder, cells))
    return _Table(settings, cells, [cell for cell in cells if cell.file not in rows], rows, folder)


def _fill(table: _Table, task: _Task, notify: Listener, ranks: Ranks) -> None:
    """Evaluate the dense network, then make every pending one. Of several ranks each makes one at a time."""
    total = len(table.cells)
    reused = total - len(table.pending)
    notify(Working("dense", reused, total))
    if _DENSE not in table.rows:  # first: test samples that do not fit cost no time then
        table.add(_DENSE, Row(None, None, False, **task.figures(task.model)), "")
    for first in range(0, len(table.pending), ranks.size):
        cells = table.pending[first : first + ranks.size]
        own = _made(task, cells[ranks.rank], notify, reused + first, total) if ranks.rank < len(cells) else None
        for cell, row in zip(cells, ranks.gathered(own), strict=False):
            assert row is not None  # as many ranks made a row as there are cells
            table.add(cell.file, _with_drop(row, table.rows[_DENSE]), cell.source)


def _made(task: _Task, cell: Cell, notify: Listener, done: int, total: int) -> Row:
    """The row of a cell, made by this rank alone."""

    def working(detail: str) -> None:
        notify(Working(cell.row.name, done, total, detail))

    with apart():
        return task.run(cell, working)


def _finished(folder: Folder, cells: list[Cell]) -> dict[str, Row]:
    """Rows of an earlier call, by file name."""
    folder.check()
    rows = {}
    places = {_DENSE: ("", Row(None, None, False)), **{cell.file: (cell.source, cell.row) for cell in cells}}
    for file, (source, expected) in places.items():
        stored = folder.cell(file)
        if stored is None:
            continue
        if stored.pop("source", None) != source:
            raise InputError(f"{folder.path} has cells of another mask {expected.mask!r}; give this one another name")
        try:
            rows[file] = row = Row(**stored)
            row.require_same_network(expected)
        except (TypeError, ValueError) as error:
            raise InputError(f"{folder.path} has no comparison in {file}: {error}; remove that file") from error
    return rows


def _with_drop(row: Row, dense: Row) -> Row:
    if row.top1 is None or dense.top1 is None:
        return row
    return dataclasses.replace(row, drop=dense.top1 - row.top1)


@contextmanager
def _without_warnings() -> Iterator[None]:
    """Each cell gives them again."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", SnowsWarning)
        yield


def _check_arguments(model: Any, test: Any, test_labels: Any, labels: object) -> None:
    require_usable(model)
    for name, value in (("test", test), ("test_labels", test_labels)):
        if value is not None and not isinstance(value, Tensor):
            raise ArgumentError(f"{name} is {a_type(value)}; expected a tensor, or nothing")
    if test is None and test_labels is not None:
        raise ArgumentError("test_labels are given without test; expected the samples they belong to")
    check_labels(labels)


def _read_once(calibration: Any) -> Any:
    """The same samples for all cells, also from a loader that shuffles. Unreadable data is refused later."""
    if isinstance(calibration, Tensor | Mapping):
        return calibration
    if isinstance(calibration, Dataset):
        calibration = DataLoader(calibration, batch_size=_READ_AT_ONCE)
    if isinstance(calibration, Iterable) and not isinstance(calibration, Iterator | str | bytes):
        return list(calibration)
    return calibration
