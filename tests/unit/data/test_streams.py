"""Streams: activations are those of the network, wherever they are kept, and are freed when nothing reads them."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from snows.data import streams
from snows.data.samples import Samples, read_samples
from snows.data.streams import Batches, Stream, cut
from snows.devices.distributed.ranks import Ranks
from snows.devices.memory import Memory
from snows.graph import Graph
from tests.networks import NETWORKS, call_arguments, captured, example

SIZES = (3, 2, 1)


@dataclass(frozen=True)
class Room(Memory):
    """Memory for so many samples, whatever their activations need."""

    total: int = 0
    on_device: int = 0
    on_host: int = 0

    def resident(self, live_bytes: int, samples: int) -> int:
        assert live_bytes > 0
        return min(samples, self.on_device)

    def hosted(self, live_bytes: int) -> int:
        return self.on_host


def batches(name: str, held_out: int = 0) -> Batches:
    _, graph = captured(name)
    leaves = pytree.tree_leaves(call_arguments(example(name, sum(SIZES))))
    parts = zip(*(leaf.split(SIZES) for leaf in leaves), strict=True)
    names = [node.name for node in graph.inputs]
    return Batches([dict(zip(names, part, strict=True)) for part in parts], SIZES, held_out)


def stream_of(name: str, memory: Memory | None = None, held_out: int = 0) -> Stream:
    _, graph = captured(name)
    return Stream(graph, graph.parameters, batches(name, held_out), memory)


def inputs_of_layers(name: str) -> dict[str, Tensor]:
    """What each layer's module reads, watched in the model itself."""
    model, _ = captured(name)
    seen: dict[str, Tensor] = {}
    with watched(model, seen), torch.no_grad():
        args, kwargs = call_arguments(example(name, sum(SIZES)))
        model(*args, **kwargs)
    return seen


@contextmanager
def watched(model: nn.Module, seen: dict[str, Tensor]) -> Iterator[None]:
    """Keeps the first input of each layer's module."""
    names = {
        module: name
        for name, module in model.named_modules()
        if isinstance(module, nn.Linear | nn.Conv1d | nn.Conv2d | nn.Conv3d)
    }

    def keep(module: nn.Module, args: tuple[Tensor, ...]) -> None:
        seen.setdefault(names[module], args[0].clone())

    handles = [module.register_forward_pre_hook(keep) for module in names]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def equal(one: Stream, two: Stream) -> bool:
    """The same values, bit by bit."""
    pairs = [(one[i], two[i]) for i in range(len(SIZES))]
    return all(
        a.keys() == b.keys() and all(torch.equal(torch.as_tensor(a[k]), torch.as_tensor(b[k])) for k in a)
        for a, b in pairs
    )


# The values


@pytest.mark.parametrize("name", [name for name in NETWORKS if name != "attention"])  # its layers are inside a module
def test_each_layer_finds_the_inputs_that_its_module_reads(name: str) -> None:
    _, graph = captured(name)
    stream, expected = stream_of(name), inputs_of_layers(name)
    layers = [layer for layer in graph.layers if layer.refusal is None]
    assert layers
    for layer in layers:
        stream.advance(layer.position)
        found = torch.cat([stream.read(i, [layer.input])[layer.input] for i in range(len(SIZES))])
        torch.testing.assert_close(found, expected[layer.name].view_as(found))


@pytest.mark.parametrize("name", NETWORKS)
def test_the_end_is_the_models_outputs(name: str) -> None:
    model, graph = captured(name)
    stream = stream_of(name)
    stream.advance(graph.end)
    args, kwargs = call_arguments(example(name, sum(SIZES)))
    with torch.no_grad():
        expected = pytree.tree_leaves(model(*args, **kwargs))
    for node, output in zip(graph.outputs, expected, strict=True):
        torch.testing.assert_close(torch.cat([stream[i][node.name] for i in range(len(SIZES))]), output)


@pytest.mark.parametrize("name", ["residual", "attention", "two-inputs"])
def test_many_small_moves_are_one_large_move(name: str) -> None:
    _, graph = captured(name)
    slow = stream_of(name)
    for position in range(1, graph.end + 1):
        slow.advance(position)
        fast = stream_of(name)
        fast.advance(position)
        assert slow.position == fast.position == position
        assert equal(slow, fast)


def test_before_the_first_move_the_values_are_the_inputs() -> None:
    stream, given = stream_of("two-inputs"), batches("two-inputs")
    for index in range(len(SIZES)):
        for key, value in given.values[index].items():
            assert torch.equal(stream[index][key], value)
    assert not stream.offloaded


