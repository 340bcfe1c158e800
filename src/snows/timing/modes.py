"""How torch is made to run a call: as it is, recorded as a CUDA graph, or compiled."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch

from ..devices.cuda_graph import on_side_stream, recorded
from ..errors import ArgumentError
from ..graph.capture import quietly

Call = Callable[[], Any]
COMPILED = "compiled"  # how the names of modes that compile begin


def modes_of(device: torch.device) -> dict[str, Callable[[Call], Call]]:
    """By name, what makes a call run in this mode. The call must read the same memory each time."""
    if device.type == "cuda":
        return {"eager": _as_it_is, "graph": _recorded, COMPILED: _compiled, "compiled graph": _compiled_and_recorded}
    return {"eager": _as_it_is, COMPILED: _compiled}


def chosen_modes(names: Iterable[str] | None, device: torch.device) -> tuple[str, ...]:
    """The modes that were named, or all of the device."""
    known = tuple(modes_of(device))
    if names is None:
        return known
    for name in (chosen := tuple(names)):
        if name not in known:
            raise ArgumentError(f"the mode {name!r} is not known on {device.type}; expected {', '.join(known)}")
    return chosen


def chosen_dtype(name: torch.dtype | str | None, device: torch.device) -> torch.dtype | None:
    """The half precision that was named, on a GPU by default float16; None on other devices."""
    known = {"float16": torch.float16, "bfloat16": torch.bfloat16} if device.type == "cuda" else {}
    if name is None:
        return known.get("float16")
    word = str(name).removeprefix("torch.")
    if word not in known:
        expected = f"expected {' or '.join(known)}" if known else "it is a choice on an NVIDIA GPU only"
        raise ArgumentError(f"the dtype {word!r} cannot be timed on {device.type}; {expected}")
    return known[word]


def _as_it_is(call: Call) -> Call:
    return call


def _recorded(call: Call) -> Call:
    """The launches of one call, replayed."""
    on_side_stream(lambda: [call() for _ in range(3)])  # libraries choose their kernels
    recording, held = recorded(call)

    def replay() -> Any:
        recording.replay()
        return call, held  # what a recording reads and writes must stay in memory

    return replay


def _compiled(call: Call) -> Call:
    call()  # kernels that search their algorithm do so before they are traced
    torch.compiler.reset()  # what was compiled before counts against a limit of torch
    compiled = torch.compile(call, dynamic=False)
    with quietly():
        compiled()
    return compiled


def _compiled_and_recorded(call: Call) -> Call:
    return _recorded(_compiled(call))
