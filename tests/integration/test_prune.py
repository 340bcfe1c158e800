"""Small prunes from end to end: what is promised of the result, of the model given, and of wrong input."""

from __future__ import annotations

import gc
import warnings
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import prune as torch_prune
from torch.utils.data import DataLoader, TensorDataset

import snows
from snows import ArgumentError, CaptureError, InputError, SnowsWarning, api
from snows.data import preparation
from snows.data.models import build_model
from snows.data.sources import load_data
from snows.devices import memory
from snows.errors import StatisticsError
from snows.events import LayerSolved, LayerStarted
from snows.masks import Choice
from snows.solve import layer as adjust
from snows.solve.least_squares import RowBlocks
from snows.solve.newton import Newton, NewtonOutcome
from snows.solve.objective import Objective
from snows.solve.problem import LayerProblem
from tests.networks import NETWORKS, example, make
from tests.oracles import KStepLoss

SAMPLES = 24
QUICK = snows.Recipe(horizon=3, sweeps=2, cg_steps=5)


def quick(name: str, pattern: Any = None, **options: Any) -> snows.Result:
    options = {"recipe": QUICK, "progress": False, **options}
    return snows.prune(make(name), example(name, SAMPLES), pattern, **options)


def check(result: snows.Result, model: nn.Module) -> None:
    """What holds of every result."""
    dense = model.state_dict()
    assert type(result.model) is type(model)
    assert set(result.masks) == {layer.parameter for layer in result.report.layers}
    for name, tensor in result.model.state_dict().items():
        if name in result.masks:
            mask = result.masks[name]
            assert mask.dtype == torch.bool
            assert not tensor[~mask].any()
            assert torch.isfinite(tensor).all()
        else:
            assert torch.equal(tensor, dense[name])
    for layer in result.report.layers:
        assert layer.kept == int(result.masks[layer.parameter].sum())
        for solve in layer.solves:
            if solve.outcome != NewtonOutcome.NOT_ASKED.value:
                assert not solve.held_out > solve.held_out_masked  # NaN where nothing is held out
                assert solve.loss <= solve.loss_start or solve.kept != "solved"
                # The same number where the masked weights are the start, computed with and without gradients.
                assert solve.loss_start <= solve.loss_masked * (1 + 1e-6)
    total = sum(int((~mask).sum()) for mask in result.masks.values())
    assert result.report.sparsity == pytest.approx(total / sum(mask.numel() for mask in result.masks.values()))
    assert result.report.network_sparsity == pytest.approx(total / sum(p.numel() for p in model.parameters()))


ALL_LAYERS = {
    "mlp": "2:4", "conv-bn": "2:4", "residual": "2:4", "grouped": 0.3, "depthwise": 0.3, "conv1d": 0.3, "conv3d": 0.3,
    "padded": "2:4", "attention": "2:4", "gated": "2:4", "shared-relu": "1:4", "tied": "2:4", "two-outputs": "2:4",
    "dict-output": 0.3, "two-inputs": "2:4",
}  # fmt: skip


@pytest.mark.parametrize("name", NETWORKS)
def test_every_network_is_pruned(name: str) -> None:
    pattern = ALL_LAYERS[name]
    result = quick(name, pattern)
    check(result, make(name))
    reasons = {layer.name: layer.reason for layer in result.report.dense_layers}
    assert any("first layer" in reason for reason in reasons.values())
    assert any("last layer" in reason for reason in reasons.values())
    if isinstance(pattern, str):
        n, m = map(int, pattern.split(":"))
        assert all(snows.NM(n, m).violations(mask) == 0 for mask in result.masks.values())
        assert all(mask.sum() * m == mask.numel() * n for mask in result.masks.values())
    else:
        weights = sum(mask.numel() for mask in result.masks.values())
        assert sum(int((~mask).sum()) for mask in result.masks.values()) == round(pattern * weights)


@pytest.mark.parametrize("mask", ["magnitude", "random", "wanda", snows.Magnitude(), snows.Wanda()])
@pytest.mark.parametrize("pattern", ["2:4", 0.5, snows.Unstructured(0.5, "uniform")])
def test_every_mask_method_with_every_kind_of_pattern(mask: Any, pattern: Any) -> None:
    result = quick("mlp", pattern, mask=mask, layers="2")
    check(result, make("mlp"))
    assert int(result.masks["2.weight"].sum()) == 32


