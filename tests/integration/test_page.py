"""The page of a report in a browser: nothing from a network, no errors, and charts that show what report.json says."""

from __future__ import annotations

import base64
import json
import shutil
import time
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import snows
from snows.events import Event, OperationErrors, WeightFacts, WeightsShown
from snows.results.report import fold
from tests.networks import example, make
from tests.unit.results.test_report import FINISHED, RUN, STARTED, solve, solved

CHROMIUM = shutil.which("chromium")
pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="needs the program chromium: apt install chromium")

HOSTILE = "</script><img src=x onerror=\"document.title='owned'\"><b>name</b>"


@dataclass
class Opened:
    """A page, what it printed on the console, and what it asked for."""

    page: Any
    report: dict[str, Any]
    printed: list[str] = field(default_factory=list)
    requests: list[str] = field(default_factory=list)

    def values(self, chart: str, series: str) -> list[list[float]]:
        """The places and values that a chart draws."""
        found: list[list[float]] = self.page.eval_on_selector_all(
            f"#{chart} [data-series='{series}']", "all => all.map(e => [Number(e.dataset.x), Number(e.dataset.value)])"
        )
        return found

    def names(self) -> list[str]:
        """Of the layers that the table shows, in its order."""
        rows = "#layers tbody tr:not([hidden]) [data-layer]"
        found: list[str] = self.page.eval_on_selector_all(rows, "all => all.map(e => e.textContent)")
        return found


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        chromium = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield chromium
        chromium.close()


@pytest.fixture
def open_page(browser: Any, tmp_path: Path) -> Any:
    def opened(events: list[Event], scheme: str = "light", width: int = 1280) -> Opened:
        report = fold(events)
        report.to_html(tmp_path / "report.html")
        page = browser.new_page(viewport={"width": width, "height": 900}, color_scheme=scheme)
        found = Opened(page, json.loads(report.to_json()))
        page.on("console", lambda message: found.printed.append(message.text))
        page.on("pageerror", lambda error: found.printed.append(str(error)))
        page.on("request", lambda request: found.requests.append(request.url))
        page.goto((tmp_path / "report.html").as_uri())
        return found

    return opened


def run_of(names: list[str], losses: list[float]) -> list[Event]:
    """A finished run of single layers. Layer number i has i + 1 CG steps."""
    facts = tuple(replace(STARTED.layers[2], name=n, parameter=f"{n}.weight", group=(n,)) for n in names)
    solves = [
        solved(name, solve=replace(
            solve(), loss_masked=10 * loss, loss_start=2 * loss, loss=loss, losses=(2 * loss, loss),
            held_out=1.1 * loss,
            held_out_tried={"masked weights": 11 * loss, "least squares": 2.2 * loss, "solved": 1.1 * loss},
            cg_residuals=(tuple(0.5**step for step in range(1, number + 2)),), cg_steps=number + 1,
        ))
        for number, (name, loss) in enumerate(zip(names, losses, strict=True))
    ]  # fmt: skip
    finished = replace(FINISHED, kept={f"{name}.weight": 2 + 2 * (number % 7) for number, name in enumerate(names)})
    return [replace(STARTED, layers=facts), *solves, RUN[-3], finished]


NAMES, LOSSES = ["conv1", "conv10", "conv2", HOSTILE], [0.5, 0.001, 30.0, 0.25]


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [390, 1280])
def test_it_opens_without_errors_and_fits(open_page: Any, scheme: str, width: int) -> None:
    opened = open_page(run_of(NAMES, LOSSES), scheme, width)
    assert opened.printed == []
    assert len(opened.requests) == 1  # the page itself
    assert opened.page.evaluate("document.documentElement.scrollWidth") <= width
    dark = opened.page.evaluate("getComputedStyle(document.body).backgroundColor") != "rgb(255, 255, 255)"
    assert dark == (scheme == "dark")


