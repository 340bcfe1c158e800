"""Conjugate gradients and Newton's method on problems whose answers are known."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from snows.solve.cg import CGOptions, CGOutcome, conjugate_gradient
from snows.solve.newton import NewtonOptions, NewtonOutcome, System, line_search, newton


def spd(size: int, condition: float, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    basis, _ = torch.linalg.qr(torch.randn(size, size, generator=generator, dtype=torch.float64))
    return basis @ torch.diag(torch.logspace(0, math.log10(condition), size, dtype=torch.float64)) @ basis.T


SYSTEMS = {
    "identity": torch.eye(6, dtype=torch.float64),
    "one": torch.tensor([[3.0]], dtype=torch.float64),
    "diagonal": torch.diag(torch.tensor([1.0, 10, 100, 1000], dtype=torch.float64)),
    "well-conditioned": spd(30, 10),
    "ill-conditioned": spd(30, 1e4, seed=1),
    "tiny": spd(12, 100, seed=2) * 1e-12,
}


def rhs_of(matrix: Tensor) -> Tensor:
    return torch.randn(len(matrix), generator=torch.Generator().manual_seed(5), dtype=torch.float64)


@pytest.mark.parametrize("damping", [0.0, 0.1])
@pytest.mark.parametrize("preconditioned", [False, True])
@pytest.mark.parametrize("name", SYSTEMS)
def test_cg_solves_the_system(name: str, preconditioned: bool, damping: float) -> None:
    matrix = SYSTEMS[name]
    rhs = rhs_of(matrix)
    precondition: Callable[[Tensor], Tensor] = (lambda r: r / matrix.diagonal()) if preconditioned else (lambda r: r)
    found = conjugate_gradient(matrix.__matmul__, rhs, CGOptions(2000, relative_tolerance=1e-10), precondition, damping)
    expected = torch.linalg.solve(matrix + damping * torch.eye(len(matrix), dtype=torch.float64), rhs)
    assert found.outcome is CGOutcome.CONVERGED
    assert found.steps > 0
    torch.testing.assert_close(found.solution, expected, rtol=1e-5, atol=1e-6 * float(expected.abs().max()))


def test_the_exact_inverse_as_preconditioner_needs_one_step() -> None:
    matrix = SYSTEMS["ill-conditioned"]
    inverse = torch.linalg.inv(matrix)
    found = conjugate_gradient(
        matrix.__matmul__, rhs_of(matrix), CGOptions(10, relative_tolerance=1e-6), inverse.__matmul__
    )
    assert (found.steps, found.outcome) == (1, CGOutcome.CONVERGED)


def test_the_residual_of_every_cg_step_is_known() -> None:
    matrix = SYSTEMS["well-conditioned"]
    rhs = rhs_of(matrix)
    for steps in (1, 2, 5):
        found = conjugate_gradient(matrix.__matmul__, rhs, CGOptions(steps))
        assert len(found.residuals) == found.steps == steps
        left = float((rhs - matrix @ found.solution).norm() / rhs.norm())
        assert found.residuals[-1] == pytest.approx(left, rel=1e-6)
    ended = conjugate_gradient(matrix.__matmul__, rhs, CGOptions(500, relative_tolerance=1e-4))
    assert ended.residuals[-1] <= 1e-4 < ended.residuals[-2]


@pytest.mark.parametrize("options", [{"relative_tolerance": 1e-3}, {"absolute_tolerance": 1e-2}])
def test_cg_stops_at_its_tolerance_and_not_before(options: dict[str, float]) -> None:
    matrix = SYSTEMS["well-conditioned"]
    rhs = rhs_of(matrix)
    limit = options.get("absolute_tolerance", options.get("relative_tolerance", 0) * float(rhs.norm()))
    found = conjugate_gradient(matrix.__matmul__, rhs, CGOptions(1000, **options))
    assert found.outcome is CGOutcome.CONVERGED
    assert float((rhs - matrix @ found.solution).norm()) <= limit * (1 + 1e-9)
    before = conjugate_gradient(matrix.__matmul__, rhs, CGOptions(found.steps - 1, **options))
    assert before.outcome is CGOutcome.MAX_STEPS
    assert before.steps == found.steps - 1
    assert float((rhs - matrix @ before.solution).norm()) > limit


def test_a_zero_right_hand_side_needs_no_step() -> None:
    found = conjugate_gradient(lambda v: v, torch.zeros(3), CGOptions(5))
    assert (found.steps, found.outcome) == (0, CGOutcome.CONVERGED)
    assert not found.solution.any()


@pytest.mark.parametrize("least", [0.3, 0.03, 0.003])
@pytest.mark.parametrize("name", list(SYSTEMS))
def test_a_step_that_gains_little_is_the_last(name: str, least: float) -> None:
    """Gains are measured here from the quadratic model itself, solution by solution."""
    matrix, rhs = SYSTEMS[name], rhs_of(SYSTEMS[name])
    found = conjugate_gradient(matrix.__matmul__, rhs, CGOptions(300, relative_tolerance=1e-9, least_gain=least))
    solutions = [conjugate_gradient(matrix.__matmul__, rhs, CGOptions(n)).solution for n in range(1, found.steps + 1)]
    models = [0.0, *(float(x @ rhs - x @ matrix @ x / 2) for x in solutions)]
    enough = [(after - before) >= least * after for before, after in itertools.pairwise(models)]
    assert torch.equal(found.solution, solutions[-1])
    if found.outcome is CGOutcome.LITTLE_GAIN:
        assert enough == [True] * (found.steps - 1) + [False]
    else:
        assert found.outcome is CGOutcome.CONVERGED
        assert all(enough[:-1])


def test_negative_curvature_at_the_first_step_gives_the_preconditioned_gradient() -> None:
    rhs = torch.tensor([1.0, 2.0], dtype=torch.float64)
    found = conjugate_gradient(lambda v: -v, rhs, CGOptions(5), lambda r: 0.5 * r)
    assert (found.steps, found.outcome) == (1, CGOutcome.NEGATIVE_CURVATURE)
    assert torch.equal(found.solution, 0.5 * rhs)


def test_negative_curvature_later_gives_the_solution_before_it() -> None:
    matrix = torch.diag(torch.tensor([4.0, 1.0, -0.5], dtype=torch.float64))
    rhs = torch.tensor([3.0, 1.0, 0.1], dtype=torch.float64)
    found = conjugate_gradient(matrix.__matmul__, rhs, CGOptions(10))
    assert found.outcome is CGOutcome.NEGATIVE_CURVATURE
    assert found.steps > 1
    before = conjugate_gradient(matrix.__matmul__, rhs, CGOptions(found.steps - 1))
    assert torch.equal(found.solution, before.solution)
    assert float(found.solution @ rhs) > 0  # still a descent direction for the gradient -rhs


def test_negative_curvature_at_the_second_step_gives_the_first() -> None:
    matrix, rhs = torch.diag(torch.tensor([4.0, -0.5])).double(), torch.tensor([3.0, 0.1], dtype=torch.float64)
    found = conjugate_gradient(matrix.__matmul__, rhs, CGOptions(10), lambda r: 2 * r)
    assert (found.steps, found.outcome) == (2, CGOutcome.NEGATIVE_CURVATURE)
    first = float(rhs @ rhs) / float(rhs @ matrix @ rhs) * rhs
    torch.testing.assert_close(found.solution, first)


def test_no_curvature_is_like_negative_curvature() -> None:
    found = conjugate_gradient(torch.zeros_like, torch.ones(2), CGOptions(10))
    assert (found.steps, found.outcome) == (1, CGOutcome.NEGATIVE_CURVATURE)
    assert torch.equal(found.solution, torch.ones(2))


def test_a_residual_of_just_the_tolerance_is_small_enough() -> None:
    found = conjugate_gradient(lambda v: v, torch.tensor([1.0, 0.0]), CGOptions(10))
    assert (found.steps, found.outcome) == (1, CGOutcome.CONVERGED)
    assert conjugate_gradient(lambda v: v, torch.tensor([3.0, 4.0]), CGOptions(10, absolute_tolerance=5.0)).steps == 0


def test_the_first_step_always_gains_enough() -> None:
    matrix = SYSTEMS["diagonal"]
    found = conjugate_gradient(matrix.__matmul__, rhs_of(matrix), CGOptions(10, least_gain=1.0))
    assert (found.steps, found.outcome) == (2, CGOutcome.LITTLE_GAIN)


@pytest.mark.parametrize(("options", "calls"), [({}, 75 + 3), ({"refresh": 7}, 75 + 10)])
def test_the_residual_is_computed_anew_now_and_then(options: dict[str, int], calls: int) -> None:
    products = 0

    def product(v: Tensor) -> Tensor:
        nonlocal products
        products += 1
        return SYSTEMS["ill-conditioned"] @ v

    found = conjugate_gradient(product, rhs_of(SYSTEMS["ill-conditioned"]), CGOptions(75, **options), damping=0.5)
    assert (found.outcome, products) == (CGOutcome.MAX_STEPS, calls)


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_product_that_is_not_finite_ends_the_solve(bad: float) -> None:
    calls = 0

    def product(v: Tensor) -> Tensor:
        nonlocal calls
        calls += 1
        return SYSTEMS["diagonal"] @ v if calls < 3 else torch.full_like(v, bad)

    found = conjugate_gradient(product, rhs_of(SYSTEMS["diagonal"]), CGOptions(10))
    assert found.outcome is CGOutcome.NOT_FINITE
    assert found.steps == 2
    assert torch.isfinite(found.solution).all()


def test_the_refreshed_residual_does_not_change_the_answer() -> None:
    matrix = SYSTEMS["well-conditioned"]
    rhs = rhs_of(matrix)
    often = conjugate_gradient(matrix.__matmul__, rhs, CGOptions(200, relative_tolerance=1e-10, refresh=1))
    never = conjugate_gradient(matrix.__matmul__, rhs, CGOptions(200, relative_tolerance=1e-10, refresh=10**6))
    torch.testing.assert_close(often.solution, never.solution, rtol=1e-7, atol=1e-9)


class Quadratic:
    """0.5 (w - m)^T A (w - m), remembering every loss it was asked for."""

    def __init__(self, matrix: Tensor, minimum: Tensor) -> None:
        self.matrix, self.minimum = matrix, minimum

    def loss(self, weight: Tensor) -> float:
        away = weight - self.minimum
        return float(0.5 * away @ self.matrix @ away)

    def loss_and_gradient(self, weight: Tensor) -> tuple[float, Tensor]:
        return self.loss(weight), self.matrix @ (weight - self.minimum)


class Rosenbrock:
    """A curved valley: full Newton steps overshoot here and there."""

    def loss(self, w: Tensor) -> float:
        return float((1 - w[0]) ** 2 + 100 * (w[1] - w[0] ** 2) ** 2)

    def loss_and_gradient(self, w: Tensor) -> tuple[float, Tensor]:
        variable = w.clone().requires_grad_()
        loss = (1 - variable[0]) ** 2 + 100 * (variable[1] - variable[0] ** 2) ** 2
        return self.loss(w), torch.autograd.grad(loss, variable)[0]

    def hessian(self, w: Tensor) -> Tensor:
        f = lambda v: (1 - v[0]) ** 2 + 100 * (v[1] - v[0] ** 2) ** 2  # noqa: E731
        return torch.autograd.functional.hessian(f, w)


EXACT = CGOptions(100, relative_tolerance=1e-13)


def test_newton_solves_a_quadratic_in_one_step_on_the_kept_weights() -> None:
    matrix = spd(8, 50)
    objective = Quadratic(matrix, rhs_of(matrix))
    mask = torch.tensor([True, False] * 4)
    restricted = System(lambda v: matrix @ (v * mask) * mask)
    start = torch.zeros(8, dtype=torch.float64)
    found = newton(objective, lambda w, step: restricted, start, mask, NewtonOptions(1, EXACT))
    expected = torch.linalg.solve(matrix[mask][:, mask], (matrix @ objective.minimum)[mask])
    torch.testing.assert_close(found.weight[mask], expected, rtol=1e-9, atol=1e-10)
    assert not found.weight[~mask].any()
    assert (found.steps, found.outcome) == (1, NewtonOutcome.STEPS_DONE)
    assert found.loss == objective.loss(found.weight) < found.loss_before == objective.loss(start)


def test_newton_stops_at_a_stationary_point() -> None:
    matrix = spd(4, 10)
    objective = Quadratic(matrix, rhs_of(matrix))
    options = NewtonOptions(5, CGOptions(50, absolute_tolerance=1e-6))
    ones = torch.ones(4, dtype=torch.bool)
    found = newton(
        objective, lambda w, s: System(matrix.__matmul__), torch.zeros(4, dtype=torch.float64), ones, options
    )
    assert found.outcome is NewtonOutcome.CONVERGED
    assert found.gradient_norm <= 1e-6
    again = newton(objective, lambda w, s: System(matrix.__matmul__), objective.minimum, ones, options)
    assert (again.steps, again.outcome) == (0, NewtonOutcome.CONVERGED)
    assert torch.equal(again.weight, objective.minimum)


def test_the_accepted_loss_never_rises() -> None:
    objective, weight = Rosenbrock(), torch.tensor([-1.2, 1.0], dtype=torch.float64)
    mask = torch.ones(2, dtype=torch.bool)
    losses = [objective.loss(weight)]
    for _ in range(30):
        matrix = objective.hessian(weight)
        found = newton(
            objective, lambda w, s, m=matrix: System(m.__matmul__), weight, mask, NewtonOptions(1, CGOptions(10))
        )
        assert found.loss == objective.loss(found.weight)
        losses.append(found.loss)
        weight = found.weight
    assert losses == sorted(losses, reverse=True)
    assert losses[-1] < 1e-12
    many = newton(
        objective,
        lambda w, s: System(objective.hessian(w).__matmul__),
        torch.tensor([-1.2, 1.0], dtype=torch.float64),
        mask,
        NewtonOptions(30, CGOptions(10)),
    )
    assert many.loss == pytest.approx(losses[-1], abs=1e-12)


def test_a_rejected_step_is_never_kept() -> None:
    """A curvature so small that even ten halvings overshoot."""
    objective = Quadratic(torch.eye(3, dtype=torch.float64), torch.zeros(3, dtype=torch.float64))
    start = torch.ones(3, dtype=torch.float64)
    found = newton(
        objective,
        lambda w, s: System(lambda v: 1e-6 * v),
        start,
        torch.ones(3, dtype=torch.bool),
        NewtonOptions(3, EXACT),
    )
    assert found.outcome is NewtonOutcome.NO_DECREASE
    assert torch.equal(found.weight, start)
    assert found.loss == found.loss_before
    assert found.steps == 0


def test_a_step_that_only_passes_after_halving_is_halved() -> None:
    objective = Quadratic(torch.eye(2, dtype=torch.float64), torch.zeros(2, dtype=torch.float64))
    start = torch.ones(2, dtype=torch.float64)
    options = NewtonOptions(1, EXACT)
    accepted = line_search(objective, start, objective.loss(start), start, -8 * start, options)
    assert accepted is not None
    weight, loss = accepted
    assert torch.equal(weight, torch.zeros(2, dtype=torch.float64))
    assert loss == 0


class Scripted:
    """Losses by the length of the way from the start, noted when they are asked for."""

    def __init__(self, *losses: float) -> None:
        self.losses, self.weights = iter(losses), []

    def loss(self, weight: Tensor) -> float:
        self.weights.append(float(weight))
        return next(self.losses)

    def loss_and_gradient(self, weight: Tensor) -> tuple[float, Tensor]:
        raise AssertionError("the line search needs no gradients")


def search(losses: list[float], slope: float = -4.0, **options: Any) -> tuple[tuple[Tensor, float] | None, list[float]]:
    """Along the direction 1 from 0, where the loss is 10."""
    objective = Scripted(*losses)
    one = torch.ones((), dtype=torch.float64)
    found = line_search(objective, 0 * one, 10.0, slope * one, one, NewtonOptions(1, EXACT, **options))
    return found, objective.weights


@pytest.mark.parametrize("slope", [0.5, 0.0, 2.0, math.nan, -math.inf])
def test_a_direction_that_does_not_descend_is_refused(slope: float) -> None:
    assert search([-1.0] * 20, slope) == (None, [])


@pytest.mark.parametrize(
    ("loss", "accepted"), [(8.0, True), (7.9, True), (8.1, False), (9.9, False), (10.0, False), (math.nan, False)]
)
def test_armijos_condition(loss: float, accepted: bool) -> None:
    """With beta of a half a full step must lower the loss by 2 of the 4 that its slope promises."""
    found, weights = search([loss, 0.0], armijo=0.5)
    assert found is not None
    assert found == ((1.0, loss) if accepted else (0.5, 0.0))
    assert weights == ([1.0] if accepted else [1.0, 0.5])


def test_an_equal_loss_is_no_decrease() -> None:
    """Even if Armijo's condition asks for none."""
    assert search([10.0, 10.0, 9.0], armijo=0.0)[0] == (0.25, 9.0)


