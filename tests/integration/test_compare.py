"""`snows.compare`: every network is a row, failures too, and a folder continues where it was stopped."""

from __future__ import annotations

import dataclasses
import itertools
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NoReturn

import pytest
import torch
from markdown_it import MarkdownIt
from torch.utils.data import DataLoader, TensorDataset

import snows
from snows import ArgumentError, CaptureError, InputError, SnowsWarning
from snows.data import preparation
from snows.evaluation.table import Comparison, ComparisonInterrupted, Row
from snows.events import Event, Warned, Working
from snows.masks.wanda import Wanda
from tests.networks import example, make

from .conftest import strict_json

QUICK = snows.Recipe(horizon=1, sweeps=1, cg_steps=2)
MODEL = make("mlp")
X, TEST = example("mlp", 24), example("mlp", 40, seed=3)
LABELS = (MODEL(TEST) - MODEL(TEST).mean(0)).argmax(1)  # not all the same


def compare(patterns: Any = ("2:4",), masks: Any = ("magnitude",), **options: Any) -> Comparison:
    """On the tiny network: one layer is pruned."""
    given = {"test": TEST, "test_labels": LABELS, "recipe": QUICK, "progress": False, **options}
    return snows.compare(MODEL, X, list(patterns), list(masks) if isinstance(masks, tuple) else masks, **given)


@dataclass
class Watched:
    """Wanda's masks, with a count of how often they are asked for, and something that happens at one of these times."""

    name: str = "watched"
    at: int = field(default=0, repr=False)
    happens: BaseException | None = field(default=None, repr=False)
    calls: int = field(default=0, repr=False)

    def choose_layer(self, *given: Any) -> Any:
        self.calls += 1
        full = isinstance(self.happens, torch.OutOfMemoryError) and self.calls > self.at  # and stays so
        if (self.calls == self.at or full) and self.happens is not None:
            raise self.happens
        return Wanda().choose_layer(*given)


def timeless(rows: tuple[Row, ...]) -> list[Row]:
    return [dataclasses.replace(row, seconds=None) for row in rows]


def content(folder: Path) -> dict[str, bytes]:
    return {str(file.relative_to(folder)): file.read_bytes() for file in folder.rglob("*") if file.is_file()}


def markdown_table(text: str) -> list[list[str]]:
    """Cells as a Markdown reader sees them."""
    tokens = MarkdownIt().enable("table").parse(text)
    rows: list[list[str]] = []
    for before, token in itertools.pairwise(tokens):
        if before.type == "tr_open":
            rows.append([])
        if before.type in ("th_open", "td_open"):
            rows[-1].append("".join(child.content for child in token.children or []))
    return rows


# Rows


@pytest.fixture(scope="module")
def found() -> Comparison:
    mine = {"2.weight": torch.arange(64).view(8, 8) % 4 == 0}
    return compare(("2:4, [24]=2:4", 0.5), {"mine|a_b*": mine, "magnitude": "magnitude"})


def test_every_cell_is_a_row(found: Comparison) -> None:
    dense, *rows = found.rows
    names = [(row.pattern, row.mask, row.snows) for row in rows]
    assert names == [
        (pattern, mask, snows)
        for pattern, mask in [("[24]=2:4, *=2:4", "magnitude"), ("0.5", "magnitude"), ("given", "mine|a_b*")]
        for snows in (False, True)
    ]
    assert (dense.mask, dense.agreement, dense.kl, dense.drop) == (None, 1, 0, None)
    assert (dense.sparsity, dense.seconds, found.failed, found.reused) == (None, None, (), 0)
    assert dense.top1 is not None
    assert 0 < dense.top1 < 1
    for row in rows:
        assert row.sparsity == (0.75 if row.pattern == "given" else 0.5)
        assert row.top1 is not None
        assert row.drop == dense.top1 - row.top1
        assert row.seconds is not None
        assert row.peak_memory_bytes is None  # a CPU
    # a cell is what `prune` and `evaluate` give by themselves
    by_hand = snows.prune(MODEL, X, "2:4", mask="magnitude", recipe=QUICK, progress=False)
    figures = snows.evaluate(by_hand.model, TEST, LABELS, MODEL)
    assert {key: getattr(rows[1], key) for key in figures} == figures
    assert rows[0].kl != rows[1].kl


