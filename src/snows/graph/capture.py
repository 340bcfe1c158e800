"""From an nn.Module to a flat graph of operations, by torch.export."""

from __future__ import annotations

import math
import warnings
from collections.abc import Mapping, Sequence
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
from .layers import Layer, find_layers, layer_name
from .operations import (
    BILINEAR,
    CONVOLUTION,
    LINEAR,
    PRODUCT,
    RECURRENT,
    TRANSPOSED_CONVOLUTION,
    aten,
    is_attention,
    is_counted,
    is_piecewise_linear,
)
from .segment import Cost, Program, SampleLayout, Segment, Values

_CAPTURED_SAMPLES = 2  # one sample would freeze the batch dimension
_TOLERANCE = 1e-3  # of the largest output; convolution algorithms differ by batch size in float32


class Graph:
    """The operations of one model, in order of execution.

    A node's position is its place in that order; `parameters` maps names to the tensors the graph reads besides its
    inputs (the model's own parameters and buffers, and what could be computed from those alone).
    """

    def __init__(
        self,
        inputs: list[Node],
        nodes: list[Node],
        outputs: list[Node],
        parameter_names: dict[Node, str],
        parameters: dict[str, Tensor],
        layers: list[Layer],
    ) -> None:
        self.inputs = inputs
        self.nodes = nodes
        self.outputs = outputs
        self.parameters = parameters
        self.layers = layers
        self._parameter_names = parameter_names
        for position, node in enumerate(nodes):
            node.meta["position"] = position
        for node, name in parameter_names.items():
            node.meta["parameter"] = name
        self._last_read = self._find_last_reads()
        self._layer_bits = {layer.node: 1 << i for i, layer in enumerate(layers) if layer.node is not None}
        self._depends_on = self._find_dependencies()
        self.operations = _counted_operations(nodes)

    @property
    def end(self) -> int:
        return len(self.nodes)

    def live(self, position: int) -> list[str]:
        """Names of the values that exist before `position` and are still read at or after it."""
        before = self.inputs + self.nodes[:position]
        return [node.name for node in before if self._last_read.get(node, -1) >= position]

    def live_bytes(self, position: int) -> int:
        """Bytes of the values alive at a position, for one sample."""
        names = set(self.live(position))
        return sum(int(node.meta["bytes"]) for node in [*self.inputs, *self.nodes[:position]] if node.name in names)

    def program(self, start: int, stop: int) -> Program:
        """Everything from `start` up to `stop`, giving what is read later."""
        nodes = self.nodes[start:stop]
        return Program(nodes, [n for n in nodes if self._last_read[n] >= stop], self._parameter_names)

    def run(self, leaves: Sequence[Any], parameters: Mapping[str, Tensor] | None = None) -> list[Any]:
        """The whole network: its outputs, flattened."""
        values: Values = {node.name: leaf for node, leaf in zip(self.inputs, leaves, strict=True)}
        values |= self.program(0, self.end)(values, self.parameters if parameters is None else parameters)
        return [values[node.name] for node in self.outputs]

    def run_operations(self, leaves: Sequence[Any]) -> Values:
        """The output of every operation, by name."""
        values: Values = {node.name: leaf for node, leaf in zip(self.inputs, leaves, strict=True)}
        return Program(self.nodes, self.operations, self._parameter_names)(values, self.parameters)

    def operations_after(self, layer: Layer) -> list[Node]:
        """The operations that depend on the layer, its own first: what K counts."""
        return [node for node in self.operations if self._depends(node, layer)]

    def layer_ancestors(self, layer: Layer) -> list[Layer]:
        """Other layers that this one depends on."""
        return [other for other in self.layers if other is not layer and self._depends(layer.node, other)]

    def layer_descendants(self, layer: Layer) -> list[Layer]:
        """Other layers that depend on this one."""
        return [other for other in self.layers if other is not layer and self._depends(other.node, layer)]

    def cost(self, layer: Layer, horizon: int) -> Cost:
        """What one pass over the varying part of a segment takes, for one sample."""
        return _cost(*self._cut(layer, horizon))

    def segment(self, layer: Layer, horizon: int) -> Segment:
        """The layer and its next `horizon` operations, or as many as there are."""
        body, prelude, targets = self._cut(layer, horizon)
        reads = {argument for node in body for argument in node.all_input_nodes}
        varying = set(body)
        own = self.nodes[layer.position]
        return Segment(
            layer=layer,
            prelude=Program(prelude, [node for node in prelude if node in reads], self._parameter_names),
            body=Program(body, targets, self._parameter_names),
            own=Program([own], [own], self._parameter_names),
            outputs=tuple(node.name for node in targets),
            sample_layouts=tuple(node.meta["sample_layout"] for node in targets),
            piecewise_linear=all(is_piecewise_linear(node, varying) for node in body),
            cost=_cost(body, prelude, targets),
        )

    def _cut(self, layer: Layer, horizon: int) -> tuple[list[Node], list[Node], list[Node]]:
        """The nodes of a segment that vary with the layer's weight, those that do not, and the operations 0 … K."""
        targets = self.operations_after(layer)[: horizon + 1]
        needed = self._ancestors(targets, layer.position)
        body = [node for node in needed if self._depends(node, layer)]
        return body, [node for node in needed if not self._depends(node, layer)], targets

    def _find_last_reads(self) -> dict[Node, int]:
        last: dict[Node, int] = {}
        for position, node in enumerate(self.nodes):
            for argument in node.all_input_nodes:
                last[argument] = position
        last.update(dict.fromkeys(self.outputs, self.end))
        return last

    def _find_dependencies(self) -> dict[Node, int]:
        """For each node the set of layers it depends on, itself included, as bits: one pass, however many layers."""
        found: dict[Node, int] = {}
        for node in self.nodes:
            bits = self._layer_bits.get(node, 0)
            for argument in node.all_input_nodes:
                bits |= found.get(argument, 0)
            found[node] = bits
        return found

    def _depends(self, node: Node | None, layer: Layer) -> bool:
        """Whether the node's value varies with the layer's weight."""
        if node is None or layer.node is None:
            return False
        return bool(self._depends_on[node] & self._layer_bits[layer.node])

    def _ancestors(self, targets: list[Node], start: int) -> list[Node]:
        """What it takes to compute `targets` from the values alive at `start`, in order of execution."""
        wanted = set(targets)
        nodes = self.nodes[start : 1 + max(int(node.meta["position"]) for node in targets)]
        for node in reversed(nodes):
            if node in wanted:
                wanted.update(node.all_input_nodes)
        return [node for node in nodes if node in wanted]


