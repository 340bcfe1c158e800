"""What network methods are told, against the eager model sample by sample."""

from __future__ import annotations

import copy
import math
from collections.abc import Mapping
from functools import cache
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call

import snows.masks.statistics
from snows.data.samples import read_samples
from snows.errors import InputError
from snows.graph import Graph, capture
from snows.masks.statistics import CalibratedNetwork
from snows.patterns import Unstructured
from tests.networks import call_arguments, captured, example, make, prunable
from tests.oracles import layer_input_output, patches

SAMPLES = 7
# convolutions with stride, padding and dilation, grouped, depthwise, in one to three dimensions; linear layers on
# sequences, packed attention; residuals, gates, several inputs and outputs
NAMES = ("residual", "grouped", "depthwise", "conv1d", "conv3d", "padded", "attention", "gated", "two-inputs")


def network(name: str, labels: Tensor | None = None, keep_bytes: int = 0, seed: int = 0) -> CalibratedNetwork:
    model, graph = captured(name)
    samples = read_samples(example(name, SAMPLES), model)
    patterns = dict.fromkeys(prunable(name), Unstructured(0.5))
    return CalibratedNetwork(graph, samples, patterns, seed, labels, keep_bytes)


def given_labels(classes: int = 2) -> Tensor:
    return torch.randint(0, classes, (SAMPLES,), generator=torch.Generator().manual_seed(3))


def parameters(model: nn.Module) -> dict[str, Tensor]:
    return {name: value.detach() for name, value in model.state_dict().items()}


def logits(model: nn.Module, inputs: Any, changed: Mapping[str, Tensor] | None = None) -> Tensor:
    found = functional_call(model, {**parameters(model), **(changed or {})}, *call_arguments(inputs))
    return found[0] if isinstance(found, tuple) else found


def one(inputs: Any, sample: int) -> Any:
    if isinstance(inputs, dict):
        return {key: value[sample : sample + 1] for key, value in inputs.items()}
    return inputs[sample : sample + 1]


def gradients_by_sample(model: nn.Module, inputs: Any, labels: Tensor, name: str) -> Tensor:
    rows = []
    for sample, label in enumerate(labels):
        weight = model.get_parameter(name).detach().clone().requires_grad_()
        loss = F.cross_entropy(logits(model, one(inputs, sample), {name: weight}), label[None])
        rows.append(torch.autograd.grad(loss, weight)[0].flatten())
    return torch.stack(rows)


@pytest.mark.parametrize("name", NAMES)
def test_gradients_are_those_of_single_samples(name: str) -> None:
    model, _ = captured(name)
    labels = given_labels()
    found = dict(network(name, labels).gradients(100))
    assert set(found) == set(prunable(name))
    for parameter, rows in found.items():
        expected = gradients_by_sample(model, example(name, SAMPLES), labels, parameter)
        torch.testing.assert_close(rows, expected, rtol=1e-9, atol=1e-12)


def test_gradients_and_loss_are_those_of_the_network_as_it_has_become() -> None:
    model, graph = captured("residual")
    labels = given_labels()
    changed = {name: 0.5 * graph.parameters[name] for name in prunable("residual")}
    asked = network("residual", labels)
    now = CalibratedNetwork(graph, asked.samples, asked.patterns, 0, labels, 1 << 20, {**graph.parameters, **changed})
    other = copy.deepcopy(model)
    other.load_state_dict(changed, strict=False)
    for name, rows in now.gradients(100):
        expected = gradients_by_sample(other, example("residual", SAMPLES), labels, name)
        torch.testing.assert_close(rows, expected, rtol=1e-9, atol=1e-12)
    assert now.loss({}) == pytest.approx(asked.loss(changed))
    assert now.loss({}) != pytest.approx(asked.loss({}))
    assert all(torch.equal(now.weights[name], weight) for name, weight in changed.items())


