"""A report in short."""

from __future__ import annotations

from dataclasses import replace

from snows.results.report import fold
from snows.results.summary import as_html, as_text, one_line
from tests.unit.results.test_html import Page
from tests.unit.results.test_report import RUN, STARTED, solve, solved


def test_one_line() -> None:
    assert one_line(fold(RUN).to_dict()) == "Net pruned to 2:4, 3 layers, 55.0 % removed"
    assert one_line(fold(RUN[:5]).to_dict()) == "Net pruned to 2:4, 3 layers, not finished"
    assert repr(fold(RUN)) == "<Report: Net pruned to 2:4, 3 layers, 55.0 % removed>"
    assert repr(fold([])) == "<Report: Model, 0 layers, not finished>"


def test_the_table_as_text() -> None:
    text = fold(RUN).summary()
    for words in (
        "Net pruned to 2:4\nmasks by magnitude · 100 calibration samples · 3 layers\n\nSparsity: 55.0 %",
        "Weights: 200 → 156 (that are not zero)",
    ):
        assert words in text
    lines = [line.split("  ") for line in text.splitlines()]
    cells = [[cell.strip() for cell in line if cell.strip()] for line in lines]
    assert ["layer", "shape", "pattern", "removed", "K", "mask only", "re-adjusted", "at the end", "held out"] in cells
    assert ["query", "8 × 4", "2:4", "50.0 %", "3", "3", "1", "1"] in cells
    assert all(len(line) <= 120 for line in text.splitlines())


def test_what_to_look_at_is_said_below() -> None:
    layers = tuple(replace(STARTED.layers[2], name=name, group=(name,)) for name in ("a", "b[red]", "c"))
    losses = {"a": 1.0, "b[red]": 9.0, "c": 1.0}
    run = [solved(name, solve=replace(solve(), loss=loss)) for name, loss in losses.items()]
    text = as_text(fold([replace(STARTED, layers=layers), *run]).to_dict())
    assert text.splitlines()[-1].startswith("b[red]: Its error is 9.0 times the median of all layers.")
    assert any(line.startswith("b[red] ") for line in text.splitlines())  # no markup


def test_names_are_not_obeyed_by_a_terminal_and_forge_no_line() -> None:
    evil = "a\nWeights: 0\x1b[2J"
    layers = tuple(replace(STARTED.layers[2], name=name, group=(name,)) for name in (evil, "b", "c"))
    run = [solved(name, solve=replace(solve(), loss=9.0 if name == evil else 1.0)) for name in (evil, "b", "c")]
    report = fold([replace(STARTED, model=evil, pattern=evil, mask=evil, layers=layers), *run])
    for line in (*report.summary().splitlines(), repr(report)):
        assert line.isprintable()
        assert not line.startswith("Weights: 0")


def test_long_names_are_whole() -> None:
    name = "blocks." * 20 + "conv"
    layer = replace(STARTED.layers[2], name=name)
    text = as_text(fold([replace(STARTED, layers=(layer,)), *RUN[2:]]).to_dict())
    assert name in "".join(line.split(" ")[0] for line in text.splitlines())


def test_notebooks_show_tables_with_escaped_names() -> None:
    report = fold(RUN)
    report.layers[0].name = report.model = "<img onerror=alert(1)>"
    text = as_html(report.to_dict())
    assert text == report._repr_html_()
    page = Page(text)
    assert "img" not in page.tags
    assert ["<img onerror=alert(1)>", "8 × 4", "2:4", "50.0 %", "3", "3", "1", "1", ""] in page.rows
    assert ["Sparsity", "55.0 %", "of the pruned layers; 22.0 % of all"] in page.rows