@pytest.mark.parametrize("halvings", [0, 1, 10])
def test_the_step_is_halved_so_often(halvings: int) -> None:
    assert search([11.0] * 20, halvings=halvings) == (None, [0.5**number for number in range(halvings + 1)])
    assert len(search([11.0] * 20)[1]) == 11


def test_newton_keeps_the_start_where_the_loss_is_not_finite() -> None:
    class Broken(Quadratic):
        def loss_and_gradient(self, weight: Tensor) -> tuple[float, Tensor]:
            return math.nan, torch.full_like(weight, math.nan)

    start = torch.ones(2, dtype=torch.float64)
    objective = Broken(torch.eye(2, dtype=torch.float64), start)
    found = newton(objective, lambda w, s: System(lambda v: v), start, start.bool(), NewtonOptions(3, EXACT))
    assert found.outcome is NewtonOutcome.NOT_FINITE
    assert torch.equal(found.weight, start)


def test_newton_keeps_the_start_where_only_the_gradient_is_not_finite() -> None:
    class Broken(Quadratic):
        def loss_and_gradient(self, weight: Tensor) -> tuple[float, Tensor]:
            return 3.0, torch.full_like(weight, math.inf)

    start = torch.ones(2, dtype=torch.float64)
    found = newton(Broken(torch.eye(2).double(), start), no_system, start, start.bool(), NewtonOptions(3, EXACT))
    assert (found.outcome, found.steps) == (NewtonOutcome.NOT_FINITE, 0)
    assert torch.equal(found.weight, start)


