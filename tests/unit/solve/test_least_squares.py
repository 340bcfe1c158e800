"""Horizon 0 is least squares row by row: against lstsq, on singular statistics, and where factors are too large."""

from __future__ import annotations

from unittest import mock

import pytest
import torch
from torch import Tensor, nn

import snows.solve.least_squares as rows
from snows import Recipe, prune
from snows.data.moments import Moments
from snows.errors import InputError
from snows.linalg.gram import CHUNK_BYTES, inverse_root, inverted
from snows.solve.least_squares import RowBlocks, RowPreconditioner, RowSystems, SharedFactor, row_systems
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


def blocks(kept_share: float = 0.6, groups: int = 2, dtype: torch.dtype = torch.float64) -> tuple[RowBlocks, Moments]:
    generator = torch.Generator().manual_seed(8)
    x = torch.randn(groups, 40, 7, generator=generator, dtype=torch.float64)
    y = torch.randn(groups, 40, 3, generator=generator, dtype=torch.float64)
    moments = Moments.collect([(x[:, :15], y[:, :15]), (x[:, 15:], y[:, 15:])])
    kept = torch.rand(3 * groups, 7, generator=generator) < kept_share
    kept[1] = False  # a row that is gone altogether
    return RowBlocks(moments.gram, kept, 1e-3, dtype), moments


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
    made, moments = blocks()
    weight = torch.randn(6, 7, generator=torch.Generator().manual_seed(9), dtype=torch.float64)
    refit = made.refit(weight, moments)
    expected = damped_rows(made, moments.cross.transpose(1, 2).flatten(0, 1), weight)
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


def shared(made: RowBlocks, dtype: torch.dtype = torch.float64) -> SharedFactor:
    return SharedFactor(made.gram, made.kept, made.relative_damping, dtype)


@pytest.mark.parametrize("groups", [1, 2])
def test_one_factor_for_all_rows_solves_the_same_equations(groups: int) -> None:
    made, moments = blocks(groups=groups)
    weight = torch.randn(3 * groups, 7, generator=torch.Generator().manual_seed(9), dtype=torch.float64)
    refit = shared(made).refit(weight, moments)
    expected = damped_rows(made, moments.cross.transpose(1, 2).flatten(0, 1), weight)
    torch.testing.assert_close(refit.weight, expected, rtol=1e-7, atol=1e-8)
    assert not refit.weight[~made.kept].any()
    assert refit.relative_damping == 1e-3


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("share", [0.25, 0.5, 0.9])
def test_one_factor_reaches_the_least_loss(share: float, dtype: torch.dtype) -> None:
    """Inputs have second moments over six orders of magnitude, and little of the loss is left where much is kept."""
    generator = torch.Generator().manual_seed(4)
    x = torch.randn(400, 96, generator=generator, dtype=torch.float64) * torch.logspace(0, -3, 96, dtype=torch.float64)
    x = x @ torch.linalg.qr(torch.randn(96, 96, generator=generator, dtype=torch.float64)).Q
    y = x @ torch.randn(96, 24, generator=generator, dtype=torch.float64)
    moments = Moments.collect([(x[None], y[None])])
    kept = torch.rand(24, 96, generator=generator) < share
    weight = torch.randn(24, 96, generator=generator, dtype=torch.float64)
    one = SharedFactor(moments.gram, kept, 1e-6, dtype)
    found = one.refit(weight.to(dtype), moments).weight.double()

    def loss(w: Tensor) -> Tensor:
        return (x @ w.T - y).square().mean(0).sum() + one.damping * (w - weight * kept).square().sum()

    oracle = torch.zeros_like(weight)
    for row, own in enumerate(kept):
        matrix = moments.gram[0][own][:, own] + one.damping * torch.eye(int(own.sum()), dtype=torch.float64)
        rhs = moments.cross[0][own, row] + one.damping * weight[row, own]
        oracle[row, own] = torch.linalg.solve(matrix, rhs)
    least = float(loss(oracle))
    assert least > 0
    assert float(loss(found)) <= least * (1 + (1e-7 if dtype == torch.float64 else 1e-5))


