"""`snows.compare`: every cell there, failures as rows, and folders that go on where they were stopped."""

from __future__ import annotations

import dataclasses
import itertools
import json
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NoReturn

import pytest
import torch
from markdown_it import MarkdownIt
from safetensors.torch import save_file
from torch.utils.data import DataLoader, TensorDataset

import snows
from snows import ArgumentError, CaptureError, InputError, SnowsWarning
from snows.cli.commands import _split_patterns
from snows.evaluation.comparison import plan_cells
from snows.evaluation.table import Comparison, ComparisonInterrupted, Row
from snows.masks.wanda import Wanda
from tests.networks import example, make

from .conftest import Outcome, Snows, assert_error
from .test_cli import FAST, NET

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


def strict(text: str) -> Any:
    def refuse(constant: str) -> NoReturn:
        raise AssertionError(f"{constant} is no JSON")

    return json.loads(text, parse_constant=refuse)


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


def test_without_test_samples() -> None:
    with pytest.warns(SnowsWarning, match="there are no test samples: only sparsity, time and memory"):
        found = compare(test=None, test_labels=None)
    assert found.table()[0] == ["pattern", "mask", "SNOWS", "sparsity", "time", "memory"]
    assert "no test samples" in found.summary
    assert found.failed == ()


def test_failures_are_rows_and_the_others_go_on() -> None:
    refuses = Watched("refuses", 1, InputError("this layer\nis not for me"))
    fills = Watched("fills", 2, torch.OutOfMemoryError("CUDA out of memory"))
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


def test_json_and_markdown_say_the_same(found: Comparison) -> None:
    data = strict(found.to_json())
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
    "no labels": (InputError, "labels='given', but a calibration batch", {"labels": "given"}),
    "layers": (ArgumentError, "layers='fc' fits no layer", {"layers": "2,fc"}),
    "layer of a pattern": (ArgumentError, "the pattern for 'fc' fits no layer", {"patterns": ("2:4, fc=1:4",)}),
    "test": (ArgumentError, "test is a list; expected a tensor", {"test": [1]}),
    "labels alone": (ArgumentError, "test_labels are given without test", {"test": None}),
    "labels of others": (InputError, "there are 40 samples and 3 labels", {"test_labels": LABELS[:3]}),
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
    assert strict((tmp_path / "whole" / "comparison.json").read_text()) == strict(whole.to_json())
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


def test_names_of_masks(tmp_path: Path) -> None:
    save_file({"2.weight": torch.ones(8, 8) > 0}, tmp_path / "mine.safetensors")
    file = str(tmp_path / "mine.safetensors")
    cells = plan_cells(["2:4", 0.5], [file, MODEL, "weights", "magnitude"])
    assert [(cell.mask, cell.row.pattern) for cell in cells[::2]] == [
        ("magnitude", "2:4"),
        ("magnitude", "0.5"),
        (file, "given"),
        ("given", "given"),
        ("weights", "given"),
    ]
    before = plan_cells(None, file)[0].source
    save_file({"2.weight": torch.ones(8, 8) < 0}, tmp_path / "mine.safetensors")
    assert plan_cells(None, file)[0].source != before  # it is the content that counts


def test_methods_without_a_name_of_their_own() -> None:
    class Plain:
        choose_layer = Watched.choose_layer

    (cell, _) = plan_cells("2:4", Plain())
    assert "0x" not in cell.mask  # an address would be another one the next time
    assert "Plain object" in cell.mask


# The command line

COMPARE = ("compare", "net.py:model", "--recipe", "fast.json", "--data")


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("work")
    (folder / "net.py").write_text(NET)
    (folder / "fast.json").write_text(FAST)
    return folder


@pytest.fixture
def run(run: Snows, place: Path, monkeypatch: pytest.MonkeyPatch) -> Snows:
    """`snows ...` in the folder of the network and its recipe."""
    monkeypatch.chdir(place)
    return run


