"""Retraining with frozen masks: ResNet20 on the whole of CIFAR-10, 90 epochs."""

from __future__ import annotations

from sections import Section

from .setting import Entry, Setting


def rows(setting: Setting) -> Section:
    yield from ()


ENTRY = Entry("retraining", "Table “Retraining experiments”", rows, minutes=20, gib=10)