@pytest.mark.parametrize("name", ["mlp", "conv-bn", "residual", "attention"])
def test_a_longer_horizon_has_a_lower_loss_than_layerwise_reconstruction(name: str) -> None:
    """By an independent loss of the first pruned layer, whose inputs and later layers are the same in both runs."""
    recipe = snows.Recipe(horizon=3, sweeps=1, newton_steps=3, held_out=0.0)
    far, near = quick(name, "2:4", recipe=recipe), quick(name, "2:4", recipe=recipe, horizon=0)
    first = far.report.layers[0]
    model = make(name)
    loss = KStepLoss(
        model,
        example(name, SAMPLES),
        model.state_dict(),
        first.parameter,
        first.horizon,
        "dense-stream",
        "variance",
        set(),
    )
    losses = [float(loss(result.model.get_parameter(first.parameter))) for result in (far, near)]
    assert losses[0] == pytest.approx(first.solves[0].loss, rel=1e-9)
    assert losses[0] <= losses[1]


def test_horizon_zero_and_mask_only() -> None:
    layerwise = quick("conv-bn", "2:4", horizon=0)
    check(layerwise, make("conv-bn"))
    assert all(layer.horizon == 0 for layer in layerwise.report.layers)
    for method in ("magnitude", "wanda"):
        bare = quick("conv-bn", "2:4", solver=None, mask=method)
        check(bare, make("conv-bn"))
        for name, mask in bare.masks.items():
            assert torch.equal(bare.model.get_parameter(name), make("conv-bn").get_parameter(name) * mask)


def test_the_paper_as_written() -> None:
    result = quick("conv-bn", "2:4", recipe="paper")
    check(result, make("conv-bn"))
    assert result.report.recipe["start"] == "masked"
    assert all(solve.start == "masked weights" for layer in result.report.layers for solve in layer.solves)
    assert {layer.solves[0].curvature for layer in result.report.layers} == {"gauss-newton"}  # here it is the Hessian
    assert {layer.solves[0].curvature for layer in quick("gated", 0.5, recipe="paper").report.layers} == {"hessian"}
    assert [layer.horizon for layer in result.report.layers] == [4, 2]  # K=40, cut at the end of the network


@pytest.mark.parametrize(("solver", "reads"), [("newton", "dense"), (None, "refitted")])
def test_masks_are_chosen_from_dense_inputs_where_weights_are_readjusted(solver: str | None, reads: str) -> None:
    def weights(reads: Any) -> list[Tensor]:
        result = quick("residual", 0.6, mask=snows.OBC(reads=reads), solver=solver)
        return [result.model.get_parameter(name) for name in result.masks]

    found = {each: weights(each) for each in ("auto", "dense", "refitted")}
    same = {each: all(map(torch.equal, found["auto"], found[each])) for each in ("dense", "refitted")}
    assert same == {each: each == reads for each in same}


@dataclass(frozen=True)
class Watched:
    """Magnitude, with a note of what it was asked."""

    asked: list[tuple[float, float]] = field(default_factory=list)  # for which sparsity, and what is left before

    def masks(self, weights: Mapping[str, Tensor], patterns: Mapping[str, Any]) -> Choice:
        for name, weight in weights.items():
            self.asked.append((patterns[name].sparsity, float((weight != 0).float().mean())))
        return Choice({name: patterns[name].best_mask(weight.abs()) for name, weight in weights.items()})


class WatchedByLayer(Watched):
    def choose_layer(self, name: str, weight: Tensor, gram: Tensor, pattern: Any) -> Choice:
        return self.masks({name: weight}, {name: pattern})


class WatchedTogether(Watched):
    def choose(self, network: Any) -> Choice:
        return self.masks(network.weights, network.patterns)


@pytest.mark.filterwarnings("ignore:the mask of")  # all weights of one of few outputs may go
@pytest.mark.parametrize(
    ("pattern", "options", "expected"),
    [
        ("1:4", {"recipe": QUICK}, [(0.5, 1.0), (0.75, 0.5)]),
        ("2:4", {"recipe": QUICK}, [(0.5, 1.0)]),  # halfway lie 2.8 of 4
        ("2:4", {"recipe": QUICK.replace(sweeps=3)}, [(0.25, 1.0), (0.5, 0.75)]),
        (0.75, {"recipe": QUICK}, [(0.5, 1.0), (0.75, 0.5)]),
        ("1:4", {"recipe": QUICK.replace(sweeps=3)}, [(0.5, 1.0), (0.75, 0.5)]),
        (0.875, {"recipe": QUICK.replace(sweeps=3)}, [(0.5, 1.0), (0.75, 0.5), (0.875, 0.25)]),
        ("1:4", {"recipe": QUICK.replace(mask_steps=1)}, [(0.75, 1.0)]),
        ("1:4", {"recipe": QUICK.replace(sweeps=1)}, [(0.75, 1.0)]),
        ("1:4", {"recipe": QUICK, "solver": None}, [(0.75, 1.0)]),
    ],
)
@pytest.mark.parametrize("kind", [WatchedByLayer, WatchedTogether])
def test_masks_reach_the_pattern_in_steps(kind: type[Watched], pattern: Any, options: Any, expected: Any) -> None:
    """Each step chooses from the weights that the sweep before has re-adjusted."""
    method = kind()
    result = snows.prune(make("mlp"), example("mlp", 40), pattern, mask=method, progress=False, **options)
    assert method.asked == expected
    (mask,) = result.masks.values()
    assert int(mask.sum()) == round((1 - expected[-1][0]) * mask.numel())