def test_a_weight_may_change_until_its_layer_is_passed() -> None:
    _, graph = captured("mlp")
    parameters = dict(graph.parameters)
    stream = Stream(graph, parameters, batches("mlp"))
    layer = next(layer for layer in graph.layers if layer.name == "2")
    stream.advance(layer.position)
    before = stream[0][layer.input]
    parameters["2.weight"] = 2 * parameters["2.weight"]
    stream.advance(layer.position + 1)
    (after,) = stream[0].values()
    expected = torch.nn.functional.linear(before, 2 * graph.parameters["2.weight"], graph.parameters["2.bias"])
    torch.testing.assert_close(after, expected)
    parameters["2.weight"] = torch.zeros_like(parameters["2.weight"])
    assert torch.equal(stream[0][next(iter(stream[0]))], after)


# What is read, and what is freed


def test_only_named_values_are_read_and_missing_ones_left_out() -> None:
    _, graph = captured("two-inputs")
    stream = stream_of("two-inputs")
    first, second = (node.name for node in graph.inputs)
    assert set(stream.read(1, [first])) == {first}
    assert set(stream.read(1, [first, second, "elsewhere"])) == {first, second}
    stream.advance(graph.end)
    assert stream.read(1, [first, second]) == {}


@pytest.mark.parametrize("name", ["residual", "attention", "shared-relu"])
@pytest.mark.parametrize("memory", [None, Room(), Room(on_device=3, on_host=2)])
def test_values_are_freed_when_nothing_reads_them(name: str, memory: Memory | None) -> None:
    _, graph = captured(name)
    stream = stream_of(name, memory)
    seen: list[weakref.ref[Tensor]] = []
    for position in range(1, graph.end + 1):
        stream.advance(position)
        for index in range(len(SIZES)):
            kept = stream._values[index]
            assert kept is not None
            assert set(kept) == set(graph.live(position))
            seen += [weakref.ref(value) for value in kept.values() if isinstance(value, Tensor)]
    gc.collect()
    held = [value for values in (*stream._values, *stream._inputs) for value in (values or {}).values()]
    alive = [value for reference in seen if (value := reference()) is not None]
    assert {id(value) for value in alive} <= {id(value) for value in held}
    assert len(alive) < len(seen)


def test_nothing_happens_at_the_same_position() -> None:
    stream = stream_of("mlp")
    stream.advance(2)
    before = stream[0]
    stream.advance(2)
    assert stream[0] is before


# A view of fewer samples


def test_a_narrowed_stream_reads_fewer_samples() -> None:
    _, graph = captured("residual")
    stream = stream_of("residual", held_out=1)
    for position in (0, 5):
        stream.advance(position)
        view = stream.narrowed(2)
        assert (view.sizes, stream.sizes) == ((2, 2, 1), SIZES)
        assert (view.position, view.fitted, view.held_out) == (stream.position, 2, (2,))
        names = graph.live(position)
        for index, size in enumerate(view.sizes):
            whole, narrow = stream.read(index, names), view.read(index, names)
            assert whole.keys() == narrow.keys() == set(names)
            for key in names:
                assert torch.equal(narrow[key], whole[key][:size])


# Where values are kept


