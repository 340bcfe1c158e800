"""The page of a report in a browser: nothing from a network, no errors, and charts that show what report.json says."""

from __future__ import annotations

import base64
import json
import shutil
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import snows
from snows.evaluation.tolerance import Sensitivity
from snows.events import Event, OperationErrors, RunFinished, WeightFacts, WeightsShown
from snows.results.figures import memory
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
    report: dict[str, Any] = field(default_factory=dict)
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

    def assert_fits(self, scheme: str, width: int) -> None:
        """No error, nothing from a network, nothing wider than the window, and the colors that the reader prefers."""
        assert self.printed == []
        assert len(self.requests) == 1  # the page itself
        assert self.page.evaluate("document.documentElement.scrollWidth") <= width
        dark = self.page.evaluate("getComputedStyle(document.body).backgroundColor") != "rgb(255, 255, 255)"
        assert dark == (scheme == "dark")


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        chromium = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield chromium
        chromium.close()


def visit(browser: Any, path: Path, scheme: str = "light", width: int = 1280) -> Opened:
    page = browser.new_page(viewport={"width": width, "height": 900}, color_scheme=scheme)
    found = Opened(page)
    page.on("console", lambda message: found.printed.append(message.text))
    page.on("pageerror", lambda error: found.printed.append(str(error)))
    page.on("request", lambda request: found.requests.append(request.url))
    page.goto(path.as_uri())
    return found


@pytest.fixture
def open_page(browser: Any, tmp_path: Path) -> Any:
    def opened(events: list[Event], scheme: str = "light", width: int = 1280) -> Opened:
        report = fold(events)
        report.to_html(tmp_path / "report.html")
        found = visit(browser, tmp_path / "report.html", scheme, width)
        found.report = json.loads(report.to_json())
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


@pytest.fixture(scope="module")
def real_run() -> list[Event]:
    """Two sweeps and a last stage. Its first phase did not raise the peak of memory."""
    events: list[Event] = []
    recipe = snows.Recipe(horizon=1, sweeps=2, finish_steps=3)
    snows.prune(make("conv-bn"), example("conv-bn", 32), "0.5", recipe=recipe, progress=events.append)
    peaks = [None, *(number << 28 for number in range(5, 50))]
    return [
        replace(event, phases=tuple(replace(phase, peak_bytes=peaks[at]) for at, phase in enumerate(event.phases)))
        if isinstance(event, RunFinished)
        else event
        for event in events
    ]


@pytest.fixture(scope="module")
def found_sensitivity() -> Sensitivity:
    found = snows.sensitivity(make("residual"), example("residual", 60), [0.5, 0.9, "2:4"], layers="*", progress=False)
    first, *others = found.layers
    return replace(found, layers=(replace(first, name=HOSTILE), *others))


EVERYWHERE = pytest.mark.parametrize(
    ("scheme", "width"), [("light", 390), ("light", 1280), ("dark", 390), ("dark", 1280)]
)


@EVERYWHERE
def test_odd_names_fit(open_page: Any, scheme: str, width: int) -> None:
    open_page(run_of(NAMES, LOSSES), scheme, width).assert_fits(scheme, width)


@EVERYWHERE
def test_charts_of_a_real_run_draw_what_its_report_says(
    open_page: Any, real_run: list[Event], scheme: str, width: int
) -> None:
    opened = open_page(real_run, scheme, width)
    layers, operations = opened.report["layers"], opened.report["operations"]
    for series, errors in operations["errors"].items():
        assert opened.values("chart-operations", series) == [[place, error] for place, error in enumerate(errors)]
    assert opened.values("chart-density", "density") == [[i, e["kept"] / e["weights"]] for i, e in enumerate(layers)]
    assert opened.values("chart-finish", "finish") == opened.report["finish"]["curve"]
    assert_phases_are_drawn(opened)
    assert_losses_of_sweeps_are_drawn(opened)
    for place in range(len(layers)):
        assert_layer_is_drawn(opened, place)
    opened.assert_fits(scheme, width)


