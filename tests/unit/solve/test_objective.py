"""Losses, gradients and curvature products against dense float64 matrices of the eager model."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor

from snows.errors import InputError
from snows.graph.autodiff import linearize
from snows.graph.segment import SampleLayout
from snows.solve.objective import Objective, Piece, restrict
from tests.networks import CURVED, NETWORKS, captured, example, prunable
from tests.oracles import KStepLoss, finite_difference
from tests.problems import SAMPLES, problem, pruned_parameters, weight_of

ALL = 1000  # a horizon beyond the end of every network here
HORIZONS = (0, 1, 3, ALL)
LAYERS = [(name, parameter) for name in NETWORKS for parameter in prunable(name)]
CASES = [(name, parameter, horizon) for name, parameter in LAYERS for horizon in HORIZONS]
NORMALIZATIONS = ("variance", "mean", "sum")

each_case = pytest.mark.parametrize(("name", "parameter", "horizon"), CASES)
each_layer = pytest.mark.parametrize(("name", "parameter"), LAYERS)


@cache
def oracle(
    name: str, parameter: str, horizon: int, targets_from: str = "dense-stream", normalization: str = "variance"
) -> KStepLoss:
    model, graph = captured(name)
    positions = {layer.parameter: layer.position for layer in graph.layers}
    earlier = {key for key, position in positions.items() if position < positions[parameter]}
    current = {key: value for key, value in pruned_parameters(name).items() if not key.endswith("!")}
    return KStepLoss(model, example(name, SAMPLES), current, parameter, horizon, targets_from, normalization, earlier)


@cache
def jacobian(name: str, parameter: str) -> list[Tensor]:
    return oracle(name, parameter, ALL).jacobian(weight_of(name, parameter))


def vectors(weight: Tensor, count: int = 3) -> list[Tensor]:
    generator = torch.Generator().manual_seed(4)
    return [torch.randn(weight.shape, generator=generator, dtype=weight.dtype) for _ in range(count)]


def relative(a: Tensor, b: Tensor) -> float:
    return float((a - b).norm() / b.norm().clamp(min=1e-300))


@each_case
@pytest.mark.parametrize("targets_from", ["dense-stream", "dense-weights"])
def test_loss_and_gradient_equal_the_eager_model(name: str, parameter: str, horizon: int, targets_from: str) -> None:
    weight = weight_of(name, parameter)
    given = problem(name, parameter, horizon, targets_from=targets_from)
    for normalization in NORMALIZATIONS:
        expected = oracle(name, parameter, horizon, targets_from, normalization)
        objective = given.objective(normalization)
        variable = weight.clone().requires_grad_()
        value = expected(variable)
        (gradient,) = torch.autograd.grad(value, variable)
        loss, found = objective.loss_and_gradient(weight)
        assert loss == pytest.approx(value.item(), rel=1e-11)
        assert objective.loss(weight) == pytest.approx(value.item(), rel=1e-11)
        assert relative(found, gradient) <= 1e-10


@each_case
def test_gauss_newton_equals_the_dense_matrix(name: str, parameter: str, horizon: int) -> None:
    weight = weight_of(name, parameter)
    matrix = oracle(name, parameter, horizon).gauss_newton(weight, jacobian(name, parameter))
    product = problem(name, parameter, horizon).objective("variance").product("gauss-newton", weight, keep=True)
    for v in vectors(weight):
        assert relative(product(v).flatten(), matrix @ v.flatten()) <= 1e-9


@each_case
def test_hessian_equals_the_dense_matrix_and_finite_differences(name: str, parameter: str, horizon: int) -> None:
    weight = weight_of(name, parameter)
    loss = oracle(name, parameter, horizon)
    given = problem(name, parameter, horizon)
    objective = given.objective("variance")
    product = objective.product("hessian", weight, keep=True)
    matrix = loss.hessian(weight)
    for v in vectors(weight):
        assert relative(product(v).flatten(), matrix @ v.flatten()) <= 1e-9
    v = vectors(weight)[0]
    assert relative(product(v), finite_difference(loss, weight, v / v.norm()) * v.norm()) <= 1e-5

    # where the segment says so, and only there, Gauss-Newton is the Hessian
    gauss_newton = loss.gauss_newton(weight, jacobian(name, parameter))
    if given.segment.piecewise_linear:
        assert relative(gauss_newton, matrix) <= 1e-9
    else:
        assert name in CURVED


@pytest.mark.parametrize(("name", "parameter"), [case for case in LAYERS if case[0] in CURVED])
def test_curved_segments_are_not_called_piecewise_linear(name: str, parameter: str) -> None:
    """By the dense matrices: whatever differs from Gauss-Newton must not be on the whitelist."""
    weight = weight_of(name, parameter)
    for horizon in HORIZONS:
        loss = oracle(name, parameter, horizon)
        equal = relative(loss.gauss_newton(weight, jacobian(name, parameter)), loss.hessian(weight)) <= 1e-9
        segment = problem(name, parameter, horizon).segment
        assert equal or not segment.piecewise_linear
        if horizon == ALL and parameter not in ("head.weight", "out.weight"):
            assert not segment.piecewise_linear


@each_case
def test_fisher_is_made_of_per_sample_gradients(name: str, parameter: str, horizon: int) -> None:
    weight = weight_of(name, parameter)
    given = problem(name, parameter, horizon)
    for normalization in NORMALIZATIONS:
        matrix = oracle(name, parameter, horizon, "dense-stream", normalization).fisher(weight)
        product = given.objective(normalization).product("fisher", weight, keep=True)
        for v in vectors(weight, 2):
            assert relative(product(v).flatten(), matrix @ v.flatten()) <= 1e-9


@each_layer
@pytest.mark.parametrize("kind", ["gauss-newton", "hessian", "fisher"])
def test_products_are_linear_and_symmetric(name: str, parameter: str, kind: Any) -> None:
    weight = weight_of(name, parameter)
    product = problem(name, parameter, 3).objective("variance").product(kind, weight, keep=True)
    u, v, w = vectors(weight)
    scale = float(product(u).norm() * v.norm())
    assert relative(product(2 * u - 3 * v), 2 * product(u) - 3 * product(v)) <= 1e-10
    assert abs(float((v * product(u)).sum() - (u * product(v)).sum())) <= 1e-10 * scale
    if kind != "hessian":
        for vector in (u, v, w):
            assert float((vector * product(vector)).sum()) >= -1e-12 * scale


@each_layer
def test_splitting_keeping_and_restricting_change_nothing_else(name: str, parameter: str) -> None:
    weight = weight_of(name, parameter)
    v = vectors(weight)[0]
    whole = problem(name, parameter, 3, split=(SAMPLES,)).objective("variance")
    for split in ((2, 3), (1,) * SAMPLES):
        objective = problem(name, parameter, 3, split=split).objective("variance")
        assert objective.weights == pytest.approx(whole.weights, rel=1e-10)
        assert objective.loss(weight) == pytest.approx(whole.loss(weight), rel=1e-10)
        assert relative(objective.loss_and_gradient(weight)[1], whole.loss_and_gradient(weight)[1]) <= 1e-10
        for kind in ("gauss-newton", "hessian", "fisher"):
            reference = whole.product(kind, weight, keep=True)(v)
            kept, made = (objective.product(kind, weight, keep=keep) for keep in (True, False))
            assert relative(kept(v), reference) <= 1e-10
            assert torch.equal(kept(v), made(v))
            assert torch.equal(kept(v), kept(v))  # nothing is used up by a product

    forgetful = problem(name, parameter, 3, keep_bytes=0).objective("variance")
    assert forgetful.loss(weight) == problem(name, parameter, 3).objective("variance").loss(weight)

    mask = torch.arange(weight.numel()).view(weight.shape) % 3 != 0
    product = whole.product("gauss-newton", weight, keep=True)
    restricted = restrict(product, mask)
    assert not restricted(v)[~mask].any()
    assert torch.equal(restricted(v), restricted(v * mask))
    assert torch.equal(restricted(v)[mask], product(v * mask)[mask])


def test_a_subset_is_normalized_by_its_own_samples() -> None:
    weight = weight_of("mlp", "2.weight")
    objective = problem("mlp", "2.weight", 2, split=(2, 2, 2)).objective("mean")
    parts = [objective.subset([index]) for index in range(3)]
    assert [part.samples for part in parts] == [2, 2, 2]
    assert objective.loss(weight) == pytest.approx(sum(part.loss(weight) for part in parts) / 3, rel=1e-12)


def test_a_constant_target_does_not_blow_up_the_variance_normalization() -> None:
    """An operation that never moves has no variance to divide by."""
    given = problem("mlp", "4.weight", 0)
    given[0], given[1]  # both pieces are kept from here on
    for index, piece in list(given._kept.items()):
        zeros = tuple(torch.zeros_like(target) for target in piece.targets)
        given._kept[index] = replace(piece, compute_targets=lambda zeros=zeros: zeros)
    weight = weight_of("mlp", "4.weight")
    assert torch.isfinite(torch.tensor(given.objective("variance").loss(weight)))


def test_fisher_refuses_samples_it_cannot_tell_apart() -> None:
    objective = problem("mlp", "2.weight", 1).objective("mean")
    unknown = Objective(
        objective.pieces, objective.weights, "mean", objective.chosen, objective.sizes, layouts=(None, None)
    )
    with pytest.raises(InputError, match="empirical Fisher needs the loss of each sample"):
        unknown.product("fisher", weight_of("mlp", "2.weight"), keep=True)


def test_sample_layouts_split_outer_and_inner_axes() -> None:
    value = torch.arange(12).view(6, 2)
    assert SampleLayout(0, inner=False).split(value, 3).tolist() == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9, 10, 11]]
    assert SampleLayout(0, inner=True).split(value, 3).tolist() == [[0, 1, 6, 7], [2, 3, 8, 9], [4, 5, 10, 11]]
    assert SampleLayout(1, inner=False).split(value.T, 3).tolist() == [[0, 2, 1, 3], [4, 6, 5, 7], [8, 10, 9, 11]]


@each_layer
def test_jacobians_in_half_precision_give_nearly_the_same(name: str, parameter: str) -> None:
    """Rounding of one part in 256 at each operation, which samples average out."""
    weight = weight_of(name, parameter)
    given = problem(name, parameter, 3)
    full, half = given.objective("variance"), given.objective("variance", torch.bfloat16)
    v = torch.randn(weight.shape, generator=torch.Generator().manual_seed(5), dtype=weight.dtype)
    for exact, rounded in (
        (full.loss_and_gradient(weight)[1], half.loss_and_gradient(weight)[1]),
        *(
            (full.product("gauss-newton", weight, keep)(v), half.product("gauss-newton", weight, keep)(v))
            for keep in (True, False)
        ),
    ):
        assert rounded.dtype == weight.dtype
        assert float((exact - rounded).norm()) < 0.02 * float(exact.norm())
    assert full.loss(weight) == half.loss(weight)


@pytest.mark.parametrize(("name", "parameter"), [("residual", "conv2.weight"), ("two-inputs", "joint.weight")])
def test_narrowed_problems_see_the_first_samples_of_each_piece(name: str, parameter: str) -> None:
    weight = weight_of(name, parameter)
    given = problem(name, parameter, 3, split=(3, 2))
    whole = given.objective("variance")
    assert given.narrowed(3) is given
    narrow = given.narrowed(2)
    assert narrow.sizes == (2, 2)
    assert [len(narrow[i].targets[0]) for i in range(2)] == [2, 2]
    for index in range(2):
        for part, target in zip(narrow[index].targets, given[index].targets, strict=True):
            torch.testing.assert_close(part, target[:2])
    objective = narrow.objective("variance")
    assert objective.weights == whole.weights  # variances are those of all samples
    v = vectors(weight)[0]
    # the second piece is whole in both: what it gives differs by the number of samples that it is a mean over
    second = objective.subset([1]).product("gauss-newton", weight, keep=True)(v)
    torch.testing.assert_close(second, whole.subset([1]).product("gauss-newton", weight, keep=True)(v))


def test_what_is_not_along_the_first_axis_is_not_narrowed() -> None:
    """Sizes that are read as numbers would not follow."""
    _, graph = captured("attention")
    layer = next(layer for layer in graph.layers if layer.parameter == "attention.out_proj.weight")
    assert not graph.segment([layer], 3).batch_first
    given = problem("attention", "attention.out_proj.weight", 3, split=(3, 2))
    assert given.narrowed(1) is given
    assert problem("attention", "mlp.0.weight", 3, split=(3, 2)).narrowed(1).sizes == (1, 1)


@pytest.mark.parametrize("shape", [(40, 4, 320, 400), (2000, 10_000), (7,)])
def test_losses_of_very_many_numbers_are_exact(shape: tuple[int, ...]) -> None:
    """In single precision a norm of twenty million numbers is off by a thousandth on a CPU."""
    x = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    if x.ndim == 4:
        x = x.to(memory_format=torch.channels_last)
    weight = torch.tensor(2.0)
    piece = Piece(lambda w: (w * x,), lambda: (x,), len(x), lambda w, _: linearize(lambda v: (v * x,), w))
    objective = Objective([piece], (1.0,), "sum", (0,), (len(x),))
    expected = float(x.double().square().sum())
    assert objective.loss(weight) == pytest.approx(expected, rel=1e-5)
    loss, gradient = objective.loss_and_gradient(weight)
    assert loss == pytest.approx(expected, rel=1e-5)
    assert float(gradient) == pytest.approx(2 * expected, rel=1e-3)
