"""How many samples make a piece, and which operations are computed once."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from snows.devices.memory import Memory
from snows.graph import Graph
from snows.graph.cost import Cost
from snows.patterns import PatternRules
from snows.plan import Plan, make_plan
from snows.recipe import Recipe
from snows.solve.footprint import linearized_bytes, micro_batch_size, operations_kept
from snows.solve.settings import Settings, resolve
from tests.networks import captured
from tests.problems import joint_network

CPU, GPU = torch.device("cpu"), torch.device("cuda")
PLENTY = Memory(1 << 40)


def planned(name: str = "residual", horizon: int = 2, **options: Any) -> tuple[Graph, Plan]:
    graph = captured(name)[1]
    return graph, make_plan(graph, PatternRules.parse("2:4"), horizon, **options)


def settings(**choices: Any) -> Settings:
    return resolve(Recipe(**{"horizon": 2, "targets": "dense-stream", **choices}), captured("residual")[1])


# Linearized segments


@pytest.mark.parametrize(
    ("kind", "precision", "size"),
    [
        ("gauss-newton", torch.float32, 50),
        ("gauss-newton", torch.bfloat16, 25),
        ("gauss-newton", torch.float64, 100),
        ("hessian", torch.float32, 2000),
        ("fisher", torch.bfloat16, 2000),
    ],
)
def test_what_a_linearized_segment_holds(kind: Any, precision: torch.dtype, size: int) -> None:
    cost = Cost(bytes=1000, output_bytes=1, prelude_bytes=2, input_bytes=3, slope_bytes=50, largest_bytes=4, flops=5)
    assert linearized_bytes(cost, kind, precision) == size


# Operations that are computed once


def test_operations_are_computed_once_if_all_samples_of_all_fit() -> None:
    graph, plan = planned()
    kept = operations_kept(graph, plan, 100, settings(), PLENTY)
    assert {node.name for node in kept} == {n for p in plan.pruned for n in graph.segment([p.layer], p.horizon).outputs}
    held = sum(node.meta["bytes"] for node in kept)
    held += max(graph.segment([p.layer], p.horizon).cost.prelude_bytes for p in plan.pruned)
    live = max(graph.live_bytes(p.layer.position) for p in plan.pruned)
    enough = 2 * 100 * (held + 2 * live)  # half of the memory is for what is held
    assert operations_kept(graph, plan, 100, settings(), Memory(enough)) == kept
    assert operations_kept(graph, plan, 100, settings(), Memory(enough - 2)) == []
    assert operations_kept(graph, plan, 101, settings(), Memory(enough)) == []


def test_operations_are_in_order_of_execution_and_none_twice() -> None:
    graph, plan = planned(horizon=9)
    kept = operations_kept(graph, plan, 100, settings(), PLENTY)
    assert kept == [node for node in graph.operations if node in kept]
    assert graph.operations[0] not in kept  # before the first pruned layer


def test_nothing_is_kept_of_targets_that_change_or_samples_that_are_not_rows() -> None:
    graph, plan = planned()
    assert operations_kept(graph, plan, 100, settings(targets="dense-weights"), PLENTY) == []
    attention, other = planned("attention")  # some of its samples are along the second axis
    assert operations_kept(attention, other, 100, settings(), PLENTY) == []


# Pieces


def one_layer_needs(graph: Graph, plan: Plan) -> int:
    """Bytes that a sample takes in a pass through the largest segment."""
    needs = []
    for group in plan.groups:
        layers = [planned.layer for planned in group]
        cost = graph.segment(layers, group[0].horizon).cost
        live = graph.live_bytes(min(layer.position for layer in layers))
        needs.append(int(1.5 * cost.bytes) + cost.output_bytes + cost.prelude_bytes + 2 * live)
    return max(needs)


@pytest.mark.parametrize(("device", "usual"), [(CPU, 250), (GPU, 1000), (torch.device("xpu"), 250)])
def test_pieces_have_the_usual_size_where_memory_allows(device: torch.device, usual: int) -> None:
    graph, plan = planned()
    chosen = settings(product_samples=None)
    assert micro_batch_size(graph, plan, 5000, chosen, device, PLENTY) == usual
    assert micro_batch_size(graph, plan, usual - 1, chosen, device, PLENTY) == usual - 1
    needs = one_layer_needs(graph, plan)
    for fitting in (3, 17):
        memory = Memory(-(-fitting * needs * 10 // 3))  # three tenths are for a pass
        assert micro_batch_size(graph, plan, 5000, chosen, device, memory) == fitting
        assert micro_batch_size(graph, plan, 5000, chosen, device, Memory(memory.total - 10)) == fitting - 1


def test_layers_that_are_solved_together_hold_what_their_first_one_reads() -> None:
    graph = joint_network()[1]
    plan = make_plan(graph, PatternRules.parse("2:4"), 1)
    (group,) = plan.groups
    assert len(group) == 3
    live = [graph.live_bytes(planned.layer.position) for planned in group]
    assert min(live) == live[0] < max(live)
    memory = Memory(-(-8 * one_layer_needs(graph, plan) * 10 // 3))
    assert micro_batch_size(graph, plan, 5000, settings(), CPU, memory) == 8
    assert micro_batch_size(graph, plan, 5000, settings(), CPU, Memory(memory.total - 10)) == 7


def test_a_piece_is_no_more_than_a_product_or_a_mini_batch_takes() -> None:
    graph, plan = planned()
    for choices, size in (
        ({"product_samples": 40}, 40),
        ({"product_samples": 40, "minibatch": 60}, 60),
        ({"product_samples": None, "minibatch": 30}, 30),
        ({"product_samples": 4000}, 250),
    ):
        assert micro_batch_size(graph, plan, 5000, settings(**choices), CPU, PLENTY) == size


def test_a_piece_has_one_sample_at_least() -> None:
    graph, plan = planned()
    assert micro_batch_size(graph, plan, 5000, settings(), CPU, Memory(10)) == 1
    assert micro_batch_size(graph, Plan((), ()), 5000, settings(), CPU, PLENTY) == 250
