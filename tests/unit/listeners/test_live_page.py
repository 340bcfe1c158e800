"""The report while the run goes on."""

from __future__ import annotations

from pathlib import Path

import pytest

import snows
from snows.events import EpochEnded, Event, LayerSolved, TrainingStep, Warned
from snows.listeners import LivePage
from tests.networks import example, make

RECIPE = snows.Recipe(horizon=1, sweeps=2, cg_steps=2)
UNFINISHED, AGAIN = "ot finished", 'http-equiv="refresh"'


def prune(*progress: object) -> snows.Result:
    return snows.prune(make("conv-bn"), example("conv-bn", 24), "2:4", recipe=RECIPE, progress=list(progress))  # type: ignore[arg-type]


def test_the_page_is_written_after_each_layer_and_is_finished_at_the_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("snows.listeners.live_page._SHARE_OF_TIME", 1e9)  # never too soon
    page = tmp_path / "live.html"
    pages: list[str] = []

    def look(event: Event) -> None:
        if isinstance(event, LayerSolved):
            pages.append(page.read_text())

    live = LivePage(page)
    assert UNFINISHED in page.read_text()
    prune(live, look)
    assert len(pages) == len(set(pages)) == 4
    assert all(UNFINISHED in text and AGAIN in text for text in pages)
    assert UNFINISHED not in page.read_text()
    assert AGAIN not in page.read_text()


def test_writing_takes_a_small_share_of_the_time(tmp_path: Path) -> None:
    live, written = LivePage(tmp_path / "live.html"), []
    live._replace = written.append  # type: ignore[method-assign,assignment]
    live._not_before = float("inf")
    for index in range(100):
        live(Warned(f"{index}"))
    assert written == []


def test_steps_do_not_change_the_page(tmp_path: Path) -> None:
    live, written = LivePage(tmp_path / "live.html"), []
    live._replace = written.append  # type: ignore[method-assign,assignment]
    for step in range(100):
        live(TrainingStep(step, 100, 1, 1))
    assert written == []
    live(Warned("be careful"))
    assert len(written) == 1


def test_the_page_of_a_retraining(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It goes on from the report of the pruned network, if it has it."""
    monkeypatch.setattr("snows.listeners.live_page._SHARE_OF_TIME", 1e9)
    result, model, x = prune(False), make("conv-bn"), example("conv-bn", 24)
    result.model.requires_grad_(True)
    own, alone = LivePage(tmp_path / "live.html", result.report), LivePage(tmp_path / "alone.html")
    pages: list[str] = []

    def look(event: Event) -> None:
        if isinstance(event, EpochEnded):
            pages.extend(live.path.read_text() for live in (own, alone))

    snows.retrain(result, x, teacher=model, epochs=2, progress=[own, alone, look])
    assert len(pages) == 6
    for epoch, text in enumerate(pages[::2]):
        assert f"{epoch} of 2 epochs of retraining" in text
        assert AGAIN in text
        assert "2:4" in text
    assert all(f"{epoch} of 2 epochs of retraining" in text for epoch, text in enumerate(pages[1::2]))
    for live in (own, alone):
        assert UNFINISHED not in live.path.read_text()
        assert AGAIN not in live.path.read_text()


def test_the_page_of_a_run_that_was_stopped_stays_as_it_is(tmp_path: Path) -> None:
    def stop(event: Event) -> None:
        if isinstance(event, LayerSolved):
            raise KeyboardInterrupt

    page = tmp_path / "live.html"
    with pytest.raises(KeyboardInterrupt):
        prune(LivePage(page), stop)
    assert UNFINISHED in page.read_text()
    assert AGAIN not in page.read_text()


def test_a_path_that_cannot_be_written_is_said_before_the_work(tmp_path: Path) -> None:
    with pytest.raises(snows.InputError, match=r"cannot write .*missing"):
        LivePage(tmp_path / "missing" / "live.html")
