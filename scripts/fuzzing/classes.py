"""All classes of cases. A new class is a function of a `Case`, in the table of one of these modules or of a new one."""

from __future__ import annotations

from collections.abc import Callable

from . import bombs, commands, names, objects, odd_files, odd_tensors, places, targets, verbs
from .world import Case

_MODULES = (targets, commands, odd_tensors, odd_files, bombs, places, names, objects, verbs)
TARGETS: dict[Callable[[Case], None], int] = {}  # with how often each is drawn
for _module in _MODULES:
    TARGETS |= _module.TARGETS
