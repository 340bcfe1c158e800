"""What a user who presses Ctrl-C is told."""

from __future__ import annotations

from pathlib import Path

import pytest

from snows.cli.interruption import Interrupted, keeping_layers, kept_cells


def test_ctrl_c_says_what_is_kept(tmp_path: Path) -> None:
    with (
        pytest.raises(Interrupted, match="nothing was saved; --resume DIR keeps finished layers"),
        keeping_layers(None),
    ):
        raise KeyboardInterrupt
    with pytest.raises(Interrupted, match="holds nothing to continue from"), keeping_layers(tmp_path):
        raise KeyboardInterrupt
    assert kept_cells(2, None) == "2 finished; pass --out DIR to continue from here the next time"
    assert kept_cells(2, tmp_path) == "2 finished; the same command continues from here"
