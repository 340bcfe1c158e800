"""K-step problems: what they keep in memory, their targets, variances and moments, and samples that are cut off.

Their objectives are compared with the eager model in test_objective.py.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from snows.solve import problem as module
from snows.solve.problem import LayerProblem
from tests.networks import example, make
from tests.oracles import layer_input_output, patches
from tests.problems import joint_network, joint_problem, joint_samples, problem, pruned_parameters, weight_of

RESIDUAL = ("residual", "conv2.weight")


def eager_pruned(name: str) -> nn.Module:
    """The network with the weights of the pruned stream."""
    model = make(name)
    named = {key: value for key, value in pruned_parameters(name).items() if key in model.state_dict()}
    model.load_state_dict({**model.state_dict(), **named})
    return model


def dense_outputs_of(given: LayerProblem) -> list[dict[str, Tensor]]:
    """The outputs of the dense network's operations, as a run computes them once."""
    names = given.segment.outputs
    return [dict(zip(names, given[index].targets, strict=True)) for index in range(len(given))]


# What is kept between passes


def test_pieces_are_kept_where_they_fit_and_made_anew_where_not() -> None:
    cost = problem(*RESIDUAL, 3).segment.cost
    enough = 5 * (cost.prelude_bytes + cost.output_bytes)
    assert cost.prelude_bytes > 0
    for keep_bytes, kept in ((enough, True), (enough - 1, False)):
        given = problem(*RESIDUAL, 3, keep_bytes=keep_bytes)
        assert (given[0] is given[0]) == kept
        assert given[0] is not given[1]


def test_outputs_that_are_known_take_no_room_and_inputs_of_offloaded_streams_do() -> None:
    cost = problem(*RESIDUAL, 3).segment.cost
    outputs = dense_outputs_of(problem(*RESIDUAL, 3))
    for known, offloaded, sample_bytes in (
        (outputs, False, cost.prelude_bytes),
        (outputs, True, cost.prelude_bytes + cost.input_bytes),
        (None, True, cost.prelude_bytes + cost.input_bytes + cost.output_bytes),
    ):
        for short, kept in ((0, True), (1, False)):
            given = problem(*RESIDUAL, 3)
            given.pruned.offloaded = offloaded
            given = replace(given, dense_outputs=known, keep_bytes=5 * sample_bytes - short, _kept={})
            given.pruned.offloaded = False  # they are where they were
            assert (given[0] is given[0]) == kept


def test_a_problem_is_a_sequence_of_its_micro_batches() -> None:
    given = problem(*RESIDUAL, 3, split=(2, 2, 1), held_out=1)
    assert len(given) == 3
    assert given.sizes == (2, 2, 1)
    assert [given[index].samples for index in range(3)] == [2, 2, 1]
    assert given.held_out == (2,)
    objective = given.objective("variance")
    assert objective.chosen == (0, 1)
    assert objective.samples == 4


def test_known_outputs_are_the_targets() -> None:
    given = problem(*RESIDUAL, 3)
    outputs = [{name: value + 1 for name, value in values.items()} for values in dense_outputs_of(given)]
    known = replace(given, dense_outputs=outputs, _kept={})
    for index in range(2):
        for target, own in zip(known[index].targets, given[index].targets, strict=True):
            assert torch.equal(target, own + 1)


# Targets


@pytest.mark.parametrize("targets_from", ["dense-stream", "dense-weights"])
def test_targets_are_outputs_of_dense_weights_on_the_right_inputs(targets_from: str) -> None:
    given = problem(*RESIDUAL, 0, split=(5,), targets_from=targets_from)
    dense = make("residual")
    x, y = layer_input_output(dense, "conv2", example("residual", 5))
    if targets_from == "dense-weights":
        x, _ = layer_input_output(eager_pruned("residual"), "conv2", example("residual", 5))
        y = dense.get_submodule("conv2")(x)
    torch.testing.assert_close(given[0].targets[0], y)


# Variances


def test_variances_do_not_depend_on_the_pieces() -> None:
    for split in ((5,), (1, 4), (2, 2, 1)):
        objective = problem(*RESIDUAL, 3, split=split).objective("variance")
        targets = problem(*RESIDUAL, 3, split=(5,))[0].targets
        expected = [1 / float(target.var(correction=0)) for target in targets]
        assert objective.weights == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize(("most", "pieces"), [(1, 1), (2, 1), (3, 2), (4, 2), (5, 3), (99, 3)])
