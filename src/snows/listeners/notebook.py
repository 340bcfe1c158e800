"""Progress in a Jupyter notebook: one output that is updated in place. Needs no widgets."""

from __future__ import annotations

import sys
import uuid
from html import escape
from typing import Any

from ..events import Event, LayerStarted, Working
from .base import BEGINNING, Progress, memory_text

_LEAST_SECONDS = 0.5  # between two updates


def in_notebook() -> bool:
    """Whether this code runs in a kernel that shows HTML."""
    ipython = sys.modules.get("IPython")
    shell = None if ipython is None else ipython.get_ipython()
    return type(shell).__name__ == "ZMQInteractiveShell"


class NotebookBar(Progress):
    """A bar below the cell that runs. What it showed last stays when the work has ended.

    Args:
        description, total, completed: As for `Progress`.
    """

    def __init__(self, description: str = BEGINNING, total: int | None = None, completed: int = 0) -> None:
        super().__init__(description, total, completed)
        self._lines: list[str] = []
        self._name = uuid.uuid4().hex
        self._last = 0.0
        self._show(update=False)

    def print(self, line: str) -> None:
        self._lines.append(line)
        self._show()

    def close(self) -> None:
        self._show()

    def _changed(self, event: Event | None) -> None:
        begins = event is None or type(event) in (LayerStarted, Working)  # and may take long
        if begins or self.timeline.elapsed - self._last >= _LEAST_SECONDS:
            self._show()

    def _show(self, update: bool = True) -> None:
        from IPython.display import HTML, display, update_display

        self._last = self.timeline.elapsed
        put: Any = update_display if update else display
        put(HTML(self.html()), display_id=self._name)  # type: ignore[no-untyped-call]

    def html(self) -> str:
        """What is shown now."""
        timeline = self.timeline
        words = [timeline.description, timeline.detail]
        if timeline.total is not None:
            words.append(f"{timeline.completed}/{timeline.total}")
        words += [timeline.end(), memory_text()]
        bar = (
            ""
            if timeline.total is None
            else f'<progress value="{timeline.completed}" max="{timeline.total}"></progress> '
        )
        text = escape(", ".join(word for word in words if word))
        return "".join(f"<div>{escape(line)}</div>" for line in self._lines) + f"<div>{bar}{text}</div>"