@pytest.mark.parametrize("case", NETWORKS)
def test_one_factor_reaches_the_loss_of_restricted_least_squares(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """In whole runs: the losses of the report, with float32 weights as users have them, and with float64."""
    name, shape, patterns = NETWORKS[case]
    x = data(2, 4, 4, samples=40) if case == "grouped" else data(*shape, samples=40)
    recipe = LEAST_SQUARES.replace(ridge=1e-9)

    def losses(dtype: torch.dtype) -> list[float]:
        model = make(name).to(dtype)
        result = prune(model, x.to(dtype), patterns, layers=list(patterns), recipe=recipe, progress=False)
        return [layer.solves[0].loss for layer in result.report.layers]

    exact = losses(torch.float64)
    monkeypatch.setattr(rows, "_MAX_FLOPS", {"cpu": 0.0})
    assert losses(torch.float64) == pytest.approx(exact, rel=1e-9, abs=1e-15)
    assert losses(torch.float32) == pytest.approx(exact, rel=1e-5, abs=1e-10)


def test_iterations_end_where_held_out_samples_no_longer_gain() -> None:
    """Few positions for the columns that are kept: the exact solution fits the noise, an early one does not."""
    generator = torch.Generator().manual_seed(5)
    scales = torch.logspace(0, -1.5, 128, dtype=torch.float64)
    x = torch.randn(170, 128, generator=generator, dtype=torch.float64) * scales
    truth = torch.randn(128, 16, generator=generator, dtype=torch.float64)
    y = x @ truth + torch.randn(170, 16, generator=generator, dtype=torch.float64)
    moments = Moments.collect([(x[None, :70], y[None, :70])])
    kept = torch.rand(16, 128, generator=generator) < 0.5
    one, start = SharedFactor(moments.gram, kept, 1e-6, torch.float64), truth.T * kept
    judged: list[float] = []

    def held_out(w: Tensor) -> float:
        judged.append(float((x[70:] @ w.T - y[70:]).square().mean()))
        return judged[-1]

    exact, early = one.refit(start, moments).weight, one.refit(start, moments, held_out).weight
    seen = list(judged)
    assert seen[-1] >= seen[-2] == min(seen) == held_out(early)  # the first that is worse is the last
    assert held_out(early) < 0.9 * held_out(exact)


def chosen(rows_: int, columns: int, share: float, product_flops: float) -> type[RowSystems]:
    """Which way is taken, without taking it."""
    gram = torch.eye(columns, dtype=torch.float64)[None]
    kept = torch.arange(columns).expand(rows_, -1) < share * columns
    with mock.patch.object(RowBlocks, "_factor"), mock.patch.object(SharedFactor, "_inverted"):
        return type(row_systems(gram, kept, 1e-6, torch.float32, product_flops))


@pytest.mark.parametrize(
    ("rows_", "columns", "share", "closed_form", "few_samples", "many_samples"),
    [
        (64, 576, 0.5, RowBlocks, RowBlocks, RowBlocks),  # ResNet20, its widest layer at 2:4
        (128, 1152, 0.25, RowBlocks, RowBlocks, RowBlocks),  # ResNet50, layer2.1.conv2 at 1:4
        (256, 2304, 0.5, SharedFactor, SharedFactor, RowBlocks),  # layer3.1.conv2
        (512, 4608, 0.5, SharedFactor, SharedFactor, SharedFactor),  # layer4.1.conv2: blocks do not fit
    ],
)
def test_the_cheaper_way_is_taken(
    rows_: int,
    columns: int,
    share: float,
    closed_form: type[RowSystems],
    few_samples: type[RowSystems],
    many_samples: type[RowSystems],
) -> None:
    assert chosen(rows_, columns, share, product_flops=0.0) is closed_form
    assert chosen(rows_, columns, share, product_flops=3e10) is few_samples
    assert chosen(rows_, columns, share, product_flops=1e12) is many_samples


def test_a_shared_factor_preconditions_by_better_solutions_than_one_product() -> None:
    generator = torch.Generator().manual_seed(4)
    scales = torch.logspace(0, -2, 96, dtype=torch.float64)
    x = torch.randn(400, 96, generator=generator, dtype=torch.float64) * scales
    x = x @ torch.linalg.qr(torch.randn(96, 96, generator=generator, dtype=torch.float64)).Q
    kept = torch.rand(24, 96, generator=generator) < 0.5
    one = SharedFactor((x.mT @ x)[None] / 400, kept, 1e-3, torch.float64)
    rhs = torch.randn(24, 96, generator=generator, dtype=torch.float64) * kept
    exact = list(one.changes(rhs, 1.0))[-1]

    def error(found: Tensor) -> float:
        """In the norm of the equations, by the best multiple of each row: their scale does not matter."""
        scale = (found * rhs).sum(1, keepdim=True) / (found * one._product(found)).sum(1, keepdim=True)
        gap = scale * found - exact
        return float((gap * one._product(gap)).sum())

    assert error(one.solve(rhs)) < 0.8 * error(one._precondition(rhs))


def test_dead_inputs_and_rows_keep_one_factor_going() -> None:
    gram = torch.zeros(1, 4, 4, dtype=torch.float64)
    kept = torch.tensor([[True, True, False, False], [False] * 4])
    weight = torch.randn(2, 4, dtype=torch.float64)
    refit = SharedFactor(gram, kept, 1e-6, torch.float64).refit(
        weight, Moments(gram, torch.zeros(1, 4, 2, dtype=torch.float64))
    )
    torch.testing.assert_close(refit.weight, weight * kept)
    collinear = torch.ones(1, 4, 4, dtype=torch.float64)  # of rank one
    moments = Moments(collinear, torch.ones(1, 4, 2, dtype=torch.float64), energy=2.0)
    refit = SharedFactor(collinear, kept, 1e-6, torch.float32).refit(weight, moments)
    assert torch.isfinite(refit.weight).all()
    assert float(refit.weight[0].sum()) == pytest.approx(1.0, abs=1e-3)


@pytest.mark.parametrize("exact", [True, False])
def test_the_preconditioner_is_symmetric_positive_definite(exact: bool) -> None:
    made: RowSystems = blocks()[0]
    if not exact:
        made = SharedFactor(made.gram, made.kept, made.relative_damping, torch.float64)
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


def test_statistics_that_are_not_finite_are_refused() -> None:
    gram = torch.full((1, 2, 2), torch.nan, dtype=torch.float64)
    with pytest.raises(InputError, match="inputs are not finite"):
        RowBlocks(gram, torch.ones(3, 2, dtype=torch.bool), 0.0, torch.float64)


def test_a_layer_whose_inputs_are_all_dead_is_survived() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 2)).double().eval()
    with torch.no_grad():
        model[0].bias.fill_(-100.0)
    result = prune(model, data(4), "2:4", progress=False)
    assert torch.isfinite(result.model[2].weight).all()
