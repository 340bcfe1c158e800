"""Which networks a comparison makes, and their names."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from snows.evaluation.cells import plan_cells
from tests.networks import make

MODEL = make("mlp")


def test_names_of_masks(tmp_path: Path) -> None:
    save_file({"2.weight": torch.ones(8, 8) > 0}, tmp_path / "mine.safetensors")
    file = str(tmp_path / "mine.safetensors")
    cells = plan_cells(["2:4", 0.5], [file, MODEL, "weights", "magnitude"])
    assert [(cell.mask, cell.row.pattern) for cell in cells[::2]] == [
        ("magnitude", "2:4"),
        ("magnitude", "0.5"),
        (file, "given"),
        ("given", "given"),
        ("weights", "given"),
    ]
    before = plan_cells(None, file)[0].source
    save_file({"2.weight": torch.ones(8, 8) < 0}, tmp_path / "mine.safetensors")
    assert plan_cells(None, file)[0].source != before  # it is the content that counts


def test_methods_without_a_name_of_their_own() -> None:
    class Plain:
        def choose_layer(self, *given: Any) -> Any: ...

    (cell, _) = plan_cells("2:4", Plain())
    assert "0x" not in cell.mask  # an address would be another one the next time
    assert "Plain object" in cell.mask
