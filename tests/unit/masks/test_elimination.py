"""Greedy elimination against Optimal Brain Surgeon, one weight at a time with the whole inverse updated."""

from __future__ import annotations

import contextlib

import pytest
import torch
from torch import Tensor

from snows.devices.working_memory import working_within
from snows.masks import elimination
from snows.masks.elimination import eliminate
from snows.patterns import Group
from tests.masks import greedy


def elimination_problem(width: int, rows: int = 4, hessians: int = 2) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(width)
    x = torch.randn(hessians, 3 * width, width, generator=generator, dtype=torch.float64)
    x = x @ (torch.eye(width) + 0.3 * torch.randn(width, width, generator=generator)).double()
    weight = torch.randn(rows, width, generator=generator, dtype=torch.float64)
    return weight, x.mT @ x / x.shape[1], torch.arange(rows) % hessians


@pytest.mark.parametrize(
    ("width", "steps", "group", "between"),
    [
        (90, 90, None, 64),  # more steps than are taken between two updates of the inverse
        (140, 134, None, 64),
        (132, 99, Group(4, 1), 64),
        (20, 20, None, 3),
        (20, 19, None, 1),
        (24, 12, Group(4, 2), 3),
        (24, 18, Group(4, 1), 5),
        (21, 14, Group(3, 1), 3),
    ],
)
@pytest.mark.parametrize("row_by_row", [False, True])
def test_elimination_with_updates_now_and_then(
    width: int,
    steps: int,
    group: Group | None,
    between: int,
    row_by_row: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(elimination, "_STEPS_BETWEEN_UPDATES", between)
    weight, hessian, which = elimination_problem(width)
    with working_within(1) if row_by_row else contextlib.nullcontext():
        found = eliminate(weight, torch.linalg.inv(hessian), which, steps, group)
    m, most = (group.size, group.removed) if group else (width, width)
    for r, row in enumerate(weight.numpy()):
        order, losses = greedy(row, hessian[which[r]].numpy(), steps, [p // m for p in range(width)], most)
        assert found.order[r].tolist() == order
        assert found.losses[r].tolist() == pytest.approx(losses, rel=1e-6)
    counts = torch.tensor([0, 1, steps // 2, steps])
    kept = found.kept(width, counts)
    for r, count in enumerate(counts.tolist()):
        assert set((~kept[r]).nonzero().flatten().tolist()) == set(found.order[r, :count].tolist())


@pytest.mark.gpu
def test_elimination_on_a_gpu_is_that_on_a_cpu() -> None:
    """There a step is recorded, and replayed until the columns are shrunk."""
    weight, hessian, which = elimination_problem(260)
    inverse = torch.linalg.inv(hessian)
    here = eliminate(weight, inverse, which, 195, Group(4, 1))
    there = eliminate(weight.cuda(), inverse.cuda(), which.cuda(), 195, Group(4, 1))
    assert torch.equal(there.order.cpu(), here.order)
    torch.testing.assert_close(there.losses.cpu(), here.losses)
