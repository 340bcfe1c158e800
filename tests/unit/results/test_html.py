"""The page of a report: everything in it, escaped, in one file."""

from __future__ import annotations

import re
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

from snows.events import DenseLayer, Distilled, Event, LayerFacts
from snows.results.html import render
from snows.results.report import Report, fold
from tests.unit.results.test_report import FINISHED, RUN, STARTED


class Page(HTMLParser):
    """Tags, and the rows of all tables."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.rows: list[list[str]] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: Any) -> None:
        self.tags.append(tag)
        if tag == "tr":
            self.rows.append([])
        elif tag in ("td", "th"):
            self.rows[-1].append("")

    def handle_data(self, data: str) -> None:
        if self.tags[-1:] in (["td"], ["th"]) and data.strip():
            self.rows[-1][-1] += data


def page(*events: Event, **changes: Any) -> Page:
    report = fold(events or RUN)
    for name, value in changes.items():
        setattr(report, name, value)
    return Page(render(report.to_dict()))


def test_what_the_page_shows() -> None:
    rows = page(evaluation=[{"network": "dense", "top1": 0.91234, "kl": None}, {"network": "SNOWS"}]).rows
    for wanted in (
        ["model", "Net"],
        ["mask", "magnitude"],
        ["magnitude kept, before and after permuting", "0.7000 -> 0.8000"],
        ["sparsity of the pruned layers", "0.5500"],
        ["sparsity of the whole network", "0.2200"],
        ["calibration samples", "100"],
        ["seconds", "12.5"],
        ["solves of an earlier call, not in these seconds", "3"],
        ["last stage, loss of held-out samples", "0.5 -> 0.25 in 2 steps"],
        ["network", "top1", "kl"],
        ["dense", "0.9123", ""],
        ["SNOWS", "", ""],
        ["query", "8x4", "2:4", "0.5000", "3", "3", "1", "20", "converged"],
        ["out", "4x4", "1:4", "0.7500", "2", "3", "1", "20", "CG tolerance"],
        ["head", "10x4", "it is the last layer"],
        ["CG tolerance", "2"],
        ["unnormalized pixels"],
    ):
        assert wanted in rows


def test_what_did_not_happen_is_not_on_the_page() -> None:
    shown = {cell for row in page(STARTED).rows for cell in row}
    for words in ("solves of an earlier call", "last stage", "magnitude kept", "times", "warning", "network"):
        assert not any(cell.startswith(words) for cell in shown), words
    assert ["query", "8x4", "2:4", "0.0000", "3", "", "", "0", ""] in page(STARTED).rows


def test_the_last_stage_is_judged_on_fitted_samples_if_none_are_held_out() -> None:
    started = LayerFacts("a", "a.weight", (2, 2), "given", None, ("a",))
    run = [replace(STARTED, held_out_samples=0, layers=(started,)), Distilled(1, float("nan"), 1.0, 1.0), FINISHED]
    assert ["last stage, loss of fitted samples", " -> 1 in 1 steps"] in page(*run).rows


def test_an_empty_report_has_a_page() -> None:
    assert "h1" in Page(render(Report().to_dict())).tags


def test_odd_names_are_escaped_everywhere() -> None:
    name = "<script>alert('1')</script>&amp\""
    report = fold(RUN)
    report.model = report.pattern = report.mask = report.device = name
    report.warnings, report.evaluation = [name], [{name: name}]
    report.dense_layers = [DenseLayer(name, (1,), name)]
    for layer in report.layers:
        layer.name, layer.pattern, layer.group = name, name, []
        layer.solves = [replace(solve, outcome=name) for solve in layer.solves]
    text = render(report.to_dict())
    found = Page(text)
    assert "script" not in found.tags
    assert "<script" not in text
    assert sum(cell == name for row in found.rows for cell in row) == 19


def test_one_file_for_light_and_dark() -> None:
    text = render(fold(RUN).to_dict())
    assert text.startswith("<!doctype html>")
    assert "prefers-color-scheme: dark" in text
    assert not re.search(r"https?:|src=|@import|url\(", text)


def test_the_page_of_a_run_that_goes_on(tmp_path: Path) -> None:
    path = tmp_path / "live.html"
    fold(RUN[:6]).to_html(path, refresh=5)
    text = path.read_text(encoding="utf-8")
    assert "Not finished" in text
    assert '<meta http-equiv="refresh" content="5">' in text
    fold(RUN).to_html(path, refresh=5)
    text = path.read_text(encoding="utf-8")
    assert "Not finished" not in text
    assert "refresh" not in text