def assert_phases_are_drawn(opened: Opened) -> None:
    phases = opened.report["phases"]
    bars = "all => all.map(e => [Number(e.dataset.value), e.offsetWidth])"
    drawn = opened.page.eval_on_selector_all("#chart-phases [data-series='phase']", bars)
    assert [value for value, _ in drawn] == [phase["seconds"] for phase in phases]
    longest = max(drawn)
    assert all(width == pytest.approx(longest[1] * value / longest[0], abs=1.5) for value, width in drawn)
    texts = "all => all.map(e => e.textContent)"
    peaks = opened.page.eval_on_selector_all("#chart-phases [data-series='memory']", texts)
    assert peaks == ["" if phase["peak_bytes"] is None else memory(phase["peak_bytes"]) for phase in phases]
    assert peaks[:2] == ["", "1.25 GiB"]


def assert_losses_of_sweeps_are_drawn(opened: Opened) -> None:
    solves = [layer["solves"] for layer in opened.report["layers"]]
    assert solves[0][0]["loss"] != solves[0][1]["loss"]
    for sweep in (0, 1, 0):
        opened.page.check(f"input[name=sweep][value='{sweep}']")
        for series, name in (("masked", "loss_masked"), ("snows", "loss")):
            assert opened.values("chart-loss", series) == [[at, each[sweep][name]] for at, each in enumerate(solves)]
        began = [(at, each[sweep]) for at, each in enumerate(solves) if each[sweep]["newton_steps"]]
        closed = [[at, solve["loss_start"]] for at, solve in began if solve["start"] == "least squares"]
        assert opened.values("chart-loss", "closed-form") == closed
        assert closed


def assert_layer_is_drawn(opened: Opened, place: int) -> None:
    layer = opened.report["layers"][place]
    opened.page.select_option("#layer-choice", str(place))
    for series, part in (("dense", "before"), ("snows", "after")):
        shares = list(map(list, enumerate(layer["picture"][part])))
        assert opened.values("chart-weights", f"weights-{series}") == shares
    assert drawn_mask(opened.page) == packed_mask(layer["picture"])
    for number, residuals in enumerate(norms for each in layer["solves"] for norms in each["cg_residuals"]):
        assert opened.values("chart-cg", f"cg-{number}") == [[step + 1, norm] for step, norm in enumerate(residuals)]


def drawn_mask(page: Any) -> list[bool]:
    """Which squares of the picture have the color of kept weights."""
    found: list[bool] = page.evaluate("""() => {
        const { rows, columns } = layers[selected].picture, canvas = document.querySelector("canvas");
        const copy = document.createElement("canvas");  // Chromium complains of canvases that are read often
        [copy.width, copy.height] = [canvas.width, canvas.height];
        const pen = copy.getContext("2d", { willReadFrequently: true }), wide = canvas.width / columns, found = [];
        pen.drawImage(canvas, 0, 0);
        const snows = getComputedStyle(document.documentElement).getPropertyValue("--snows").trim();
        const red = parseInt(snows.slice(1, 3), 16);
        const at = (place) => Math.floor((place + 0.3) * wide);
        const off = (x, y) => Math.abs(pen.getImageData(at(x), at(y), 1, 1).data[0] - red);
        for (let i = 0; i < rows * columns; i++) found.push(off(i % columns, Math.floor(i / columns)) < 10);
        return found;
    }""")
    return found


def packed_mask(picture: dict[str, Any]) -> list[bool]:
    bits = np.unpackbits(np.frombuffer(base64.b64decode(picture["bits"]), np.uint8))
    return [bool(bit) for bit in bits[: picture["rows"] * picture["columns"]]]