def test_a_listener_hears_which_network_is_made(tmp_path: Path) -> None:
    compare(masks=("wanda",), out=tmp_path)
    seen: list[Event] = []
    found = compare(masks=("wanda", "magnitude"), out=tmp_path, progress=seen.append)
    pieces = [event for event in seen if isinstance(event, Working)]
    names = [row.name for row in found.pruned if row.mask == "magnitude"]
    assert [(event.what, event.done, event.total) for event in pieces if not event.detail] == [
        ("dense", 2, 4), (names[0], 2, 4), (names[1], 3, 4),
    ]  # fmt: skip
    assert (pieces[-1].what, pieces[-1].detail) == (names[1], "sweep 1/1  2")


def test_a_listener_hears_each_warning_once() -> None:
    seen: list[Event] = []
    with pytest.warns(SnowsWarning, match="look unnormalized") as warned:
        snows.compare(
            make("conv-bn"), example("conv-bn", 8).abs() * 100, "2:4", "magnitude", test=example("conv-bn", 8),
            recipe=QUICK, progress=seen.append,
        )  # fmt: skip
    words = [event.message for event in seen if isinstance(event, Warned) and event.times == 1]
    assert words == [str(each.message) for each in warned]
    assert len(set(words)) == len(words) > 0


def test_without_test_samples() -> None:
    with pytest.warns(SnowsWarning, match="there are no test samples: only sparsity, time and memory"):
        found = compare(test=None, test_labels=None)
    assert found.table()[0] == ["pattern", "mask", "SNOWS", "sparsity", "time", "memory"]
    assert "no test samples" in found.summary
    assert found.failed == ()


def test_failures_are_rows_and_the_others_go_on() -> None:
    refuses = Watched("refuses", 1, InputError("this layer\nis not for me"))
    fills = Watched("fills", 2, torch.OutOfMemoryError("CUDA out of memory"))
    with pytest.warns(SnowsWarning, match="out of memory at 2: going on with"):
        found = compare(masks={"a": refuses, "b": fills})
    assert [row.error for row in found.pruned] == [
        "this layer is not for me",
        None,
        None,
        "out of memory; use fewer samples or a shorter horizon",
    ]
    table = markdown_table(found.to_markdown())
    assert table[0][-1] == "error"
    assert [row[-1] for row in table[1:]] == [row.error or "" for row in found.rows]
    failed = found.failed[0]
    assert (failed.top1, failed.sparsity, failed.seconds) == (None, None, None)


def test_it_is_shown_in_a_line_and_in_notebooks_as_a_table(found: Comparison) -> None:
    assert repr(found) == f"<Comparison: {found.summary}; {len(found.rows)} networks, see to_markdown()>"
    assert found._repr_markdown_() == found.to_markdown()


def test_json_and_markdown_say_the_same(found: Comparison) -> None:
    data = strict_json(found.to_json())
    assert [Row(**row) for row in data["rows"]] == list(found.rows)
    assert data["settings"]["samples"] == 24
    table = markdown_table(found.to_markdown())
    assert table[0][:5] == ["pattern", "mask", "SNOWS", "top-1", "drop"]
    assert table[1][:3] == ["dense", "–", "–"]
    assert table[2][:3] == ["[24]=2:4, *=2:4", "magnitude", "no"]
    assert table[-1][:3] == ["given", "mine|a_b*", "yes"]
    assert [row[3] for row in table[1:]] == [f"{row.top1:.2%}" for row in found.rows]
    assert table[1][-3:] == ["–", "–", "–"]