@pytest.mark.parametrize("name", ["residual", "attention"])
@pytest.mark.parametrize(("count", "batch"), [(3, 1), (2, 3), (100, 2), (5, 3), (4, 100)])
def test_batches_are_means_of_consecutive_samples(
    name: str, count: int, batch: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(snows.masks.statistics, "_MICRO_BATCH", {"cpu": 4})  # so that batches lie across micro-batches
    model, _ = captured(name)
    labels = given_labels()
    batch_taken = min(batch, SAMPLES)
    rows = min(count, SAMPLES // batch_taken)
    for parameter, found in network(name, labels).gradients(count, batch):
        single = gradients_by_sample(model, example(name, SAMPLES), labels, parameter)
        expected = single[: rows * batch_taken].unflatten(0, (rows, batch_taken)).mean(1)
        torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("name", ["residual", "attention"])
def test_gradients_do_not_depend_on_what_fits_in_memory(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    everything = network(name, keep_bytes=1 << 30)
    kept = dict(everything.gradients(SAMPLES))
    assert all(rows is kept[parameter] for parameter, rows in everything.gradients(SAMPLES))  # computed once
    largest = max(rows.numel() * rows.element_size() for rows in kept.values())
    for limit in (0, largest, 2 * largest):  # layer by layer, and some together
        asked = network(name, keep_bytes=limit)
        groups = [[layer.parameter for layer in group] for group in asked._groups_that_fit(SAMPLES)]
        assert [parameter for group in groups for parameter in group] == list(kept)
        assert len(groups) > 1
        for _ in range(2):
            parts = dict(asked.gradients(SAMPLES))
            assert list(parts) == list(kept)
            for parameter, rows in parts.items():
                torch.testing.assert_close(rows, kept[parameter], rtol=1e-12, atol=1e-15)
    monkeypatch.setattr(snows.masks.statistics, "_MICRO_BATCH", {"cpu": 2})
    monkeypatch.setattr(snows.masks.statistics, "_PATCH_BYTES", 1)
    for parameter, rows in network(name).gradients(SAMPLES):
        torch.testing.assert_close(rows, kept[parameter], rtol=1e-9, atol=1e-12)


def test_labels_are_drawn_from_the_models_own_predictions() -> None:
    model, _ = captured("mlp")
    inputs = example("mlp", SAMPLES)
    drawn, again, other = (dict(network("mlp", seed=seed).gradients(SAMPLES)) for seed in (0, 0, 1))
    assert all(torch.equal(rows, again[name]) for name, rows in drawn.items())
    assert any(not torch.equal(rows, other[name]) for name, rows in drawn.items())
    # whatever was drawn: each row is the gradient for one of the classes
    by_class = [gradients_by_sample(model, inputs, torch.full((SAMPLES,), k), "2.weight") for k in range(3)]
    for sample, row in enumerate(drawn["2.weight"]):
        assert sum(bool(torch.allclose(row, rows[sample], rtol=1e-9, atol=1e-12)) for rows in by_class) == 1
    # and the classes come up as often as the model says
    asked = network("mlp")
    counts = torch.zeros(SAMPLES, 3, dtype=torch.float64)
    for seed in range(400):
        asked.seed = seed
        counts[torch.arange(SAMPLES), asked._labels()] += 1 / 400
    assert float((counts - logits(model, inputs).softmax(1)).abs().max()) < 0.08


@pytest.mark.parametrize("name", ["residual", "attention"])
def test_the_loss_is_cross_entropy(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(snows.masks.statistics, "_MICRO_BATCH", {"cpu": 3})
    model, _ = captured(name)
    inputs, labels = example(name, SAMPLES), given_labels()
    changed = {parameter: model.get_parameter(parameter) * 0.7 for parameter in prunable(name)[:3]}
    moved, own = logits(model, inputs, changed), logits(model, inputs)
    with_labels = network(name, labels)
    assert with_labels.loss(changed) == pytest.approx(float(F.cross_entropy(moved, labels)))
    assert with_labels.loss({}) == pytest.approx(float(F.cross_entropy(own, labels)))
    without = network(name)
    expected = -float((own.softmax(1) * moved.log_softmax(1)).sum(1).mean())
    assert without.loss(changed) == pytest.approx(expected)
    assert without.loss({}) <= without.loss(changed)  # its own predictions are the best it can give


def test_losses_are_of_the_first_samples_only(monkeypatch: pytest.MonkeyPatch) -> None:
    """As many as are enough, however many there are."""
    model, graph = captured("residual")
    inputs, patterns = example("residual", SAMPLES), dict.fromkeys(prunable("residual"), Unstructured(0.5))
    first = CalibratedNetwork(graph, read_samples(inputs[:3], model), patterns, 0, given_labels()[:3])
    monkeypatch.setattr(snows.masks.statistics, "_LOSS_SAMPLES", 3)
    asked = network("residual", given_labels())
    changed = {name: weight * 0.5 for name, weight in asked.weights.items()}
    assert asked.loss(changed) == pytest.approx(first.loss(changed), rel=1e-12)


@pytest.mark.parametrize("name", NAMES)
def test_uses_are_the_positions_of_a_layers_output(name: str) -> None:
    model, _ = captured(name)
    found = network(name).uses
    for parameter in prunable(name):
        if parameter.endswith("in_proj_weight") or "out_proj" in parameter:
            assert found[parameter] == 3  # tokens
            continue
        module = model.get_submodule(parameter.removesuffix(".weight"))
        _, output = layer_input_output(model, parameter.removesuffix(".weight"), one(example(name, SAMPLES), 0))
        outputs = module.weight.shape[0]
        assert isinstance(outputs, int)
        assert found[parameter] == output.numel() // outputs


@pytest.mark.parametrize("name", ["residual", "grouped", "depthwise", "mlp"])
def test_grams_are_second_moments_of_patches_in_the_dense_network(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(snows.masks.statistics, "_MICRO_BATCH", {"cpu": 3})
    model, _ = captured(name)
    found = dict(network(name).grams())
    assert set(found) == set(prunable(name))
    for parameter, gram in found.items():
        layer = parameter.removesuffix(".weight")
        x, _ = layer_input_output(model, layer, example(name, SAMPLES))
        for own, table in zip(gram, patches(model.get_submodule(layer), x), strict=True):
            torch.testing.assert_close(own, table.T @ table / len(table), rtol=1e-9, atol=1e-12)


def test_gradients_are_computed_once() -> None:
    asked = network("mlp", keep_bytes=1 << 30)
    kept = dict(asked.gradients(SAMPLES))
    asked.patterns = dict.fromkeys(asked.weights, Unstructured(0.9))  # other sparsities of the same network
    assert all(rows is kept[name] for name, rows in asked.gradients(SAMPLES))


def test_layers_that_class_scores_do_not_depend_on_have_no_gradient() -> None:
    model, _ = captured("two-outputs")
    labels = given_labels()
    found = dict(network("two-outputs", labels).gradients(SAMPLES))
    assert not found["right.weight"].any()  # the head that gives the second output
    expected = gradients_by_sample(model, example("two-outputs", SAMPLES), labels, "trunk.0.weight")
    torch.testing.assert_close(found["trunk.0.weight"], expected, rtol=1e-9, atol=1e-12)


class Words(nn.Module):
    """Whole numbers as inputs."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(9, 4)
        self.hidden = nn.Linear(4, 6)
        self.head = nn.Linear(6, 3)

    def forward(self, words: Tensor) -> Tensor:
        return self.head(torch.relu(self.hidden(self.table(words))).mean(1))


class Maps(nn.Module):
    """No class scores: an image for each image."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv2d(2, 4, 3, padding=1)
        self.last = nn.Conv2d(4, 2, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(torch.relu(self.first(x)))


@cache
def small(kind: type[nn.Module]) -> tuple[nn.Module, Graph, Tensor]:
    with torch.random.fork_rng():
        torch.manual_seed(5)
        model = kind().double().eval().requires_grad_(False)
        inputs = torch.randint(0, 9, (SAMPLES, 5)) if kind is Words else torch.randn(SAMPLES, 2, 4, 4).double()
    return model, capture(model, (inputs[:4],), {}), inputs


def test_whole_numbers_as_inputs() -> None:
    model, graph, words = small(Words)
    patterns = {"hidden.weight": Unstructured(0.5), "head.weight": Unstructured(0.5)}
    labels = given_labels(3)
    asked = CalibratedNetwork(graph, read_samples(words, model), patterns, 0, labels)
    assert asked.uses == {"hidden.weight": 5, "head.weight": 1}
    for parameter, rows in asked.gradients(SAMPLES):
        expected = gradients_by_sample(model, words, labels, parameter)
        torch.testing.assert_close(rows, expected, rtol=1e-9, atol=1e-12)
    assert not any(parameter.requires_grad for parameter in graph.parameters.values())


@pytest.mark.parametrize("ask", ["gradients", "loss"])
def test_a_model_without_class_scores_is_refused(ask: str) -> None:
    model, graph, images = small(Maps)
    patterns = {"first.weight": Unstructured(0.5)}
    asked = CalibratedNetwork(graph, read_samples(images, model), patterns, 0)
    words = r"needs class scores \(samples x classes\); the model gives tensors of shape \(1, 2, 4, 4\)"
    with pytest.raises(InputError, match=words) as caught:
        list(asked.gradients(3)) if ask == "gradients" else asked.loss({})
    assert "'obc' or 'magnitude'" in str(caught.value)
    # what needs no classes works
    assert [name for name, _ in asked.grams()] == ["first.weight"]
    (trial,) = asked.trials()
    assert trial.error(trial.weight * 0) > 0
    assert asked.uses == {"first.weight": 16}


def test_the_model_is_left_as_it_was() -> None:
    model, graph = captured("residual")
    before = {name: value.clone() for name, value in graph.parameters.items()}
    asked = network("residual")
    list(asked.gradients(SAMPLES))
    asked.loss({})
    list(asked.grams())
    for name, value in graph.parameters.items():
        assert torch.equal(value, before[name])
        assert not value.requires_grad
    assert all(math.isfinite(float(p.sum())) and p.grad is None for p in model.parameters())
    assert torch.equal(make("residual").state_dict()["stem.weight"], model.state_dict()["stem.weight"])


@pytest.mark.parametrize("labels", [[0, 1, 2, 3, 0, 0, 0], [0, -100, 1, 1, 1, 1, 1]])
def test_labels_that_are_no_classes_are_refused(labels: list[int]) -> None:
    asked = network("residual", torch.tensor(labels))
    with pytest.raises(InputError, match=r"labels go from -?\d+ to \d, but the model has 3 classes; expected 0 to 2"):
        asked.loss({})
    with pytest.raises(InputError, match="the model has 3 classes"):
        list(asked.gradients(3))
