"""OBC against Optimal Brain Surgeon, one weight at a time."""

from __future__ import annotations

import pytest
import torch

from snows.masks import obc
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


def test_a_wide_elimination_in_single_precision_costs_little(monkeypatch: pytest.MonkeyPatch) -> None:
    weight, gram = layer("convolution")
    hessians = damped_per_row(weight, gram, 1e-4)
    exact = OBC().choose_layer("w", weight, gram, Unstructured(0.5))
    monkeypatch.setattr(obc, "_WIDE", 4)
    single = OBC().choose_layer("w", weight, gram, Unstructured(0.5))
    errors = [squared_error(weight, choice.weights["w"], hessians) for choice in (single, exact)]
    assert errors[0] <= errors[1] * 1.01
    assert int(single.masks["w"].sum()) == int(exact.masks["w"].sum())