def test_charts_draw_what_the_report_says(open_page: Any) -> None:
    opened = open_page(run_of(NAMES, LOSSES))
    layers = opened.report["layers"]
    assert opened.values("chart-loss", "masked") == [[i, e["solves"][0]["loss_masked"]] for i, e in enumerate(layers)]
    assert opened.values("chart-loss", "snows") == [[i, e["solves"][0]["loss"]] for i, e in enumerate(layers)]
    assert opened.values("chart-density", "density") == [[i, e["kept"] / e["weights"]] for i, e in enumerate(layers)]
    assert opened.values("chart-finish", "finish") == opened.report["finish"]["curve"]


def test_charts_of_a_real_run_draw_what_its_report_says(browser: Any, open_page: Any) -> None:
    events: list[Event] = []
    recipe = snows.Recipe(horizon=1, sweeps=2, finish_steps=3)
    snows.prune(make("conv-bn"), example("conv-bn", 32), "0.5", recipe=recipe, progress=events.append)
    opened = open_page(events)
    assert opened.printed == []
    operations = opened.report["operations"]
    for series, errors in operations["errors"].items():
        assert opened.values("chart-operations", series) == [[place, error] for place, error in enumerate(errors)]
    bars = "#chart-phases i"
    drawn = opened.page.eval_on_selector_all(bars, "all => all.map(e => [Number(e.dataset.value), e.offsetWidth])")
    assert [value for value, _ in drawn] == [phase["seconds"] for phase in opened.report["phases"]]
    longest = max(drawn)
    assert all(width == pytest.approx(longest[1] * value / longest[0], abs=1.5) for value, width in drawn)
    for place, layer in enumerate(opened.report["layers"]):
        opened.page.select_option("#layer-choice", str(place))
        for series, part in (("dense", "before"), ("snows", "after")):
            shares = list(map(list, enumerate(layer["picture"][part])))
            assert opened.values("chart-weights", f"weights-{series}") == shares
        assert drawn_mask(opened.page) == packed_mask(layer["picture"])


def drawn_mask(page: Any) -> list[bool]:
    """Which squares of the picture have the color of kept weights."""
    found: list[bool] = page.evaluate("""() => {
        const { rows, columns } = layers[selected].picture, canvas = document.querySelector("canvas");
        const pen = canvas.getContext("2d"), wide = canvas.width / columns, found = [];
        const at = (place) => Math.floor((place + 0.3) * wide);
        const color = (x, y) => pen.getImageData(at(x), at(y), 1, 1).data[0];
        for (let i = 0; i < rows * columns; i++) found.push(color(i % columns, Math.floor(i / columns)) < 100);
        return found;
    }""")
    return found


def packed_mask(picture: dict[str, Any]) -> list[bool]:
    bits = np.unpackbits(np.frombuffer(base64.b64decode(picture["bits"]), np.uint8))
    return [bool(bit) for bit in bits[: picture["rows"] * picture["columns"]]]


def test_marks_are_where_their_values_are(open_page: Any) -> None:
    """Bars are as high as their values, from zero; a tenth of a loss is one step further down on the axis."""
    opened = open_page(run_of(NAMES, LOSSES))
    bars = opened.page.eval_on_selector_all(
        "#chart-density [data-series]", "all => all.map(e => [Number(e.dataset.value), e.getBBox().height])"
    )
    heights = [height / value for value, height in bars]
    assert heights == pytest.approx([heights[0]] * len(bars), rel=1e-3)
    ends = opened.page.eval_on_selector_all(
        "#chart-loss circle", "all => all.map(e => [Number(e.dataset.value), Number(e.getAttribute('cy'))])"
    )
    half = len(ends) // 2
    steps = [after[1] - before[1] for before, after in zip(ends[:half], ends[half:], strict=True)]
    assert steps == pytest.approx([steps[0]] * half, rel=1e-3)
    assert steps[0] > 0


