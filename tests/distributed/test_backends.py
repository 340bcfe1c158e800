"""gloo on CPUs and NCCL on GPUs: each is given tensors that it can send."""

from __future__ import annotations

import pytest

from tests.distributed.torchrun import torchrun


@pytest.mark.parametrize(
    ("backend", "device"),
    [
        ("gloo", "cpu"),
        pytest.param("nccl", "cuda", marks=pytest.mark.gpu),
        pytest.param("cpu:gloo,cuda:nccl", "cuda", marks=pytest.mark.gpu),
    ],
)
def test_every_call_is_understood(backend: str, device: str) -> None:
    process = torchrun(1, "tests.distributed.every_call", backend, device)
    out, errors = process.communicate(timeout=300)
    assert process.returncode == 0, errors
    assert out == "every call was made\n"
