"""The embedded network and images: what the package ships is what it says."""

from __future__ import annotations

import pytest
import torch

import snows
from snows.data import embedded
from snows.data.models import build_model
from snows.data.sources import load_data


def test_the_embedded_images_are_enough() -> None:
    x, y, test_x, test_y = embedded.images()
    assert len(x) == len(y) >= 3000
    assert len(test_x) == len(test_y) >= 2000
    assert set(y.tolist()) == set(test_y.tolist()) == set(range(10))
    assert x.shape[1:] == test_x.shape[1:] == (1, 28, 28)
    assert abs(float(x.mean())) < 0.05
    assert abs(float(x.std()) - 1) < 0.05
    # calibration and test images are different ones
    assert not {row.numpy().tobytes() for row in x} & {row.numpy().tobytes() for row in test_x}


def test_the_embedded_network_works() -> None:
    data = load_data(embedded.DATA, 1000)
    assert len(data.calibration) == 1000
    figures = snows.evaluate(build_model(embedded.MODEL), data.test, data.test_labels)
    assert figures["top1"] >= 0.93


def test_a_small_prune_of_two_layers() -> None:
    model = build_model(embedded.MODEL)
    names = [name for name, module in model.named_modules() if isinstance(module, torch.nn.Conv2d)][3:5]
    recipe = snows.Recipe(horizon=2, sweeps=1, cg_steps=3)
    data = load_data(embedded.DATA, 64)
    result = snows.prune(model, data.calibration, "1:4", layers=names, recipe=recipe, progress=False)
    assert [layer.name for layer in result.report.layers] == names
    assert result.report.samples == 64
    assert all(snows.NM(1, 4).violations(mask) == 0 for mask in result.masks.values())
    assert result.report.sparsity == 0.75
    figures = snows.evaluate(result.model, data.test[:500], data.test_labels[:500], model)
    assert figures["agreement"] > 0.8


@pytest.mark.slow
def test_a_budget_by_sensitivity_beats_an_even_one() -> None:
    """At the same sparsity, by KL from the dense network on images that neither was fitted to."""
    model, data = build_model(embedded.MODEL), load_data(embedded.DATA, 500)
    found = snows.sensitivity(model, data.calibration, progress=False)
    kl = {}
    for name, pattern in {"uniform": snows.Unstructured(0.9, "uniform"), "measured": found.pattern(0.9)}.items():
        result = snows.prune(model, data.calibration, pattern, effort="fast", progress=False)
        assert result.report.sparsity == pytest.approx(0.9, abs=1e-4)
        kl[name] = snows.evaluate(result.model, data.test, data.test_labels, model)["kl"]
    assert kl["measured"] < kl["uniform"], kl
