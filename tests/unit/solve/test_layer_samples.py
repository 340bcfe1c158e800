"""Which samples a solve takes for its curvature products, in which precision, and how much of them is kept."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from snows.devices.memory import Memory
from snows.solve import layer as module
from snows.solve.layer import Turn
from snows.solve.objective import Objective
from tests.problems import CASE, mask_of, problem, products_of, settings, solve


def test_pieces_rotate_from_step_to_step_and_from_sweep_to_sweep() -> None:
    subsets = module._rotating_subsets((4,) * 5, 8, steps_before=0)
    assert [subsets(step) for step in range(5)] == [(0, 1), (2, 3), (0, 4), (1, 2), (3, 4)]
    later = module._rotating_subsets((4,) * 5, 8, steps_before=3)
    assert [later(step) for step in range(2)] == [subsets(3), subsets(4)]


@pytest.mark.parametrize(
    ("sizes", "samples", "pieces"),
    [((4, 4, 2), 10, (0, 1, 2)), ((4, 4, 2), 11, (0, 1, 2)), ((4, 4, 2), 9, (0, 1)), ((4, 4, 2), 5, (0,)),
     ((4, 4, 2), 1, (0,)), ((4, 4, 2), 7, (0, 1)), ((4, 2), 3, (0,))],
)  # fmt: skip
def test_a_subset_has_about_so_many_samples(sizes: tuple[int, ...], samples: int, pieces: tuple[int, ...]) -> None:
    assert module._rotating_subsets(sizes, samples, steps_before=0)(0) == pieces


@pytest.mark.parametrize(
    ("samples", "batches"),
    [(4, [(0,), (1,), (2,), (3,)]), (1, [(0,), (1,), (2,), (3,)]), (9, [(0, 1), (2, 3)]), (12, [(0, 1, 2), (3,)]),
     (99, [(0, 1, 2, 3)])],
)  # fmt: skip
def test_mini_batches_are_consecutive_pieces(samples: int, batches: list[tuple[int, ...]]) -> None:
    assert module._consecutive((4, 4, 4, 2), samples) == batches
    assert module._consecutive((4, 2), 3) == [(0,), (1,)]  # by the size of the first piece


def test_products_take_other_samples_in_each_step_and_sweep(monkeypatch: pytest.MonkeyPatch) -> None:
    given = problem(*CASE, 3, split=(2,) * 7, held_out=1)
    chosen = settings(product_samples=4, newton_steps=2, cg_steps=2)

    def both_sweeps() -> None:
        solve(given, chosen, Turn(0, 0, 0))
        solve(given, chosen, Turn(0, 1, 0))

    assert products_of(both_sweeps, monkeypatch) == [((0, 1), 4), ((2, 3), 4), ((4, 5), 4), ((0, 1), 4)]


def test_products_take_some_samples_of_large_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    given = problem(*CASE, 3, split=(5, 5, 4), held_out=1)
    seen = products_of(lambda: solve(given, settings(product_samples=3)), monkeypatch)
    assert seen == [((0,), 3)]


def test_products_take_all_fitted_samples_where_there_are_not_more(monkeypatch: pytest.MonkeyPatch) -> None:
    given = problem(*CASE, 3, split=(5, 5, 4), held_out=1)
    for samples in (None, 10, 1000):
        seen = products_of(lambda samples=samples: solve(given, settings(product_samples=samples)), monkeypatch)
        assert seen == [((0, 1), 10)]
        monkeypatch.undo()


@pytest.mark.parametrize(("most", "taken"), [(None, 10), (1000, 5)])
def test_memory_limits_the_samples_of_products_unless_all_are_asked_for(
    most: int | None, taken: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "linearized_bytes", lambda *_: 100)
    monkeypatch.setattr(Memory, "products", 700)
    given = problem(*CASE, 3, split=(5, 5, 4), held_out=1)
    seen = products_of(lambda: solve(given, settings(product_samples=most)), monkeypatch)
    assert [samples for _, samples in seen] == [taken]


@pytest.mark.parametrize(("spare", "kept"), [(0, True), (-1, False)])
def test_jacobians_are_kept_where_they_fit(spare: int, kept: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    given = problem(*CASE, 3, split=(2, 3))
    keeps: list[bool] = []
    product = Objective.product

    def watch(objective: Objective, kind: Any, weight: Tensor, keep: bool) -> Any:
        keeps.append(keep)
        return product(objective, kind, weight, keep)

    monkeypatch.setattr(Objective, "product", watch)
    monkeypatch.setattr(module, "linearized_bytes", lambda *_: 100)
    monkeypatch.setattr(Memory, "products", 500 + spare)
    solve(given, settings())
    assert keeps == [kept]


def test_derivatives_have_one_precision_and_losses_the_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    planned: list[Any] = []
    monkeypatch.setattr(module, "derivative_precision", lambda *_: torch.bfloat16)
    monkeypatch.setattr(module, "linearized_bytes", lambda *given: planned.append(given[2]) or 1)
    taken: set[torch.dtype] = set()
    given = problem(*CASE, 3)
    linearize = type(given.segment.body).linearize

    def watch(program: Any, values: Any, parameters: Any, varying: Any, dtype: torch.dtype) -> Any:
        taken.add(dtype)
        return linearize(program, values, parameters, varying, dtype)

    monkeypatch.setattr(type(given.segment.body), "linearize", watch)
    result = solve(given, settings(product_samples=2))
    assert taken == set(planned) == {torch.bfloat16}
    assert result.solve.loss == given.objective("variance").loss(result.weights["conv2.weight"])


def test_only_whole_pieces_are_taken_where_memory_is_short(monkeypatch: pytest.MonkeyPatch) -> None:
    """Six of ten samples fit, which is one piece of four: less than a half, so that all are taken."""
    monkeypatch.setattr(module, "linearized_bytes", lambda *_: 100)
    monkeypatch.setattr(Memory, "products", 600)
    given = problem(*CASE, 3, split=(4, 3, 3))
    seen = products_of(lambda: solve(given, settings(product_samples=1000)), monkeypatch)
    assert [samples for _, samples in seen] == [10]


def test_the_output_that_keeps_most_says_how_many_samples_are_needed(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[list[int]] = []
    monkeypatch.setattr(module, "samples_in_products", lambda _, inputs: asked.append(inputs) or 5)
    given = problem(*CASE, 3)
    solve(given, settings())
    kept = mask_of(given.layers[0].shape).flatten(1).sum(1)
    assert kept.min() < kept.max()
    assert asked == [[int(kept.max())]]