def no_system(weight: Tensor, step: int) -> System:
    raise AssertionError("nothing is solved")


def test_a_gradient_of_just_the_tolerance_is_small_enough() -> None:
    objective, start = Quadratic(torch.eye(2).double(), torch.zeros(2).double()), torch.tensor([3.0, 4.0]).double()
    options = NewtonOptions(1, CGOptions(5, absolute_tolerance=5.0))
    found = newton(objective, no_system, start, start.bool(), options)
    assert (found.outcome, found.steps, found.gradient_norm) == (NewtonOutcome.CONVERGED, 0, 5.0)


def test_a_gradient_of_norm_one_is_not_zero() -> None:
    objective, start = Quadratic(torch.eye(1).double(), torch.zeros(1).double()), torch.ones(1).double()
    found = newton(objective, lambda w, s: System(lambda v: v), start, start.bool(), NewtonOptions(1, EXACT))
    assert (found.outcome, found.steps, found.loss) == (NewtonOutcome.STEPS_DONE, 1, 0.0)


def test_steps_of_all_systems_are_counted() -> None:
    """Without damping, as that is the default; no negative curvature on the way."""
    objective, steps = Rosenbrock(), []

    def system(weight: Tensor, step: int) -> System:
        steps.append(step)
        return System(lambda v: torch.diag(torch.tensor([900.0, 300.0])).double() @ v)

    start = torch.tensor([-1.2, 1.0], dtype=torch.float64)
    found = newton(objective, system, start, torch.ones(2).bool(), NewtonOptions(3, EXACT))
    assert (steps, found.steps, found.cg_steps) == ([0, 1, 2], 3, 6)
    assert found.negative_curvature == 0
    assert System(lambda v: v).mean_diagonal == 0.0
    assert NewtonOptions(1, EXACT) == NewtonOptions(1, EXACT, 0.0, 0.0, armijo=1e-5, halvings=10)


