"""What torchrun starts in tests: every call of a group, on tensors of the CPU and of the device, and a run.

    torchrun --nproc-per-node 1 -m tests.distributed.every_call BACKEND DEVICE

One rank is a group here, which it is for no user: a single GPU is enough to see what NCCL takes.
"""

from __future__ import annotations

import os
import sys
import warnings
from unittest import mock

import torch
import torch.distributed as dist

from snows import api
from snows.devices.distributed.group import Group
from snows.devices.distributed.watch import Watch
from tests.distributed.cases import LAST_STAGE, Case

DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.int64, torch.bool)
RUNS = {
    "tensors": Case("conv-bn", "2:4", recipe=LAST_STAGE),
    "a Dataset": Case("conv-bn", "2:4", samples=60, recipe=LAST_STAGE, dataset=True),
    "gradients": Case("conv-bn", 0.5, options=lambda: {"mask": "woodfisher"}),
}


def call_everything(group: Group, device: str) -> None:
    """The sum over one rank is its own term, and so is what it sends itself."""
    broadcast = dist.broadcast

    def strict(tensor: torch.Tensor, **options: object) -> None:
        assert tensor.is_contiguous()  # which NCCL wants; gloo takes anything
        broadcast(tensor, **options)

    for dtype in DTYPES:
        sent = torch.tensor([[1, 0], [1, 1]], dtype=dtype, device=device)
        held = sent.mT
        with mock.patch.object(dist, "broadcast", strict):
            group.take_first([held])
        assert torch.equal(held, sent.mT), dtype
    terms = [torch.ones(2, device=device), torch.ones(3, dtype=torch.float64, device=device)]
    for found, term in zip(group.sums(lambda: terms, lambda: terms), terms, strict=True):
        assert torch.equal(found, term)
        assert (found.device, found.dtype) == (term.device, term.dtype)
    assert group.together(lambda: "done") == "done"
    assert group.gathered({"rank": 0}) == [{"rank": 0}]
    assert group.from_first(lambda: [1, 2]) == [1, 2]
    assert group.on_this_host == 1


def main(backend: str, device: str) -> None:
    warnings.simplefilter("ignore")
    if device == "cuda":
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group(backend)
    group = Group(Watch.started())
    call_everything(group, "cpu")
    call_everything(group, device)
    for name, case in RUNS.items():
        alone = case.run(device=device)
        with mock.patch.object(api, "current_ranks", return_value=group):
            shared = case.run(device=device)
        for parameter, mask in alone.masks.items():
            assert torch.equal(shared.masks[parameter], mask), name
        for key, value in alone.model.state_dict().items():
            torch.testing.assert_close(shared.model.state_dict()[key], value, rtol=1e-6, atol=1e-9)
    print("every call was made")


if __name__ == "__main__":
    main(*sys.argv[1:])
