"""What a run is expected to take of the device's memory. The factors themselves were measured on a GPU."""

from __future__ import annotations

import itertools
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from snows.devices.memory import Memory
from snows.graph import Graph, capture
from snows.graph.cost import Cost
from snows.patterns import NM, PatternRules
from snows.plan import make_plan
from snows.recipe import DEFAULT, Recipe
from snows.solve.estimate import Estimate
from snows.solve.footprint import linearized_bytes, micro_batch_size, operations_kept
from snows.solve.settings import resolve
from tests.networks import captured

GPU = torch.device("cuda")
PLENTY = Memory(1 << 40)
COST = Cost(bytes=1000, output_bytes=100, prelude_bytes=20, input_bytes=30, slope_bytes=600, largest_bytes=50, flops=1)


def estimate(total: int = 1 << 40, samples: int = 1000, horizon: int = 4, graph: Graph | None = None) -> Estimate:
    graph = graph or captured("residual")[1]
    settings = resolve(DEFAULT.replace(horizon=horizon), graph, "cuda")
    plan = make_plan(graph, PatternRules.parse("2:4"), horizon)
    memory = Memory(total)
    size = micro_batch_size(graph, plan, samples, settings, GPU, memory)
    return Estimate(graph, plan, settings, memory, GPU, samples, size)


def test_more_samples_and_longer_horizons_take_more() -> None:
    assert estimate(samples=2000).peak() > estimate(samples=1000).peak() > estimate(samples=500).peak() > 0
    assert estimate(horizon=6).peak() > estimate(horizon=1).peak()


