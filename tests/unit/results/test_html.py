"""The report as a page: everything in it, escaped, in one file.

tests/integration/test_page.py opens it in a browser.
"""

from __future__ import annotations

import json
import re
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from snows.events import DenseLayer, Distilled, EpochEnded, Event, LayerFacts, OperationErrors, Phase
from snows.results.html import render
from snows.results.report import Report, fold
from tests.unit.results.test_report import FINISHED, RETRAINED, RUN, STARTED, solve, solved


class Page(HTMLParser):
    """Tags, the rows of all tables, and all words outside of styles and scripts."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.rows: list[list[str]] = []
        self.words: list[str] = []
        self.data = ""
        self._inside, self._in_cell = "", False
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: Any) -> None:
        self.tags.append(tag)
        self._inside = "data" if ("id", "data") in attrs else tag
        if tag == "tr":
            self.rows.append([])
        elif tag in ("td", "th"):
            self.rows[-1].append("")
            self._in_cell = True

    def handle_endtag(self, tag: str) -> None:
        self._inside = ""
        self._in_cell = self._in_cell and tag not in ("td", "th")

    def handle_data(self, data: str) -> None:
        if self._inside == "data":
            self.data += data
        elif self._inside not in ("style", "script"):
            self.words.append(" ".join(data.split()))
            if self._in_cell:
                self.rows[-1][-1] += data.strip()

    @property
    def text(self) -> str:
        return " ".join(word for word in self.words if word)


def page(*events: Event, **changes: Any) -> Page:
    report = fold(events or RUN)
    for name, value in changes.items():
        setattr(report, name, value)
    return Page(render(report.to_dict()))


def test_the_headline() -> None:
    rows = [{"network": "dense", "top1": 0.95}, {"network": "mask only", "top1": 0.1}, {"network": "S", "top1": 0.9}]
    text = page(evaluation=rows).text
    for words in (
        "Net pruned to 2:4", "masks by magnitude · 100 calibration samples · 3 layers",
        "Top-1 accuracy 95.00 → 90.00 % 10.00 % with the mask only",
        "Sparsity 55.0 % of the pruned layers; 22.0 % of all",
        "Weights 200 → 156 that are not zero", "Time 12.5 s on cpu, 1 MiB at the peak",
    ):  # fmt: skip
        assert words in text, words
    assert "FLOPs 2 k → 1.5 k for one sample, 1.33 times fewer" in page(
        replace(STARTED, flops=2000, layers=(replace(STARTED.layers[0], flops=1000),)), FINISHED
    ).text  # fmt: skip


def test_masks_from_elsewhere_are_no_pattern() -> None:
    given = replace(STARTED, pattern="given", mask="given")
    assert str(STARTED) == "Net to 2:4"
    assert str(given) == "Net with given masks"
    assert page(given).text.startswith("Net with given masks –")


def test_on_a_cpu_the_peak_of_memory_is_that_of_the_process() -> None:
    phases = (Phase("reading", 1.0, None), Phase("solving", 9.0, 3 << 30), Phase("comparing", 1.0, 2 << 30))
    finished = replace(FINISHED, peak_memory_bytes=None, phases=phases)
    assert "Time 12.5 s on cpu, 3 GiB at the peak" in page(STARTED, finished).text
    assert "at the peak" not in page(STARTED, replace(finished, phases=())).text


def test_without_an_evaluation_the_headline_has_what_the_run_measured_itself() -> None:
    errors = {"mask only": (0.5, 2.0), "before the last stage": (0.1, 0.3), "SNOWS": (0.1, 0.0125)}
    measured = OperationErrors(("a", "b"), 50, errors, {"mask only": 0.1, "before the last stage": 0.9, "SNOWS": 0.96})
    agreement = "Agreement 10 → 96 % mask only → re-adjusted, same top class as dense, 50 samples"
    error = "Output error 200 → 1.25 % mask only → re-adjusted, of the variance"
    assert f"{agreement} {error}" in page(*RUN, measured).text
    evaluated = page(
        *RUN, measured, evaluation=[{"network": "dense", "top1": 0.95}, {"network": "S", "top1": 0.9}]
    ).text
    assert agreement not in evaluated
    assert error not in evaluated
    no_classes = page(*RUN, replace(measured, agreement={})).text
    assert "Agreement" not in no_classes
    assert error in no_classes
    masked = replace(measured, errors={"mask only": (0.5, 2.0)}, agreement={"mask only": 0.1})
    assert (
        "Agreement 10 % mask only, same top class as dense, 50 samples Output error 200 % mask only, of the variance"
        in page(*RUN, masked).text
    )


def test_the_tables() -> None:
    rows = page(evaluation=[{"network": "dense", "top1": 0.91234, "kl": None}, {"network": "SNOWS"}]).rows
    for wanted in (
        ["network", "top-1 accuracy", "KL to dense"],
        ["dense", "91.23 %", ""],
        ["SNOWS", "", ""],
        ["query", "8 × 4", "2:4", "50.0 %", "3", "3", "1", "1", "", "20", "1", "converged"],
        ["out", "4 × 4", "1:4", "75.0 %", "2", "3", "1", "1", "", "20", "1", "CG tolerance"],
        ["head", "10 × 4", "it is the last layer"],
    ):
        assert wanted in rows, wanted


def test_the_table_says_in_short_what_was_kept() -> None:
    report = fold(RUN)
    report.layers[0].solves = [replace(solve, kept="half of the way") for solve in report.layers[0].solves]
    text = render(report.to_dict())
    found = next(row for row in Page(text).rows if row[0] == "query")
    assert found[-1] == "half of the way kept"
    whole = "converged; worse on held-out samples, so half of the way was kept"
    assert f'title="{whole}"' in text
    assert f"C{whole[1:]}." in text  # where the layer is opened


def test_everything_that_decides_the_result_is_told() -> None:
    text = page().text
    for words in (
        "unnormalized pixels", "2 × CG tolerance", "calibration samples 100, 5 of them held out", "seed 7",
        "versions snows 1, torch 2", "channels re-ordered N:M masks keep 80.0 % of the magnitude instead of 70.0 %",
        "solved by an earlier call 3 solves", "sweeps 2 ridge 1e-06",
        "trained together for 2 steps (3 s). Loss of the held-out samples: 0.5 before, 0.25 at the best",
    ):  # fmt: skip
        assert words in text, words


def test_what_did_not_happen_is_not_on_the_page() -> None:
    found = page(STARTED)
    for words in ("solved by an earlier call", "Last stage", "re-ordered", "Warnings", "How good", "Sparsity", "Time"):
        assert words not in found.text, words
    assert ["query", "8 × 4", "2:4", "", "3", "", "", "", "0", "0", "not solved yet"] in found.rows


def test_losses_at_the_end_are_shown_where_there_is_a_second_sweep() -> None:
    once = fold(RUN)
    for layer in once.layers:
        layer.solves = layer.solves[:1]
    for report, shown in ((fold(RUN), True), (once, False)):
        found = Page(render(report.to_dict()))
        titles = next(row for row in found.rows if "how it ended" in row)
        assert ("at the end" in titles) == ("at the end, when all other layers" in found.text) == shown
        assert all(len(row) == len(titles) for row in found.rows if row[0] in ("query", "out"))


def test_the_last_stage_is_judged_on_fitted_samples_if_none_are_held_out() -> None:
    started = LayerFacts("a", "a.weight", (2, 2), "given", None, ("a",))
    ended = Distilled(1, float("nan"), 1.0, 1.0, ((0, 2.0), (1, 1.0)))
    text = page(replace(STARTED, held_out_samples=0, layers=(started,)), ended, FINISHED).text
    assert "Loss of the fitted samples:" in text


def test_a_layer_that_stands_out_is_marked() -> None:
    layers = tuple(replace(STARTED.layers[2], name=name, group=(name,)) for name in "abc")
    losses = {"a": 1.0, "b": 9.0, "c": 1.0}
    run = [solved(name, solve=replace(solve(), loss=loss)) for name, loss in losses.items()]
    text = render(fold([replace(STARTED, layers=layers), *run]).to_dict())
    assert text.count('class="mark" title="Its error is 9.0 times the median') == 1
    assert 'data-first="1"' in text


def test_the_closed_form_is_a_result_of_its_own_where_newton_went_on_from_it() -> None:
    out = STARTED.layers[2]
    for changes, shown in ({}, True), ({"newton_steps": 0}, False), ({"start": "masked weights"}, False):
        run = (replace(STARTED, layers=(out,)), solved("out", solve=replace(solve(), **changes)))
        assert ("closed form: layer-wise" in page(*run).text) == shown
        labels = [line.get_label() for line in fold(run).plot().axes[0].lines]
        assert ("closed form: layer-wise" in labels) == shown


def test_an_empty_report_has_a_page() -> None:
    found = Page(render(Report().to_dict()))
    assert "h1" in found.tags
    assert "masks by" not in found.text  # nothing is known


@pytest.mark.parametrize("run", [RUN, []])
def test_a_retraining_cut_off_anywhere_has_a_page(run: list[Event]) -> None:
    for length in range(1, len(RETRAINED) + 1):
        found = page(*run, *RETRAINED[:length])
        assert ("Not finished" in found.text) == (length < len(RETRAINED))
        epochs = sum(isinstance(event, EpochEnded) for event in RETRAINED[:length])
        assert ["0", "", "", "50.00 %"] in found.rows or epochs == 0
        words = f"what has happened so far, {max(0, epochs - 1)} of 2 epochs of retraining."
        assert words in found.text or length == len(RETRAINED)
    assert found.text.startswith("Net pruned to 2:4 and retrained –" if run else "Net retrained –")
    assert "Kept are the weights of epoch 1: the best top-1 accuracy of 10 held-out samples" in found.text


def test_the_data_of_the_charts_is_the_report() -> None:
    report = fold(RUN).to_dict()
    assert json.loads(Page(render(report)).data) == json.loads(json.dumps(report))


def test_odd_names_are_escaped_everywhere() -> None:
    name = "</script><script>alert('1')</script><!--&amp\""
    report = fold(RUN)
    report.model = report.pattern = report.mask = report.device = name
    report.warnings, report.evaluation = [name], [{name: name}]
    report.dense_layers = [DenseLayer(name, (1,), name)]
    report.versions, report.recipe = {name: name}, {name: name}
    for layer in report.layers:
        layer.name, layer.pattern, layer.group = name, name, []
        layer.solves = [replace(solve, outcome=name) for solve in layer.solves]
    text = render(report.to_dict())
    found = Page(text)
    assert found.tags.count("script") == text.count("<script") == text.count("</script>") == 2
    assert json.loads(found.data)["model"] == name
    assert sum(name in cell for row in found.rows for cell in row) >= 13


def test_one_file_for_light_and_dark_that_needs_no_network() -> None:
    text = render(fold(RUN).to_dict())
    assert text.startswith("<!doctype html>")
    assert "prefers-color-scheme: dark" in text
    assert "default-src 'none'" in text
    assert not re.search(r"https?:(?!//www.w3.org/2000/svg)|src=|@import|url\(|innerHTML", text)


@pytest.mark.parametrize("length", range(len(RUN) + 1))
def test_a_run_cut_off_anywhere_has_a_page(length: int) -> None:
    text = page(*RUN[:length]).text if length else Page(render(Report().to_dict())).text
    assert ("Not finished" in text) == (length < len(RUN))


def test_the_page_of_a_run_that_goes_on(tmp_path: Path) -> None:
    path = tmp_path / "live.html"
    fold(RUN[:6]).to_html(path, refresh=5)
    text = path.read_text(encoding="utf-8")
    assert "Not finished: this page shows what has happened so far, 2 of 3 layers solved at least once." in text
    assert '<meta http-equiv="refresh" content="5">' in text
    fold(RUN).to_html(path, refresh=5)
    text = path.read_text(encoding="utf-8")
    assert "Not finished" not in text
    assert 'http-equiv="refresh"' not in text