def _cost(body: list[Node], prelude: list[Node], targets: list[Node]) -> Cost:
    return Cost(
        bytes=sum(node.meta["bytes"] for node in body),
        output_bytes=sum(node.meta["bytes"] for node in [*targets, *prelude]),
        flops=sum(node.meta["flops"] for node in body),
    )


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
            program: ExportedProgram = exported.run_decompositions(_DECOMPOSITIONS)
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
    """Eval-mode batch norm as one scale and one shift: nothing to recompute in derivatives, no tuple to cut through."""
    scale = torch.rsqrt(variance + eps)
    if weight is not None:
        scale = scale * weight
    shift = -mean * scale
    if bias is not None:
        shift = shift + bias
    shape = [-1] + [1] * (x.ndim - 2)
    return x * scale.view(shape) + shift.view(shape), x.new_empty(0), x.new_empty(0)


def _hardsigmoid(x: Tensor) -> Tensor:
    """Its own backward has no derivative in torch."""
    return (x + 3).clamp(0, 6) / 6


_DECOMPOSITIONS: dict[Any, Any] = {
    aten._native_batch_norm_legit_no_training.default: _batch_norm,
    aten.hardsigmoid.default: _hardsigmoid,
}


def _flatten(model: nn.Module, exported: ExportedProgram) -> Graph:
    """Sort an exported program into inputs, parameters (also what follows from those alone) and operations."""
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
            parameter_names[node] = spec.target
            parameters[spec.target] = state[spec.target].detach()

    calls = [node for node in exported.graph.nodes if node.op == "call_function"]
    aliases = _aliases(model)
    trained = {name for name, _ in model.named_parameters()}
    layers = [
        layer if layer.parameter in trained else replace(layer, refusal="its weight is a buffer, not a parameter")
        for layer in find_layers(calls, parameter_names, parameters, aliases)
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
    return Graph(inputs, nodes, outputs, parameter_names, parameters, layers)


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
    """Learn how each operation's output is laid out over samples: rotating the inputs must rotate the outputs."""
    samples = _CAPTURED_SAMPLES + 1
    # rotated, not reversed: three samples made of two different ones read the same in both directions
    rotated = [leaf.roll(1, 0) if isinstance(leaf, Tensor) and leaf.ndim else leaf for leaf in leaves]
    with torch.no_grad():
        before, after = (graph.run_operations(batch) for batch in (leaves, rotated))
    for node in graph.operations:
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


def _counted_operations(nodes: list[Node]) -> list[Node]:
    """The operations K counts. Projections that only feed an attention are part of it: it is their output."""
    counted = [node for node in nodes if is_counted(node)]
    members = set(counted)

    def only_feeds_attention(node: Node) -> bool:
        reached, waiting, seen = [], list(node.users), set()
        while waiting:
            user = waiting.pop()
            if user in seen:
                continue
            seen.add(user)
            if user in members:
                reached.append(user)
            elif "position" in user.meta:
                waiting.extend(user.users)
            else:
                return False  # the value leaves the network
        return bool(reached) and all(is_attention(user) for user in reached)

    return [node for node in counted if is_attention(node) or not only_feeds_attention(node)]


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
