"""Query, key and value that meet in one attention are solved together, however a network spells them."""

from __future__ import annotations

import math
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import snows
from snows.data.streams import Batches, Stream
from snows.events import Event, LayerStarted
from snows.graph import Graph, capture
from snows.patterns import PatternRules
from snows.plan import make_plan, role
from snows.solve.problem import LayerProblem
from tests.networks import Attention as Packed
from tests.oracles import KStepLoss

SPELLINGS = ("fused", "separate", "written")
RECIPE = snows.Recipe(horizon=3, sweeps=2, cg_steps=6)


class Projections(nn.Module):
    """What `nn.MultiheadAttention` computes, by other means."""

    def __init__(self, spelling: str, width: int = 4, heads: int = 2, key_heads: int | None = None) -> None:
        super().__init__()
        self.spelling, self.heads, self.key_heads = spelling, heads, key_heads or heads
        if spelling == "fused":
            self.qkv = nn.Linear(width, 3 * width)
        else:
            self.v_proj = nn.Linear(width, self.key_heads * width // heads)
            self.k_proj = nn.Linear(width, self.key_heads * width // heads)
            self.q_proj = nn.Linear(width, width)
        self.out_proj = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        if self.spelling == "fused":
            parts = list(self.qkv(x).chunk(3, -1))
        else:  # computed in another order than the attention reads them
            v, k = self.v_proj(x), self.k_proj(x)
            parts = [self.q_proj(x), k, v]
        q, k, v = (part.unflatten(-1, (-1, x.shape[-1] // self.heads)).transpose(1, 2) for part in parts)
        k, v = (part.repeat_interleave(self.heads // self.key_heads, 1) for part in (k, v))
        if self.spelling == "written":
            attended = torch.softmax(q @ k.transpose(-1, -2) / math.sqrt(q.shape[-1]), -1) @ v
        else:
            attended = F.scaled_dot_product_attention(q, k, v)
        return self.out_proj(attended.transpose(1, 2).flatten(2))


class Block(nn.Module):
    """The network of `tests.networks.Attention`, with its attention spelled otherwise."""

    def __init__(self, spelling: str, key_heads: int | None = None) -> None:
        super().__init__()
        self.embed = nn.Linear(3, 4)
        self.norm1 = nn.LayerNorm(4)
        self.attention = Projections(spelling, key_heads=key_heads)
        self.norm2 = nn.LayerNorm(4)
        self.mlp = nn.Sequential(nn.Linear(4, 8), nn.GELU(), nn.Linear(8, 4))
        self.norm3 = nn.LayerNorm(4)
        self.head = nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x)
        x = x + self.attention(self.norm1(x))
        x = x + self.mlp(self.norm2(x))
        return self.head(self.norm3(x).mean(1))


@cache
def packed() -> nn.Module:
    torch.manual_seed(3)
    return Packed().double().eval().requires_grad_(False)


@cache
def spelled(spelling: str) -> nn.Module:
    """The packed network's weights in another spelling."""
    state = packed().state_dict()
    weights, biases = state.pop("attention.in_proj_weight"), state.pop("attention.in_proj_bias")
    if spelling == "fused":
        state |= {"attention.qkv.weight": weights, "attention.qkv.bias": biases}
    else:
        for name, weight, bias in zip("qkv", weights.chunk(3), biases.chunk(3), strict=True):
            state |= {f"attention.{name}_proj.weight": weight, f"attention.{name}_proj.bias": bias}
    model = Block(spelling).double().eval().requires_grad_(False)
    model.load_state_dict(state)
    return model


def samples(count: int) -> Tensor:
    return torch.randn(count, 5, 3, generator=torch.Generator().manual_seed(8), dtype=torch.float64)


def planned_groups(graph: Graph, **options: Any) -> list[list[str]]:
    plan = make_plan(graph, PatternRules.parse("2:4"), 3, **options)
    return [[planned.layer.name for planned in group] for group in plan.groups]


def joined(model: nn.Module) -> Tensor:
    """Query, key and value as one matrix."""
    state = model.state_dict()
    single = [f"attention.{name}" for name in ("in_proj_weight", "qkv.weight") if f"attention.{name}" in state]
    return state[single[0]] if single else torch.cat([state[f"attention.{name}_proj.weight"] for name in "qkv"])


@pytest.mark.parametrize("spelling", SPELLINGS)
def test_the_spellings_are_one_network(spelling: str) -> None:
    x = samples(3)
    torch.testing.assert_close(spelled(spelling)(x), packed()(x), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("spelling", ["separate", "written"])
def test_query_key_and_value_are_one_group_in_this_order(spelling: str) -> None:
    graph = capture(spelled(spelling), (samples(2),), {})
    together = [f"attention.{name}_proj" for name in "qkv"]
    if spelling == "written":  # by a product of query and key, which says nothing of their order
        together = [f"attention.{name}_proj" for name in "kqv"]
    assert planned_groups(graph) == [together, ["attention.out_proj"], ["mlp.0"], ["mlp.2"]]
    assert planned_groups(graph, layers="*q_proj, *v_proj")[0] == ["attention.q_proj", "attention.v_proj"]


@pytest.mark.parametrize("spelling", SPELLINGS)
@pytest.mark.parametrize("horizon", [0, 2, 20])
def test_the_joint_problem_against_a_dense_oracle(spelling: str, horizon: int) -> None:
    """Loss, gradient, Hessian and Gauss-Newton over all three matrices, by the eager packed network in float64."""
    model, x = spelled(spelling), samples(4)
    graph = capture(model, (x[:2],), {})
    plan = make_plan(graph, PatternRules.parse("2:4"), horizon)
    layers = [planned.layer for planned in plan.groups[0]]
    batches = Batches([{graph.inputs[0].name: part} for part in x.split([3, 1])], (3, 1))
    streams = [Stream(graph, graph.parameters, batches) for _ in range(2)]
    for stream in streams:
        stream.advance(min(layer.position for layer in layers))
    problem = LayerProblem(graph.segment(layers, horizon), *streams, "dense-stream", 1 << 30)
    objective = problem.objective("variance")

    oracle = KStepLoss(
        packed(), x, packed().state_dict(), "attention.in_proj_weight", horizon, "dense-stream", "variance", set()
    )
    generator = torch.Generator().manual_seed(1)
    moved = joined(packed()) + 0.3 * torch.randn(12, 4, generator=generator, dtype=torch.float64)
    order = [name for layer in layers for name in (layer.name[-6] if len(layers) > 1 else "qkv")]
    where = torch.cat([torch.arange(16) + 16 * "qkv".index(name) for name in order])  # of packed, in the oracle's order
    mine = moved.flatten()[where].view(-1) if len(layers) > 1 else moved

    assert objective.loss(mine) == pytest.approx(float(oracle(moved)), rel=1e-10)
    variable = moved.clone().requires_grad_()
    (slope,) = torch.autograd.grad(oracle(variable), variable)
    torch.testing.assert_close(objective.loss_and_gradient(mine)[1].flatten(), slope.flatten()[where])
    for kind, matrix in (("hessian", oracle.hessian(moved)), ("gauss-newton", oracle.gauss_newton(moved))):
        product = objective.product(kind, mine, keep=True)
        columns = [product(column.view_as(mine)).flatten() for column in torch.eye(48, dtype=torch.float64)]
        torch.testing.assert_close(torch.stack(columns), matrix[where][:, where], rtol=1e-8, atol=1e-10)


def test_every_spelling_gives_the_same_result() -> None:
    x = samples(40)
    results = {
        name: snows.prune(model, x, "2:4", recipe=RECIPE, progress=False)
        for name, model in [("packed", packed()), *((s, spelled(s)) for s in ("fused", "separate"))]
    }
    wanted = results["packed"]
    for result in results.values():
        torch.testing.assert_close(joined(result.model), joined(wanted.model), rtol=1e-6, atol=1e-6)
        torch.testing.assert_close(result.model(x), wanted.model(x), rtol=1e-6, atol=1e-6)
        assert result.report.solve_outcomes == wanted.report.solve_outcomes


def test_the_report_names_what_was_solved_together() -> None:
    seen: list[Event] = []
    result = snows.prune(spelled("separate"), samples(40), "2:4", recipe=RECIPE, progress=seen.append)
    layers = {layer.name: layer for layer in result.report.layers}
    group = [f"attention.{name}_proj" for name in "qkv"]
    assert [layers[name].group for name in group] == [group] * 3
    assert layers["attention.q_proj"].solves == layers["attention.v_proj"].solves
    assert layers["mlp.0"].group == ["mlp.0"]
    started = [event for event in seen if isinstance(event, LayerStarted)]
    assert started[0].layers == tuple(group)
    assert started[0].layer == " + ".join(group)
    assert started[-1].total == 4
    outcomes = {solve.outcome for layer in layers.values() for solve in layer.solves}
    ended = sum(result.report.solve_outcomes[outcome] for outcome in outcomes)
    assert ended == 4 * RECIPE.sweeps


@pytest.mark.parametrize("key_heads", [1, 2])
def test_fewer_heads_of_keys_than_of_queries(key_heads: int) -> None:
    torch.manual_seed(5)
    model = Block("separate", key_heads).double().eval()
    result = snows.prune(model, samples(60), "2:4", layers="qkv", recipe=RECIPE, progress=False)
    assert {len(layer.group) for layer in result.report.layers} == {3}
    assert all(layer.solves[0].loss < layer.solves[0].loss_masked for layer in result.report.layers)
    assert all(snows.NM(2, 4).violations(mask) == 0 for mask in result.masks.values())


def test_an_interrupted_group_is_resumed(tmp_path: Path) -> None:
    def stop(event: Event) -> None:
        if isinstance(event, LayerStarted) and (event.sweep, event.index) == (1, 1):
            raise KeyboardInterrupt

    options: dict[str, Any] = {"pattern": "2:4", "recipe": RECIPE}
    whole = snows.prune(spelled("separate"), samples(40), progress=False, **options)
    with pytest.raises(KeyboardInterrupt):
        snows.prune(spelled("separate"), samples(40), progress=stop, resume=tmp_path / "state", **options)
    again = snows.prune(spelled("separate"), samples(40), progress=False, resume=tmp_path / "state", **options)
    for name, tensor in whole.model.state_dict().items():
        assert torch.equal(tensor, again.model.state_dict()[name])


@pytest.mark.parametrize("spelling", SPELLINGS)
def test_layers_are_chosen_by_their_role(spelling: str) -> None:
    graph = capture(spelled(spelling), (samples(2),), {})
    found = {layer.name: role(graph, layer) for layer in graph.layers}
    projections = {name: kind for name, kind in found.items() if name.startswith("attention.")}
    assert projections.pop("attention.out_proj") == "out"
    assert set(projections.values()) == {"qkv"}
    others = {name: found[name] for name in ("embed", "mlp.0", "mlp.2", "head")}
    assert others == {"embed": None, "mlp.0": "mlp", "mlp.2": "mlp", "head": None}

    def chosen(**options: Any) -> set[str]:
        return {name for group in planned_groups(graph, **options) for name in group}

    assert chosen(layers="mlp") == {"mlp.0", "mlp.2"}
    assert chosen(layers=["out", "mlp.0"]) == {"attention.out_proj", "mlp.0"}
    assert chosen(layers="qkv, out") == {*projections, "attention.out_proj"}
    assert chosen(exclude="qkv,out") == {"mlp.0", "mlp.2"}


def test_a_role_that_no_layer_has_is_refused() -> None:
    network = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4)).eval()
    with pytest.raises(snows.ArgumentError, match="layers='qkv' fits no layer"):
        snows.prune(network, torch.randn(8, 4), "2:4", layers="qkv", progress=False)
