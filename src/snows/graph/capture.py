"""From an nn.Module to a flat graph of operations, by torch.export."""

from __future__ import annotations

import math
import warnings
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.export import Dim, ExportedProgram
from torch.export.graph_signature import InputKind, OutputKind
from torch.fx import Node
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils import _pytree as pytree

from ..errors import CaptureError, InputError
from .functional import made_plain
from .graph import Graph
from .layers import Layer, find_layers, layer_name
from .operators import (
    BILINEAR,
    CONVOLUTION,
    LINEAR,
    PRODUCT,
    RECURRENT,
    TRANSPOSED_CONVOLUTION,
    aten,
    is_attention,
)
from .segment import SampleLayout

_CAPTURED_SAMPLES = 2  # one sample would freeze the batch dimension
_TOLERANCE = 1e-3  # of the largest output; convolution algorithms differ by batch size in float32


def capture(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Graph:
    """Capture a model in eval mode from an example batch of at least one sample.

    The graph is compared with the model itself at another batch size before it is returned.
    """
    leaves = pytree.tree_leaves((args, kwargs))
    sizes = {leaf.shape[0] for leaf in leaves if isinstance(leaf, Tensor) and leaf.ndim}
    if len(sizes) != 1:
        raise CaptureError(f"the inputs of one batch have {sorted(sizes)} samples; expected the same number in each")
    two = _resize((args, kwargs), _CAPTURED_SAMPLES)
    try:
        with torch.no_grad():
            model(*two[0], **two[1])
    except Exception as error:  # whatever the user's own forward raises
        shapes = [tuple(leaf.shape) for leaf in leaves if isinstance(leaf, Tensor)]
        raise InputError(
            f"{type(model).__name__} does not run on the data (inputs of shape {shapes}): {_first_line(error)}"
        ) from error
    program = _export(model, *two)
    graph = _flatten(model, program)
    three = _resize((args, kwargs), _CAPTURED_SAMPLES + 1)
    _compare_with_model(model, graph, three)
    _find_sample_layouts(graph, pytree.tree_leaves(three))
    return graph


def _export(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> ExportedProgram:
    def dynamic(leaf: Any) -> Any:
        return {0: Dim.AUTO} if isinstance(leaf, Tensor) and leaf.ndim else None

    shapes = pytree.tree_map(dynamic, (args, kwargs))
    try:
        with warnings.catch_warnings(), sdpa_kernel(SDPBackend.MATH), torch.no_grad():
            warnings.simplefilter("ignore")  # torch's own, about its internals
            names = _positional_names(model, args)
            exported = torch.export.export(
                model, args, kwargs, dynamic_shapes={**dict(zip(names, shapes[0], strict=True)), **shapes[1]},
                strict=False,
            )  # fmt: skip
            program: ExportedProgram = (
                exported if made_plain(exported) else exported.run_decompositions(_DECOMPOSITIONS)
            )
            return program
    except Exception as error:  # torch.export raises many kinds; each means the same to the caller
        raise CaptureError(
            f"{type(model).__name__} cannot be captured by torch.export: {_first_line(error)} "
            "(branches that depend on values, and operations outside torch, must be rewritten or left out of forward)"
        ) from error


def _first_line(error: Exception) -> str:
    lines = str(error).strip().splitlines()
    return lines[0][:300] if lines else type(error).__name__


def _positional_names(model: nn.Module, args: tuple[Any, ...]) -> list[str]:
    """torch.export wants dynamic shapes by argument name."""
    import inspect

    parameters = list(inspect.signature(model.forward).parameters.values())
    variadic = [p.name for p in parameters if p.kind is p.VAR_POSITIONAL]
    if variadic:
        raise CaptureError(
            f"{type(model).__name__}.forward takes *{variadic[0]}; give its inputs names, so that each can be followed"
        )
    return [p.name for p in parameters[: len(args)]]


def _batch_norm(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, mean: Tensor, variance: Tensor, momentum: float, eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Eval-mode batch norm as one scale and shift: one pass, nothing to recompute in derivatives, no tuple to cut."""
    scale = torch.rsqrt(variance + eps)
    if weight is not None:
        scale = scale * weight
    shift = -mean * scale
    if bias is not None:
        shift = shift + bias
    shape = [-1] + [1] * (x.ndim - 2)
    return torch.addcmul(shift.view(shape), x, scale.view(shape)), x.new_empty(0), x.new_empty(0)


def _hardsigmoid(x: Tensor) -> Tensor:
    """Its own backward has no derivative in torch."""
    return (x + 3).clamp(0, 6) / 6


_DECOMPOSITIONS: dict[Any, Any] = {
    aten._native_batch_norm_legit_no_training.default: _batch_norm,
    aten.hardsigmoid.default: _hardsigmoid,
}


def _flatten(model: nn.Module, exported: ExportedProgram) -> Graph:
    """Sort an exported program into inputs, parameters (also what follows from those alone) and operations."""
    aliases = _aliases(model)
    placeholders = {node.name: node for node in exported.graph.nodes if node.op == "placeholder"}
    state: dict[str, Any] = {**exported.state_dict, **exported.constants}
    inputs: list[Node] = []
    parameter_names: dict[Node, str] = {}
    parameters: dict[str, Tensor] = {}
    for spec in exported.graph_signature.input_specs:
        node = placeholders[spec.arg.name]
        if spec.kind is InputKind.USER_INPUT:
            inputs.append(node)
        else:
            assert spec.target is not None
            name = aliases.get(spec.target, spec.target)  # one name for a tied weight, whichever is read
            parameter_names[node] = name
            parameters[name] = state[spec.target].detach()

    calls = [node for node in exported.graph.nodes if node.op == "call_function"]
    trained = {name for name, _ in model.named_parameters()}
    layers = [
        layer if layer.parameter in trained else replace(layer, refusal="its weight is a buffer, not a parameter")
        for layer in find_layers(calls, parameter_names, parameters)
    ]
    unreached = _unreached(model, {layer.parameter for layer in layers}, aliases, calls, parameter_names)

    follows_input: set[Node] = set(inputs)
    for node in calls:
        if any(argument in follows_input for argument in node.all_input_nodes):
            follows_input.add(node)
    result = [spec.arg.name for spec in exported.graph_signature.output_specs if spec.kind is OutputKind.USER_OUTPUT]
    by_name = {node.name: node for node in exported.graph.nodes}
    outputs = [by_name[name] for name in result if name in by_name]
    alive = _alive(calls, outputs)

    # What depends on parameters only is computed here, once, and becomes a parameter itself.
    known: dict[Node, Any] = {node: parameters[name] for node, name in parameter_names.items()}
    folded = [node for node in calls if node in alive and node not in follows_input]
    for node in folded:
        known[node] = node.target(
            *torch.fx.map_arg(node.args, known.__getitem__), **torch.fx.map_arg(node.kwargs, known.__getitem__)
        )
    for node in folded:
        parameter_names[node] = f"{node.name}!"  # no parameter of a module has such a name
        parameters[f"{node.name}!"] = known[node]

    nodes = [node for node in calls if node in alive and node in follows_input]
    for node in [*inputs, *nodes]:
        _measure(node)
    kept = set(nodes)
    layers = [layer if layer.node in kept else _detached(layer, layer.node in alive) for layer in layers]
    layers += unreached
    return Graph(inputs, nodes, outputs, parameter_names, parameters, layers, trained)


def _alive(calls: list[Node], outputs: list[Node]) -> set[Node]:
    alive = set(outputs)
    for node in reversed(calls):
        if node in alive:
            alive.update(node.all_input_nodes)
    return alive


def _aliases(model: nn.Module) -> dict[str, str]:
    """Tied parameters: each further name -> the first one."""
    first: dict[int, str] = {}
    aliases: dict[str, str] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        if first.setdefault(id(parameter), name) != name:
            aliases[name] = first[id(parameter)]
    return aliases


def _detached(layer: Layer, used: bool) -> Layer:
    reason = (
        "its input is the same whatever the data, so there is nothing to match"
        if used
        else "the model's output does not depend on it"
    )
    return Layer(layer.name, layer.parameter, layer.shape, refusal=reason)


_PRUNABLE_MODULES = (nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.Linear)
_TRANSPOSED_MODULES = (nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)


def _unreached(
    model: nn.Module, found: set[str], aliases: dict[str, str], calls: list[Node], names: dict[Node, str]
) -> list[Layer]:
    """Weights that no convolution or linear operation reads directly, each with the reason."""
    reasons = _indirect_weights(calls, names)
    layers: list[Layer] = []
    for name, module in model.named_modules():
        weight = getattr(module, "weight", None)
        if not isinstance(module, _PRUNABLE_MODULES + _TRANSPOSED_MODULES) or not isinstance(weight, Tensor):
            continue
        parameter = f"{name}.weight" if name else "weight"
        if aliases.get(parameter, parameter) in found:
            continue
        if isinstance(module, _TRANSPOSED_MODULES):
            reason = _TRANSPOSED
        elif not isinstance(weight, nn.Parameter):
            reason = "its weight is computed from other parameters"
        else:
            reason = reasons.get(parameter, "forward does not use it")
        layers.append(Layer(layer_name(parameter), parameter, weight.shape, refusal=reason))
    listed = found | {layer.parameter for layer in layers}
    inside = tuple(f"{layer.name}." for layer in layers)  # what a computed weight is computed from
    for name, value in model.named_parameters():
        if name in reasons and value.ndim > 1 and name not in listed and not name.startswith(inside):
            layers.append(Layer(layer_name(name), name, value.shape, refusal=reasons[name]))
    return layers


_TRANSPOSED = "transposed convolutions are not supported"
_TRANSFORMED = "its weight is transformed before it is used"
_MULTIPLIED = "its weight is used in a plain matrix product, not in a linear layer"
_RECURRENT = "recurrent layers are not supported"


def _indirect_weights(calls: list[Node], names: dict[Node, str]) -> dict[str, str]:
    """Parameters that data is multiplied with by other means than as a layer's own weight, and by which."""
    made_of: dict[Node, set[str]] = {node: {name} for node, name in names.items()}  # what parameters alone give
    reasons: dict[str, str] = {}
    for node in calls:
        sources = [a for a in node.all_input_nodes if not isinstance(a.meta.get("val"), int | torch.SymInt)]
        if all(source in made_of for source in sources):
            made_of[node] = {name for source in sources for name in made_of[source]}
            continue
        if node.target in CONVOLUTION | LINEAR:
            reason, weights = _TRANSFORMED, sources[1:2]
        elif node.target in TRANSPOSED_CONVOLUTION:
            reason, weights = _TRANSPOSED, sources[1:2]
        elif node.target in PRODUCT | BILINEAR:
            reason, weights = _MULTIPLIED, sources
        elif node.target in RECURRENT:
            reason, weights = _RECURRENT, sources
        else:
            continue
        for weight in weights:
            reasons |= dict.fromkeys(made_of.get(weight, ()), reason)
    return reasons


def _measure(node: Node) -> None:
    """Note the bytes and operations of a node's value, for one sample."""
    values = [v for v in pytree.tree_leaves(node.meta.get("val")) if isinstance(v, Tensor)]
    node.meta["bytes"] = sum(math.ceil(_numel(v) * v.element_size() / _CAPTURED_SAMPLES) for v in values)
    flops = sum(_numel(v) for v in values) / _CAPTURED_SAMPLES
    if node.target in CONVOLUTION | LINEAR | TRANSPOSED_CONVOLUTION and len(node.args) > 1:
        weight = node.args[1].meta["val"]  # type: ignore[union-attr]  # the weight is a node
        flops *= 2 * math.prod(weight.shape[1:])
    elif is_attention(node):
        source = [a.meta["val"] for a in node.all_input_nodes if isinstance(a.meta.get("val"), Tensor)]
        flops *= 4 * max(int(v.shape[-2]) if v.ndim > 1 else 1 for v in source)
    node.meta["flops"] = int(flops)


def _numel(value: Tensor) -> int:
    return math.prod(_size(size) for size in value.shape)


def _size(size: Any) -> int:
    return int(size) if isinstance(size, int) else int(size.node.hint)


def _find_sample_layouts(graph: Graph, leaves: list[Any]) -> None:
    """Learn how the output of each operation and layer is laid out over samples: rotated inputs must rotate it."""
    samples = _CAPTURED_SAMPLES + 1
    # rotated, not reversed: three samples made of two different ones read the same in both directions
    rotated = [leaf.roll(1, 0) if isinstance(leaf, Tensor) and leaf.ndim else leaf for leaf in leaves]
    layers = [layer.node for layer in graph.layers if layer.node is not None]  # some are no operation: projections
    with torch.no_grad():
        before, after = (graph.run_operations(batch, layers) for batch in (leaves, rotated))
    for node in dict.fromkeys([*graph.operations, *layers]):
        layouts = [
            SampleLayout(axis, inner)
            for axis, size in enumerate(node.meta["val"].shape)
            if not isinstance(size, int)
            for inner in (False, True)
        ]
        node.meta["sample_layout"] = next(
            (
                layout
                for layout in layouts
                if before[node.name].shape[layout.axis] % samples == 0
                and _close(layout.split(before[node.name], samples).roll(1, 0), layout.split(after[node.name], samples))
            ),
            None,
        )


def _close(a: Tensor, b: Tensor) -> bool:
    return float((a - b).abs().max()) <= _TOLERANCE * max(float(a.abs().max()), 1e-6)


def _resize(batch: tuple[tuple[Any, ...], dict[str, Any]], samples: int) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The batch with this many samples, repeating some if there are too few."""

    def resize(leaf: Any) -> Any:
        if not isinstance(leaf, Tensor) or not leaf.ndim:
            return leaf
        return leaf[torch.arange(samples, device=leaf.device) % leaf.shape[0]]

    args, kwargs = pytree.tree_map(resize, batch)
    return args, kwargs


def _compare_with_model(model: nn.Module, graph: Graph, batch: tuple[tuple[Any, ...], dict[str, Any]]) -> None:
    name = type(model).__name__
    args, kwargs = batch
    with torch.no_grad():
        try:
            expected, again = (
                [leaf for leaf in pytree.tree_leaves(model(*args, **kwargs)) if isinstance(leaf, Tensor)]
                for _ in range(2)
            )
        except Exception as error:  # whatever the user's own forward raises
            raise CaptureError(
                f"{name} runs on {_CAPTURED_SAMPLES} samples, not on {_CAPTURED_SAMPLES + 1} ({_first_line(error)}); "
                "take sizes from the input's shape instead of constants"
            ) from error
        if any(not torch.equal(a, b) for a, b in zip(expected, again, strict=True)):
            raise CaptureError(
                f"{name} gives different outputs for the same input in eval mode (dropout always on, or noise); "
                "make its forward deterministic first"
            )
        try:
            results = [leaf for leaf in graph.run(pytree.tree_leaves(batch)) if isinstance(leaf, Tensor)]
        except RuntimeError as error:
            raise CaptureError(
                f"{name} only runs at the batch size it was captured with ({_first_line(error)}); "
                "take sizes from the input's shape instead of constants"
            ) from error
    same = len(expected) == len(results) and all(
        a.shape == b.shape and _close(a, b)
        for a, b in zip(expected, results, strict=True)
        if a.is_floating_point() and a.numel()
    )
    if not same:
        raise CaptureError(
            f"the captured graph of {name} does not give the model's own outputs at another batch size; "
            "take sizes from the input's shape instead of constants"
        )
