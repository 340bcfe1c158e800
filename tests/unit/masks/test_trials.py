"""One layer exchanged at a time, against the eager model with that weight."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.func import functional_call

import snows.masks.trials
from snows.data.samples import read_samples
from snows.graph.cost import bytes_of
from snows.masks.trials import Trials, judged_samples
from tests.networks import call_arguments, captured, example, prunable

SAMPLES = 11


def trials(name: str, labels: Tensor | None = None, fitted: int = 4) -> Trials:
    model, graph = captured(name)
    samples = read_samples(example(name, SAMPLES), model)
    first, others = samples.split(fitted)
    if labels is not None:
        others = type(others)(others.leaves, others.spec, others.count, labels, others.place)
    layers = [layer for layer in graph.layers if layer.parameter in prunable(name)]
    return Trials(graph, layers, first, others)


def outputs(name: str, changed: dict[str, Tensor]) -> list[Tensor]:
    model, _ = captured(name)
    state = {key: value.detach() for key, value in model.state_dict().items()}
    found = functional_call(model, {**state, **changed}, *call_arguments(example(name, SAMPLES)))
    return [value[4:] for value in (found if isinstance(found, tuple) else (found,))]


@pytest.mark.parametrize("name", ["residual", "grouped", "two-outputs", "attention"])
def test_the_error_is_relative_to_the_variance(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the judged samples, in several micro-batches, for every layer: what was computed before it is not computed
    again."""
    monkeypatch.setattr(snows.masks.trials, "_MICRO_BATCH", {"cpu": 3})
    model, _ = captured(name)
    seen = []
    for trial in trials(name):
        seen.append(trial.name)
        weight = model.get_parameter(trial.name).detach() * 0.5
        pairs = list(zip(outputs(name, {trial.name: weight}), outputs(name, {}), strict=True))
        expected = sum(float(((a - b) ** 2).mean() / b.flatten().var()) for a, b in pairs) / len(pairs)
        assert trial.error(weight) == pytest.approx(expected)
        assert trial.error(trial.weight) == pytest.approx(0, abs=1e-20)
    assert set(seen) == set(prunable(name))


def test_the_effect_on_classes() -> None:
    labels = torch.tensor([0, 1, 1, 0, 1, 0, 0])
    asked = trials("residual", labels)
    (dense,) = outputs("residual", {})
    trial = next(iter(asked))
    weight = trial.weight * -1
    (changed,) = outputs("residual", {trial.name: weight})
    effect = trial.effect(weight)
    assert effect.kl == pytest.approx(
        float(F.kl_div(changed.log_softmax(1), dense.log_softmax(1), reduction="batchmean", log_target=True))
    )
    assert effect.agreement == pytest.approx(float((changed.argmax(1) == dense.argmax(1)).double().mean()))
    assert effect.accuracy == pytest.approx(float((changed.argmax(1) == labels).double().mean()))
    assert asked.dense_accuracy == pytest.approx(float((dense.argmax(1) == labels).double().mean()))
    without = trials("residual")
    assert next(iter(without)).effect(weight).accuracy is without.dense_accuracy is None


def test_outputs_that_are_no_classes_have_an_error_alone() -> None:
    asked = trials("padded")
    trial = next(iter(asked))
    effect = trial.effect(trial.weight * 0.5)
    assert (asked.scores is None) == (effect.kl is None)
    assert effect.error > 0


def test_judged_samples_are_few_where_outputs_are_large(monkeypatch: pytest.MonkeyPatch) -> None:
    _, graph = captured("residual")
    size = sum(bytes_of(node) for node in graph.outputs)
    assert judged_samples(graph, 1000) == 250
    assert judged_samples(graph, 30) == 30
    monkeypatch.setattr(snows.masks.trials, "_OUTPUT_BYTES", 20 * size)
    assert judged_samples(graph, 1000) == 20
    monkeypatch.setattr(snows.masks.trials, "_OUTPUT_BYTES", 1)
    assert judged_samples(graph, 1000) == 8
