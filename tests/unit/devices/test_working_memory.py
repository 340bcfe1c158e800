"""How much memory work in rows may take at once."""

from __future__ import annotations

import pytest
import torch

from snows.devices.working_memory import bytes_at_once, working_within

CPU = torch.device("cpu")


def test_a_limit_holds_inside_only_and_never_raises_the_usual_amount() -> None:
    usual = bytes_at_once(CPU)
    assert usual == 1 << 30
    with working_within(1000):
        assert bytes_at_once(CPU) == 1000
        with working_within(10):
            assert bytes_at_once(CPU) == 10
        assert bytes_at_once(CPU) == 1000
    with working_within(2 * usual):
        assert bytes_at_once(CPU) == usual
    assert bytes_at_once(CPU) == usual


def test_a_limit_ends_with_an_exception() -> None:
    with pytest.raises(KeyError), working_within(1000):
        raise KeyError
    assert bytes_at_once(CPU) == 1 << 30


def test_on_a_gpu_a_quarter_of_what_is_free(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (4000, 9000))
    assert bytes_at_once(torch.device("cuda")) == 1000
    with working_within(600):
        assert bytes_at_once(torch.device("cuda")) == 600
