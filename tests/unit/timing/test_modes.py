"""The modes of a device, and that a call computes the same in each."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from torch import Tensor, nn

from snows.errors import ArgumentError
from snows.timing.modes import chosen_dtype, modes_of


def network() -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 8)).eval()


def test_which_modes_there_are() -> None:
    assert list(modes_of(torch.device("cpu"))) == ["eager", "compiled"]
    assert list(modes_of(torch.device("cuda"))) == ["eager", "graph", "compiled", "compiled graph"]


def test_half_precision_is_a_choice_on_a_gpu() -> None:
    gpu, cpu = torch.device("cuda"), torch.device("cpu")
    assert chosen_dtype(None, gpu) is chosen_dtype("float16", gpu) is torch.float16
    assert chosen_dtype("bfloat16", gpu) is chosen_dtype(torch.bfloat16, gpu) is torch.bfloat16
    assert chosen_dtype(None, cpu) is None
    with pytest.raises(ArgumentError, match="'float32' cannot be timed on cuda; expected float16 or bfloat16"):
        chosen_dtype(torch.float32, gpu)
    with pytest.raises(ArgumentError, match="'bfloat16' cannot be timed on cpu; it is a choice on an NVIDIA GPU only"):
        chosen_dtype("bfloat16", cpu)


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
