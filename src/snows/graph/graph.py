"""The operations of one model in order of execution, and how they are cut into segments."""

from __future__ import annotations

import copy
from collections.abc import Collection, Iterable, Iterator, Mapping, MutableMapping, Sequence
from functools import cached_property
from typing import Any

import torch
from torch import Tensor
from torch.fx import Node
from torch.fx.node import map_aggregate

from ..devices.weights import Resting, Room, fitting_together
from .cost import Cost, bytes_of, cost_of
from .layers import Layer
from .operators import Family, is_attention, is_counted, is_piecewise_linear, operator_of, sizes_of
from .segment import Program, Segment, Values


class Graph:
    """The operations of one model, in order of execution.

    inputs, outputs   the model's own
    nodes             what is computed between them; a node's position is its place in this list
    parameters        by name, the tensors the nodes read besides the inputs: the model's parameters and buffers, and
                      what could be computed from those alone
    layers            the operations whose weight can be pruned, and those refused with a reason
    trained           names of the model's parameters
    assumptions       what torch.export took for granted of sizes, such as "x.size()[0] < 10" at a branch of forward;
                      the graph holds where they do
    """

    def __init__(
        self,
        inputs: list[Node],
        nodes: list[Node],
        outputs: list[Node],
        parameter_names: dict[Node, str],
        parameters: MutableMapping[str, Tensor],
        layers: list[Layer],
        trained: Collection[str],
        assumptions: Sequence[str] = (),
    ) -> None:
        self.inputs = inputs
        self.nodes = nodes
        self.outputs = outputs
        self.parameters = parameters
        self.layers = layers
        self.trained = frozenset(trained)
        self.assumptions = tuple(assumptions)
        self._parameter_names = parameter_names
        for position, node in enumerate(nodes):
            node.meta["position"] = position
        for node, name in parameter_names.items():
            node.meta["parameter"] = name
        self._last_read = self._find_last_reads()
        self._layer_bits = {layer.parameter: 1 << i for i, layer in enumerate(layers)}
        self._depends_on = self._find_dependencies()
        self.operations = _counted_operations(nodes)
        # Made once: every sweep asks for the same ones again.
        self._programs: dict[tuple[int, int], Program] = {}
        self._segments: dict[tuple[tuple[str, ...], int], Segment] = {}

    def with_own_parameters(self) -> Graph:
        """The same graph with a parameter table of its own: a parameter replaced in one stays in the other."""
        other = copy.copy(self)
        other.parameters = copy.copy(self.parameters)
        return other

    def leave_parameters(self, room: Room) -> None:
        """Run on the device of the room from now on. Parameters stay where they are, and are copied when they are read.

        To be called before anything was cut from the graph.
        """

        def moved(argument: Any) -> Any:
            return room.device if isinstance(argument, torch.device) else argument

        for node in self.nodes:
            node.args, node.kwargs = map_aggregate(node.args, moved), map_aggregate(node.kwargs, moved)
        self.parameters = Resting(room, self.parameters)
        self._programs.clear()

    # Running

    @property
    def end(self) -> int:
        return len(self.nodes)

    def live(self, position: int) -> list[str]:
        """Names of the values that exist before `position` and are still read at or after it."""
        return [node.name for node in self._live_nodes(position)]

    def live_bytes(self, position: int) -> int:
        """Bytes of the values that are alive at a position, for one sample."""
        return sum(bytes_of(node) for node in self._live_nodes(position))

    def _live_nodes(self, position: int) -> list[Node]:
        before = self.inputs + self.nodes[:position]
        return [node for node in before if self._last_read.get(node, -1) >= position]

    def program(self, start: int, stop: int) -> Program:
        """Everything from `start` up to `stop`. It gives the values that are read later."""
        if (start, stop) not in self._programs:
            nodes = self.nodes[start:stop]
            gives = [node for node in nodes if self._last_read[node] >= stop]
            self._programs[start, stop] = Program(nodes, gives, self._parameter_names)
        return self._programs[start, stop]

    def run(self, leaves: Sequence[Any], parameters: Mapping[str, Tensor] | None = None) -> list[Any]:
        """The whole network: its outputs, flattened."""
        values, position = self._named(leaves), 0
        weights = self.parameters if parameters is None else parameters
        for stop in self.stops(0, self.end, weights):
            values |= self.program(position, stop)(values, weights)
            values = {name: values[name] for name in self.live(stop)}
            position = stop
        return [values[node.name] for node in self.outputs]

    def stops(self, start: int, stop: int, parameters: Mapping[str, Tensor]) -> Iterator[int]:
        """Positions to stop at on the way from `start` to `stop`, so that the parameters read in between fit the device
        together. The last one is `stop`."""
        names = self._parameter_names
        reads = ([names[a] for a in node.all_input_nodes if a in names] for node in self.nodes[start:stop])
        yield from (start + steps for steps in fitting_together(parameters, reads))
        if stop > start:
            yield stop

    def run_operations(self, leaves: Sequence[Any], others: Iterable[Node] = ()) -> Values:
        """The output of every operation, and of some other nodes, by name."""
        return self.giving([*self.operations, *others])(self._named(leaves), self.parameters)

    def outputs_of(self, nodes: Iterable[Node], batches: Iterable[Values]) -> list[Values]:
        """The values of these nodes, for each batch of inputs."""
        program = self.giving(nodes)
        with torch.no_grad():
            return [program(inputs, self.parameters) for inputs in batches]

    def giving(self, nodes: Iterable[Node], first_order: bool = False) -> Program:
        """The whole network as a function that gives the values of these nodes."""
        return Program(self.nodes, nodes, self._parameter_names, first_order)

    def _named(self, leaves: Sequence[Any]) -> Values:
        return {node.name: leaf for node, leaf in zip(self.inputs, leaves, strict=True)}

    # Questions

    @property
    def parameter_nodes(self) -> Collection[Node]:
        """The nodes that stand for parameters and buffers."""
        return self._parameter_names.keys()

    @property
    def vectors(self) -> list[str]:
        """Biases, scales and shifts: trained parameters with one dimension that nothing else was computed from."""
        names = self._parameter_names
        computed = [node for node, name in names.items() if name not in self.trained]
        sources = {names[argument] for node in computed for argument in node.all_input_nodes}
        read = dict.fromkeys(Program(self.nodes, [], names).parameters)
        return [name for name in read if name in self.trained - sources and self.parameters[name].ndim == 1]

    @cached_property
    def piecewise_linear(self) -> bool:
        """Whether the whole network is a piecewise linear function of its inputs."""
        varying = {*self.inputs, *self.nodes}
        return all(is_piecewise_linear(node, varying) for node in self.nodes)

    def operations_after(self, *layers: Layer) -> list[Node]:
        """The operations that depend on the layers, their own first: what K counts."""
        return [node for node in self.operations if self._depends(node, *layers)]

    def attention_fed_by(self, layer: Layer) -> tuple[Node, int] | None:
        """The attention that a projection feeds, and which of its inputs it is. None if it feeds anything else."""
        first = next(iter(self.operations_after(layer)), None)
        if first is None or layer.node is first or not is_attention(first):
            return None
        arguments = first.all_input_nodes
        return first, next(index for index, argument in enumerate(arguments) if self._depends(argument, layer))

    def follows_attention(self, layer: Layer) -> bool:
        """Whether the layer reads an attention's output, with no other operation in between."""
        waiting, operations = [layer.node.all_input_nodes[0]], set(self.operations)
        while waiting:
            node = waiting.pop()
            if is_attention(node):
                return True
            passes = node not in operations and operator_of(node).family is not Family.ADDITION
            if passes and "position" in node.meta:
                waiting.extend(node.all_input_nodes)
        return False

    def has_attention_before(self, layer: Layer) -> bool:
        """Whether the layer's input depends on an attention."""
        return any(is_attention(node) for node in self._ancestors([layer.node], 0))

    def reads_table(self, layer: Layer) -> bool:
        """Whether the layer's input depends on an embedding table, as in a language model."""
        return any(operator_of(node).family is Family.EMBEDDING for node in self._ancestors([layer.node], 0))

    def layer_ancestors(self, layer: Layer) -> list[Layer]:
        """Other layers that this one depends on."""
        return [
            other for other in self.layers if other is not layer and any(self._depends(n, other) for n in layer.uses)
        ]

    def layer_descendants(self, layer: Layer) -> list[Layer]:
        """Other layers that depend on this one."""
        return [
            other for other in self.layers if other is not layer and any(self._depends(n, layer) for n in other.uses)
        ]

    # Segments

    def cost(self, layers: Sequence[Layer], horizon: int) -> Cost:
        """What one pass over the varying part of a segment takes, for one sample."""
        return cost_of(*self._cut(layers, horizon), [layer.weight for layer in layers])

    def segment(self, layers: Sequence[Layer], horizon: int) -> Segment:
        """The layers, which must not depend on one another, with the next `horizon` operations or as many as exist."""
        key = (tuple(layer.parameter for layer in layers), horizon)
        if key not in self._segments:
            self._segments[key] = self._make_segment(layers, horizon)
        return self._segments[key]

    def _make_segment(self, layers: Sequence[Layer], horizon: int) -> Segment:
        body, prelude, targets = self._cut(layers, horizon)
        reads = {argument for node in body for argument in node.all_input_nodes}
        weights = [layer.weight for layer in layers]
        varying = {*body, *weights}
        return Segment(
            layers=tuple(layers),
            prelude=Program(prelude, [node for node in prelude if node in reads], self._parameter_names),
            body=Program(body, targets, self._parameter_names),
            own=tuple(Program([layer.node], [layer.node], self._parameter_names) for layer in layers),
            outputs=tuple(node.name for node in targets),
            sample_layouts=tuple(node.meta["sample_layout"] for node in targets),
            piecewise_linear=all(is_piecewise_linear(node, varying) for node in body),
            batch_first=all(self._is_batch_first(node) for node in self._values_read_by([*prelude, *body])),
            cost=cost_of(body, prelude, targets, weights),
        )

    def _cut(self, layers: Sequence[Layer], horizon: int) -> tuple[list[Node], list[Node], list[Node]]:
        """The nodes of a segment that vary with the layers' weights, those that do not, and the operations 0 … K."""
        targets = self.operations_after(*layers)[: horizon + 1]
        needed = self._ancestors(targets, min(layer.position for layer in layers))
        body = [node for node in needed if self._depends(node, *layers)]
        return body, [node for node in needed if not self._depends(node, *layers)], targets

    def _values_read_by(self, nodes: list[Node]) -> set[Node]:
        """What the nodes read from before them, parameters aside."""
        read = {argument for node in nodes for argument in node.all_input_nodes}
        return {node for node in read - set(nodes) if node not in self._parameter_names}

    def _is_batch_first(self, node: Node) -> bool:
        """Whether the node's value has one row per sample, and no other axis that depends on their number."""
        sizes = sizes_of(node)
        return bool(sizes) and sizes[0] in self._sample_counts and all(isinstance(size, int) for size in sizes[1:])

    @cached_property
    def _sample_counts(self) -> set[Any]:
        """The symbols for the number of samples. Inputs that never meet have one each; some inputs have none."""
        first = [sizes[0] for sizes in map(sizes_of, self.inputs) if sizes]
        return {size for size in first if not isinstance(size, int)}

    # What depends on what

    def _find_last_reads(self) -> dict[Node, int]:
        last: dict[Node, int] = {}
        for position, node in enumerate(self.nodes):
            for argument in node.all_input_nodes:
                last[argument] = position
        last.update(dict.fromkeys(self.outputs, self.end))
        return last

    def _find_dependencies(self) -> dict[Node, int]:
        """For each node the layers it depends on, its own included, as bits: one pass for any number of layers."""
        own: dict[Node, int] = {}
        for layer in self.layers:
            for node in layer.uses:
                own[node] = own.get(node, 0) | self._layer_bits[layer.parameter]
        found: dict[Node, int] = {}
        for node in self.nodes:
            bits = own.get(node, 0)
            for argument in node.all_input_nodes:
                bits |= found.get(argument, 0)
            found[node] = bits
        return found

    def _depends(self, node: Node, *layers: Layer) -> bool:
        """Whether the node's value varies with the weight of one of the layers."""
        found = self._depends_on.get(node, 0)
        return any(found & self._layer_bits[layer.parameter] for layer in layers)

    def _ancestors(self, targets: list[Node], start: int) -> list[Node]:
        """The nodes that compute `targets` from the values alive at `start`, in order of execution."""
        wanted = set(targets)
        nodes = self.nodes[start : 1 + max(int(node.meta["position"]) for node in targets)]
        for node in reversed(nodes):
            if node in wanted:
                wanted.update(node.all_input_nodes)
        return [node for node in nodes if node in wanted]


def _counted_operations(nodes: list[Node]) -> list[Node]:
    """The operations that K counts: those with elements. A projection that only feeds an attention belongs to it."""
    counted = [node for node in nodes if is_counted(node) and node.meta["bytes"] > 0]
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