def test_more_steps_than_sweeps_are_refused() -> None:
    with pytest.raises(ArgumentError, match=r"mask_steps is 3, sweeps 2; .* at least as many sweeps are expected"):
        quick("mlp", "1:4", mask="wanda", recipe=QUICK.replace(mask_steps=3))


@pytest.mark.parametrize("curvature", ["gauss-newton", "hessian", "fisher"])
def test_every_curvature_lowers_the_loss(curvature: str) -> None:
    result = quick("attention", "2:4", recipe=QUICK.replace(curvature=curvature))
    check(result, make("attention"))
    assert {solve.curvature for layer in result.report.layers for solve in layer.solves} == {curvature}


# What is kept


@pytest.mark.parametrize("factor", [100.0, float("nan")])
def test_weights_that_do_worse_on_held_out_samples_are_not_kept(factor: float, monkeypatch: pytest.MonkeyPatch) -> None:
    solve = adjust.newton

    def overfit(*arguments: Any) -> Newton:
        return replace(solve(*arguments), weight=arguments[2] * factor, loss=0.0)

    monkeypatch.setattr(adjust, "newton", overfit)
    result = quick("conv-bn", "2:4")
    solves = [solve for layer in result.report.layers for solve in layer.solves]
    assert {solve.kept for solve in solves} <= {"least squares", "masked weights"}
    check(result, make("conv-bn"))
    assert result.report.solve_outcomes["worse on held-out samples; the start was kept"] == len(solves)


def test_a_solve_that_goes_too_far_is_kept_in_part(monkeypatch: pytest.MonkeyPatch) -> None:
    """Four times as far as Newton's method would go."""
    solve = adjust.newton

    def too_far(*arguments: Any) -> Newton:
        start, found = arguments[2], solve(*arguments)
        return replace(found, weight=start + 4 * (found.weight - start), loss=0.0)

    monkeypatch.setattr(adjust, "newton", too_far)
    report = quick("conv-bn", "2:4", recipe=QUICK.replace(mask_steps=1)).report
    solves = [solve for layer in report.layers for solve in layer.solves if "of the way" in solve.kept]
    assert solves
    for solve_report in solves:
        assert 0 < solve_report.held_out < solve_report.held_out_masked
        assert solve_report.loss > 0  # measured, not that of the solve
    assert report.solve_outcomes["worse on held-out samples; part of the way was kept"] == len(solves)


def test_with_nothing_held_out_every_solve_is_kept() -> None:
    result = quick("conv-bn", "2:4", recipe=QUICK.replace(held_out=0.0))
    check(result, make("conv-bn"))
    assert result.report.held_out_samples == 0
    assert {solve.kept for layer in result.report.layers for solve in layer.solves} == {"solved"}


