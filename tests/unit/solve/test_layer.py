"""One layer's solve: the start, Newton's systems and their samples, mini-batches, and what held-out samples decide."""

from __future__ import annotations

import hashlib
import math
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from snows.devices.memory import Memory
from snows.errors import SnowsWarning, StatisticsError
from snows.solve import layer as module
from snows.solve.layer import (
    Turn,
    contiguous,
    curvature_kind,
    derivative_precision,
    mask_layer,
    samples_in_products,
)
from snows.solve.newton import NewtonOutcome, NewtonResult
from snows.solve.objective import Objective
from snows.solve.problem import LayerProblem
from snows.solve.settings import ALL_SAMPLES, CurvatureSettings
from tests.networks import example, make
from tests.oracles import KStepLoss, layer_input_output, restricted_least_squares
from tests.problems import (
    CASE,
    FIRST,
    PLENTY,
    joint_problem,
    mask_of,
    problem,
    products_of,
    pruned_parameters,
    settings,
    solve,
)


def oracle(given: LayerProblem, horizon: int, samples: int, normalization: str = "variance") -> KStepLoss:
    """On the first samples, in a second sweep."""
    name, parameter = CASE
    return KStepLoss(
        make(name), example(name, sum(given.sizes))[:samples], _current(name), parameter, horizon, "dense-stream",
        normalization, set(),
    )  # fmt: skip


def _current(name: str) -> dict[str, Tensor]:
    return {key: value for key, value in pruned_parameters(name).items() if not key.endswith("!")}


# Numbers


def test_random_numbers_depend_on_seed_sweep_and_index_alone() -> None:
    def first(turn: Turn) -> int:
        return int(torch.randint(0, 1 << 60, (), generator=turn.generator()))

    assert first(Turn(1, 2, 3)) == first(Turn(1, 2, 3)) == first(Turn(1, 2, 3, new_mask=False))
    digest = hashlib.sha256(b"1/2/3").hexdigest()  # the same in every version: runs of an earlier one may be resumed
    assert Turn(1, 2, 3).generator().initial_seed() == int(digest[:16], 16) // 2
    turns = [Turn(seed, sweep, index) for seed in range(3) for sweep in range(3) for index in range(3)]
    assert len({first(turn) for turn in [*turns, Turn(0, 1, 11), Turn(0, 11, 1)]}) == len(turns) + 2


def test_tensors_are_laid_out_as_if_they_were_loaded() -> None:
    value = torch.randn(3, 4, 2, 2).to(memory_format=torch.channels_last)
    result = contiguous({"a": value})["a"]
    assert torch.equal(result, value)
    assert result.is_contiguous()


@pytest.mark.parametrize(
    ("kind", "piecewise_linear", "expected"),
    [
        ("exact", True, "gauss-newton"), ("exact", False, "hessian"), ("hessian", True, "hessian"),
        ("gauss-newton", False, "gauss-newton"), ("fisher", True, "fisher"),
    ],
)  # fmt: skip
def test_kinds_of_curvature(kind: Any, piecewise_linear: bool, expected: str) -> None:
    chosen = CurvatureSettings(kind, 1, preconditioned=True, half_precision=False)
    assert curvature_kind(chosen, SimpleNamespace(piecewise_linear=piecewise_linear)) == expected  # type: ignore[arg-type]