def test_all_cells_see_the_same_samples() -> None:
    """Also of a loader that gives others each time."""
    loader = DataLoader(TensorDataset(X, torch.zeros(24)), batch_size=5, shuffle=True)
    method = Watched()
    found = snows.compare(
        MODEL, loader, ["2:4", "2:4 "], {"a": method, "b": method}, test=TEST, recipe=QUICK, progress=False
    )
    a, b = timeless(found.pruned[:2]), timeless(found.pruned[2:])
    assert [dataclasses.replace(row, mask="a") for row in b] == a
    assert method.calls == 4  # a pattern that is given twice is one
    assert found.settings["samples"] == 24


def test_the_model_is_captured_once_and_the_data_read_once(monkeypatch: pytest.MonkeyPatch) -> None:
    counts: Counter[str] = Counter()

    def counted(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any, **options: Any) -> Any:
            counts[name] += 1
            return function(*arguments, **options)

        return call

    class Loader(DataLoader[Any]):
        __iter__ = counted("loader", DataLoader.__iter__)

    for name in ("capture", "read_samples"):
        monkeypatch.setattr(preparation, name, counted(name, getattr(preparation, name)))
    loader = Loader(TensorDataset(X), batch_size=5)
    once = snows.compare(MODEL, loader, ["2:4", 0.5], ["magnitude", "wanda"], test=TEST, recipe=QUICK, progress=False)
    assert len(once.pruned) == 8
    assert once.failed == ()
    assert counts == {"capture": 1, "read_samples": 1, "loader": 1}


def test_every_network_warns_of_the_data(monkeypatch: pytest.MonkeyPatch) -> None:
    """Though the data is read once, the report of each run holds the warning."""
    reports = []

    def kept(*arguments: Any, **options: Any) -> snows.Result:
        result = snows.prune(*arguments, **options)
        reports.append(result.report)
        return result

    monkeypatch.setattr("snows.evaluation.comparison.prune", kept)
    with pytest.warns(SnowsWarning, match="look unnormalized"):
        snows.compare(
            make("conv-bn"), example("conv-bn", 8).abs() * 100, "2:4", "magnitude", test=example("conv-bn", 8),
            recipe=QUICK, progress=False,
        )  # fmt: skip
    assert len(reports) == 2
    assert all("look unnormalized" in report.warnings[0] for report in reports)


def test_memory_is_bounded_as_in_prune(monkeypatch: pytest.MonkeyPatch) -> None:
    given = []

    def watched(*arguments: Any, memory: Any, **options: Any) -> snows.Result:
        given.append(memory)
        return snows.prune(*arguments, memory=memory, **options)

    monkeypatch.setattr("snows.evaluation.comparison.prune", watched)
    found = compare(memory="64 MiB")
    assert found.settings["memory"] == 64 << 20
    assert set(given) == {64 << 20}
    assert found.failed == ()


def test_channels_may_be_permuted_first() -> None:
    plain, permuted = compare(), compare(("2:4", "0.5"), permute=True)
    assert permuted.settings["permute"] is True
    assert [row.sparsity for row in permuted.pruned if row.pattern == "2:4"] == [row.sparsity for row in plain.pruned]
    assert permuted.pruned[0].kl != plain.pruned[0].kl  # another mask
    assert {row.error for row in permuted.failed} == {"permute is for N:M patterns; expected one such as '2:4'"}
    assert {row.pattern for row in permuted.failed} == {"0.5"}


# Wrong input is said before any work

WRONG: dict[str, tuple[type[Exception], str, dict[str, Any]]] = {
    "memory": (ArgumentError, "memory is 'much'; expected a size such as '24GiB'", {"memory": "much"}),
    "pattern": (ArgumentError, "pattern 'half' is not understood", {"patterns": ("2:4", "half")}),
    "no pattern": (ArgumentError, "no pattern is given for the mask magnitude", {"patterns": ()}),
    "mask": (ArgumentError, "mask 'best' is not known", {"masks": ("magnitude", "best")}),
    "no mask": (ArgumentError, "no mask is given", {"masks": ()}),
    "one mask": (ArgumentError, "put it into a list", {"masks": {"2.weight": torch.ones(8, 8) > 0}}),
    "same names": (ArgumentError, "two masks are called .*; give them names", {"masks": (Wanda(), Wanda())}),
    "recipe": (ArgumentError, "recipe 'best' is not known", {"recipe": "best"}),
    "horizon": (ArgumentError, "horizon is -1", {"horizon": -1}),
    "labels": (ArgumentError, "labels is 'some'; expected 'model' or 'given'", {"labels": "some"}),
    "no labels": (InputError, "labels are needed, but a calibration batch", {"labels": "given"}),
    "layers": (ArgumentError, "layers='fc' fits no layer", {"layers": "2,fc"}),
    "layer of a pattern": (ArgumentError, "the pattern for 'fc' fits no layer", {"patterns": ("2:4, fc=1:4",)}),
    "test": (ArgumentError, "test is a list; expected a tensor", {"test": [1]}),
    "labels alone": (ArgumentError, "test_labels are given without test", {"test": None}),
    "labels of others": (InputError, "there are 40 samples or more and 3 labels", {"test_labels": LABELS[:3]}),
}


