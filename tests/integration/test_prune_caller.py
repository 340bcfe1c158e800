"""What a prune leaves as it was: the model, the caller's state, other threads, memory."""

from __future__ import annotations

import gc
import warnings
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from torch import nn

import snows
from snows import SnowsWarning
from snows.data import preparation
from snows.events import LayerSolved, LayerStarted
from snows.solve import layer as layer_solve
from snows.solve.least_squares import RowBlocks
from snows.solve.newton import NewtonResult
from snows.solve.problem import LayerProblem
from tests.networks import example, make
from tests.prunes import ALL_LAYERS, QUICK, SAMPLES, quick, weights


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
    solve, turns = layer_solve.newton, iter([(sweep, index) for sweep in range(2) for index in range(2)])

    def newton(*arguments: Any) -> NewtonResult:
        if next(turns) == at and raises is not None:
            raise raises
        return solve(*arguments)

    monkeypatch.setattr(layer_solve, "newton", newton)
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
    layers = [event for event in events if isinstance(event, LayerStarted)]
    assert [(e.sweep, e.layer, isinstance(e, LayerSolved)) for e in layers] == [
        (sweep, name, ended) for sweep in range(2) for name in names for ended in (False, True)
    ]


def test_a_model_in_train_mode_is_run_in_eval_mode_with_a_warning() -> None:
    model = make("conv-bn").train()
    with pytest.warns(SnowsWarning, match="the model is in train mode") as caught:
        result = snows.prune(model, example("conv-bn", SAMPLES), "2:4", recipe=QUICK, progress=False)
    assert len([each for each in caught if "train mode" in str(each.message)]) == 1
    assert result.report.warnings == [str(each.message) for each in caught]
    assert model.training
    assert result.model.training
    assert torch.equal(weights(quick("conv-bn", "2:4")), weights(result))


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
