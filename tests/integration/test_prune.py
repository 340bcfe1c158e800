"""Small prunes from end to end: what is promised of every result."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import snows
from snows.data.models import build_model
from snows.data.sources import load_data
from tests.networks import NETWORKS, example, make
from tests.oracles import KStepLoss
from tests.prunes import ALL_LAYERS, QUICK, SAMPLES, check, quick, weights


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
        total = sum(mask.numel() for mask in result.masks.values())
        assert sum(int((~mask).sum()) for mask in result.masks.values()) == round(pattern * total)


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


@pytest.mark.parametrize("curvature", ["gauss-newton", "hessian", "fisher"])
def test_every_curvature_lowers_the_loss(curvature: str) -> None:
    result = quick("attention", "2:4", recipe=QUICK.replace(curvature=curvature))
    check(result, make("attention"))
    assert {solve.curvature for layer in result.report.layers for solve in layer.solves} == {curvature}


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
    monkeypatch.setattr("snows.run.micro_batch_size", lambda *_: 5)
    torch.testing.assert_close(run(x), reference, rtol=1e-6, atol=1e-8)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_models_are_given_back_in_their_own_precision(dtype: torch.dtype) -> None:
    model = make("conv-bn").to(dtype)
    result = snows.prune(model, example("conv-bn", SAMPLES).float(), "2:4", recipe=QUICK, progress=False)
    assert {parameter.dtype for parameter in result.model.parameters()} == {dtype}
    check(result, model)
    for name, mask in result.masks.items():
        assert not result.model.get_parameter(name)[~mask].any()


def test_the_report_is_data() -> None:
    import json

    report = quick("conv-bn", "2:4").report
    data = json.loads(report.to_json())
    assert data["sparsity"] == pytest.approx(0.5)
    assert data["samples"] == SAMPLES
    assert len(data["layers"]) == len(report.layers)


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