def test_variances_are_those_of_the_first_fitted_samples(
    most: int, pieces: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_VARIANCE_SAMPLES", most)
    given = problem(*RESIDUAL, 2, split=(2, 2, 2, 2), held_out=1)
    weights = given.objective("variance").weights
    targets = zip(*(given[index].targets for index in range(pieces)), strict=True)
    expected = [1 / float(torch.cat(parts).var(correction=0)) for parts in targets]
    assert weights == pytest.approx(expected, rel=1e-12)


def test_a_thousand_samples_are_enough_for_variances() -> None:
    given = problem("mlp", "2.weight", 0, split=(500, 500, 500))
    targets = torch.cat([given[index].targets[0] for index in range(2)])
    assert given.objective("variance").weights == pytest.approx([1 / float(targets.var(correction=0))], rel=1e-12)


def test_known_variances_are_used_and_new_ones_are_added() -> None:
    given = problem(*RESIDUAL, 2)
    first, *others = given.segment.outputs
    known = {first: 4.0, "of another layer": 9.0}
    given = replace(given, variances=known)
    weights = given.objective("variance").weights
    own = problem(*RESIDUAL, 2).objective("variance").weights
    assert weights[0] == 0.25
    assert weights[1:] == own[1:]
    assert set(known) == {first, "of another layer", *others}
    assert [1 / known[name] for name in others] == pytest.approx(list(own[1:]))


def test_only_the_variance_normalization_weighs_operations() -> None:
    given = problem(*RESIDUAL, 2)
    for normalization in ("mean", "sum"):
        objective = given.objective(normalization)  # type: ignore[arg-type]
        assert objective.weights == (1.0, 1.0, 1.0)
        assert objective.normalization == normalization
    assert given.variances == {}


def test_a_constant_target_has_a_least_variance() -> None:
    given = replace(problem(*RESIDUAL, 0), variances={problem(*RESIDUAL, 0).segment.outputs[0]: 0.0})
    assert given.objective("variance").weights == (1e12,)


def test_precision_and_layouts_reach_the_objective() -> None:
    given = problem(*RESIDUAL, 2)
    assert given.objective("mean").precision is None
    objective = given.objective("mean", torch.bfloat16)
    assert objective.precision is torch.bfloat16
    assert objective.layouts == given.segment.sample_layouts


# Samples that are cut off


def test_pieces_are_narrowed_to_their_first_samples_also_with_known_outputs() -> None:
    given = problem(*RESIDUAL, 2, split=(3, 2))
    known = replace(given, dense_outputs=dict(enumerate(dense_outputs_of(given))), _kept={})
    known[0], known[1]  # kept from here on
    narrow = known.narrowed(1)
    assert narrow.sizes == (1, 1)
    weight = weight_of(*RESIDUAL)
    for index in range(2):
        whole = zip(given[index].targets, given[index].forward(weight), strict=True)
        parts = zip(narrow[index].targets, narrow[index].forward(weight), strict=True)
        for (target, output), (part, narrowed) in zip(whole, parts, strict=True):
            torch.testing.assert_close(part, target[:1])
            torch.testing.assert_close(narrowed, output[:1])
    assert known.sizes == (3, 2)
    assert len(known[0].targets[0]) == 3


def test_a_problem_is_narrowed_only_where_a_piece_is_larger() -> None:
    given = problem(*RESIDUAL, 2, split=(2, 3))
    assert given.narrowed(3) is given
    assert given.narrowed(2).sizes == (2, 2)
    inner = replace(given, segment=replace(given.segment, batch_first=False))
    assert inner.narrowed(1) is inner


# Moments


def averaged(module: nn.Module, x: Tensor, y: Tensor | None = None) -> Tensor:
    """Second moments of patches, averaged over positions; with outputs, their moments with these."""
    groups = patches(module, x)
    if y is None:
        return torch.stack([part.T @ part / len(part) for part in groups])
    rows = (y.movedim(1, -1) if isinstance(module, nn.Conv2d) else y).reshape(len(groups[0]), len(groups), -1)
    return torch.stack([part.T @ rows[:, index] / len(part) for index, part in enumerate(groups)])


MOMENTS = [("residual", "conv2"), ("grouped", "2"), ("depthwise", "2"), ("mlp", "2"), ("attention", "mlp.2")]


def test_pieces_are_counted_by_the_size_of_the_first() -> None:
    given = problem("residual", "last.weight", 1, split=(6, 4, 4))
    x, _ = layer_input_output(eager_pruned("residual"), "last", example("residual", 14))
    torch.testing.assert_close(given.gram(samples=5), averaged(make("residual").last, x[:6]))


@pytest.mark.parametrize(("name", "layer"), MOMENTS)
@pytest.mark.parametrize("targets_from", ["dense-stream", "dense-weights"])
def test_moments_are_those_of_the_eager_layer(name: str, layer: str, targets_from: str) -> None:
    given = problem(name, f"{layer}.weight", 1, split=(2, 3, 2), targets_from=targets_from, held_out=1)
    fitted = example(name, 7)[:5]
    dense, pruned = make(name), eager_pruned(name)
    own = dense.get_submodule(layer)
    pruned_x, _ = layer_input_output(pruned, layer, fitted)
    dense_x, y = layer_input_output(dense, layer, fitted)
    if targets_from == "dense-weights":
        y = own(pruned_x)
    if own.bias is not None:
        y = y - (own.bias.view(-1, 1, 1) if isinstance(own, nn.Conv2d) else own.bias)
    moments = given.moments()
    torch.testing.assert_close(moments.gram, averaged(own, pruned_x), check_dtype=True)
    torch.testing.assert_close(moments.cross, averaged(own, pruned_x, y))
    torch.testing.assert_close(given.gram(), averaged(own, pruned_x))
    torch.testing.assert_close(given.dense_gram(), averaged(own, dense_x))


@pytest.mark.parametrize(
    ("name", "layer", "samples", "size", "pieces"),
    [
        ("mlp", "2", 1, 8, 4),  # 8 columns, 1 position: 4 * 8 / 1 samples at least
        ("mlp", "2", 1, 11, 3),
        ("mlp", "2", 33, 8, 5),
        ("residual", "conv2", 1, 6, 6),  # 36 columns, 4 positions: 36 samples
        ("residual", "conv2", 1, 7, 6),
        ("residual", "last", 1, 4, 1),  # 4 columns, 4 positions: 4 samples
        ("residual", "last", 4, 4, 1),
        ("residual", "last", 5, 4, 2),
        ("residual", "last", 8, 4, 2),
        ("residual", "last", 1000, 4, 6),
        ("residual", "last", None, 4, 6),
    ],
)
def test_moments_of_about_so_many_samples(name: str, layer: str, samples: int | None, size: int, pieces: int) -> None:
    """At least four positions for each column, in whole pieces, of the six that are fitted."""
    given = problem(name, f"{layer}.weight", 1, split=(size,) * 7, held_out=1)
    own = make(name).get_submodule(layer)
    x, _ = layer_input_output(eager_pruned(name), layer, example(name, 7 * size))
    torch.testing.assert_close(given.gram(samples=samples), averaged(own, x[: pieces * size]))


def test_each_layer_of_a_group_has_moments_of_its_own_inputs() -> None:
    model, given = joint_network()[0], joint_problem()
    x = joint_samples()
    for index, layer in enumerate(given.layers):
        own = model.get_submodule(layer.name)
        read, y = layer_input_output(model, layer.name, x)
        torch.testing.assert_close(given.moments(index).gram, averaged(own, read))
        torch.testing.assert_close(given.moments(index).cross, averaged(own, read, y - own.bias))
        torch.testing.assert_close(given.gram(index), averaged(own, read))
        torch.testing.assert_close(given.dense_gram(index), averaged(own, read))


def test_weights_of_later_layers_are_those_of_the_pruned_stream() -> None:
    """A second sweep: the outputs behind the layer are those of weights that are already re-adjusted."""
    given = problem("mlp", "2.weight", 2, split=(5,))
    pruned = eager_pruned("mlp")
    weight = weight_of("mlp", "2.weight")
    pruned[2].weight.copy_(weight)
    expected = [layer_input_output(pruned, name, example("mlp", 5))[1] for name in ("2", "3", "4")]
    found: Any = given[0].forward(weight)
    for output, wanted in zip(found, expected, strict=True):
        torch.testing.assert_close(output, wanted)


def test_linearized_outputs_are_the_outputs() -> None:
    given, weight = problem(*RESIDUAL, 2), weight_of(*RESIDUAL)
    outputs, jacobian = given[0].linearize(weight, torch.float64)
    for output, wanted in zip(outputs, given[0].forward(weight), strict=True):
        torch.testing.assert_close(output, wanted)
    v = torch.ones_like(weight)
    step = 1e-6
    for tangent, before, after in zip(
        jacobian.push(v), given[0].forward(weight - step * v), given[0].forward(weight + step * v), strict=True
    ):
        torch.testing.assert_close(tangent, (after - before) / (2 * step), rtol=1e-6, atol=1e-6)
