"""Which device to work on, and tensors that are put there."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from snows import ArgumentError, InputError
from snows.data import preparation
from snows.devices.device import as_device, best_device, device_of, move, placed, require_usable_device
from tests.networks import mlp

MPS = torch.device("mps")


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("abacus", "^device 'abacus' is not known; expected 'cpu', 'cuda'"),
        ("meta", "^the device meta holds no values; expected 'cpu'"),
        ("mps", "^the device mps has no double precision, .*; expected 'cpu'"),
    ],
)
def test_devices_that_are_refused(name: str, words: str) -> None:
    with pytest.raises(ArgumentError, match=words):
        as_device(name)


@pytest.mark.parametrize(("found", "best"), [(None, "cpu"), ("cuda", "cuda"), ("mps", "cpu")])
def test_the_best_device_is_one_that_can_be_used(found: str | None, best: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: found is not None)
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda: torch.device(found or "cpu"))
    assert best_device() == torch.device(best)


def test_the_named_device_comes_before_the_model_s() -> None:
    model = nn.Linear(2, 2, device="meta")
    assert device_of(model, "cuda:1") == torch.device("cuda:1")
    assert device_of(model).type == "meta"
    assert device_of(nn.ReLU()).type == "cpu"


def test_a_model_on_a_device_without_double_precision_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(
        InputError, match=r"^the model is on mps, and mps has no double precision, .*; give model\.cpu\(\)$"
    ):
        require_usable_device(MPS)
    monkeypatch.setattr(preparation, "device_of", lambda model, device: as_device(device) or MPS)
    with pytest.raises(InputError, match=r"^the model is on mps"):
        preparation.prepare(mlp().eval(), torch.randn(8, 6), None, seed=0)
    preparation.prepare(mlp().eval(), torch.randn(8, 6), "cpu", seed=0)


def test_a_device_that_says_nothing_when_it_fails() -> None:
    class Stuck(nn.Module):
        def to(self, *args: Any, **kwargs: Any) -> Any:
            raise RuntimeError

    with pytest.raises(InputError, match=r"^the model cannot be moved to the device 'cuda': RuntimeError$"):
        move(Stuck(), torch.device("cuda"))


def test_floats_take_the_type_and_images_the_layout() -> None:
    given = {"images": torch.ones(2, 3, 4, 5), "classes": torch.arange(3), "words": ["a", None], "row": torch.ones(2)}
    found = placed(given, torch.device("cpu"), torch.float64, torch.channels_last)
    assert [found[key].dtype for key in ("images", "row", "classes")] == [torch.float64, torch.float64, torch.int64]
    assert found["images"].is_contiguous(memory_format=torch.channels_last)
    assert torch.equal(found["images"], given["images"].double())
    assert found["words"] == ["a", None]
    assert placed(given, torch.device("cpu"), torch.float32)["images"].is_contiguous()