@EVERYWHERE
def test_the_page_of_a_sensitivity(
    browser: Any, tmp_path: Path, found_sensitivity: Sensitivity, scheme: str, width: int
) -> None:
    """Each layer has a chart, with its points where the errors say."""
    found_sensitivity.to_html(tmp_path / "sensitivity.html")
    opened = visit(browser, tmp_path / "sensitivity.html", scheme, width)
    opened.assert_fits(scheme, width)
    layers = found_sensitivity.layers
    captions = opened.page.eval_on_selector_all("figcaption", "all => all.map(e => e.textContent)")
    assert captions == [layer.name for layer in layers]
    assert opened.page.query_selector_all("img, b b, td b") == []
    for state, words in (("masked", "mask only"), ("readjusted", "re-adjusted")):
        points = opened.page.eval_on_selector_all(
            f"circle.{state}",
            "all => all.map(e => [e.cx.baseVal.value / 230, e.cy.baseVal.value / 130, e.textContent])",
        )
        levels = [level for layer in layers for level in layer.levels if level.unstructured]
        assert len(points) == len(levels) == 2 * len(layers)
        for (x, y, title), level in zip(points, levels, strict=True):
            error = (level.mask_only if state == "masked" else level.readjusted).error
            assert x == pytest.approx(level.sparsity, abs=1e-3)
            assert 10 ** (1 - 5 * y) == pytest.approx(min(max(error, 1e-4), 10), rel=0.01)  # five decades from 10 down
            assert title.startswith(f"{level.pattern}, {words}: error {error:.2%}")


@pytest.mark.parametrize("width", [390, 1280])
def test_the_headline_and_the_table_of_a_resnet_are_not_cut_off(browser: Any, tmp_path: Path, width: int) -> None:
    layer = replace(STARTED.layers[2], name="layer2.0.downsample.0", shape=(64, 64, 3, 3), group=())
    started = replace(STARTED, layers=(layer,), flops=62_400_000)
    report = fold([started, solved(layer.name, solve=solve(outcome="all Newton steps taken")), FINISHED])
    report.evaluation = [{"network": "dense", "top1": 0.9495}, {"network": "SNOWS (K=6)", "top1": 0.9465}]
    report.to_html(tmp_path / "report.html")
    opened = visit(browser, tmp_path / "report.html", width=width)
    edge = "document.querySelector('.cards').getBoundingClientRect().right"
    cards = "[...document.querySelectorAll('.card')].map(e => e.getBoundingClientRect().right)"
    assert opened.page.evaluate(f"Math.max(...{cards}) <= {edge} + 1")
    if width == 1280:  # on a phone the table may be moved
        assert opened.page.evaluate("(e => e.scrollWidth <= e.clientWidth)(document.querySelector('#table .wide'))")


def test_marks_are_where_their_values_are(open_page: Any) -> None:
    """Bars are as high as their values, from zero; a tenth of a loss is one step further down on the axis."""
    opened = open_page(run_of(NAMES, LOSSES))
    bars = opened.page.eval_on_selector_all(
        "#chart-density [data-series]", "all => all.map(e => [Number(e.dataset.value), e.getBBox().height])"
    )
    heights = [height / value for value, height in bars]
    assert heights == pytest.approx([heights[0]] * len(bars), rel=1e-3)
    ends = opened.page.eval_on_selector_all(
        "#chart-loss circle:not(.layerwise)", "all => all.map(e => [Number(e.dataset.value), e.cy.baseVal.value])"
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
    opened = open_page([started, *solves, *solves, *solves, ended, pictures, operations, finished])
    assert (tmp_path / "report.html").stat().st_size < 1_000_000
    assert min(seconds_to_load(opened.page) for _ in range(3)) < 1  # the best, as the machine may be busy
    assert len(opened.values("chart-loss", "snows")) == 53
    assert len(opened.values("chart-operations", "SNOWS")) == 106
    assert opened.printed == []


def seconds_to_load(page: Any) -> float:
    """All charts are drawn before the event `load` ends."""
    page.reload()
    milliseconds: float = page.evaluate("performance.getEntriesByType('navigation')[0].loadEventEnd")
    assert milliseconds > 0
    return milliseconds / 1000
