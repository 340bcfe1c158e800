"""What a user who presses Ctrl-C is told."""

from __future__ import annotations

import pytest

from snows.cli.interruption import Interrupted, saying


def test_ctrl_c_says_what_is_kept_and_other_errors_pass() -> None:
    with pytest.raises(Interrupted, match=r"^two of three$"), saying(lambda: "two of three"):
        raise KeyboardInterrupt
    with pytest.raises(ZeroDivisionError), saying(lambda: "two of three"):
        raise ZeroDivisionError
