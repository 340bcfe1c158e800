"""The modes of a device, and that a call computes the same in each."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from torch import Tensor, nn

from snows.timing.modes import modes_of


def network() -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 8)).eval()


def test_which_modes_there_are() -> None:
    assert list(modes_of(torch.device("cpu"))) == ["eager", "compiled"]
    assert list(modes_of(torch.device("cuda"))) == ["eager", "graph", "compiled", "compiled graph"]


def test_eager_is_the_call_itself() -> None:
    def call() -> int:
        return 3

    assert modes_of(torch.device("cpu"))["eager"](call) is call


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # of torch's compiler
def test_compiled_calls_compute_the_same() -> None:
    model, x = network(), torch.randn(4, 16)
    with torch.no_grad():
        found: Tensor = modes_of(x.device)["compiled"](partial(model, x))()
        torch.testing.assert_close(found, model(x))


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["graph", "compiled", "compiled graph"])
def test_recorded_calls_read_their_input_again(name: str) -> None:
    model, x = network().cuda(), torch.randn(4, 16, device="cuda")
    with torch.no_grad():
        call = modes_of(x.device)[name](partial(model, x))
        for _ in range(2):
            x.normal_()
            found = call()
            outputs = found[1] if "graph" in name else found
            torch.testing.assert_close(outputs, model(x), rtol=1e-3, atol=1e-3)