def test_what_is_known_of_the_start_is_not_computed_again() -> None:
    class Once(Quadratic):
        def loss_and_gradient(self, weight: Tensor) -> tuple[float, Tensor]:
            raise AssertionError("it is known")

    objective, start = Once(torch.eye(2).double(), torch.zeros(2).double()), torch.ones(2).double()
    known = (objective.loss(start), start)
    identical = lambda w, s: System(lambda v: v)  # noqa: E731
    found = newton(objective, identical, start, start.bool(), NewtonOptions(1, EXACT), known)
    assert (found.loss_before, found.loss) == (1.0, 0.0)


def test_negative_curvature_is_counted_and_the_loss_still_falls() -> None:
    objective = Quadratic(torch.eye(2, dtype=torch.float64), torch.zeros(2, dtype=torch.float64))
    start = torch.ones(2, dtype=torch.float64)
    found = newton(objective, lambda w, s: System(lambda v: -v), start, start.bool(), NewtonOptions(2, CGOptions(5)))
    assert found.negative_curvature >= 1
    assert found.loss < found.loss_before


def test_damping_is_absolute_plus_relative_to_the_mean_diagonal() -> None:
    matrix = torch.diag(torch.tensor([1.0, 3.0], dtype=torch.float64))
    objective = Quadratic(matrix, torch.tensor([1.0, 1.0], dtype=torch.float64))
    options = NewtonOptions(1, EXACT, damping=0.5, relative_damping=0.25)
    found = newton(
        objective,
        lambda w, s: System(matrix.__matmul__, mean_diagonal=2.0),
        torch.zeros(2, dtype=torch.float64),
        torch.ones(2, dtype=torch.bool),
        options,
    )
    damped = matrix + (0.5 + 0.25 * 2.0) * torch.eye(2, dtype=torch.float64)
    torch.testing.assert_close(found.weight, torch.linalg.solve(damped, matrix @ objective.minimum))