@pytest.mark.parametrize("name", ["residual", "attention", "two-inputs"])
@pytest.mark.parametrize("on_device", [0, 3, 5, 6])
@pytest.mark.parametrize("on_host", [0, 2, 99])
def test_offloaded_values_are_the_same(
    name: str, on_device: int, on_host: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, graph = captured(name)
    on_disk: list[int] = []
    monkeypatch.setattr(streams, "on_disk", lambda value: on_disk.append(id(value)) or value.clone())
    plain, offloaded = stream_of(name), stream_of(name, Room(on_device=on_device, on_host=on_host))
    for position in range(1, graph.end + 1):
        on_disk.clear()
        plain.advance(position)
        offloaded.advance(position)
        assert not plain.offloaded
        assert offloaded.offloaded == (on_device < sum(SIZES))
        # A micro-batch is moved as a whole: to the host if its last sample finds no room on the device, and so on.
        last = [sum(SIZES[: index + 1]) for index in range(len(SIZES))]
        tensors = sum(isinstance(value, Tensor) for value in plain[0].values())
        assert len(on_disk) == tensors * sum(end > on_device + on_host for end in last)
        assert equal(plain, offloaded)


def test_values_on_the_device_are_not_copied() -> None:
    stream = stream_of("mlp", Room(on_device=3))
    stream.advance(2)
    kept = [next(iter((values or {}).values())) for values in stream._values]
    assert all(next(iter(stream.read(i, stream[i]).values())).data_ptr() == v.data_ptr() for i, v in enumerate(kept))
    assert next(iter(stream[0].values())).data_ptr() == kept[0].data_ptr()


# Micro-batches of samples


def table(count: int) -> Samples:
    return read_samples(torch.arange(float(count)).view(count, 1), nn.Identity())


@pytest.mark.parametrize(
    ("size", "sizes", "held_out"),
    [(2, (2, 2, 1, 2, 1), 2), (5, (5, 3), 1), (1, (1,) * 8, 3), (100, (5, 3), 1)],
)
def test_fitted_samples_come_first_and_are_not_mixed_with_those_held_out(
    size: int, sizes: tuple[int, ...], held_out: int
) -> None:
    fitted, judged = table(8).split(5)
    made = cut(fitted, judged, ["x"], size)
    assert (made.sizes, made.held_out, len(made.values)) == (sizes, held_out, len(sizes))
    rows = [made.values[index]["x"] for index in range(len(sizes))]
    assert tuple(map(len, rows)) == sizes
    assert torch.cat(rows).flatten().tolist() == list(range(8))
    _, graph = captured("mlp")
    stream = Stream(graph, graph.parameters, made)
    assert stream.fitted == len(sizes) - held_out
    assert stream.held_out == tuple(range(stream.fitted, len(sizes)))
    assert torch.cat(rows[stream.fitted :]).flatten().tolist() == [5, 6, 7]


def test_nothing_is_held_out_where_there_is_nothing() -> None:
    fitted, nothing = table(4).split(4)
    made = cut(fitted, nothing, ["x"], 3)
    assert (made.sizes, made.held_out) == ((3, 1), 0)


def test_smaller_micro_batches_hold_the_same_samples() -> None:
    made: Batches | None = cut(*table(8).split(6), ["x"], 5)
    sizes = []
    while made is not None:
        rows = torch.cat([made.values[index]["x"] for index in range(len(made.sizes))])
        assert rows.flatten().tolist() == list(range(8))
        sizes.append(max(made.sizes))
        made = made.smaller() if made.smaller else None
    assert sizes == [5, 2, 1]


@pytest.mark.parametrize("size", [1, 2, 4, 5, 100])
@pytest.mark.parametrize("ranks", [2, 3, 7])
def test_ranks_share_the_blocks_of_one_process(ranks: int, size: int) -> None:
    """Each has every so many-th sample, whatever the size of a block: those of a Dataset are read by one rank alone."""
    _, graph = captured("mlp")
    alone = Stream(graph, graph.parameters, cut(*table(13).split(9), ["x"], size))
    blocks: dict[int, list[float]] = {}
    first: dict[int, list[float]] = {}
    for rank in range(ranks):
        stream = Stream(graph, graph.parameters, cut(*table(13).split(9), ["x"], size, Ranks(rank, ranks)))
        own = {index: stream[index]["x"].flatten().tolist() for index in stream.own}
        assert [row for rows in own.values() for row in rows] == [*range(rank, 9, ranks), *range(9 + rank, 13, ranks)]
        assert [stream.samples_in(block) for block in stream.blocks] == list(alone.sizes[: alone.fitted])
        view = stream.narrowed(3)
        for number, block in enumerate(stream.blocks):
            for index in set(block) & own.keys():
                blocks.setdefault(number, []).extend(own[index])
                first.setdefault(number, []).extend(view.read(index, ["x"])["x"].flatten().tolist())
    for number in range(alone.fitted):
        rows = alone[number]["x"].flatten().tolist()
        assert sorted(blocks[number]) == rows
        assert sorted(first[number]) == rows[:3]


def test_samples_are_read_when_they_are_needed(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[int, int]] = []
    rows = Samples.rows

    def watch(samples: Samples, start: int, stop: int) -> list[Any]:
        asked.append((start, stop))
        return rows(samples, start, stop)

    monkeypatch.setattr(Samples, "rows", watch)
    made = cut(*table(8).split(6), ["x"], 4)
    assert asked == []
    assert made.values[1]["x"].flatten().tolist() == [4, 5]
    assert made.values[2]["x"].flatten().tolist() == [6, 7]
    assert asked == [(4, 6), (0, 2)]


def test_the_graph_is_what_it_was() -> None:
    """Captured networks are shared by the tests: a stream changes neither parameters nor programs."""
    _, graph = captured("mlp")
    before = {name: value.clone() for name, value in graph.parameters.items()}
    stream = stream_of("mlp")
    stream.advance(graph.end)
    assert isinstance(graph, Graph)
    assert all(torch.equal(before[name], value) for name, value in graph.parameters.items())
