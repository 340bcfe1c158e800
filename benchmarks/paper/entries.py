"""All tables and figures of the paper, by name."""

from __future__ import annotations

from . import (
    attention,
    bound,
    cg_caps,
    chita,
    curvature,
    first_layer,
    flops,
    horizon,
    nm,
    retraining,
    toy,
    transfer,
    unstructured,
    vit,
)
from .setting import Entry

ENTRIES: dict[str, Entry] = {
    entry.name: entry
    for entry in (
        horizon.ENTRY,
        nm.ENTRY,
        unstructured.ENTRY,
        retraining.ENTRY,
        first_layer.ENTRY,
        toy.ENTRY,
        curvature.ENTRY,
        cg_caps.ENTRY,
        vit.ENTRY,
        attention.ENTRY,
        transfer.ENTRY,
        flops.ENTRY,
        chita.ENTRY,
        bound.ENTRY,
    )
}