def test_samples_are_fitted_or_held_out_never_both(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: dict[str, set[float]] = {"fitted": set(), "held out": set()}
    cut = api.cut

    def watch(*arguments: Any) -> Any:
        batches = cut(*arguments)
        for index, batch in enumerate(batches.values):
            kind = "held out" if index >= len(batches.sizes) - batches.held_out else "fitted"
            seen[kind] |= set(next(iter(batch.values())).flatten(1)[:, 0].tolist())
        return batches

    monkeypatch.setattr(api, "cut", watch)
    result = quick("residual", "2:4")
    assert (len(seen["fitted"]), len(seen["held out"])) == (18, 6)
    assert not seen["fitted"] & seen["held out"]
    assert (result.report.samples, result.report.held_out_samples) == (SAMPLES, 6)


@pytest.mark.parametrize("minibatch", [None, 4])
def test_curvature_is_that_of_fitted_samples(minibatch: int | None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "_MICRO_BATCH", {"cpu": 4})
    seen: set[int] = set()
    product = Objective.product

    def watch(objective: Objective, *arguments: Any) -> Any:
        seen.update(objective.chosen)
        return product(objective, *arguments)

    monkeypatch.setattr(Objective, "product", watch)
    quick("residual", "2:4", recipe=QUICK.replace(minibatch=minibatch))
    assert seen == set(range(5))  # 18 samples are fitted, 6 held out


def test_statistics_that_cannot_be_used_are_survived(monkeypatch: pytest.MonkeyPatch) -> None:
    def singular(*_: Any) -> None:
        raise StatisticsError("its statistics stay singular")

    monkeypatch.setattr(adjust, "RowBlocks", singular)
    with pytest.warns(SnowsWarning, match="solved without its closed form"):
        result = quick("conv-bn", "2:4")
    check(result, make("conv-bn"))
    assert any("stay singular" in warning for warning in result.report.warnings)
    assert any(solve.newton_steps for layer in result.report.layers for solve in layer.solves)


# Where masks come from


def test_given_masks_are_kept_as_they_are_and_other_layers_stay_dense() -> None:
    masks = {"2": torch.rand(8, 8, generator=torch.Generator().manual_seed(0)) < 0.6}
    result = quick("mlp", mask=masks)
    check(result, make("mlp"))
    assert list(result.masks) == ["2.weight"]
    assert torch.equal(result.masks["2.weight"], masks["2"])
    by_parameter = quick("mlp", mask={"2.weight": masks["2"]})
    assert torch.equal(by_parameter.model.get_parameter("2.weight"), result.model.get_parameter("2.weight"))
    assert result.report.pattern == "given"


def test_the_zeros_of_the_weights_are_a_mask() -> None:
    model = make("mlp")
    model[2].weight[:, ::2] = 0
    with pytest.warns(SnowsWarning, match="the sparse network is its own reference"):
        result = snows.prune(model, example("mlp", SAMPLES), mask="weights", recipe=QUICK, progress=False)
    check(result, model)
    assert torch.equal(result.masks["2.weight"], model[2].weight != 0)


def test_torch_pruning_modules_are_read_as_masks_and_left_alone() -> None:
    model = make("mlp")
    torch_prune.l1_unstructured(model[2], "weight", 0.4)
    result = snows.prune(model, example("mlp", SAMPLES), recipe=QUICK, progress=False)
    assert torch.equal(result.masks["2.weight"], model[2].weight_mask.bool())
    assert not result.model[2].weight[~result.masks["2.weight"]].any()
    assert not hasattr(result.model[2], "weight_mask")
    assert hasattr(model[2], "weight_orig")
    assert torch_prune.is_pruned(model)


def test_torch_pruning_modules_of_a_model_that_can_still_be_trained() -> None:
    torch.manual_seed(2)
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 2)).eval()
    torch_prune.l1_unstructured(model[2], "weight", 0.4)
    result = snows.prune(model, torch.randn(SAMPLES, 4), recipe=QUICK, progress=False)
    assert torch.equal(result.masks["2.weight"], model[2].weight_mask.bool())


def test_patterns_layers_and_exclusions_by_name() -> None:
    pattern = {"*": "2:4", "shortcut.*": "dense", "last": "1:4"}
    result = quick("residual", pattern, layers=["conv*", "shortcut.0", "last"], exclude="conv2")
    assert {layer.name: layer.pattern for layer in result.report.layers} == {"conv1": "2:4", "last": "1:4"}
    reasons = {layer.name: layer.reason for layer in result.report.dense_layers}
    assert reasons == {
        "stem": "not among the chosen layers",
        "conv2": "excluded",
        "shortcut.0": "its pattern is 'dense'",
        "head": "not among the chosen layers",
    }
    check(result, make("residual"))


def test_first_and_last_layers_are_pruned_when_named() -> None:
    result = quick("mlp", 0.3, layers="*")
    assert [layer.name for layer in result.report.layers] == ["0", "2", "4"]
    check(result, make("mlp"))


def test_layers_that_do_not_fit_the_pattern_are_listed() -> None:
    result = quick("depthwise", "2:4")
    reasons = {layer.name: layer.reason for layer in result.report.dense_layers}
    assert reasons["2"] == "its 1 input channels per group are no multiple of 4"


# The caller's world


def state(model: nn.Module) -> tuple[Any, ...]:
    return (
        {name: value.clone() for name, value in model.state_dict().items()},
        {name: (p.requires_grad, None if p.grad is None else p.grad.clone()) for name, p in model.named_parameters()},
        {name: module.training for name, module in model.named_modules()},
        {name: len(module._forward_hooks) for name, module in model.named_modules()},
        torch.get_rng_state(),
        torch.is_grad_enabled(),
        (torch.get_default_dtype(), torch.get_num_threads(), torch.are_deterministic_algorithms_enabled()),
        (torch.backends.cuda.flash_sdp_enabled(), torch.backends.cuda.math_sdp_enabled(), list(warnings.filters)),
    )


def assert_same(before: tuple[Any, ...], after: tuple[Any, ...]) -> None:
    torch.testing.assert_close(after[0], before[0], rtol=0, atol=0)
    for name, (requires_grad, grad) in before[1].items():
        assert after[1][name][0] == requires_grad
        assert (grad is None) == (after[1][name][1] is None)
        assert grad is None or torch.equal(grad, after[1][name][1])
    assert after[2] == before[2]
    assert after[3] == before[3]
    assert torch.equal(after[4], before[4])
    assert after[5:] == before[5:]


