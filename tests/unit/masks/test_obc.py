"""Greedy elimination and OBC against Optimal Brain Surgeon, one weight at a time."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from snows.linalg import rows as layout
from snows.masks import elimination, obc
from snows.masks.elimination import eliminate
from snows.masks.obc import OBC
from snows.patterns import NM, Pattern, Unstructured
from tests.masks import damped_per_row, each_layer, fit_all, greedy, groups_of, layer, squared_error


@each_layer
def test_obc_is_the_greedy_of_its_definition(name: str, pattern: Pattern) -> None:
    weight, gram = layer(name)
    method = OBC(damping=1e-2)
    hessians = damped_per_row(weight, gram, 1e-2)
    group = groups_of(tuple(weight.shape), pattern)
    columns = len(group)
    expected = torch.ones_like(weight, dtype=torch.bool).flatten(1)
    rows = weight.flatten(1).numpy()
    total = 0.0
    if isinstance(pattern, NM):
        gone = pattern.m - pattern.n
        for r, row in enumerate(rows):
            order, losses = greedy(row, hessians[r], columns * gone // pattern.m, group, gone)
            expected[r, order] = False
            total += sum(losses)
    else:  # the cheapest steps of all rows; each row gives up as many as it has among them, in its own order
        found = [greedy(row, hessians[r], columns, group) for r, row in enumerate(rows)]
        steps = sorted((loss, r) for r, (_, losses) in enumerate(found) for loss in losses)
        for r, (order, losses) in enumerate(found):
            count = sum(owner == r for _, owner in steps[: round(pattern.sparsity * weight.numel())])
            expected[r, order[:count]] = False
            total += sum(losses[:count])
    choice = method.choose_layer("w", weight, gram, pattern)
    assert torch.equal(choice.masks["w"], expected.view_as(weight))
    torch.testing.assert_close(choice.weights["w"], fit_all(weight, hessians, choice.masks["w"]), rtol=1e-7, atol=1e-9)
    # what the steps cost is what the error comes to
    assert squared_error(weight, choice.weights["w"], hessians) == pytest.approx(total, rel=1e-8)


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
        (132, 99, (4, 3), 64),
        (20, 20, None, 3),
        (20, 19, None, 1),
        (24, 12, (4, 2), 3),
        (24, 18, (4, 3), 5),
        (21, 14, (3, 2), 3),
    ],
)
@pytest.mark.parametrize("row_by_row", [False, True])
def test_elimination_with_updates_now_and_then(
    width: int,
    steps: int,
    group: tuple[int, int] | None,
    between: int,
    row_by_row: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(elimination, "_STEPS_BETWEEN_UPDATES", between)
    if row_by_row:
        monkeypatch.setattr(layout, "_CPU_BYTES", 1)
    weight, hessian, which = elimination_problem(width)
    found = eliminate(weight, torch.linalg.inv(hessian), which, steps, group)
    m, most = group or (width, width)
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
    here = eliminate(weight, inverse, which, 195, (4, 3))
    there = eliminate(weight.cuda(), inverse.cuda(), which.cuda(), 195, (4, 3))
    assert torch.equal(there.order.cpu(), here.order)
    torch.testing.assert_close(there.losses.cpu(), here.losses)


def test_a_wide_elimination_in_single_precision_costs_little(monkeypatch: pytest.MonkeyPatch) -> None:
    weight, gram = layer("convolution")
    hessians = damped_per_row(weight, gram, 1e-4)
    exact = OBC().choose_layer("w", weight, gram, Unstructured(0.5))
    monkeypatch.setattr(obc, "_WIDE", 4)
    single = OBC().choose_layer("w", weight, gram, Unstructured(0.5))
    errors = [squared_error(weight, choice.weights["w"], hessians) for choice in (single, exact)]
    assert errors[0] <= errors[1] * 1.01
    assert int(single.masks["w"].sum()) == int(exact.masks["w"].sum())
