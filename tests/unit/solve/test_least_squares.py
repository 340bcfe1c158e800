"""Horizon 0 is least squares row by row: against lstsq, on singular statistics, and where factors are too large."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import snows.solve.least_squares as rows
from snows import Recipe, prune
from snows.data.moments import Moments
from snows.errors import InputError, StatisticsError
from snows.linalg.gram import CHUNK_BYTES, inverse_root, inverted
from snows.solve.cg import CGOptions
from snows.solve.least_squares import RowBlocks, RowPreconditioner
from snows.solve.newton import NewtonOutcome
from tests.networks import make
from tests.oracles import layer_input_output, restricted_least_squares

LEAST_SQUARES = Recipe(horizon=0, sweeps=1, ridge=0.0, held_out=0.0)

NETWORKS = {
    "conv-bn": ("conv-bn", (2, 6, 6), {"3": 0.5}),
    "residual": ("residual", (2, 6, 6), {"conv1": 0.5, "conv2": "2:4", "shortcut.0": 0.5}),
    "grouped": ("grouped", (2, 6, 6), {"2": "2:4", "4": "1:2"}),
    "depthwise": ("depthwise", (2, 6, 6), {"2": 0.4, "5": "1:4"}),
    "mlp": ("mlp", (6,), {"2": "2:4"}),
    "mlp, two layers": ("mlp", (6,), {"0": 0.3, "2": "2:4"}),
}


def data(*shape: int, samples: int = 60) -> Tensor:
    return torch.randn(samples, *shape, generator=torch.Generator().manual_seed(7), dtype=torch.float64)


@pytest.mark.parametrize("targets", ["dense-weights", "dense-stream"])
@pytest.mark.parametrize("case", NETWORKS)
def test_horizon_zero_equals_restricted_least_squares(case: str, targets: str) -> None:
    name, shape, patterns = NETWORKS[case]
    model = make(name)
    x = data(*shape, samples=12 if len(shape) > 1 else 60) if case != "grouped" else data(2, 4, 4, samples=40)
    recipe = LEAST_SQUARES.replace(targets=targets)
    result = prune(model, x, patterns, layers=list(patterns), recipe=recipe, progress=False)
    assert {layer.name for layer in result.report.layers} == set(patterns)
    for layer in result.report.layers:
        module = model.get_submodule(layer.name)
        _, dense_output = layer_input_output(model, layer.name, x)
        pruned_input, _ = layer_input_output(result.model, layer.name, x)
        with torch.no_grad():
            target = dense_output if targets == "dense-stream" else module(pruned_input)
        expected = restricted_least_squares(module, pruned_input, target, result.masks[layer.parameter])
        found = result.model.get_parameter(layer.parameter)
        torch.testing.assert_close(found, expected, rtol=1e-8, atol=1e-8)
        assert not found[~result.masks[layer.parameter]].any()
        assert layer.solves[0].outcome == NewtonOutcome.CLOSED_FORM.value
        assert layer.solves[0].relative_damping == 0.0


@pytest.mark.parametrize("kind", ["dead", "collinear", "too few samples"])
def test_singular_statistics_raise_the_damping_and_say_so(kind: str) -> None:
    model = make("mlp")
    x = data(6)
    if kind == "dead":
        x[:, 2] = 0
    elif kind == "collinear":
        x[:, 3] = x[:, 1]
        x[:, 4] = 2 * x[:, 0]
    else:
        x = x[:3]
    mask = {"0": torch.arange(48).view(8, 6) % 7 != 0}
    result = prune(model, x, mask=mask, recipe=LEAST_SQUARES, progress=False)
    (layer,) = result.report.layers
    assert layer.solves[0].relative_damping > 0
    weight = result.model.get_parameter("0.weight")
    assert torch.isfinite(weight).all()
    assert float(weight.abs().max()) < 10  # not blown up along the directions that the data does not fix
    # the fit is as good as that of any least-squares solution
    module = model.get_submodule("0")
    best = restricted_least_squares(module, x, module(x), mask["0"])
    error, least = (float(((x @ (w - module.weight).T) ** 2).mean()) for w in (weight, best))
    assert error <= least * (1 + 1e-4) + 1e-9


def blocks(kept_share: float = 0.6, groups: int = 2, dtype: torch.dtype = torch.float64) -> tuple[RowBlocks, Tensor]:
    generator = torch.Generator().manual_seed(8)
    x = torch.randn(groups, 40, 7, generator=generator, dtype=torch.float64)
    y = torch.randn(groups, 40, 3, generator=generator, dtype=torch.float64)
    moments = Moments.collect([(x[:, :15], y[:, :15]), (x[:, 15:], y[:, 15:])])
    kept = torch.rand(3 * groups, 7, generator=generator) < kept_share
    kept[1] = False  # a row that is gone altogether
    return RowBlocks(moments.gram, kept, 1e-3, dtype), moments.cross


def damped_rows(made: RowBlocks, rhs: Tensor, weight: Tensor) -> Tensor:
    """Each row's damped normal equations, one by one."""
    result = torch.zeros_like(rhs)
    for row, kept in enumerate(made.kept):
        gram = made.gram[row // made.rows_per_group][kept][:, kept]
        damping = made.relative_damping * made.mean_diagonal
        matrix = gram + damping * torch.eye(len(gram), dtype=gram.dtype)
        result[row, kept] = torch.linalg.solve(matrix, rhs[row, kept] + damping * weight[row, kept])
    return result


def test_moments_do_not_depend_on_how_positions_are_split() -> None:
    x, y = torch.randn(2, 10, 4), torch.randn(2, 10, 3)
    whole = Moments.collect([(x, y)])
    parts = Moments.collect([(x[:, :1], y[:, :1]), (x[:, 1:], y[:, 1:])])
    torch.testing.assert_close(parts.gram, whole.gram, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(parts.cross, whole.cross, rtol=1e-5, atol=1e-6)
    assert whole.gram.dtype == torch.float64


def test_refit_solves_the_damped_normal_equations() -> None:
    made, cross = blocks()
    assert made.exact
    weight = torch.randn(6, 7, generator=torch.Generator().manual_seed(9), dtype=torch.float64)
    refit = made.refit(weight, cross)
    expected = damped_rows(made, cross.transpose(1, 2).flatten(0, 1), weight)
    torch.testing.assert_close(refit.weight, expected, rtol=1e-9, atol=1e-10)
    assert not refit.weight[~made.kept].any()
    assert refit.relative_damping == 1e-3


def test_small_chunks_give_the_same_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    made, _ = blocks()
    monkeypatch.setitem(CHUNK_BYTES, "cpu", 1)
    chunked, _ = blocks()
    monkeypatch.undo()
    asked = RowBlocks(made.gram, made.kept, made.relative_damping, torch.float64, chunk_bytes=1)
    rhs = torch.randn(6, 7, dtype=torch.float64)
    for one_by_one in (chunked, asked):
        assert len(one_by_one._inverses) == 6 > len(made._inverses)
        torch.testing.assert_close(one_by_one.solve(rhs), made.solve(rhs), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("size", [1, 7, 128, 129, 300])
def test_blocks_are_inverted_by_halves(size: int) -> None:
    generator = torch.Generator().manual_seed(3)
    x = torch.randn(3, 2 * size + 5, size, generator=generator, dtype=torch.float64)
    blocks = x.mT @ x + 1e-3 * torch.eye(size, dtype=torch.float64)
    root, said = inverse_root(blocks)
    assert not torch.cat(said).any()
    torch.testing.assert_close(root.mT @ root, torch.linalg.inv(blocks), rtol=1e-8, atol=1e-10)
    assert torch.equal(root, root.tril())


@pytest.mark.parametrize("place", [0, 299])
def test_halves_tell_what_is_not_positive_definite(place: int) -> None:
    blocks = torch.eye(300, dtype=torch.float64).repeat(2, 1, 1)
    blocks[1, place, place] = -1.0
    assert torch.cat(inverse_root(blocks)[1]).any()
    assert inverted(blocks) is None


def test_conjugate_gradients_take_over_where_factors_are_too_large(monkeypatch: pytest.MonkeyPatch) -> None:
    exact, cross = blocks()
    weight = torch.zeros(6, 7, dtype=torch.float64)
    monkeypatch.setattr(rows, "_MAX_FLOPS", {"cpu": 1.0})
    iterative, _ = blocks()
    assert exact.exact
    assert not iterative.exact
    found, expected = iterative.refit(weight, cross).weight, exact.refit(weight, cross).weight
    assert float((found - expected).norm() / expected.norm()) <= 1e-3
    assert not found[~iterative.kept].any()


def kept_counts(*counts: int) -> tuple[Tensor, Tensor]:
    """Unit statistics of eight inputs, and rows that keep so many of them."""
    kept = torch.arange(8) < torch.tensor(counts)[:, None]
    return torch.eye(8, dtype=torch.float64)[None], kept


@pytest.mark.parametrize(("spare", "exact"), [(0, True), (-1e-3, False)])
def test_factors_are_formed_within_flops_and_bytes(spare: float, exact: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    gram, kept = kept_counts(8, 6, 3)
    monkeypatch.setattr(rows, "_MAX_FLOPS", {"cpu": (512 + 216 + 27) / 3 + spare, "cuda": 1.0})
    assert RowBlocks(gram, kept, 0.0, torch.float64).exact == exact
    monkeypatch.setattr(rows, "_MAX_FLOPS", {"cpu": 1e9, "cuda": 1.0})
    for dtype, size in ((torch.float64, 8), (torch.float32, 4)):
        monkeypatch.setattr(rows, "_MAX_BYTES", {"cpu": (64 + 36 + 9) * size + spare, "cuda": 1})
        assert RowBlocks(gram, kept, 0.0, dtype).exact == exact


@pytest.mark.parametrize(
    ("device_bytes", "offloads"), [(None, False), ((64 + 36 + 9) * 4, False), ((64 + 36 + 9) * 4 - 1, True)]
)
def test_factors_that_do_not_fit_are_offloaded(device_bytes: int | None, offloads: bool) -> None:
    gram, kept = kept_counts(8, 6, 3)
    made = RowBlocks(gram, kept, 0.0, torch.float32, device_bytes)
    assert made.offloads == offloads
    rhs = torch.randn(3, 8, dtype=torch.float64)
    torch.testing.assert_close(made.solve(rhs), rhs * kept, rtol=1e-6, atol=1e-6)
    assert made.solve(rhs).dtype == torch.float64


@pytest.mark.gpu
def test_offloaded_factors_give_the_same_solution() -> None:
    made, _ = blocks()
    gram, kept = made.gram.cuda(), made.kept.cuda()
    here, there = (RowBlocks(gram, kept, 1e-3, torch.float64, device_bytes) for device_bytes in (None, 0))
    assert {inverse.device.type for *_, inverse in here._inverses} == {"cuda"}
    assert {inverse.device.type for *_, inverse in there._inverses} == {"cpu"}
    rhs = torch.randn(6, 7, dtype=torch.float64)
    assert torch.equal(here.solve(rhs), there.solve(rhs))


@pytest.mark.parametrize(("given", "last"), [(0.0, "10"), (1e-6, "1e+06")])
def test_statistics_that_stay_singular_are_an_error(given: float, last: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The damping is raised twelve times: by a factor of ten, from 1e-10 at least."""
    dampings: list[float] = []

    def never(block: Tensor) -> None:
        dampings.append(float(block[0, 0, 0]) - 1)

    monkeypatch.setattr(rows, "inverted", never)
    with pytest.raises(StatisticsError, match=rf"stay singular at a relative damping of {re.escape(last)}; are all"):
        RowBlocks(*kept_counts(2), given, torch.float64)
    first = [given] if given else [0.0, 1e-10]
    expected = [*first, *(first[-1] * 10**step for step in range(1, 13 - len(first)))]
    assert dampings == pytest.approx(expected, abs=1e-15, rel=1e-3)


def test_the_damping_is_relative_to_the_mean_diagonal() -> None:
    gram = torch.diag(torch.tensor([1.0, 3.0], dtype=torch.float64))[None]
    made = RowBlocks(gram, torch.ones(1, 2, dtype=torch.bool), 0.5, torch.float64)
    assert made.mean_diagonal == 2.0
    expected = torch.tensor([[1 / (1 + 1.0), 1 / (3 + 1.0)]], dtype=torch.float64)
    torch.testing.assert_close(made.solve(torch.ones(1, 2, dtype=torch.float64)), expected)
    dead = RowBlocks(torch.zeros(1, 2, 2, dtype=torch.float64), torch.ones(1, 2).bool(), 0.5, torch.float64)
    assert dead.mean_diagonal == 1.0


def test_without_factors_the_diagonal_is_used(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rows, "_MAX_FLOPS", {"cpu": 0.0})
    gram = torch.tensor([[[2.0, 1.0], [1.0, 4.0]], [[6.0, 0.0], [0.0, 8.0]]], dtype=torch.float64)
    kept = torch.tensor([[True, True], [True, False], [True, True], [False, True]])
    made = RowBlocks(gram, kept, 0.1, torch.float64)
    damped = torch.tensor([[2.5, 4.5], [2.5, 4.5], [6.5, 8.5], [6.5, 8.5]], dtype=torch.float64)
    rhs = torch.randn(4, 2, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    torch.testing.assert_close(made.solve(rhs), rhs / damped * kept)
    assert made.trace.tolist() == [6.0, 2.0, 14.0, 8.0]


@pytest.mark.parametrize(("exact", "steps", "tolerance"), [(True, 15, 1e-12), (False, 50, 1e-4)])
def test_how_far_least_squares_is_solved(
    exact: bool, steps: int, tolerance: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    made, cross = blocks()
    made.exact = exact
    seen: list[tuple[Any, ...]] = []
    solve = rows.conjugate_gradient
    monkeypatch.setattr(rows, "conjugate_gradient", lambda *given: seen.append(given) or solve(*given))
    made.refit(torch.zeros(6, 7), cross)
    _, rhs, options, precondition, damping = seen[0]
    assert options == CGOptions(steps, relative_tolerance=tolerance)
    assert precondition == made.solve
    assert damping == 1e-3 * made.mean_diagonal
    assert not rhs[~made.kept].any()


def test_the_whole_run_agrees_without_factors(monkeypatch: pytest.MonkeyPatch) -> None:
    def run() -> Tensor:
        recipe = LEAST_SQUARES.replace(ridge=1e-6)
        return prune(make("mlp"), data(6), "2:4", layers="2", recipe=recipe, progress=False).model.get_parameter(
            "2.weight"
        )

    exact = run()
    monkeypatch.setattr(rows, "_MAX_FLOPS", {"cpu": 1.0})
    assert float((run() - exact).norm() / exact.norm()) <= 2e-3


@pytest.mark.parametrize("exact", [True, False])
def test_the_preconditioner_is_symmetric_positive_definite(monkeypatch: pytest.MonkeyPatch, exact: bool) -> None:
    if not exact:
        monkeypatch.setattr(rows, "_MAX_FLOPS", {"cpu": 1.0})
    made, _ = blocks()
    generator = torch.Generator().manual_seed(10)
    probe = (torch.randint(0, 2, (6, 7), generator=generator) * 2 - 1).double() * made.kept
    noisy = torch.randn(6, 7, generator=generator, dtype=torch.float64)  # some rows' traces come out negative
    precondition = RowPreconditioner([made], [probe], [noisy])
    identity = torch.eye(42, dtype=torch.float64)
    matrix = torch.stack([precondition([column.view(6, 7)])[0].flatten() for column in identity])
    torch.testing.assert_close(matrix, matrix.T, rtol=1e-10, atol=1e-12)
    kept = made.kept.flatten()
    assert not matrix[~kept].any()
    assert float(torch.linalg.eigvalsh(matrix[kept][:, kept]).min()) > 0
    assert precondition.mean_diagonal > 0


def test_the_preconditioner_scales_rows_by_the_true_product() -> None:
    """Where B is a multiple of each row's own block, the preconditioner is its inverse."""
    made, _ = blocks(kept_share=2.0)
    made = RowBlocks(made.gram, torch.ones_like(made.kept), 0.0, torch.float64)
    scale = torch.arange(1, 7, dtype=torch.float64)[:, None]
    product = lambda v: scale * (v.unflatten(0, (2, -1)) @ made.gram).flatten(0, 1)  # noqa: E731
    # unit vectors summed one at a time: the exact trace in place of a probe's estimate
    unit = torch.eye(7, dtype=torch.float64)
    traces = torch.stack([product(column.expand(6, 7))[:, i] for i, column in enumerate(unit)]).sum(0)
    probe = torch.ones(6, 7, dtype=torch.float64)
    precondition = RowPreconditioner([made], [probe], [(traces / 7)[:, None].expand(6, 7)])
    v = torch.randn(6, 7, generator=torch.Generator().manual_seed(11), dtype=torch.float64)
    torch.testing.assert_close(precondition([product(v)])[0], v, rtol=1e-8, atol=1e-9)


def test_similar_rows_are_drawn_to_their_mean() -> None:
    """A probe's noise, even below zero, moves the scale of a row by a factor of two at most."""
    made, _ = blocks(kept_share=2.0)
    made = RowBlocks(made.gram, torch.ones_like(made.kept), 0.0, torch.float64)
    estimates = torch.tensor([-5.0, 0.0, 1.0, 2.0, 4.0, 5.0], dtype=torch.float64)
    probe = torch.ones(6, 7, dtype=torch.float64)
    v = torch.randn(6, 7, generator=torch.Generator().manual_seed(12), dtype=torch.float64)
    precondition = RowPreconditioner([made], [probe], [(estimates / 7)[:, None].expand(6, 7)], similar_rows=True)
    drawn = (estimates.clamp(min=0) + 2) / 2  # 2 is their mean
    expected = made.solve(v) * (made.trace / drawn)[:, None]
    torch.testing.assert_close(precondition([v])[0], expected)
    assert precondition.mean_diagonal == pytest.approx(float(drawn.sum()) / 42)


def test_rows_that_are_not_similar_keep_their_own_estimates() -> None:
    """But for the least of them, a thousandth of the mean."""
    made, _ = blocks(kept_share=2.0)
    estimates = torch.tensor([-5.0, 0.0, 1.0, 2.0, 4.0, 5.0], dtype=torch.float64)
    probe, v = torch.ones(6, 7, dtype=torch.float64), torch.randn(6, 7, dtype=torch.float64)
    precondition = RowPreconditioner([made], [probe], [(estimates / 7)[:, None].expand(6, 7)])
    own = estimates.clamp(min=2e-3)
    torch.testing.assert_close(precondition([v])[0], made.solve(v) * (made.trace / own)[:, None])
    assert precondition.mean_diagonal == pytest.approx(float(own.sum()) / int(made.kept.sum()))


def test_a_curvature_that_vanishes_at_the_probe_is_survived() -> None:
    made, _ = blocks(kept_share=2.0)
    probe, v = torch.ones(6, 7, dtype=torch.float64), torch.randn(6, 7, dtype=torch.float64)
    precondition = RowPreconditioner([made], [probe], [torch.zeros(6, 7, dtype=torch.float64)])
    torch.testing.assert_close(precondition([v])[0], made.solve(v) * made.trace[:, None] * 1e30)
    assert 0 < precondition.mean_diagonal < 1e-29


def test_rows_of_weights_that_are_solved_together_have_one_mean() -> None:
    made, _ = blocks(kept_share=2.0)
    probe, v = torch.ones(6, 7, dtype=torch.float64), torch.randn(6, 7, dtype=torch.float64)
    products = [torch.full((6, 7), value / 7, dtype=torch.float64) for value in (1.0, 5.0)]
    precondition = RowPreconditioner([made, made], [probe, probe], products, similar_rows=True)
    for solved, drawn in zip(precondition([v, v]), (2.0, 4.0), strict=True):  # half of the way to 3
        torch.testing.assert_close(solved, made.solve(v) * (made.trace / drawn)[:, None])


@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
def test_statistics_that_are_not_finite_are_refused(bad: float) -> None:
    gram = torch.eye(2, dtype=torch.float64)[None]
    gram[0, 0, 1] = bad
    with pytest.raises(InputError, match="inputs are not finite"):
        RowBlocks(gram, torch.ones(3, 2, dtype=torch.bool), 0.0, torch.float64)


def test_a_layer_whose_inputs_are_all_dead_is_survived() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 2)).double().eval()
    with torch.no_grad():
        model[0].bias.fill_(-100.0)
    result = prune(model, data(4), "2:4", progress=False)
    assert torch.isfinite(result.model[2].weight).all()