def mixed_model() -> nn.Module:
    """Half in train mode, half with gradients: something to be restored."""
    model = make("conv-bn")
    model[1].train()
    for parameter in list(model.parameters())[::2]:
        parameter.requires_grad_()
        parameter.grad = torch.ones_like(parameter)
    return model


class StopHereError(Exception):
    pass


@pytest.mark.parametrize(
    ("raises", "at"),
    [(None, (0, 0)), *((kind, at) for kind in (StopHereError, KeyboardInterrupt) for at in [(0, 0), (0, 1), (1, 1)])],
)
def test_the_model_and_the_world_are_left_as_they_were(
    raises: type[BaseException] | None, at: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """After a run, and after an exception in the middle of a layer's solve."""
    model = mixed_model()
    solve, turns = adjust.newton, iter([(sweep, index) for sweep in range(2) for index in range(2)])

    def newton(*arguments: Any) -> Newton:
        if next(turns) == at and raises is not None:
            raise raises
        return solve(*arguments)

    monkeypatch.setattr(adjust, "newton", newton)
    options: dict[str, Any] = {"recipe": QUICK, "progress": False}
    with torch.no_grad():  # the caller's own mode
        before = state(model)
        if raises is not None:
            with pytest.raises(raises):
                snows.prune(model, example("conv-bn", SAMPLES), "2:4", **options)
        else:
            result = snows.prune(model, example("conv-bn", SAMPLES), "2:4", **options)
            assert {n: m.training for n, m in result.model.named_modules()} == before[2]
            assert [p.requires_grad for p in result.model.parameters()] == [r for r, _ in before[1].values()]
        after = state(model)
    assert_same(before, after)


def test_prunes_in_two_threads_are_as_those_in_one() -> None:
    names = ["residual", "attention", "conv-bn", "depthwise"]
    given = {name: (make(name), example(name, SAMPLES), ALL_LAYERS[name]) for name in names}

    def run(name: str) -> snows.Result:
        return snows.prune(*given[name], recipe=QUICK, progress=False)

    alone = {name: run(name) for name in names}
    before = state(make("mlp"))
    with ThreadPoolExecutor(2) as pool:
        together = dict(zip(names, pool.map(run, names), strict=True))
    assert_same(before, state(make("mlp")))
    for name in names:
        assert torch.equal(weights(together[name]), weights(alone[name]))
        assert together[name].report.solve_outcomes == alone[name].report.solve_outcomes
        assert together[name].report.warnings == alone[name].report.warnings


def test_a_capture_that_is_shared_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    model, x = make("residual"), example("residual", SAMPLES)
    mask = {"conv1": torch.arange(model.get_parameter("conv1.weight").numel()).view(4, 4, 3, 3) % 3 != 0}
    options: dict[str, Any] = {"recipe": QUICK, "progress": False}
    alone = [snows.prune(model, x, mask=mask, **options), snows.prune(model, x, "2:4", **options)]
    captured: list[int] = []
    capture = preparation.capture
    monkeypatch.setattr(preparation, "capture", lambda *given: captured.append(1) or capture(*given))
    with preparation.capturing_once(model):
        shared = [snows.prune(model, x, mask=mask, **options), snows.prune(model, x, "2:4", **options)]
        snows.prune(model, x, "2:4", seed=1, **options)
    assert len(captured) == 2
    assert all(torch.equal(weights(a), weights(b)) for a, b in zip(alone, shared, strict=True))
    snows.prune(model, x, "2:4", **options)
    assert len(captured) == 3


def test_progress_tells_the_beginning_and_the_end_of_each_layer() -> None:
    events: list[snows.Event] = []
    result = quick("conv-bn", "2:4", progress=events.append)
    names = [layer.name for layer in result.report.layers]
    told = [event for event in events if isinstance(event, LayerStarted)]
    assert [(e.sweep, e.layer, isinstance(e, LayerSolved)) for e in told] == [
        (sweep, name, ended) for sweep in range(2) for name in names for ended in (False, True)
    ]


def weights(result: snows.Result) -> Tensor:
    return torch.cat([parameter.flatten() for parameter in result.model.parameters()])


def test_a_second_run_is_bit_identical_and_another_seed_is_not() -> None:
    first = quick("residual", "2:4", seed=3)
    torch.rand(5)  # the caller's random numbers do not matter
    assert torch.equal(weights(quick("residual", "2:4", seed=3)), weights(first))
    assert not torch.equal(weights(quick("residual", "2:4", seed=4)), weights(first))
    chosen, other = (quick("residual", "2:4", mask="random", solver=None, seed=seed).masks for seed in (3, 4))
    assert any(not torch.equal(chosen[name], other[name]) for name in chosen)


def test_the_result_does_not_depend_on_how_samples_are_batched(monkeypatch: pytest.MonkeyPatch) -> None:
    model, x = make("conv-bn"), example("conv-bn", SAMPLES)
    recipe = QUICK.replace(product_samples=None)

    def run(calibration: Any) -> Tensor:
        return weights(snows.prune(model, calibration, "2:4", recipe=recipe, progress=False))

    reference = run(x)
    labels = torch.zeros(SAMPLES)
    for calibration in (
        list(x.split(5)),
        [(part, None) for part in x.split(7)],
        TensorDataset(x, labels),
        DataLoader(TensorDataset(x, labels), batch_size=10),
        [{"input": part} for part in x.split(9)],
    ):
        assert torch.equal(run(calibration), reference)
    # the pieces that the work is cut into
    monkeypatch.setattr("snows.api.micro_batch_size", lambda *_: 5)
    torch.testing.assert_close(run(x), reference, rtol=1e-6, atol=1e-8)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_models_are_given_back_in_their_own_precision(dtype: torch.dtype) -> None:
    model = make("conv-bn").to(dtype)
    result = snows.prune(model, example("conv-bn", SAMPLES).float(), "2:4", recipe=QUICK, progress=False)
    assert {parameter.dtype for parameter in result.model.parameters()} == {dtype}
    check(result, model)
    for name, mask in result.masks.items():
        assert not result.model.get_parameter(name)[~mask].any()


def test_a_model_in_train_mode_is_run_in_eval_mode_with_a_warning() -> None:
    model = make("conv-bn").train()
    with pytest.warns(SnowsWarning, match="the model is in train mode") as caught:
        result = snows.prune(model, example("conv-bn", SAMPLES), "2:4", recipe=QUICK, progress=False)
    assert len(caught) == 1
    assert result.report.warnings == [str(caught[0].message)]
    assert model.training
    assert result.model.training
    assert torch.equal(weights(quick("conv-bn", "2:4")), weights(result))


def test_the_report_is_data() -> None:
    import json

    report = quick("conv-bn", "2:4").report
    data = json.loads(report.to_json())
    assert data["sparsity"] == pytest.approx(0.5)
    assert data["samples"] == SAMPLES
    assert len(data["layers"]) == len(report.layers)


# Wrong input


def one_shot() -> Iterator[Tensor]:
    yield torch.randn(4, 6)


def broken_weights() -> nn.Module:
    model = make("mlp")
    model[2].weight[0, 0] = torch.nan
    return model


def broken_data() -> Tensor:
    x = example("mlp", SAMPLES)
    x[3, 1] = torch.inf
    return x


X = example("mlp", SAMPLES)
ERRORS: dict[str, tuple[type[Exception], str, Callable[[], Any]]] = {
    "no module": (ArgumentError, r"^model is a str; expected an nn\.Module$", lambda: snows.prune("resnet", X, "2:4")),
    "shape of the data": (
        InputError,
        r"^Sequential does not run on the data \(inputs of shape \[\(8, 5\)\]\)",
        lambda: snows.prune(make("mlp"), torch.randn(9, 5), "2:4"),
    ),
    "no batches": (InputError, "^the calibration data has no batches", lambda: snows.prune(make("mlp"), [], "2:4")),
    "no samples": (InputError, "^the calibration data has no batches", lambda: snows.prune(make("mlp"), X[:0], "2:4")),
    "one-shot generator": (InputError, "one-shot generator", lambda: snows.prune(make("mlp"), one_shot(), "2:4")),
    "no data": (InputError, "^the calibration data is a int", lambda: snows.prune(make("mlp"), 3, "2:4")),
    "a path": (InputError, "^the calibration data is a str", lambda: snows.prune(make("mlp"), "images/", "2:4")),
    "batches of numbers": (InputError, "^a calibration batch is a int", lambda: snows.prune(make("mlp"), [1], "2:4")),
    "batches without batch dimension": (
        InputError, "no tensor with a batch dimension", lambda: snows.prune(make("mlp"), [torch.tensor(1.0)], "2:4"),
    ),
    "samples of different shapes": (
        InputError,
        r"differ in the shape of their samples: \[\(5,\), \(6,\)\]",
        lambda: snows.prune(make("mlp"), [X, torch.randn(3, 5)], "2:4"),
    ),
    "batches of different structure": (
        InputError, "differ in their structure", lambda: snows.prune(make("mlp"), [X, {"input": X}], "2:4"),
    ),
    "inputs of different length": (
        InputError,
        r"have \[3, 4\] samples",
        lambda: snows.prune(
            make("two-inputs"), {"image": torch.randn(3, 2, 3, 3), "number": torch.randn(4, 3)}, "2:4"
        ),
    ),
    "unknown keyword": (
        InputError, "has the keys pixels, which the model's forward does not take",
        lambda: snows.prune(make("mlp"), {"pixels": X}, "2:4"),
    ),
    "NaN in the weights": (
        InputError, r"^the model's weights contain NaN or infinity \(in 2\.weight\)",
        lambda: snows.prune(broken_weights(), X, "2:4"),
    ),
    "infinity in the data": (
        InputError, "^the calibration data contains NaN or infinity",
        lambda: snows.prune(make("mlp"), broken_data(), "2:4"),
    ),
    "pattern that fits no layer": (
        InputError, "^no layer can be pruned: .*no multiple of 16", lambda: snows.prune(make("mlp"), X, "2:16"),
    ),
    "nothing between first and last": (
        InputError,
        "^no layer can be pruned: .*name it in layers= to prune it",
        lambda: snows.prune(nn.Linear(6, 2).double().eval(), X, "2:4"),
    ),
    "pattern of an unknown layer": (
        ArgumentError, "^the pattern for 'fc9' fits no layer; the layers are 0, 2, 4",
        lambda: snows.prune(make("mlp"), X, {"*": "2:4", "fc9": "1:4"}),
    ),
    "malformed pattern": (ArgumentError, "^pattern '5:4'", lambda: snows.prune(make("mlp"), X, "5:4")),
    "no pattern": (ArgumentError, "^no pattern is given", lambda: snows.prune(make("mlp"), X)),
    "unknown layer": (
        ArgumentError, r"^layers='head\*' fits no layer; the layers are 0, 2, 4",
        lambda: snows.prune(make("mlp"), X, "2:4", layers="head*"),
    ),
    "empty layers": (ArgumentError, "^layers is empty", lambda: snows.prune(make("mlp"), X, "2:4", layers=[])),
    "unknown mask": (
        ArgumentError, "^mask 'fisher' is not known", lambda: snows.prune(make("mlp"), X, "2:4", mask="fisher"),
    ),
    "a mask that is nothing": (ArgumentError, "^mask is a float", lambda: snows.prune(make("mlp"), X, "2:4", mask=0.5)),
    "weights without zeros": (
        InputError, "^mask='weights', but no weight of the model is zero",
        lambda: snows.prune(make("mlp"), X, mask="weights"),
    ),
    "mask of a wrong shape": (
        InputError, r"^the mask of '2' has shape \(8, 4\); the weight has shape \(8, 8\)",
        lambda: snows.prune(make("mlp"), X, mask={"2": torch.ones(8, 4, dtype=torch.bool)}),
    ),
    "mask of other values": (
        ArgumentError, r"^the mask of '2' is torch\.float32 with values other than 0 and 1; expected a bool tensor",
        lambda: snows.prune(make("mlp"), X, mask={"2": torch.full((8, 8), 0.5)}),
    ),
    "mask of an unknown layer": (
        ArgumentError, "^the mask names 'fc9', which is no layer of the model",
        lambda: snows.prune(make("mlp"), X, mask={"fc9": torch.ones(8, 8, dtype=torch.bool)}),
    ),
    "mask of a tied layer": (
        InputError, "^the mask names 'twice', which cannot be pruned: its weight is used in 2 places",
        lambda: snows.prune(make("tied"), X[:, :5], mask={"twice": torch.ones(4, 4, dtype=torch.bool)}),
    ),
    "no masks": (ArgumentError, "^the given mask is empty", lambda: snows.prune(make("mlp"), X, mask={})),
    "unknown recipe": (
        ArgumentError, "^recipe 'best' is not known", lambda: snows.prune(make("mlp"), X, "2:4", recipe="best"),
    ),
    "unknown solver": (ArgumentError, "^solver is 'adam'", lambda: snows.prune(make("mlp"), X, "2:4", solver="adam")),
    "negative horizon": (
        ArgumentError, "^recipe: horizon is -1; expected a whole number of at least 0",
        lambda: snows.prune(make("mlp"), X, "2:4", horizon=-1),
    ),
    "unknown choice of a recipe": (
        ArgumentError, "^recipe: unknown choice steps; known are horizon", lambda: snows.Recipe().replace(steps=3),
    ),
    "wrong choice of a recipe": (
        ArgumentError, "^recipe: targets is 'dense'; expected one of", lambda: snows.Recipe(targets="dense"),
    ),
    "unknown device": (
        ArgumentError, "^device 'gpu' is not known", lambda: snows.prune(make("mlp"), X, "2:4", device="gpu"),
    ),
    "a device that is not there": (
        InputError, "^the model cannot be moved to the device",
        lambda: snows.prune(make("mlp"), X, "2:4", device="cuda:99"),
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", ERRORS)
def test_wrong_input_gets_one_clear_sentence(case: str) -> None:
    kind, words, call = ERRORS[case]
    with pytest.raises(kind, match=words) as caught:
        call()
    assert "\n" not in str(caught.value)
    assert type(caught.value) is kind


def test_a_model_that_cannot_be_captured_is_said_so() -> None:
    class Branching(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc = nn.Linear(6, 6)

        def forward(self, x: Tensor) -> Tensor:
            return self.fc(x) if x.mean() > 0 else x

    with pytest.raises(CaptureError, match=r"^Branching cannot be captured by torch\.export"):
        snows.prune(Branching().eval(), X.float(), "2:4")


WARNINGS: dict[str, tuple[str, Callable[[], Any]]] = {
    "unnormalized images": (
        "look unnormalized",
        lambda: snows.prune(make("conv-bn"), torch.rand(6, 2, 4, 4) * 255, "2:4", solver=None, progress=False),
    ),
    "a row without weights": (
        "the mask of 2 removes every weight of 1 of its 8 outputs",
        lambda: quick("mlp", mask={"2": torch.arange(8)[:, None].expand(8, 8) > 0}),
    ),
    "an exclusion that fits nothing": ("exclude='fc9' fits no layer", lambda: quick("mlp", "2:4", exclude="fc9")),
}


@pytest.mark.parametrize("case", WARNINGS)
def test_warnings_are_given_and_kept_in_the_report(case: str) -> None:
    words, call = WARNINGS[case]
    with pytest.warns(SnowsWarning, match=words):
        result = call()
    assert any(words in warning for warning in result.report.warnings)


def test_activations_are_freed_without_the_garbage_collector() -> None:
    """A reference cycle would keep every layer's activations on the device until the collector came round."""
    gc.collect()
    gc.disable()
    try:
        quick("residual", 0.5)
        alive = [thing for thing in gc.get_objects() if type(thing) in (LayerProblem, RowBlocks)]
    finally:
        gc.enable()
    assert not alive


class TwoInputs(nn.Module):
    """`y` is an input here, though many data sets call their labels so."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = nn.Linear(4, 8), nn.Linear(8, 8), nn.Linear(8, 2)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        out: Tensor = self.c(torch.relu(self.b(torch.relu(self.a(x)) + y)))
        return out


def test_an_input_that_is_called_like_a_label_is_kept_and_labels_are_dropped() -> None:
    torch.manual_seed(0)
    batches = [{"x": torch.randn(6, 4), "y": torch.randn(6, 8), "labels": torch.zeros(6)} for _ in range(3)]
    result = snows.prune(TwoInputs().eval(), batches, "2:4", recipe=QUICK, progress=False)
    assert result.report.samples == 18
    assert [layer.name for layer in result.report.layers] == ["b"]


def test_a_weight_with_two_names_that_is_used_once_is_pruned() -> None:
    class TwoNames(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.spare, self.used, self.head = (torch.nn.Linear(4, 4) for _ in range(4))
            self.used.weight = self.spare.weight

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.head(torch.relu(self.used(torch.relu(self.first(x)))))

    result = snows.prune(TwoNames().eval(), torch.randn(32, 4), "2:4", progress=False)
    assert list(result.masks) == ["spare.weight"]
    assert result.model.used.weight is result.model.spare.weight
    assert int((result.model.used.weight == 0).sum()) == 8


def test_mirrored_images_are_samples_like_others() -> None:
    """The same as fitting to both, but for their order and for what is held out."""
    model, data = build_model("resnet20-fashion"), load_data("fashion", 40, 0)
    recipe = snows.Recipe(horizon=0, sweeps=1, held_out=0.0, mirror=True)
    options = {"layers": "layer1.0.conv1", "progress": False}
    mirrored = snows.prune(model, data.calibration, "1:4", recipe=recipe, **options)
    both = torch.cat([data.calibration, data.calibration.flip(-1)])
    expected = snows.prune(model, both, "1:4", recipe=recipe.replace(mirror=False), **options)
    plain = snows.prune(model, data.calibration, "1:4", recipe=recipe.replace(mirror=False), **options)
    name = "layer1.0.conv1.weight"
    found, wanted, other = (r.model.state_dict()[name] for r in (mirrored, expected, plain))
    assert float((found - wanted).norm()) < 0.01 * float((found - other).norm())  # sums in another order
    assert mirrored.report.samples == 40


def test_what_is_no_image_is_not_mirrored() -> None:
    with pytest.raises(snows.ArgumentError, match="mirror is for images"):
        snows.prune(make("mlp"), example("mlp", 20), "2:4", recipe=snows.Recipe(mirror=True), progress=False)
    with pytest.raises(snows.ArgumentError, match="expected one of False, True"):
        snows.Recipe(mirror="yes")  # type: ignore[arg-type]
