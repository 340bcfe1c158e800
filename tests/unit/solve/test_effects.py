"""What pruning did to the network, beside direct computations."""

from __future__ import annotations

import base64
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import snows
from snows.data.preparation import prepare
from snows.devices.memory import Memory
from snows.events import Event, OperationErrors, WeightsShown
from snows.solve.effects import effects, operation_errors, weight_facts
from tests.networks import captured, example, make

PLENTY = Memory(1 << 40)


def measured(
    networks: dict[str, dict[str, Tensor]], count: int = 40, memory: Memory = PLENTY
) -> OperationErrors | None:
    prepared = prepare(make("mlp"), example("mlp", count), None, seed=0)
    return operation_errors(prepared.graph, prepared.samples, networks, memory, 16 * count)


def halved(name: str = "2.weight") -> dict[str, Tensor]:
    return {name: make("mlp").get_parameter(name).detach() / 2}


def test_errors_are_those_of_the_operations_themselves() -> None:
    found = measured({"mask only": halved(), "SNOWS": {}})
    assert found is not None
    assert found.samples == 40
    dense, changed = make("mlp"), make("mlp")
    changed.load_state_dict({**dense.state_dict(), **halved()})
    x, y = example("mlp", 40), example("mlp", 40)
    expected = []
    for one, two in zip(dense.children(), changed.children(), strict=True):
        x, y = one(x), two(y)
        expected.append(float((x - y).square().mean() / x.var(correction=0)))
    assert found.names == tuple(name for name, _ in dense.named_children())
    assert found.errors["mask only"] == pytest.approx(expected, rel=1e-3)
    assert found.errors["SNOWS"] == (0.0,) * len(expected)
    assert found.agreement["SNOWS"] == 1
    assert found.agreement["mask only"] == float((x.argmax(1) == y.argmax(1)).double().mean())


def test_samples_are_few_and_come_in_pieces_that_fit() -> None:
    whole = measured({"mask only": halved()}, 200)
    assert whole is not None
    assert whole.samples == 64
    for room in (20_000, 100_000):
        pieces = measured({"mask only": halved()}, 200, Memory(room))
        assert pieces is not None
        assert pieces.errors["mask only"] == pytest.approx(whole.errors["mask only"], rel=1e-3)
    assert measured({"mask only": halved()}, 200, Memory(100)) is None  # not even one sample fits


def test_without_layers_that_change_nothing_there_is_the_mask_alone() -> None:
    graph = captured("mlp")[1]
    prepared = prepare(make("mlp"), example("mlp", 20), None, seed=0)
    mask = torch.ones_like(graph.parameters["2.weight"], dtype=torch.bool)
    given: dict[str, Any] = {"before the last stage": {}, "SNOWS": {}}
    weights = halved()
    shown, errors = effects(prepared.graph, {"2.weight": mask}, weights, given, prepared.samples, 20, PLENTY)
    assert isinstance(shown, WeightsShown)
    assert isinstance(errors, OperationErrors)
    assert list(errors.errors) == ["mask only"]
    assert errors.errors["mask only"][-1] > 0  # the weights as the run left them


@pytest.mark.parametrize("steps", [0, 2])
@pytest.mark.parametrize("solver", ["newton", None])
def test_a_run_tells_of_its_stages(solver: Any, steps: int) -> None:
    events: list[Event] = []
    recipe = snows.Recipe(horizon=1, sweeps=1, finish_steps=steps)
    result = snows.prune(
        make("conv-bn"), example("conv-bn", 32), "2:4", solver=solver, recipe=recipe, progress=events.append
    )
    (found,) = [event for event in events if isinstance(event, OperationErrors)]
    stages = ["before the last stage"] if steps and solver else []
    assert list(found.errors) == ["mask only", *stages, *(["SNOWS"] if solver else [])]
    if solver:
        assert found.errors["SNOWS"][-1] < found.errors["mask only"][-1]
    assert result.report.operations == found
    assert all(layer.picture is not None for layer in result.report.layers)
    names = [phase.name for phase in result.report.phases]
    assert names[0] == "reading samples, capturing the network"
    assert ("last stage" in names) == bool(stages)
    assert sum(phase.seconds for phase in result.report.phases) <= result.report.seconds


def test_histograms_have_shares_of_all_weights() -> None:
    before = torch.tensor([[-1.0, -0.1, 0.1, 1.0], [0.5, -0.5, 0.2, -0.2]])
    mask = before.abs() > 0.3
    facts = weight_facts(before, 2 * before * mask, mask)
    assert sum(facts.before) == pytest.approx(1)
    assert sum(facts.after) == pytest.approx(0.5)
    assert facts.high == -facts.low == 1.0
    assert facts.after[0] == facts.after[-1] == 0.25  # 2 and -1, cut to the ends: two of eight on each side
    assert facts.before == facts.before[::-1]


def test_weights_far_out_do_not_squeeze_a_histogram_and_large_layers_are_sampled() -> None:
    weights = torch.randn(1100, 1000, generator=torch.Generator().manual_seed(0))
    weights[0, 0] = 1e6
    weights[5, 5] = -3.0
    facts = weight_facts(weights, weights, torch.ones_like(weights, dtype=torch.bool))
    assert facts.high < 1e4
    nothing = torch.zeros(2, 2)
    assert sum(weight_facts(nothing, nothing, nothing.bool()).before) == pytest.approx(1)


def test_the_picture_is_the_corner_of_the_mask_with_inputs_side_by_side() -> None:
    mask = torch.rand(40, 8, 3, 3, generator=torch.Generator().manual_seed(0)) < 0.5
    facts = weight_facts(mask.float(), mask.float(), mask)
    assert (facts.rows, facts.columns) == (32, 64)
    bits = np.unpackbits(np.frombuffer(base64.b64decode(facts.bits), np.uint8)).reshape(32, 64).astype(bool)
    for row, column in ((0, 0), (3, 11), (31, 63)):
        assert bits[row, column] == mask[row, column % 8, column // 8 // 3, column // 8 % 3]
    small = weight_facts(torch.ones(2, 3), torch.ones(2, 3), torch.ones(2, 3, dtype=torch.bool))
    assert (small.rows, small.columns, small.bits) == (2, 3, base64.b64encode(bytes([0b11111100])).decode())


class TwoActivations(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.one, self.two, self.relu = nn.Linear(4, 4), nn.Linear(4, 3), nn.ReLU()

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.two(torch.tanh(self.relu(self.relu(self.one(x))))))


def test_operations_are_called_after_their_modules() -> None:
    prepared = prepare(TwoActivations().eval(), torch.randn(8, 4), None, seed=0)
    found = operation_errors(prepared.graph, prepared.samples, {"SNOWS": {}}, PLENTY, 8)
    assert found is not None
    assert found.names == ("one", "relu", "relu", "tanh", "two", "tanh")