@pytest.mark.parametrize("half", [True, False])
@pytest.mark.parametrize("device", ["cuda", "cpu"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("piecewise_linear", [True, False])
def test_derivatives_in_half_precision(half: bool, device: str, dtype: torch.dtype, piecewise_linear: bool) -> None:
    chosen = CurvatureSettings("gauss-newton", 1, preconditioned=True, half_precision=half)
    segment: Any = SimpleNamespace(piecewise_linear=piecewise_linear)
    halved = half and device == "cuda" and dtype == torch.float32 and piecewise_linear
    found = derivative_precision(chosen, segment, torch.device(device), dtype)
    assert found == (torch.bfloat16 if halved else dtype)


@pytest.mark.parametrize(
    ("most", "inputs", "samples"),
    [(1000, [14, 2], 100), (1000, [15], 105), (1000, [2, 100], 700), (1000, [500], 1000), (40, [100], 40),
     (ALL_SAMPLES, [3], ALL_SAMPLES)],
)  # fmt: skip
def test_samples_of_a_product(most: int, inputs: list[int], samples: int) -> None:
    chosen = CurvatureSettings("gauss-newton", most, preconditioned=True, half_precision=False)
    assert samples_in_products(chosen, inputs) == samples


# Newton's systems


@pytest.mark.parametrize("normalization", ["variance", "mean", "sum"])
@pytest.mark.parametrize("damping", [0.0, 0.05])
def test_a_newton_step_is_that_of_the_dense_system_on_kept_weights(normalization: str, damping: float) -> None:
    """With the eager model's gradient and Gauss-Newton matrix in float64."""
    given = problem(*CASE, 3, split=(20, 20))
    chosen = settings(normalization=normalization, damping=damping, held_out=0.0)
    result = solve(given, chosen)
    mask = mask_of(given.layers[0].shape)
    start = pruned_parameters("residual")["conv2.weight"] * mask
    loss = oracle(given, 3, 40, normalization)
    variable = start.clone().requires_grad_()
    (gradient,) = torch.autograd.grad(loss(variable), variable)
    kept = mask.flatten()
    matrix = loss.gauss_newton(start)[kept][:, kept]
    matrix = matrix + damping * torch.eye(len(matrix), dtype=matrix.dtype)
    step = torch.zeros_like(start).flatten()
    step[kept] = torch.linalg.pinv(matrix, rtol=1e-10) @ -gradient.flatten()[kept]
    solve_report = result.solve
    assert solve_report.outcome == NewtonOutcome.STEPS_DONE.value
    torch.testing.assert_close(result.weights["conv2.weight"], start + step.view_as(start), rtol=1e-5, atol=1e-7)
    assert solve_report.loss_masked == solve_report.loss_start == pytest.approx(float(loss(start)), rel=1e-9)
    assert solve_report.loss == pytest.approx(float(loss(result.weights["conv2.weight"])), rel=1e-9)


def test_a_preconditioner_changes_the_way_but_not_the_solution() -> None:
    given = problem(*CASE, 3, split=(20, 20))
    plain = solve(given, settings(held_out=0.0))
    preconditioned = solve(given, settings(held_out=0.0, preconditioner="rows", ridge=1e-6))
    torch.testing.assert_close(
        preconditioned.weights["conv2.weight"], plain.weights["conv2.weight"], rtol=1e-5, atol=1e-7
    )
    assert 0 < preconditioned.solve.cg_steps < plain.solve.cg_steps


def test_relative_damping_is_a_share_of_the_mean_diagonal(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the curvature's own diagonal, as a probe of random signs tells it."""
    systems: list[Any] = []
    newton = module.newton

    def watch(objective: Any, system: Any, *arguments: Any) -> NewtonResult:
        systems.append(system(arguments[0], 0))
        return newton(objective, system, *arguments)

    monkeypatch.setattr(module, "newton", watch)
    given = problem(*CASE, 3, split=(20, 20))
    solve(given, settings(preconditioner="rows", relative_damping=1e-3))
    start = pruned_parameters("residual")["conv2.weight"] * mask_of(given.layers[0].shape)
    matrix = oracle(given, 3, 40).gauss_newton(start)
    kept = mask_of(given.layers[0].shape).flatten()
    signs = 2.0 * torch.randint(0, 2, start.shape, generator=FIRST.generator(), dtype=torch.int8) - 1
    probe = signs.double().flatten() * kept
    traces = (probe * (matrix @ probe)).view(4, -1).sum(1).clamp(min=0)
    assert (traces > 0.01 * traces.mean()).all()
    assert systems[0].mean_diagonal == pytest.approx(float(traces.sum() / kept.sum()))
    v = torch.randn(start.shape, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    product = systems[0].product(v)
    torch.testing.assert_close(product.flatten()[kept], (matrix @ (v.flatten() * kept))[kept])
    assert not product.flatten()[~kept].any()
    assert not systems[0].precondition(v).flatten()[~kept].any()


def test_the_probe_has_random_signs_at_kept_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    probes: list[Tensor] = []
    preconditioner = module.RowPreconditioner

    def watch(blocks: Any, probes_: Any, products: Any, similar_rows: bool) -> Any:
        probes.extend(probes_)
        return preconditioner(blocks, probes_, products, similar_rows)

    monkeypatch.setattr(module, "RowPreconditioner", watch)
    given = problem(*CASE, 3)
    for turn in (Turn(0, 0, 0), Turn(0, 0, 0), Turn(0, 0, 1)):
        solve(given, settings(preconditioner="rows"), turn)
    mask = mask_of(given.layers[0].shape)
    for probe in probes:
        assert torch.equal(probe != 0, mask)
        assert set(probe[mask].tolist()) == {-1.0, 1.0}
        assert abs(float(probe[mask].mean())) < 0.4
    assert torch.equal(probes[0], probes[1])
    assert not torch.equal(probes[0], probes[2])


@pytest.mark.parametrize(
    ("name", "parameter", "similar"),
    [
        (*CASE, True),
        ("attention", "attention.out_proj.weight", True),
        ("attention", "mlp.0.weight", True),
        ("attention", "attention.in_proj_weight", False),  # its rows are those of query, key and value
    ],
)
def test_rows_are_drawn_to_their_mean_where_they_are_of_one_kind(
    name: str, parameter: str, similar: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[bool] = []
    preconditioner = module.RowPreconditioner

    def watch(blocks: Any, probes: Any, products: Any, similar_rows: bool) -> Any:
        seen.append(similar_rows)
        return preconditioner(blocks, probes, products, similar_rows)

    monkeypatch.setattr(module, "RowPreconditioner", watch)
    solve(problem(name, parameter, 3), settings(name, preconditioner="rows", targets="dense-stream"))
    assert seen == [similar]


@pytest.mark.parametrize(("ridge", "relative_damping", "used"), [(1e-6, 1e-3, 1e-3), (1e-2, 1e-3, 1e-2)])
def test_a_preconditioner_alone_has_newtons_damping_and_some_samples(
    ridge: float, relative_damping: float, used: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[tuple[Any, ...]] = []
    blocks = module.row_systems

    def watch(*arguments: Any) -> Any:
        made.append(arguments)
        return blocks(*arguments)

    monkeypatch.setattr(module, "row_systems", watch)
    monkeypatch.setattr(LayerProblem, "moments", lambda *_: pytest.fail("needs all samples"))
    given = problem(*CASE, 3, split=(2,) * 40)
    chosen = settings(preconditioner="rows", ridge=ridge, relative_damping=relative_damping, product_samples=7)
    memory = Memory(10**9)
    result = solve(given, chosen, memory=memory)
    gram, kept, ridge_used, dtype, preconditions, device_bytes, chunk_bytes = made[0]
    assert preconditions
    assert torch.equal(gram, given.gram(samples=7))
    assert not torch.equal(gram, given.gram())
    assert torch.equal(kept, mask_of(given.layers[0].shape).flatten(1))
    assert ridge_used == used
    assert dtype == torch.float64
    assert (device_bytes, chunk_bytes) == (memory.factors, memory.chunk)
    assert result.solve.start == "masked weights"
    assert result.solve.relative_damping == 0.0


def test_no_factors_are_made_where_none_are_needed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "row_systems", lambda *_: pytest.fail("nothing needs factors"))
    solve(problem(*CASE, 3), settings())
    closed_form = settings(start="closed-form")
    solve(problem(*CASE, 3), closed_form, Turn(0, 1, 0, new_mask=False))


# The start


def test_one_layer_alone_is_solved_in_closed_form() -> None:
    """By least squares on kept weights, row by row."""
    given = problem(*CASE, 0, split=(20, 20))
    result = solve(given, settings(start="closed-form", ridge=0.0, horizon=0))
    model = make("residual")
    own = make("residual").get_submodule("conv2")
    _, y = layer_input_output(model, "conv2", example("residual", 40))
    model.load_state_dict({**model.state_dict(), **_current("residual")})
    x, _ = layer_input_output(model, "conv2", example("residual", 40))
    expected = restricted_least_squares(own, x, y, mask_of(own.weight.shape))
    torch.testing.assert_close(result.weights["conv2.weight"], expected, rtol=1e-7, atol=1e-7)
    report = result.solve
    assert (report.outcome, report.start) == (NewtonOutcome.CLOSED_FORM.value, "least squares")
    assert (report.newton_steps, report.cg_steps, report.kept) == (0, 0, "solved")
    assert report.loss == report.loss_start < report.loss_masked


@pytest.mark.parametrize("horizon", [1, 3])
def test_beyond_one_layer_least_squares_is_where_newton_starts(horizon: int) -> None:
    given = problem("mlp", "2.weight", horizon, split=(20, 20))
    report = solve(given, settings("mlp", start="closed-form", ridge=1e-9)).solve
    assert report.start == "least squares"
    assert report.newton_steps == 1
    assert report.loss < report.loss_start < report.loss_masked
    assert report.relative_damping == 1e-9


def test_of_layers_that_are_solved_together_the_largest_damping_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    raised = iter([1e-6, 3e-6, 2e-6])
    blocks = module.row_systems

    def raise_damping(*arguments: Any) -> Any:
        made = blocks(*arguments)
        made.relative_damping = next(raised)
        return made

    monkeypatch.setattr(module, "row_systems", raise_damping)
    given = joint_problem()
    masks = {layer.parameter: mask_of(layer.shape) for layer in given.layers}
    chosen = settings(start="closed-form", targets="dense-stream")
    result = module.solve_layer(given, given.pruned.parameters, masks, chosen, PLENTY, FIRST)
    assert result.solve.relative_damping == 3e-6
    assert list(result.weights) == list(masks)
    for name, mask in masks.items():
        assert result.weights[name].shape == mask.shape
        assert not result.weights[name][~mask].any()


def test_a_mask_that_is_not_new_starts_from_the_weights() -> None:
    """They were solved under this mask in the sweep before."""
    given = problem("mlp", "2.weight", 0, split=(20, 20))
    report = solve(given, settings("mlp", start="closed-form"), Turn(0, 1, 0, new_mask=False)).solve
    assert report.start == "masked weights"
    assert report.outcome != NewtonOutcome.CLOSED_FORM.value
    assert report.newton_steps == 1


@pytest.mark.parametrize(
    ("shift", "start"), [(-1e-9, "least squares"), (0.0, "masked weights"), (1.0, "masked weights")]
)
def test_least_squares_is_the_start_only_if_its_loss_is_lower(
    shift: float, start: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Everything has the same loss but what least squares gives."""
    given = problem("mlp", "2.weight", 0, split=(20, 20))
    monkeypatch.setattr(Objective, "of_squared_error", lambda *_: 2.0)  # the masked weights'
    monkeypatch.setattr(Objective, "loss", lambda *_: 2.0 + shift)
    report = solve(given, settings("mlp", start="closed-form")).solve
    assert report.start == start


def test_statistics_that_cannot_be_used_are_a_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    def singular(*_: Any) -> None:
        raise StatisticsError("its statistics stay singular")

    monkeypatch.setattr(module, "row_systems", singular)
    chosen = settings("mlp", start="closed-form", preconditioner="rows")
    with pytest.warns(SnowsWarning, match="^2: its statistics stay singular; this layer is solved without its closed"):
        report = solve(problem("mlp", "2.weight", 1, split=(20, 20)), chosen).solve
    assert report.start == "masked weights"
    assert report.newton_steps == 1
    assert report.relative_damping == 0.0
    assert not math.isnan(report.loss_masked)


# Mini-batches


def test_mini_batches_are_one_newton_solve_after_another(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[tuple[tuple[int, ...], Tensor]] = []

    def fake(objective: Objective, system: Any, weight: Tensor, mask: Tensor, options: Any, **_: Any) -> NewtonResult:
        calls.append((objective.chosen, weight))
        assert torch.equal(mask, mask_of(weight.shape))
        assert options is chosen.newton
        return NewtonResult(weight * 0.5, 9.0, 8.0, 2, 30, NewtonOutcome.NO_DECREASE, negative_curvature=4)

    monkeypatch.setattr(module, "newton", fake)
    given = problem(*CASE, 3, split=(2,) * 6, held_out=1)
    chosen = settings(minibatch=4)
    result = solve(given, chosen)
    start = pruned_parameters("residual")["conv2.weight"] * mask_of(given.layers[0].shape)
    assert [pieces for pieces, _ in calls] == [(0, 1), (2, 3), (4,)]
    assert all(torch.equal(weight, start * 0.5**number) for number, (_, weight) in enumerate(calls))
    report = result.solve
    assert (report.newton_steps, report.cg_steps, report.negative_curvature) == (6, 90, 12)
    assert report.outcome == NewtonOutcome.STEPS_DONE.value
    objective = given.objective("variance")
    assert report.loss_start == report.loss_masked == objective.loss(start)


def test_mini_batches_have_curvature_of_their_own_samples(monkeypatch: pytest.MonkeyPatch) -> None:
    given = problem(*CASE, 3, split=(4, 4, 2), held_out=1)
    seen = products_of(lambda: solve(given, settings(minibatch=4)), monkeypatch)
    assert seen == [((0,), 4), ((1,), 4)]


def test_the_loss_after_mini_batches_is_that_of_all_fitted_samples() -> None:
    given = problem(*CASE, 3, split=(4, 4))
    result = solve(given, settings(minibatch=4))
    assert result.solve.newton_steps == 2
    assert result.solve.loss == pytest.approx(given.objective("variance").loss(result.weights["conv2.weight"]))


# What is handed to Newton's method, and what comes out


def test_newton_begins_with_what_is_known_of_the_start(monkeypatch: pytest.MonkeyPatch) -> None:
    known: list[Any] = []
    newton = module.newton

    def watch(*arguments: Any) -> NewtonResult:
        known.append(arguments[5])
        return newton(*arguments)

    monkeypatch.setattr(module, "newton", watch)
    given = problem("mlp", "2.weight", 2, split=(20, 20))
    solve(given, settings("mlp"))
    assert known == [None]
    result = solve(given, settings("mlp", start="closed-form", ridge=1e-9))
    loss, gradient = known[1]
    assert loss == result.solve.loss_start
    assert gradient.shape == (8, 8)
    assert gradient.any()


def test_weights_and_masks_are_those_of_the_layers_alone() -> None:
    given = problem(*CASE, 3)
    result = solve(given, settings())
    assert list(result.weights) == list(result.masks) == ["conv2.weight"]
    mask = mask_of(given.layers[0].shape)
    assert torch.equal(result.masks["conv2.weight"], mask)
    assert not result.weights["conv2.weight"][~mask].any()
    assert result.weights["conv2.weight"].is_contiguous()
    assert (result.solve.sweep, result.solve.seconds) == (0, 0.0)  # a run measures them
    assert solve(given, settings(), Turn(0, 2, 0)).solve.sweep == 2


def test_the_curvature_is_reported() -> None:
    for kind in ("hessian", "gauss-newton", "fisher"):
        given = problem("attention", "mlp.0.weight", 3)
        chosen = settings("attention", curvature=kind, targets="dense-stream", cg_steps=3)
        assert solve(given, chosen).solve.curvature == kind


def test_a_mask_alone() -> None:
    weights = {"a": torch.arange(4.0).view(2, 2).T, "b": torch.ones(3)}
    masks = {"a": torch.tensor([[True, False], [True, True]]), "b": torch.zeros(3).bool()}
    result = mask_layer(["a"], weights, masks, sweep=2)
    assert result.weights["a"].tolist() == [[0.0, 0.0], [1.0, 3.0]]
    assert result.weights["a"].is_contiguous()
    assert list(result.weights) == list(result.masks) == ["a"]
    report = result.solve
    assert (report.sweep, report.outcome, report.start) == (2, "mask only", "masked weights")
    assert (report.newton_steps, report.cg_steps, report.negative_curvature, report.seconds) == (0, 0, 0, 0.0)
    assert (report.kept, report.curvature, report.relative_damping) == ("solved", "", 0.0)
    assert all(math.isnan(value) for value in (report.loss, report.loss_start, report.loss_masked, report.held_out))
