"""The two streams of a run: where they stand, and what is kept of the dense network from sweep to sweep."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from snows.data.samples import read_samples
from snows.data.streams import Batches, cut
from snows.devices.memory import Memory
from snows.errors import SnowsWarning
from snows.graph import Graph
from snows.patterns import PatternRules
from snows.plan import Plan, make_plan
from snows.recipe import Recipe
from snows.solve.activations import Activations
from snows.solve.problem import LayerProblem
from snows.solve.settings import resolve
from tests.networks import captured, example, make
from tests.problems import pruned_parameters

PLENTY = Memory(1 << 34)
SAMPLES, HELD_OUT, SIZE = 12, 2, 4


def graph_and_plan(horizon: int = 2) -> tuple[Graph, Plan]:
    graph = captured("residual")[1]
    return graph, make_plan(graph, PatternRules.parse("2:4"), horizon)


def batches(size: int = SIZE) -> Batches:
    samples = read_samples(example("residual", SAMPLES), make("residual"))
    fitted, held_out = samples.split(SAMPLES - HELD_OUT)
    return cut(fitted, held_out, [node.name for node in captured("residual")[1].inputs], size)


def activations(
    targets: str = "dense-stream", memory: Memory = PLENTY, readjusts: bool = True, **recipe: Any
) -> Activations:
    graph, plan = graph_and_plan()
    settings = resolve(Recipe(horizon=2, targets=targets, **recipe), graph)  # type: ignore[arg-type]
    return Activations(graph, plan, batches(), settings, memory, readjusts)


def other_weights(seed: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    changed = dict(pruned_parameters("residual"))
    for layer in captured("residual")[1].layers:
        weight = changed[layer.parameter]
        changed[layer.parameter] = weight + 0.3 * torch.randn(weight.shape, generator=generator, dtype=weight.dtype)
    return changed


def variances_of(given: LayerProblem) -> list[float]:
    """From all targets of the fitted samples at once."""
    targets = zip(*(given[index].targets for index in range(given.pruned.fitted)), strict=True)
    return [float(torch.cat(parts).var(correction=0)) for parts in targets]


def weights_of(given: LayerProblem) -> list[float]:
    return [1 / weight for weight in given.objective("variance").weights]


# Variances


@pytest.mark.parametrize("targets", ["dense-stream", "dense-weights"])
def test_variances_are_those_of_the_targets_in_every_sweep(targets: str) -> None:
    """Targets from dense weights depend on the pruned network's activations, which change from sweep to sweep."""
    given = activations(targets)
    groups = graph_and_plan()[1].groups
    seen: list[list[float]] = []
    for sweep in range(3):
        given.restart(other_weights(sweep))
        for group in groups:
            problem = given.problem(group)
            seen.append(weights_of(problem))
            assert seen[-1] == pytest.approx(variances_of(problem), rel=1e-9)
    first, second = seen[len(groups) - 1], seen[2 * len(groups) - 1]
    assert (first == second) == (targets == "dense-stream")


def test_variances_of_the_dense_stream_are_computed_once() -> None:
    given, groups = activations(), graph_and_plan()[1].groups
    problem = given.problem(groups[0])
    weights_of(problem)
    given.restart(other_weights(0))
    again = given.problem(groups[0])
    assert again.variances is problem.variances
    assert set(again.variances) == set(again.segment.outputs)


# Streams


def positions(problem: LayerProblem) -> tuple[int, int]:
    return problem.dense.position, problem.pruned.position


def test_both_streams_move_to_the_layer_and_start_anew_in_a_sweep() -> None:
    given = activations("dense-stream", Memory(1000))
    for _ in range(2):
        given.restart(other_weights(0))
        for group in graph_and_plan()[1].groups:
            layer = group[0].layer
            problem = given.problem(group)
            assert positions(problem) == (layer.position, layer.position)
            assert problem.layers == (layer,)
            assert problem.segment.horizon == group[0].horizon


def test_the_pruned_stream_reads_the_weights_of_the_sweep() -> None:
    given, groups = activations(memory=Memory(1000)), graph_and_plan()[1].groups
    weights = dict(captured("residual")[1].parameters)
    given.restart(weights)
    given.problem(groups[0])
    changed = torch.zeros_like(weights["conv1.weight"])
    weights["conv1.weight"] = changed  # as a run does when it accepts a layer
    later = given.problem(groups[1])
    assert groups[1][0].layer.name == "conv2"
    x = later.pruned.read(0, [later.layers[0].input])[later.layers[0].input]
    dense = later.dense.read(0, [later.layers[0].input])[later.layers[0].input]
    assert torch.equal(x, x[:1, :, :1, :1].expand_as(x))  # what a convolution without weights leaves
    assert not torch.equal(dense, x)
    assert later.pruned.parameters is weights
    assert later.dense.parameters is captured("residual")[1].parameters


