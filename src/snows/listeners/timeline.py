"""Where the work is, and when it will end: what all progress displays have in common."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

from ..events import CGStep, Counted, EpochEnded, Event, LayerSolved, LayerStarted, TimeEstimated, Working
from ..words import duration

_TRUST = 0.1  # an estimate counts as much as this share of the run; then the measured pace rules


@dataclass(frozen=True)
class _Planned:
    """The expected time of every group of layers, in all sweeps, and of what follows. Without an estimate in units."""

    layers: tuple[float, ...]
    after: float
    in_seconds: bool


class Timeline:
    """What is being done, how much of it is done, and how long the rest will take.

    Events of a run tell it that. Other work sets the description and counts by hand.
    """

    def __init__(
        self,
        description: str = "",
        total: int | None = None,
        completed: int = 0,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        self.description, self.total, self.completed = description, total, completed
        self.detail = ""  # of the layer at hand
        self._now = now
        self._began = self._stage_began = self._last_event = now()
        self._completed_before = completed  # of this stage, by others
        self._stage: type[Event] | None = None
        self._estimate: TimeEstimated | None = None
        self._planned: _Planned | None = None
        self._worked = self._planned_work = 0.0  # on layers of this call

    def __call__(self, event: Event) -> None:
        if isinstance(event, TimeEstimated):
            self._estimate = event
        elif isinstance(event, LayerStarted):
            self._layer(event)
        elif isinstance(event, CGStep):
            self.detail = str(event)
        elif isinstance(event, EpochEnded):
            self.description, self.detail = str(event), ""
        elif isinstance(event, Counted):
            self._count(event, event.step, event.steps, self._last_event, event.step - 1)
        elif isinstance(event, Working):
            self._count(event, event.done, event.total, self._now(), event.done)
            self.detail = event.detail
        self._last_event = self._now()

    def describe(self, description: str) -> None:
        self.description = description

    def advance(self) -> None:
        self.completed += 1

    @property
    def elapsed(self) -> float:
        """Seconds since the beginning."""
        return self._now() - self._began

    @property
    def in_this_stage(self) -> float:
        """Seconds since the layer at hand was begun."""
        return self._now() - self._stage_began

    @property
    def remaining(self) -> float | None:
        """Seconds until the end; None if that is not known yet."""
        if self._planned is not None:
            return self._remaining_of_layers(self._planned)
        done = self.completed - self._completed_before
        if self.total is None or done <= 0:
            return None
        spent = self.in_this_stage
        return max(0.0, spent / done * (self.total - self._completed_before) - spent)

    def end(self) -> str:
        """When it will end, in words; empty if that is not known."""
        remaining = self.remaining
        if remaining is None:
            return ""
        clock = time.localtime(time.time() + remaining)
        form = "%H:%M" if remaining < 20 * 3600 else "%a %H:%M"
        return f"ends about {time.strftime(form, clock)}, in {duration(remaining)}"

    def _layer(self, event: LayerStarted) -> None:
        if self._planned is None:
            self._planned = self._plan(event)
        place = event.sweep * event.total + event.index
        self.description, self.detail = str(event), ""
        self.completed, self.total = place, event.sweeps * event.total
        if not isinstance(event, LayerSolved):
            self._stage_began = self._now()
            return
        self.completed += 1
        if not event.recalled:
            self._worked += self.in_this_stage
            self._planned_work += self._planned.layers[place]
        self._stage_began = self._now()

    def _plan(self, event: LayerStarted) -> _Planned:
        estimate = self._estimate
        if estimate is not None and len(estimate.layers) == event.sweeps * event.total:
            return _Planned(estimate.layers, estimate.last_stage, in_seconds=True)
        return _Planned((1.0,) * (event.sweeps * event.total), 0.0, in_seconds=False)

    def _remaining_of_layers(self, planned: _Planned) -> float | None:
        trust = _TRUST * sum(planned.layers) if planned.in_seconds else 0.0
        if trust + self._planned_work == 0:
            return None
        pace = (trust + self._worked) / (trust + self._planned_work)
        left = [pace * part for part in planned.layers[self.completed :]]
        here = min(self.in_this_stage, left[0]) if left else 0.0
        return sum(left) - here + pace * planned.after

    def _count(self, event: Event, done: int, total: int | None, began: float, before: int) -> None:
        """So many are done. If the event is the first of its kind, the work began at that time with so many done."""
        if type(event) is not self._stage:
            self._stage, self._planned = type(event), None
            self._stage_began, self._completed_before = began, before
        self.description, self.detail = str(event), ""
        self.completed, self.total = done, total