def test_a_click_opens_a_layer(open_page: Any) -> None:
    opened = open_page(run_of(NAMES, LOSSES))
    page = opened.page
    assert page.input_value("#layer-choice") == "2"  # the one that stands out
    for number, click in (
        (3, "[data-layer='3']"),
        (1, "#chart-loss [data-slot='1']"),
        (0, "#chart-density [data-slot='0']"),
    ):
        page.click(click)
        assert page.input_value("#layer-choice") == str(number)
        said = opened.report["layers"][number]["solves"][0]
        tried = said["held_out_tried"]
        assert opened.values("chart-newton", "fitted") == [
            [0, said["loss_masked"]],
            [1, said["loss_start"]],
            [2, said["loss"]],
        ]
        assert opened.values("chart-newton", "held-out") == [
            [0, tried["masked weights"]], [1, tried["least squares"]], [2, tried["solved"]],
        ]  # fmt: skip
        residuals = [[step + 1, norm] for step, norm in enumerate(said["cg_residuals"][0])]
        assert opened.values("chart-cg", "cg-0") == residuals
        assert len(residuals) == number + 1
        assert page.url.endswith(f"#layer-{number}")
    page.reload()
    assert page.input_value("#layer-choice") == "0"
    assert opened.printed == []


def test_the_table_sorts_and_filters(open_page: Any) -> None:
    opened = open_page(run_of(NAMES, LOSSES))
    page = opened.page
    assert opened.names() == NAMES
    page.click("#layers th >> text=re-adjusted")
    assert opened.names() == ["conv10", HOSTILE, "conv1", "conv2"]
    page.click("#layers th >> text=re-adjusted")
    assert opened.names() == ["conv2", "conv1", HOSTILE, "conv10"]
    page.click("#layers th >> text=layer")
    assert opened.names()[1:] == ["conv1", "conv2", "conv10"]
    page.fill("#filter", "CONV1")
    assert opened.names() == ["conv1", "conv10"]
    assert page.inner_text("#shown") == "2 of 4 layers"
    page.fill("#filter", "")
    page.check("#only-worst")
    assert opened.names() == ["conv2"]


def test_odd_names_stay_text(open_page: Any) -> None:
    opened = open_page(run_of(NAMES, LOSSES))
    page = opened.page
    page.hover("#chart-loss [data-slot='3']")
    assert page.inner_text("#tip strong") == HOSTILE
    page.click("[data-layer='3']")
    assert page.eval_on_selector("#layer-choice", "e => e.selectedOptions[0].textContent") == HOSTILE
    assert page.query_selector_all("img, b b, td b") == []
    assert page.title() == "Net pruned to 2:4 – snows"


@pytest.mark.parametrize("length", range(len(RUN) + 1))
def test_a_run_cut_off_anywhere_opens(open_page: Any, length: int) -> None:
    opened = open_page(RUN[:length])
    assert opened.printed == []
    assert ("Not finished" in opened.page.inner_text("body")) == (length < len(RUN))


def test_the_page_of_a_resnet50_is_small_and_opens_at_once(open_page: Any, tmp_path: Path) -> None:
    """53 layers, three sweeps of 20 CG steps, 106 operations, and the pictures of all layers."""
    names = [f"layer{number // 13}.{number % 13}.conv" for number in range(53)]
    started, *solves, ended, finished = run_of(names, [0.1 + number / 53 for number in range(53)])
    tail = tuple(float(f"{0.8**step:.4g}") for step in range(20))
    solves = [replace(each, solve=replace(each.solve, cg_residuals=(tail,))) for each in solves]  # type: ignore[type-var, attr-defined]
    shares = tuple(round(0.0123 * number, 4) for number in range(31))
    facts = WeightFacts(-0.1234, 0.1234, shares, shares, 32, 64, base64.b64encode(bytes(range(256))).decode())
    errors = {
        name: tuple(round(1e-3 * number, 4) for number in range(106)) for name in ("mask only", "before", "SNOWS")
    }
    operations = OperationErrors(tuple(f"{name}.{k}" for name in names for k in (1, 2)), 50, errors, {})
    pictures = WeightsShown({f"{name}.weight": facts for name in names})
    began = time.perf_counter()
    opened = open_page([started, *solves, *solves, *solves, ended, pictures, operations, finished])
    assert time.perf_counter() - began < 5  # alone on a machine it is well below one second
    assert (tmp_path / "report.html").stat().st_size < 1_000_000
    drawn = opened.page.evaluate("performance.getEntriesByType('navigation')[0].loadEventEnd")
    assert drawn < 3000
    assert len(opened.values("chart-loss", "snows")) == 53
    assert len(opened.values("chart-operations", "SNOWS")) == 106
    assert opened.printed == []