def test_the_peak_is_that_of_the_widest_layer() -> None:
    """Layers are solved one after another, so narrow ones add nothing. The widest holds a block for each output."""
    widths = [4, 8, 256, 16, 8, 2]
    parts = [part for pair in itertools.pairwise(widths) for part in (nn.Linear(*pair), nn.ReLU())]
    graph = capture(nn.Sequential(*parts).eval(), (torch.randn(8, 4),), {})
    found = estimate(samples=100, horizon=1, graph=graph)
    needs = {group[0].layer.name: found.of_group(group) for group in found.plan.groups}
    assert list(needs) == ["2", "4", "6"]
    assert found.peak() == needs["4"] < sum(needs.values())
    blocks = 4 * 16 * (256 // 2) ** 2  # float32, outputs, inputs that 2:4 keeps
    assert needs["4"] > blocks > max(needs["2"], needs["6"]) / 2
    assert replace(found, plan=replace(found.plan, pruned=())).peak() == 0


@pytest.mark.parametrize("horizon", [1, 6])
def test_within_a_budget_samples_do_not_count(horizon: int) -> None:
    """Activations are kept elsewhere, targets are computed again, and pieces are small."""
    total = 300_000
    few, many = (estimate(total, samples, horizon) for samples in (2_000, 200_000))
    assert few.micro_batch == many.micro_batch < 1000
    assert many.peak() <= total
    assert many.peak() == pytest.approx(few.peak(), rel=0.2)
    assert estimate(1 << 40, 200_000, horizon).peak() > 10 * total


def test_half_precision_takes_half() -> None:
    _, graph = captured("residual")
    cost = graph.segment([graph.layers[1]], 4).cost
    full, half = (linearized_bytes(cost, "gauss-newton", dtype) for dtype in (torch.float32, torch.bfloat16))
    assert full == 2 * half == cost.slope_bytes
    assert linearized_bytes(cost, "hessian", torch.float32) == 2 * cost.bytes > full


# Bytes of one group, by hand


def made_up(
    memory: Memory = PLENTY,
    device: str = "cpu",
    operations_kept: int = 0,
    cost: Cost = COST,
    is_one_layer: bool = False,
    groups: tuple[tuple[str, ...], ...] = (("a",),),
    given_mask: bool = False,
    **choices: Any,
) -> Estimate:
    """500 samples in pieces of 200. Layer `a` has 6 outputs of 8 inputs, `b` has 10 of 8; a sample holds 7 bytes."""
    rows = {"a": 6, "b": 10}
    positions = {"a": 1, "b": 2}
    pattern = None if given_mask else NM(2, 4)
    plan = [
        tuple(
            SimpleNamespace(
                layer=SimpleNamespace(
                    name=name, shape=torch.Size((rows[name], 8)), columns=8, position=positions[name]
                ),
                pattern=pattern,
                horizon=3,
            )
            for name in group
        )
        for group in groups
    ]
    segment = SimpleNamespace(cost=cost, is_one_layer=is_one_layer, piecewise_linear=True)
    graph = SimpleNamespace(segment=lambda layers, horizon: segment, live_bytes=lambda position: 7 * position)
    recipe = Recipe(**{"horizon": 3, "sweeps": 1, "product_samples": 100, **choices})
    settings = resolve(recipe, captured("mlp")[1], device)
    made: Any = Estimate(graph, SimpleNamespace(groups=plan), settings, memory, torch.device(device), 500, 200)  # type: ignore[arg-type]
    made.__dict__["_operations_kept"] = operations_kept  # a cached value
    return made


def group_of(made: Estimate) -> Any:
    return made.plan.groups[0]


SMALL_PASS = replace(COST, bytes=1)
HELD = 2 * 7 * 500 + (20 + 100) * 500  # activations in two streams, targets, and what is computed beforehand
BLOCKS = 4 * 6 * 4**2  # of 6 outputs with 4 inputs each, in float32
PRODUCTS = 600 * 100 + (100 + 20 + 3 * 50) * 100  # Jacobians of 100 samples, and tangents


@pytest.mark.parametrize(
    ("options", "size"),
    [
        ({}, HELD + BLOCKS + 1500 * 200),  # a gradient takes most: values of a piece one and a half times
        ({"cost": SMALL_PASS}, HELD + BLOCKS + PRODUCTS),
        (
            {"cost": SMALL_PASS, "is_one_layer": True},
            HELD + BLOCKS + 5 * 8 * 6 * 4**2,
        ),  # blocks while they are inverted
        ({"cost": SMALL_PASS, "operations_kept": 11}, HELD - 100 * 500 + 11 * 500 + BLOCKS + PRODUCTS),
        (
            {"cost": SMALL_PASS, "product_samples": 300},
            HELD + BLOCKS + 870 * 100,
        ),  # 7 an input, 100 at least
        ({"cost": SMALL_PASS, "product_samples": None}, HELD + BLOCKS + 600 * 500 + 270 * 200),
        ({"cost": SMALL_PASS, "minibatch": 300}, HELD + BLOCKS + 600 * 300 + 270 * 200),
        ({"cost": SMALL_PASS, "minibatch": 900}, HELD + BLOCKS + 600 * 500 + 270 * 200),
        ({"cost": SMALL_PASS, "curvature": "hessian"}, HELD + BLOCKS + (2 * 1 + 270) * 100),  # two values each
        ({"cost": SMALL_PASS, "device": "cuda"}, HELD + BLOCKS + 300 * 100 + 135 * 100),  # in half precision
        ({"cost": SMALL_PASS, "given_mask": True}, HELD + BLOCKS + PRODUCTS),  # half of it is taken to be kept
        ({"cost": SMALL_PASS, "sweeps": 2, "is_one_layer": True}, HELD + BLOCKS + 5 * 8 * 6 * 4**2),
        ({"groups": (("a", "b"),), "cost": SMALL_PASS}, HELD + BLOCKS + 4 * 10 * 4**2 + PRODUCTS),
    ],
)
def test_bytes_of_one_group(options: dict[str, Any], size: int) -> None:
    made = made_up(**options)
    assert made.of_group(group_of(made)) == size


def test_the_first_mask_step_keeps_most() -> None:
    """1:4 in two steps is 2:4 first."""
    for steps, inputs in ((1, 2), (2, 4)):
        made = made_up(sweeps=2, mask_steps=steps, is_one_layer=True, cost=SMALL_PASS)
        group_of(made)[0].pattern = NM(1, 4)
        blocks = 4 * 6 * inputs**2
        assert made.of_group(group_of(made)) == HELD + blocks + 5 * 2 * blocks


def test_activations_that_do_not_fit_are_elsewhere() -> None:
    """Of 500 samples 300 stay; of the others a piece is read at a time. Targets are computed again for each piece."""
    memory = Memory(2 * 14 * 300)
    made = made_up(memory, cost=SMALL_PASS, is_one_layer=True)
    chunk = max(memory.chunk, 8 * 4**2)
    held = 14 * (300 + 200) + (20 + 30 + 100) * 200
    assert made.of_group(group_of(made)) == held + BLOCKS + max(5 * min(8 * 6 * 4**2, chunk), 300)


def test_targets_are_kept_if_all_of_them_fit() -> None:
    live, targets = 14 * 500, 120 * 500
    for total, samples in ((2 * (live + targets), 500), (2 * (live + targets) - 2, 200)):
        made = made_up(Memory(total), cost=SMALL_PASS, is_one_layer=True)
        factoring = 5 * min(8 * 6 * 4**2, max(made.memory.chunk, 8 * 4**2))
        assert made.of_group(group_of(made)) == live + 120 * samples + BLOCKS + factoring


def test_jacobians_are_kept_if_all_of_them_fit() -> None:
    """A fifth of the memory is for products. Less than a half is not worth taking: then they are made anew."""
    for total, kept, taken in ((5 * 600 * 300, 300, 300), (5 * 600 * 299, 200, 200), (5 * 600 * 149, 200, 300)):
        made = made_up(Memory(total), cost=SMALL_PASS, product_samples=300)
        made = replace(made, settings=replace(made.settings, curvature=replace(made.settings.curvature, samples=300)))
        made.__dict__["_operations_kept"] = 0
        group = group_of(made)
        group[0].layer.columns = 8 * 50  # 7 samples for each of its 200 inputs: all 300 that may be
        products = made._products(made.graph.segment([], 3), group)
        assert products == 600 * kept + 270 * min(taken, 200)


@pytest.mark.parametrize(
    ("choices", "fitting", "size"),
    [
        ({"minibatch": 300}, 180, 870 * 200),  # a piece at a time, though 180 would fit
        ({"product_samples": None}, 450, 870 * 200),
        ({"product_samples": None}, 500, 600 * 500 + 270 * 200),
    ],
)
def test_memory_does_not_limit_samples_that_were_asked_for(choices: dict[str, Any], fitting: int, size: int) -> None:
    made = made_up(Memory(5 * 600 * fitting), **choices)
    assert made._products(made.graph.segment([], 3), group_of(made)) == size


def test_a_closed_form_needs_no_products() -> None:
    made = made_up(is_one_layer=True)
    assert made._products(made.graph.segment([], 3), group_of(made)) == 0


def test_inputs_that_are_kept() -> None:
    for given_mask, inputs in ((True, 4), (False, 6)):
        made = made_up(given_mask=given_mask)
        if not given_mask:
            group_of(made)[0].pattern = NM(3, 4)
        assert made.kept_inputs(group_of(made)[0]) == inputs


@pytest.mark.parametrize(("total", "working"), [(1 << 40, 5 * 8 * 10 * 4**2), (1000, 5 * 8 * 4**2), (5000, 5 * 200)])
def test_blocks_are_inverted_in_chunks_of_one_at_least(total: int, working: int) -> None:
    """Of the layer with the larger ones; each chunk needs five copies."""
    made = made_up(Memory(total), groups=(("a", "b"),))
    assert made._factors(group_of(made))[1] == working


def test_factors_that_do_not_fit_are_not_on_the_device() -> None:
    for total, blocks in ((3840, 384), (3830, 0)):
        made = made_up(Memory(total), cost=SMALL_PASS, is_one_layer=True)
        assert made._factors(group_of(made))[0] == blocks


def test_samples_of_a_product() -> None:
    made = made_up(product_samples=900)
    group_of(made)[0].layer.columns = 60  # 30 are kept
    assert made.product_samples(group_of(made)) == 210
    group_of(made)[0].layer.columns = 600
    assert made.product_samples(group_of(made)) == 500  # there are not more


def test_a_piece_is_no_more_than_there_are_samples() -> None:
    made = replace(made_up(is_one_layer=True), samples=150)
    made.__dict__["_operations_kept"] = 0
    assert made.of_group(group_of(made)) == (14 + 120) * 150 + BLOCKS + 1500 * 150


def test_the_whole_is_the_largest_group_not_the_sum() -> None:
    made = made_up(groups=(("a",), ("b",), ("a",)), cost=SMALL_PASS, is_one_layer=True)
    largest = made.of_group(made.plan.groups[1])
    assert made.peak() == largest
    assert largest > made.of_group(made.plan.groups[0])


def test_operations_that_are_kept_count() -> None:
    found = estimate(samples=100)
    kept = operations_kept(found.graph, found.plan, 100, found.settings, found.memory)
    assert found._operations_kept == sum(node.meta["bytes"] for node in kept) > 0