@pytest.mark.parametrize(
    ("targets", "memory", "readjusts", "moves"),
    [
        ("dense-stream", PLENTY, True, False),  # targets are known
        ("dense-stream", Memory(1000), True, True),  # no room for all targets
        ("dense-stream", PLENTY, False, True),  # mask only: there are no targets
        ("dense-weights", PLENTY, True, False),  # targets are those of dense weights in the pruned network
    ],
)
def test_the_dense_stream_moves_only_where_it_is_read(
    targets: str, memory: Memory, readjusts: bool, moves: bool
) -> None:
    given, group = activations(targets, memory, readjusts), graph_and_plan()[1].groups[-1]
    problem = given.problem(group)
    position = group[0].layer.position
    assert positions(problem) == (position if moves else 0, position)
    assert (problem.dense_outputs is not None) == (targets == "dense-stream" and memory is PLENTY and readjusts)
    problem.moments()  # known targets are those of the closed form, too
    assert positions(problem) == (position if moves else 0, position)
    problem.dense_gram()  # as some mask methods do
    assert positions(problem) == (position, position)


def test_moments_are_the_same_whether_dense_outputs_are_kept_or_not() -> None:
    kept, computed = activations(), activations(memory=Memory(1000))
    for group in graph_and_plan()[1].groups:
        one, other = kept.problem(group).moments(), computed.problem(group).moments()
        torch.testing.assert_close(one.gram, other.gram)
        torch.testing.assert_close(one.cross, other.cross)


def test_outputs_of_the_dense_network_are_computed_once_and_are_the_targets(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[int] = []
    outputs_of = Graph.outputs_of

    def counted(graph: Graph, *arguments: Any) -> Any:
        calls.append(1)
        return outputs_of(graph, *arguments)

    monkeypatch.setattr(Graph, "outputs_of", counted)
    given, slow = activations(), activations(memory=Memory(1000))
    for sweep in range(2):
        for each in (given, slow):
            each.restart(other_weights(sweep))
        for group in graph_and_plan()[1].groups:
            known, computed = given.problem(group), slow.problem(group)
            for index in range(len(known)):
                for one, other in zip(known[index].targets, computed[index].targets, strict=True):
                    torch.testing.assert_close(one, other)
    assert len(calls) == 1


def test_targets_have_the_room_that_activations_leave() -> None:
    graph, plan = graph_and_plan()
    for total in (2000, 20_000, 200_000):
        memory = Memory(total)
        given = activations(memory=memory)
        for group in plan.groups:
            problem = given.problem(group)
            live = graph.live_bytes(group[0].layer.position)
            assert problem.keep_bytes == memory.targets(live, SAMPLES)


# Smaller pieces


def test_smaller_pieces_after_memory_ran_out(monkeypatch: pytest.MonkeyPatch) -> None:
    emptied: list[int] = []
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: emptied.append(1))
    given = activations()
    weights = other_weights(0)
    given.restart(weights)
    group = graph_and_plan()[1].groups[1]
    before = given.problem(group)
    assert before.sizes == (4, 4, 2, 2)
    assert before.dense_outputs is not None
    with pytest.warns(SnowsWarning, match="^out of memory at conv2: going on with 2 samples at a time instead of 4$"):
        given.use_smaller_pieces("conv2")
    assert emptied == [1]
    after = given.problem(group)
    assert after.sizes == (2,) * 6
    assert after.held_out == (5,)
    assert after.dense_outputs is None  # what was kept is given up
    assert after.pruned.parameters is weights
    assert positions(after) == (group[0].layer.position,) * 2
    assert weights_of(after) == pytest.approx(weights_of(before))


def test_single_samples_that_do_not_fit_are_an_error() -> None:
    given = activations()
    with pytest.warns(SnowsWarning, match="going on with"):
        given.use_smaller_pieces("conv2")
    with pytest.warns(SnowsWarning, match="going on with 1 samples at a time instead of 2"):
        given.use_smaller_pieces("conv2")
    with pytest.raises(torch.OutOfMemoryError, match=r"^conv2 does not fit .*, not even with single samples$"):
        given.use_smaller_pieces("conv2")


def test_batches_that_cannot_be_cut_are_an_error() -> None:
    graph, plan = graph_and_plan()
    whole = replace(batches(), smaller=None)
    given = Activations(graph, plan, whole, resolve(Recipe(horizon=2), graph), PLENTY, readjusts=True)
    with pytest.raises(torch.OutOfMemoryError, match="not even with single samples"):
        given.use_smaller_pieces("conv2")


def test_streams_keep_to_the_memory() -> None:
    given = activations(memory=Memory(1000, host=0))
    problem = given.problem(graph_and_plan()[1].groups[0])
    assert problem.dense.offloaded
    assert problem.pruned.offloaded