@pytest.mark.parametrize("case", WRONG)
def test_wrong_input(case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def work(*_: Any, **__: Any) -> NoReturn:
        raise AssertionError("nothing should be pruned")

    monkeypatch.setattr("snows.evaluation.comparison.prune", work)
    kind, words, options = WRONG[case]
    with pytest.raises(kind, match=words):
        compare(**options, out=tmp_path / "out")
    assert not list(tmp_path.iterdir())


def test_wrong_models_and_data() -> None:
    class Branching(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x if float(x.detach().sum()) > 0 else -x

    with pytest.raises(ArgumentError, match="model is a str"):
        snows.compare("resnet", X, "2:4", "magnitude", test=TEST)  # type: ignore[arg-type]
    with pytest.raises(InputError, match="one-shot generator"):
        snows.compare(MODEL, iter([X]), "2:4", "magnitude", test=TEST)
    branching = torch.nn.Sequential(torch.nn.Linear(6, 8), Branching(), torch.nn.Linear(8, 3)).double()
    with pytest.raises(CaptureError):
        snows.compare(branching.eval(), X, "2:4", "magnitude", test=TEST)


# Folders


def test_a_folder_goes_on_where_it_was_stopped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out = tmp_path / "out"
    whole = compare(masks=("magnitude", Watched()), out=tmp_path / "whole")
    assert {path.name for path in (tmp_path / "whole").iterdir()} == {
        "settings.json", "cells", "comparison.json", "comparison.md",
    }  # fmt: skip
    assert strict_json((tmp_path / "whole" / "comparison.json").read_text()) == strict_json(whole.to_json())
    assert (tmp_path / "whole" / "comparison.md").read_text() == whole.to_markdown()

    # stopped by the user in the last cell
    stopping = Watched(at=2, happens=KeyboardInterrupt())
    with pytest.raises(KeyboardInterrupt) as stopped:
        compare(masks=("magnitude", stopping), out=out)
    assert isinstance(stopped.value, ComparisonInterrupted)
    assert timeless(stopped.value.comparison.rows) == timeless(whole.rows[:-1])
    before = content(out)
    assert len(before) == 5  # settings, dense, three cells
    assert not [name for name in before if "/." in name]

    # the same again: what is finished is not made again
    again = Watched()
    resumed = compare(masks=("magnitude", again), out=out)
    assert again.calls == 1
    assert (resumed.reused, len(resumed.pruned)) == (3, 4)
    assert timeless(resumed.rows) == timeless(whole.rows)
    after = content(out)
    assert {name: after[name] for name in before} == before

    # nothing is left to do; nor is anything captured or evaluated
    monkeypatch.setattr("snows.evaluation.comparison.prepare", None)
    monkeypatch.setattr("snows.evaluation.comparison.evaluate", None)
    third = compare(masks=("magnitude", again), out=out)
    assert (third.reused, third.rows) == (4, resumed.rows)


def test_failed_cells_are_tried_again_and_masks_may_be_added(tmp_path: Path) -> None:
    first = compare(masks=(Watched(at=2, happens=InputError("not today")),), out=tmp_path)
    assert [row.error for row in first.pruned] == [None, "not today"]
    method = Watched()
    second = compare(masks=("magnitude", method), out=tmp_path)
    assert (second.failed, second.reused, method.calls) == ((), 1, 1)
    assert timeless(second.rows[-2:-1]) == timeless(first.rows[1:2])
    # the same name for something else is not the same mask
    masks = {"magnitude": "magnitude", "mine": {"2.weight": torch.arange(64).view(8, 8) % 2 == 0}}
    assert compare(masks=masks, out=tmp_path).reused == 2
    assert compare(masks=masks, out=tmp_path).reused == 4
    before = content(tmp_path)
    with pytest.raises(InputError, match="has cells of another mask 'mine'; give this one another name"):
        compare(masks={"mine": {"2.weight": ~masks["mine"]["2.weight"]}}, out=tmp_path)
    assert content(tmp_path) == before


def test_a_folder_of_other_settings_is_refused(tmp_path: Path) -> None:
    out = tmp_path / "out"
    compare(out=out)
    before = content(out)
    other = make("mlp")
    other[0].bias.add_(1)
    cases: dict[str, Callable[[], Any]] = {
        "seed was 0 and is 1": lambda: compare(seed=1, out=out),
        "recipe cg steps was 2 and is 3": lambda: compare(recipe=QUICK.replace(cg_steps=3), out=out),
        "recipe horizon was 1 and is 0": lambda: compare(horizon=0, out=out),
        "layers was none and is 2": lambda: compare(layers="2", out=out),
        "the test samples differ": lambda: compare(test_labels=(LABELS + 1) % 3, out=out),
        "the calibration samples differ; samples was 24 and is 23": lambda: snows.compare(
            MODEL, X[:23], "2:4", "magnitude", test=TEST, test_labels=LABELS, recipe=QUICK, out=out
        ),
        "the model's weights differ": lambda: snows.compare(
            other, X, "2:4", "magnitude", test=TEST, test_labels=LABELS, recipe=QUICK, out=out
        ),
    }
    for words, call in cases.items():
        with pytest.raises(InputError) as refused:
            call()
        assert str(refused.value).startswith(f"{out} was made with other settings ({words}); choose another folder")
    assert content(out) == before
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "notes.txt").write_text("mine")
    with pytest.raises(InputError, match="full exists and is not empty"):
        compare(out=tmp_path / "full")
    (out / "settings.json").write_text("{")
    with pytest.raises(InputError, match="cannot read"):
        compare(out=out)


def test_a_folder_that_cannot_be_written_is_refused_before_the_work(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("snows.evaluation.comparison.evaluate", lambda *_, **__: pytest.fail("the work began"))
    (tmp_path / "file").write_text("mine")
    for out, words in (
        (tmp_path / "file" / "out", "file is no folder"),
        (tmp_path / ("x" * 300), "File name too long"),
    ):
        with pytest.raises(InputError, match=words):
            compare(out=out)
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


def test_a_cell_is_written_whole_or_not_at_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: Any) -> NoReturn:
        raise OSError(28, "No space left on device")

    compare(out=tmp_path)
    before = content(tmp_path)
    monkeypatch.setattr("snows.results.files.os.replace", full)
    with pytest.raises(InputError, match="No space left on device"):
        compare(masks=("wanda",), out=tmp_path)
    assert content(tmp_path) == before
    cell = next((tmp_path / "cells").glob("magnitude-*"))
    cell.write_text('{"source": "magnitude", "other": 1}')
    with pytest.raises(InputError, match=rf"has no comparison in {cell.name}"):
        compare(out=tmp_path)


def test_cells_that_were_exchanged_are_noticed(tmp_path: Path) -> None:
    compare(out=tmp_path)
    one, two = sorted((tmp_path / "cells").glob("magnitude-*"))
    first, second = one.read_text(), two.read_text()
    one.write_text(second)
    two.write_text(first)
    with pytest.raises(InputError, match=r"it is the row of .*; expected "):
        compare(out=tmp_path)
    one.write_text(first.replace('"top1": ', '"top1": "x", "top5": '))
    with pytest.raises(InputError, match="has no comparison in"):
        compare(out=tmp_path)
