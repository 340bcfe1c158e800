"""From an nn.Module to a flat graph of operations, by torch.export."""

from __future__ import annotations

import inspect
import io
import logging
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, redirect_stderr
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.export import Dim, ExportedProgram
from torch.export.graph_signature import InputKind, OutputKind
from torch.fx import Node, map_arg
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils import _pytree as pytree

from ..errors import CaptureError, first_line
from .comparison import CAPTURED_SAMPLES, close, compare_with_model, require_running, tensors
from .cost import measure
from .functional import made_functional
from .graph import Graph
from .layers import Layer, find_layers
from .refusals import refused_layers
from .segment import SampleLayout

Call = tuple[tuple[Any, ...], dict[str, Any]]  # the arguments of one call of the model


def capture(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Graph:
    """Capture a model in eval mode from an example batch of at least one sample.

    The graph is compared with the model itself at another batch size before it is returned. Where forward depends on
    the batch size, `compare_at_sizes` has to follow.
    """
    _check_batch((args, kwargs))
    example = resized((args, kwargs), CAPTURED_SAMPLES)
    require_running(model, *example)
    graph = _assemble(model, *_export(model, *example))
    other = resized((args, kwargs), CAPTURED_SAMPLES + 1)
    compare_with_model(model, graph, *other)
    _find_sample_layouts(graph, pytree.tree_leaves(other))
    return graph


def _check_batch(call: Call) -> None:
    sizes = {leaf.shape[0] for leaf in pytree.tree_leaves(call) if has_samples(leaf)}
    if not sizes:
        raise CaptureError("no input of the model is a tensor with a batch dimension; expected at least one")
    if len(sizes) > 1:
        raise CaptureError(f"the inputs of one batch have {sorted(sizes)} samples; expected the same number in each")


def has_samples(leaf: Any) -> bool:
    """Whether an input has one row per sample. Numbers and tensors without axes are the same for all samples."""
    return isinstance(leaf, Tensor) and leaf.ndim > 0


def resized(call: Call, samples: int) -> Call:
    """The same call with this many samples; some are repeated if there are too few."""

    def resize(leaf: Any) -> Any:
        if not has_samples(leaf):
            return leaf
        return leaf[torch.arange(samples, device=leaf.device) % leaf.shape[0]]

    args, kwargs = pytree.tree_map(resize, call)
    return args, kwargs


# Export


def _export(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[ExportedProgram, list[str]]:
    """The program, and what it assumes of sizes."""
    names = positional_names(model, args)
    shapes = pytree.tree_map(lambda leaf: {0: Dim.AUTO} if has_samples(leaf) else None, (args, kwargs))
    dynamic_shapes = {**dict(zip(names, shapes[0], strict=True)), **shapes[1]}
    try:
        with quietly(), sdpa_kernel(SDPBackend.MATH), torch.no_grad():
            exported = torch.export.export(model, args, kwargs, dynamic_shapes=dynamic_shapes, strict=False)
            assumptions = list(exported._guards_code)
            return made_functional(exported), assumptions
    except Exception as error:  # torch.export raises many kinds; each means the same to the caller
        raise CaptureError(
            f"{type(model).__name__} cannot be captured by torch.export: {first_line(error)} "
            "(branches that depend on values, and operations outside torch, must be rewritten or left out of forward)"
        ) from error


@contextmanager
def quietly() -> Iterator[None]:
    """Without torch's own warnings, log records and prints: before it raises, it prints whole graphs."""
    disabled = logging.root.manager.disable
    logging.disable(logging.CRITICAL)
    try:
        with warnings.catch_warnings(), redirect_stderr(io.StringIO()):
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(disabled)


def positional_names(model: nn.Module, args: tuple[Any, ...]) -> list[str]:
    """The names of the positional arguments: torch.export wants dynamic shapes by name."""
    parameters = list(inspect.signature(model.forward).parameters.values())
    variadic = [p.name for p in parameters if p.kind is p.VAR_POSITIONAL]
    if variadic:
        raise CaptureError(
            f"{type(model).__name__}.forward takes *{variadic[0]}; give its inputs names, so that each can be followed"
        )
    return [p.name for p in parameters[: len(args)]]


# From an exported program to a graph


def _assemble(model: nn.Module, exported: ExportedProgram, assumptions: list[str]) -> Graph:
    """Sort an exported program into inputs, parameters, operations and layers."""
    aliases = _aliases(model)
    inputs, parameter_names, parameters = _placeholders(exported, aliases)
    calls = [node for node in exported.graph.nodes if node.op == "call_function"]
    _check_sizes(model, calls)
    outputs = _outputs(exported)
    trained = {name for name, _ in model.named_parameters()}

    layers = find_layers(calls, parameter_names, parameters)
    unreached = refused_layers(model, {layer.parameter for layer in layers}, aliases, calls, parameter_names)
    alive = _alive(calls, outputs)
    varying = _varying(calls, inputs)
    _fold(calls, alive - varying, parameter_names, parameters)

    nodes = [node for node in calls if node in alive and node in varying]
    measure([*inputs, *nodes], CAPTURED_SAMPLES)
    layers = [_judged(layer, trained, alive, varying) for layer in layers] + unreached
    return Graph(inputs, nodes, outputs, parameter_names, parameters, layers, trained, assumptions)


def _aliases(model: nn.Module) -> dict[str, str]:
    """Tied parameters: each further name -> the first one."""
    first: dict[int, str] = {}
    aliases: dict[str, str] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        if first.setdefault(id(parameter), name) != name:
            aliases[name] = first[id(parameter)]
    return aliases


def _placeholders(
    exported: ExportedProgram, aliases: Mapping[str, str]
) -> tuple[list[Node], dict[Node, str], dict[str, Tensor]]:
    """The inputs; the names of parameters and buffers; and these themselves."""
    nodes = {node.name: node for node in exported.graph.nodes if node.op == "placeholder"}
    state: dict[str, Any] = {**exported.state_dict, **exported.constants}
    inputs: list[Node] = []
    parameter_names: dict[Node, str] = {}
    parameters: dict[str, Tensor] = {}
    for spec in exported.graph_signature.input_specs:
        node = nodes[spec.arg.name]
        if spec.kind is InputKind.USER_INPUT:
            inputs.append(node)
            continue
        target = str(spec.target)
        name = aliases.get(target, target)  # a tied weight has one name, whichever is read
        parameter_names[node] = name
        parameters[name] = state[target].detach()
    return inputs, parameter_names, parameters


def _outputs(exported: ExportedProgram) -> list[Node]:
    by_name = {node.name: node for node in exported.graph.nodes}
    specs = exported.graph_signature.output_specs
    return [by_name[s.arg.name] for s in specs if s.kind is OutputKind.USER_OUTPUT and s.arg.name in by_name]


def _check_sizes(model: nn.Module, calls: Iterable[Node]) -> None:
    for node in calls:
        sizes: list[Any] = [size for value in tensors(node.meta.get("val")) for size in value.shape]
        if not all(isinstance(size, int) or size.node.has_hint() for size in sizes):
            raise CaptureError(
                f"{type(model).__name__} computes a tensor whose size depends on values ({node.target}); "
                "use torch.where or a mask instead, so that sizes depend on shapes only"
            )


def _alive(calls: Sequence[Node], outputs: Iterable[Node]) -> set[Node]:
    """The nodes that the outputs depend on."""
    alive = set(outputs)
    for node in reversed(calls):
        if node in alive:
            alive.update(node.all_input_nodes)
    return alive


def _varying(calls: Iterable[Node], inputs: Iterable[Node]) -> set[Node]:
    """The nodes that depend on the inputs."""
    varying = set(inputs)
    for node in calls:
        if any(argument in varying for argument in node.all_input_nodes):
            varying.add(node)
    return varying


def _fold(
    calls: Iterable[Node], fixed: set[Node], parameter_names: dict[Node, str], parameters: dict[str, Tensor]
) -> None:
    """Compute once what depends on parameters only. It becomes a parameter itself."""
    known: dict[Node, Any] = {node: parameters[name] for node, name in parameter_names.items()}
    for node in calls:
        if node not in fixed:
            continue
        target: Any = node.target
        known[node] = target(*map_arg(node.args, known.__getitem__), **map_arg(node.kwargs, known.__getitem__))
        parameter_names[node] = f"{node.name}!"  # no parameter of a module has such a name
        parameters[f"{node.name}!"] = known[node]


def _judged(layer: Layer, trained: set[str], alive: set[Node], varying: set[Node]) -> Layer:
    """The layer, or a refused one if its operation is not part of the graph or its weight is no parameter."""
    if layer.node not in alive:
        return _without_operation(layer, "the model's output does not depend on it")
    if layer.node not in varying:
        return _without_operation(layer, "its input is the same whatever the data, so there is nothing to match")
    if 0 in layer.shape or layer.node.meta["bytes"] == 0:
        return _without_operation(layer, "its weight or its output has no elements")
    if layer.parameter not in trained:
        return replace(layer, refusal="its weight is a buffer, not a parameter")
    return layer


def _without_operation(layer: Layer, reason: str) -> Layer:
    return Layer(layer.name, layer.parameter, layer.shape, refusal=reason)


def _find_sample_layouts(graph: Graph, leaves: list[Any]) -> None:
    """Note how the output of each operation and layer is laid out over samples: rotated inputs must rotate it."""
    samples = CAPTURED_SAMPLES + 1
    # Rotated, not reversed: three samples made of two different ones read the same in both directions.
    rotated = [leaf.roll(1, 0) if has_samples(leaf) else leaf for leaf in leaves]
    layers = [layer.node for layer in graph.layers if layer.in_graph]  # projections are layers but no operations
    with torch.no_grad():
        before, after = (graph.run_operations(batch, layers) for batch in (leaves, rotated))
    for node in dict.fromkeys([*graph.operations, *layers]):
        node.meta["sample_layout"] = _sample_layout(node, before[node.name], after[node.name], samples)


def _sample_layout(node: Node, before: Tensor, after: Tensor, samples: int) -> SampleLayout | None:
    """The layout in which rotating the samples turns one value into the other. None if there is no such layout."""
    axes = [axis for axis, size in enumerate(node.meta["val"].shape) if not isinstance(size, int)]
    for layout in (SampleLayout(axis, inner) for axis in axes for inner in (False, True)):
        if before.shape[layout.axis] % samples:
            continue
        if close(layout.split(before, samples).roll(1, 0), layout.split(after, samples)):
            return layout
    return None
