"""The closed form with one factor for all rows: its loss beside that of float64 least squares, in whole runs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import snows.solve.least_squares as rows
from snows import Recipe, Result, prune
from snows.data import embedded
from snows.data.moments import Moments
from snows.solve.newton import NewtonOutcome
from snows.solve.problem import LayerProblem
from tests.networks import NETWORKS, example, make
from tests.problems import mask_of, problem, settings, solve

CLOSED_FORM = Recipe(horizon=0, sweeps=1, targets="dense-stream", held_out=0.0)
MOST_ABOVE = 1e-6  # of the least loss
MOST_ABOVE_SINGULAR = 1e-4  # in single precision, where the Gram matrix is as singular as its rounding
ROUNDING = 1e-12  # of the targets' energy: where the fit is exact, all that is left is rounding
OF_SEVERAL_OPERATIONS = {"attention.in_proj_weight"}  # Newton's method goes on from its least squares


@dataclass
class Equations:
    """What one layer was fitted to: inputs (groups x positions x columns) and the outputs that it should have."""

    parameter: str
    x: Tensor
    y: Tensor

    def loss(self, change: Tensor, start: Tensor, ridge: float) -> float:
        """The squared error, and what the damping adds to it for a change from the start (rows x columns)."""
        weight = (start + change).unflatten(0, (len(self.x), -1))
        return float((self.x @ weight.mT - self.y).square().sum() + self.damping(ridge) * change.square().sum())

    def least_loss(self, start: Tensor, kept: Tensor, ridge: float) -> float:
        """Each row by itself, on the inputs that it keeps."""
        change = torch.zeros_like(start)
        for row, own in enumerate(kept):
            group, output = divmod(row, self.y.shape[-1])
            inputs, target = self.x[group], self.y[group, :, output] - self.x[group] @ start[row]
            damping = self.damping(ridge) ** 0.5 * torch.eye(int(own.sum()), dtype=torch.float64)
            table = torch.cat([inputs[:, own], damping])
            target = torch.cat([target, torch.zeros(len(damping), dtype=torch.float64)])
            change[row, own] = torch.linalg.lstsq(table, target[:, None], driver="gelsd").solution[:, 0]
        return self.loss(change, start, ridge)

    def most_above(self, dtype: torch.dtype) -> float:
        singular = bool((torch.linalg.matrix_rank(self.x) < self.x.shape[-1]).any())
        return MOST_ABOVE_SINGULAR if singular and dtype == torch.float32 else MOST_ABOVE

    def damping(self, ridge: float) -> float:
        return ridge * float(self.x.square().sum(1).mean())


def prune_by_one_factor(
    monkeypatch: pytest.MonkeyPatch, model: nn.Module, inputs: Any, ridge: float, **options: Any
) -> tuple[Result, list[Equations]]:
    """A run without row blocks, and what its layers were fitted to."""
    found: list[Equations] = []
    moments = LayerProblem.moments

    def seen(problem: LayerProblem, index: int = 0) -> Moments:
        layer = problem.layers[index]
        pairs = list(problem._input_output_pairs(layer, problem.segment.own[index]))
        x, y = (torch.cat(parts, 1).double() for parts in zip(*pairs, strict=True))
        found.append(Equations(layer.parameter, layer.in_weight_order(x, 2), y))
        return moments(problem, index)

    monkeypatch.setattr(LayerProblem, "moments", seen)
    monkeypatch.setattr(rows, "_MAX_FLOPS", {"cpu": 0.0})  # no row blocks
    return prune(model, inputs, recipe=CLOSED_FORM.replace(ridge=ridge), progress=False, **options), found


def assert_least_losses(model: nn.Module, result: Result, equations: list[Equations], ridge: float) -> None:
    outcomes = {layer.parameter: layer.solves[0].outcome for layer in result.report.layers}
    others = {name for name, outcome in outcomes.items() if outcome != NewtonOutcome.CLOSED_FORM.value}
    assert others <= OF_SEVERAL_OPERATIONS
    dtype = next(model.parameters()).dtype
    too_high = {}
    for one in equations:
        if one.parameter in others:
            continue
        kept = result.masks[one.parameter].flatten(1)
        start = model.get_parameter(one.parameter).detach().double().flatten(1) * kept
        found = result.model.get_parameter(one.parameter).detach().double().flatten(1)
        least = one.least_loss(start, kept, ridge)
        excess = one.loss(found - start, start, ridge) - least
        if not excess <= one.most_above(dtype) * least + ROUNDING * float(one.y.square().sum()):
            too_high[one.parameter] = excess / least
    assert too_high == {}


@pytest.mark.filterwarnings("ignore:the masks? of .* removes? every weight")
@pytest.mark.parametrize(("dtype", "ridge"), [(torch.float32, Recipe().ridge), (torch.float64, 1e-10)])
@pytest.mark.parametrize("name", NETWORKS)
def test_every_layer_of_every_tiny_network(
    name: str, dtype: torch.dtype, ridge: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With the damping that users have, and with next to none, where some statistics are singular."""
    inputs = example(name, 60)
    inputs = {key: x.to(dtype) for key, x in inputs.items()} if isinstance(inputs, dict) else inputs.to(dtype)
    model = make(name).to(dtype)
    result, equations = prune_by_one_factor(monkeypatch, model, inputs, ridge, pattern=0.5, layers="*")
    assert {one.parameter for one in equations} == set(result.masks)
    assert_least_losses(model, result, equations, ridge)


def test_layers_of_the_embedded_network(monkeypatch: pytest.MonkeyPatch) -> None:
    layers = ["layer1.0.conv2", "layer2.1.conv1", "layer3.2.conv2"]
    model, x = embedded.model(), embedded.images()[0][:20]
    ridge = Recipe().ridge
    result, equations = prune_by_one_factor(monkeypatch, model, x, ridge, pattern="2:4", layers=layers)
    assert [one.parameter for one in equations] == [f"{name}.weight" for name in layers]
    assert_least_losses(model, result, equations, ridge)


@pytest.mark.parametrize("normalization", ["variance", "mean", "sum"])
@pytest.mark.parametrize(
    "case", [("residual", "conv2.weight"), ("depthwise", "2.weight"), ("grouped", "4.weight"), ("mlp", "2.weight")]
)
def test_the_loss_of_masked_weights_is_that_of_a_pass_over_the_samples(
    case: tuple[str, str], normalization: str
) -> None:
    """It comes from second moments, without such a pass."""
    given = problem(*case, 0, split=(20, 20, 8), held_out=1)
    report = solve(given, settings(case[0], start="closed-form", horizon=0, normalization=normalization)).solve
    weight = given.pruned.parameters[case[1]]
    by_pass = given.objective(normalization).loss(weight * mask_of(weight.shape))
    assert by_pass > 0
    assert report.loss_masked == pytest.approx(by_pass, rel=1e-9)
