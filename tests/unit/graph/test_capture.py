"""Capture: what the graph computes, what is said where a model cannot be captured, inputs without a batch dimension."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils import _pytree as pytree

import snows
from snows.errors import CaptureError, InputError
from snows.graph import Graph, capture
from snows.graph.comparison import compare_at_sizes
from snows.graph.segment import SampleLayout
from tests.networks import NETWORKS, call_arguments, captured, example
from tests.oracles import operations


@pytest.mark.parametrize("name", NETWORKS)
def test_the_graph_gives_the_models_outputs_at_another_batch_size(name: str) -> None:
    model, graph = captured(name)
    for samples in (1, 7):
        args, kwargs = call_arguments(example(name, samples, seed=samples))
        with torch.no_grad():
            expected = pytree.tree_leaves(model(*args, **kwargs))
            found = graph.run(pytree.tree_leaves((args, kwargs)))
        for a, b in zip(found, expected, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("name", NETWORKS)
def test_operations_are_those_of_the_eager_model(name: str) -> None:
    """Each counted module gives one operation; batch norms, additions and pooling none."""
    model, graph = captured(name)
    values = graph.run_operations(pytree.tree_leaves(call_arguments(example(name, 3))))
    seen = operations(model, example(name, 3), model.state_dict())
    found = [values[node.name] for node in graph.operations]
    assert len(found) == len(seen)
    for operation, module_output in zip(found, seen, strict=True):
        if operation.shape != module_output.shape:  # attention keeps its heads, samples and tokens in other axes
            operation, module_output = (value.flatten().sort().values for value in (operation, module_output))
        torch.testing.assert_close(operation, module_output, rtol=1e-10, atol=1e-12)


class Forward(nn.Module):
    """A linear layer with some forward around it."""

    def __init__(self, forward: Callable[..., Any]) -> None:
        super().__init__()
        self.fc = nn.Linear(4, 4)
        self.of = forward

    def forward(self, x: Tensor) -> Any:
        return self.of(self.fc, x)


def captured_forward(forward: Callable[..., Any], samples: int = 4) -> Graph:
    return capture(Forward(forward).eval(), (torch.randn(samples, 4),), {})


# What samples are


def test_one_sample_is_enough_as_an_example() -> None:
    graph = captured_forward(lambda fc, x: fc(x), samples=1)
    assert graph.run([torch.randn(9, 4)])[0].shape == (9, 4)


def test_sample_layouts() -> None:
    graph = captured_forward(lambda fc, x: torch.relu(fc(x).T) + torch.relu(fc(x)).flatten().sum())
    layouts = {node.name: node.meta["sample_layout"] for node in graph.operations}
    first = SampleLayout(axis=0, inner=False)
    assert layouts == {"linear": first, "relu": SampleLayout(axis=1, inner=False), "linear_1": first, "relu_1": first}
    mixed = captured_forward(lambda fc, x: torch.relu(fc(x) + fc(x).sum(0)))
    assert mixed.operations[-1].meta["sample_layout"] == first
    lost = captured_forward(lambda fc, x: torch.relu(fc(x).cumsum(0)))  # rotated inputs do not rotate it
    assert lost.operations[-1].meta["sample_layout"] is None


def test_two_samples_are_enough_to_tell_samples_from_tokens() -> None:
    """nn.MultiheadAttention projects its output with samples as the fast index, not the slow one."""
    model, graph = captured("attention")
    again = capture(model, (example("attention", 2),), {})
    layouts = [node.meta["sample_layout"] for node in graph.operations]
    assert [node.meta["sample_layout"] for node in again.operations] == layouts
    assert None not in layouts
    assert any(layout.inner for layout in layouts)


def test_parameters_alone_are_computed_once() -> None:
    graph = captured_forward(lambda fc, x: fc(x) * fc.weight.exp().sum())
    assert [str(node.target) for node in graph.nodes] == ["aten.linear.default", "aten.mul.Tensor"]
    (made,) = [value for name, value in graph.parameters.items() if name.endswith("!") and name.startswith("sum")]
    torch.testing.assert_close(made, graph.parameters["fc.weight"].exp().sum())


def test_a_vector_that_something_was_computed_from_stays_as_it_is() -> None:
    assert captured_forward(lambda fc, x: fc(x)).vectors == ["fc.bias"]
    assert captured_forward(lambda fc, x: fc(x) * fc.bias.exp()).vectors == []


def test_what_no_output_needs_is_left_out() -> None:
    def forward(fc: nn.Linear, x: Tensor) -> Tensor:
        fc(x).relu().sum()
        return fc(x)

    assert [node.name for node in captured_forward(forward).nodes] == ["linear_1"]


def test_outputs_are_those_of_forward() -> None:
    """Not the buffers it changes, and not the constants it returns."""

    class Counting(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc = nn.Linear(4, 4)
            self.register_buffer("calls", torch.zeros(()))

        def forward(self, x: Tensor) -> tuple[Tensor, int, None, Tensor]:
            self.calls += 1
            return self.fc(x), 3, None, x

    graph = capture(Counting(), (torch.randn(4, 4),), {})
    assert [node.name for node in graph.outputs] == [graph.layers[0].node.name, graph.inputs[0].name]
    x = torch.randn(7, 4)
    assert torch.equal(graph.run([x])[1], x)


# Scalars among the inputs


class Scaled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.middle, self.last = nn.Linear(6, 8), nn.Linear(8, 8), nn.Linear(8, 3)

    def forward(self, scale: Tensor | float, x: Tensor) -> Tensor:
        x = torch.relu(self.first(x * scale))
        return self.last(torch.relu(self.middle(x)) * scale)


class ScaledLast(Scaled):
    def forward(self, x: Tensor, scale: Tensor | float) -> Tensor:  # type: ignore[override]
        return super().forward(scale, x)


SCALARS = {"tensor": torch.tensor(1.5), "float": 1.5, "whole number": 2, "true": True}


@pytest.mark.parametrize("kind", SCALARS)
def test_a_first_input_may_be_a_scalar(kind: str) -> None:
    torch.manual_seed(0)
    model, scale = Scaled().eval(), SCALARS[kind]
    graph = capture(model, (scale, torch.randn(4, 6)), {})
    x = torch.randn(7, 6)
    torch.testing.assert_close(graph.run([scale, x])[0], model(scale, x))
    first, middle, _ = graph.layers
    assert graph.segment([first], 0).batch_first
    assert graph.segment([middle], 0).batch_first
    reads_the_scale = kind == "tensor"  # numbers are part of the graph
    assert graph.segment([middle], 2).batch_first != reads_the_scale


@pytest.mark.parametrize("kind", ["tensor", "float"])
def test_a_model_with_a_scalar_first_is_pruned_as_with_the_scalar_last(kind: str) -> None:
    torch.manual_seed(0)
    model, other = Scaled().eval(), ScaledLast().eval()
    other.load_state_dict(model.state_dict())
    x = torch.randn(64, 6, generator=torch.Generator().manual_seed(1))
    first = snows.prune(model, [((SCALARS[kind], x),)], "2:4", progress=False)
    last = snows.prune(other, [((x, SCALARS[kind]),)], "2:4", progress=False)
    assert first.masks.keys() == {"middle.weight"}
    for name, weight in first.model.state_dict().items():
        torch.testing.assert_close(weight, last.model.state_dict()[name], rtol=0, atol=0)
    assert not torch.equal(first.model.middle.weight, model.middle.weight)


def test_inputs_that_never_meet_have_their_own_batch_dimension() -> None:
    class Apart(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.left, self.right = nn.Linear(4, 4), nn.Linear(4, 4)

        def forward(self, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
            return self.left(x), self.right(y)

    graph = capture(Apart(), (torch.randn(4, 4), torch.randn(4, 4)), {})
    assert [graph.segment([layer], 0).batch_first for layer in graph.layers] == [True, True]


# Models that cannot be captured


SIZES = r"take the batch size from x\.shape\[0\]; len\(x\), int\(…\), constants and branches on the batch size stay"
UNCAPTURABLE = {
    "a branch on values": (
        lambda fc, x: fc(x) if x.sum() > 0 else -fc(x),
        r"^Forward cannot be captured by torch\.export: .*branches that depend on values",
    ),
    "dropout that is always on": (
        lambda fc, x: F.dropout(fc(x), 0.5, training=True),
        r"^Forward gives different outputs for the same input in eval mode: .*make its forward deterministic",
    ),
    "an input that is changed in place": (
        lambda fc, x: fc(x.mul_(2)),
        r"^Forward gives different outputs .*: forward changes its input in place; .*x = x\.clone\(\)",
    ),
    "a batch size in reshape": (lambda fc, x: fc(x).reshape(2, 2, 2).flatten(1), rf"runs on 2 samples, .* 3 .*{SIZES}"),
    "a batch size in a constant": (
        lambda fc, x: fc(x) + torch.ones(2, 4),
        rf"runs on 2 .* not on 3 .*{SIZES}",
    ),
    "len": (lambda fc, x: fc(x).view(len(x), 2, 2), rf"only runs at the batch size it was captured with .*{SIZES}"),
    "int": (lambda fc, x: fc(x).view(int(x.shape[0]), 2, 2), rf"only runs at the batch size .*{SIZES}"),
    "len in a value": (lambda fc, x: fc(x) / len(x), rf"does not give the model's own outputs .*{SIZES}"),
    "len in a small value": (lambda fc, x: 1e-4 * fc(x) / len(x), rf"does not give the model's own outputs .*{SIZES}"),
    "a size that depends on values": (
        lambda fc, x: fc(x)[fc(x)[:, 0] > 0].sum(0) + x,
        r"^Forward computes a tensor whose size depends on values \(aten\.index\.Tensor\); use torch\.where or a mask",
    ),
    "numpy": (
        lambda fc, x: fc(x) + torch.from_numpy(x.detach().numpy()),
        r"^Forward cannot be captured by torch\.export: .*operations outside torch",
    ),
}


@pytest.mark.parametrize("case", UNCAPTURABLE)
def test_what_cannot_be_captured_is_said_in_a_sentence(case: str) -> None:
    forward, words = UNCAPTURABLE[case]
    with pytest.raises(CaptureError, match=words):
        captured_forward(forward)


@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("sample", [0, 2])
def test_outputs_that_are_not_finite_are_said_so(value: float, sample: int) -> None:
    """Of every sample that is looked at."""
    x = torch.randn(4, 4)
    x[sample, 0] = value
    with pytest.raises(InputError, match=r"^Forward gives NaN or infinity on the data; expected finite outputs"):
        capture(Forward(lambda fc, x: fc(x) + x).eval(), (x,), {})


def test_sparse_outputs_are_refused() -> None:
    with pytest.raises(InputError, match=r"^Forward gives a sparse output \(torch\.sparse_coo\)"):
        captured_forward(lambda fc, x: fc(x).to_sparse())


BRANCHES: dict[str, tuple[Callable[[Tensor], bool], bool]] = {  # and whether the branch is taken below 10 samples
    "x.shape[0]": (lambda x: x.shape[0] < 10, True),
    "len(x)": (lambda x: len(x) < 10, True),
    "the number of elements": (lambda x: x.numel() < 40, True),
    "one size": (lambda x: x.shape[0] != 16, True),
    "no branch": (lambda x: True, False),
}


@pytest.mark.parametrize("case", BRANCHES)
def test_branches_on_the_batch_size_are_seen_at_the_sizes_that_are_used(case: str) -> None:
    branch, matters = BRANCHES[case]
    model = Forward(lambda fc, x: fc(x) if branch(x) else fc(x) * 2).eval()
    x = torch.randn(40, 4)
    graph = capture(model, (x,), {})
    assert bool(graph.assumptions) == matters

    def compare(largest: int) -> None:
        compare_at_sizes(model, graph, largest, lambda start, stop: ((x[start:stop],), {}))

    compare(9)
    if not matters:
        return compare(40)
    with pytest.raises(CaptureError, match=r"does not give the model's own outputs on 16 samples; .*branches on the"):
        compare(40)


def test_a_branch_on_the_batch_size_that_changes_nothing_is_accepted() -> None:
    model = Forward(lambda fc, x: fc(x) if x.shape[0] < 10 else torch.cat([fc(x[:10]), fc(x[10:])])).eval()
    x = torch.randn(40, 4)
    compare_at_sizes(model, capture(model, (x,), {}), 40, lambda start, stop: ((x[start:stop],), {}))


def test_sizes_of_the_shape_stay_dynamic() -> None:
    graph = captured_forward(lambda fc, x: fc(x).view(x.shape[0], 2, 2) / x.shape[0])
    assert graph.run([torch.randn(9, 4)])[0].shape == (9, 2, 2)


def test_other_wrong_inputs() -> None:
    class Variadic(nn.Module):
        def forward(self, *xs: Tensor) -> Tensor:
            return xs[0]

    with pytest.raises(CaptureError, match=r"takes \*xs; give its inputs names"):
        capture(Variadic(), (torch.randn(4, 4),), {})
    with pytest.raises(InputError, match=r"^Linear does not run on the data \(inputs of shape \[\(2, 4\)\]\): .*mat1"):
        capture(nn.Linear(3, 3), (torch.randn(4, 4),), {})
    with pytest.raises(CaptureError, match=r"have \[3, 4\] samples; expected the same number in each"):
        capture(nn.Bilinear(2, 2, 2), (torch.randn(4, 2), torch.randn(3, 2)), {})
    with pytest.raises(CaptureError, match="no input of the model is a tensor with a batch dimension"):
        capture(nn.ReLU(), (torch.tensor(1.0),), {})


def test_a_message_has_one_line_of_what_torch_says() -> None:
    def forward(fc: nn.Linear, x: Tensor) -> Tensor:
        raise ValueError("x" * 400 + "\nmore")

    with pytest.raises(InputError) as caught:
        captured_forward(forward)
    assert str(caught.value).endswith(": " + "x" * 300)

    def silent(fc: nn.Linear, x: Tensor) -> Tensor:
        raise ValueError

    with pytest.raises(InputError, match=r": ValueError$"):
        captured_forward(silent)


# torch's own output


class Records(logging.Handler):
    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.seen.append(record.getMessage())


def test_a_failed_capture_prints_and_logs_nothing(capfd: pytest.CaptureFixture[str]) -> None:
    """torch prints the whole graph to stderr, and a log record to its own handlers, before it raises."""
    handler = Records()
    loggers = [logging.getLogger(name) for name in ("", "torch", "torch.fx.experimental.symbolic_shapes")]
    for logger in loggers:
        logger.addHandler(handler)
    try:
        with pytest.raises(CaptureError):
            captured_forward(UNCAPTURABLE["a branch on values"][0])
    finally:
        for logger in loggers:
            logger.removeHandler(handler)
    printed = capfd.readouterr()
    assert (printed.out, printed.err) == ("", "")
    assert handler.seen == []


@pytest.mark.parametrize("level", [logging.NOTSET, logging.INFO])
@pytest.mark.parametrize("fails", [False, True])
def test_the_callers_logging_is_as_before(level: int, fails: bool, capfd: pytest.CaptureFixture[str]) -> None:
    before = logging.root.manager.disable
    logging.disable(level)
    try:
        if fails:
            with pytest.raises(CaptureError):
                captured_forward(UNCAPTURABLE["a branch on values"][0])
        else:
            captured_forward(lambda fc, x: fc(x))
        assert logging.root.manager.disable == level
    finally:
        logging.disable(before)


def test_other_errors_of_forward_keep_their_cause() -> None:
    with pytest.raises(CaptureError) as caught:
        captured_forward(UNCAPTURABLE["a branch on values"][0])
    assert caught.value.__cause__ is not None