def test_the_command(run: Snows, tmp_path: Path) -> None:
    words = (
        *COMPARE,
        "net.py:labelled",
        "--pattern",
        "2:4",
        "--mask",
        "magnitude,wanda",
        "--out",
        tmp_path / "out",
    )
    table = run(*words)
    assert (table.status, table.err.strip()) == (0, "")
    for part in ("top-1", "drop", "top-5", "KL", "agreement", "wanda", "2:4", "48 test samples", "cpu"):
        assert part in table.out
    assert "there already" not in table.out
    narrow = run(*words, columns=80)
    assert "4 of 4 were there already." in narrow.out
    assert max(map(len, narrow.out.splitlines())) <= 80
    assert "top-1" in narrow.out
    assert "Too wide for this terminal: top-5" in narrow.out
    markdown = run(*words, "--markdown")
    assert markdown.out == (tmp_path / "out" / "comparison.md").read_text()
    data = run(*words, "--json")
    assert data.err == ""
    assert data.data == strict((tmp_path / "out" / "comparison.json").read_text())
    assert run(*words, "--quiet") == Outcome(0, "", "")
    assert_error(run(*words, "--seed", 1), 1, "was made with other settings (seed was 0 and is 1)")


def test_patterns_and_masks_of_the_command(run: Snows, tmp_path: Path) -> None:
    save_file({"2.weight": torch.arange(256).view(16, 16) % 4 == 0}, tmp_path / "mine.safetensors")
    data = run(
        *COMPARE, "net.py:unlabelled", "--pattern", "2:4, 4=dense", "--mask", "magnitude",
        "--mask", f"{tmp_path / 'mine.safetensors'}", "--json",
    ).data  # fmt: skip
    assert [(row["pattern"], row["mask"], row["sparsity"]) for row in data["rows"][1::2]] == [
        ("4=dense, *=2:4", "magnitude", 0.5),
        ("given", str(tmp_path / "mine.safetensors"), 0.75),
    ]
    assert {(row["top1"], row["loss"], row["drop"]) for row in data["rows"]} == {(None, None, None)}
    assert all(row["agreement"] > 0 for row in data["rows"])
    assert _split_patterns(["1:4,2:4", "0.7"]) == ["1:4", "2:4", "0.7"]
    assert _split_patterns(["1:4, head=dense"]) == ["1:4, head=dense"]


def test_failures_of_the_command(run: Snows) -> None:
    start = (*COMPARE, "net.py:labelled")
    some = run(*start, "--pattern", "2:4,3:7", "--mask", "magnitude")
    assert some.status == 0
    assert some.out.count("failed: magnitude, 3:7, with") == 2
    everything = run(*start, "--pattern", "3:7", "--mask", "magnitude", "--quiet")
    assert_error(everything, 1, "nothing could be compared: magnitude, 3:7, without SNOWS: no layer can be pruned")
    bare = run(*COMPARE, "net.py:calibration", "--mask", "magnitude", "--json")
    assert bare.err.startswith("warning: there are no test samples")
    assert len(bare.data["rows"]) == 3
    assert_error(run(*start, "--json", "--markdown"), 2, "--json and --markdown are both given")
    assert_error(run("compare", "missing.py:model", *start[2:], "--pattern", "2:4,half"), 2, "pattern 'half'")
    assert_error(run("compare", "missing.py:model", *start[2:], "--mask", "wanda,best"), 2, "mask 'best' is not known")
    assert_error(run("compare", "net.py:model"), 2, "--data is needed")


def test_an_interruption_of_the_command(run: Snows, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*given: Any, **options: Any) -> snows.Result:
        if options["solver"] == "newton":
            raise KeyboardInterrupt
        return snows.prune(*given, **options)

    monkeypatch.setattr("snows.evaluation.comparison.prune", interrupted)
    words = (*COMPARE, "net.py:labelled", "--mask", "magnitude")
    bare = run(*words)
    assert bare.status == 130
    assert bare.out.count("magnitude") == 1
    assert bare.err.splitlines()[-1] == ("interrupted; 1 finished; pass --out DIR to go on from here the next time")
    kept = run(*words, "--json", "--out", tmp_path / "out")
    assert (kept.status, len(strict(kept.out)["rows"])) == (130, 2)
    assert kept.err.splitlines() == ["interrupted; 1 finished; the same command goes on from here"]
    assert len(list((tmp_path / "out" / "cells").iterdir())) == 2
