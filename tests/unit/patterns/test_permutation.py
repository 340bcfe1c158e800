"""Channels re-ordered for N:M masks: the function stays, the kept magnitude rises, what cannot be followed is fixed."""

from __future__ import annotations

import copy
from collections.abc import Callable
from itertools import combinations
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import parametrizations

from snows.data import embedded
from snows.errors import InputError
from snows.graph import Graph, capture
from snows.graph.channels import find_spaces
from snows.patterns import NM, Group, Pattern, Unstructured, permutation
from snows.patterns.permutation import Permuted, _compare, _gains, best_order, kept_magnitude, permute_channels
from tests import networks


class Block(nn.Module):
    """A ResNet basic block or bottleneck, with a shortcut where the shape changes."""

    def __init__(self, before: int, inside: int, after: int, stride: int = 1) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(before, inside, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(inside)
        self.conv2 = nn.Conv2d(inside, inside, 3, stride, 1, bias=False)
        self.bn2 = nn.BatchNorm2d(inside)
        self.conv3 = nn.Conv2d(inside, after, 1)
        self.bn3 = nn.BatchNorm2d(after)
        self.shortcut = nn.Conv2d(before, after, 1, stride) if before != after or stride != 1 else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        y = F.relu(self.bn2(self.conv2(F.relu(self.bn1(self.conv1(x))))))
        return F.relu(self.bn3(self.conv3(y)) + self.shortcut(x))


class Inverted(nn.Module):
    """Expansion, depthwise convolution, squeeze and excitation, projection, around a linear residual stream."""

    def __init__(self, channels: int, inside: int) -> None:
        super().__init__()
        self.expand = nn.Sequential(nn.Conv2d(channels, inside, 1), nn.BatchNorm2d(inside), nn.ReLU6())
        self.depthwise = nn.Sequential(
            nn.Conv2d(inside, inside, 3, padding=1, groups=inside), nn.BatchNorm2d(inside), nn.PReLU(inside)
        )
        self.squeeze, self.excite = nn.Conv2d(inside, 8, 1), nn.Conv2d(8, inside, 1)
        self.project = nn.Sequential(nn.Conv2d(inside, channels, 1), nn.BatchNorm2d(channels))

    def forward(self, x: Tensor) -> Tensor:
        y = self.depthwise(self.expand(x))
        y = y * torch.sigmoid(self.excite(F.silu(self.squeeze(F.adaptive_avg_pool2d(y, 1)))))
        return x + self.project(y)


class Encoder(nn.Module):
    """A vision transformer: class token, positions, packed attention, layer norms on the residual stream."""

    def __init__(self) -> None:
        super().__init__()
        self.patch = nn.Conv2d(2, 8, 2, 2)
        self.token = nn.Parameter(torch.randn(1, 1, 8))
        self.positions = nn.Parameter(torch.randn(1, 5, 8))
        self.norm1, self.norm2, self.norm3 = nn.LayerNorm(8), nn.LayerNorm(8), nn.LayerNorm(8)
        self.attention = nn.MultiheadAttention(8, 2, batch_first=True)
        self.fc1, self.fc2 = nn.Linear(8, 16), nn.Linear(16, 8)
        self.head = nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.patch(x).flatten(2).transpose(1, 2)
        x = torch.cat([self.token.expand(x.shape[0], -1, -1), x], 1) + self.positions
        y = self.norm1(x)
        x = x + self.attention(y, y, y, need_weights=False)[0]
        x = x + self.fc2(F.gelu(self.fc1(self.norm2(x))))
        return self.head(self.norm3(x)[:, 0])


class TwoReaders(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(5, 8)
        self.left, self.right = nn.Linear(8, 8), nn.Linear(8, 3)
        self.head = nn.Linear(8, 3)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        x = self.words((x[:, 0] > 0).long()) * 2
        return self.head(F.relu(self.left(x))), self.right(x)


class Between(nn.Module):
    """Something between a convolution and the one that reads its channels."""

    def __init__(self, between: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.first, self.second, self.head = nn.Conv2d(2, 8, 1), nn.Conv2d(8, 8, 1), nn.Linear(8, 2)
        self.between = between

    def forward(self, x: Tensor) -> Tensor:
        return self.head(F.relu(self.second(self.between(self.first(x)))).mean((2, 3)))


def image_net(*body: nn.Module, channels: int = 8) -> nn.Module:
    head = [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(channels, 3)]
    return networks.Sequential(nn.Conv2d(2, 8, 3, padding=1, bias=False), nn.BatchNorm2d(8), nn.ReLU(), *body, *head)


IMAGES = (2, 4, 4)
# Each network with one sample's shape and the layers that read each free space.
FREE: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...], list[set[str]]]] = {
    "plain": (
        lambda: image_net(nn.Conv2d(8, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.MaxPool2d(2)),
        IMAGES,
        [{"3"}, {"9"}],
    ),
    "mlp": (
        lambda: networks.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 3)),
        (4,),
        [{"2"}, {"4"}],
    ),
    "residual": (
        lambda: image_net(Block(8, 8, 8), Block(8, 8, 16, 2), Block(16, 8, 16), channels=16),
        IMAGES,
        [
            {"3.conv1", "4.conv1", "4.shortcut"},
            *({f"{i}.{name}"} for i in (3, 4, 5) for name in ("conv2", "conv3")),
            {"5.conv1", "8"},
        ],
    ),
    "inverted": (
        lambda: image_net(Inverted(8, 16), Inverted(8, 16)),
        IMAGES,
        [
            {"3.expand.0", "4.expand.0", "7"},
            {"3.squeeze", "3.project.0"},
            {"3.excite"},
            {"4.squeeze", "4.project.0"},
            {"4.excite"},
        ],
    ),
    "encoder": (Encoder, IMAGES, [{"attention.in_proj_weight", "fc1", "head"}, {"fc2"}]),
    "two-readers": (TwoReaders, (4,), [{"left", "right"}, {"head"}]),
}


def made(factory: Callable[[], nn.Module]) -> nn.Module:
    """In float64, with random statistics, and weights of very different sizes: there is something to gain."""
    with torch.random.fork_rng(), torch.no_grad():
        torch.manual_seed(3)
        model = factory().double().eval()
        networks.random_statistics(model)
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.mul_(torch.randn_like(parameter).exp())
            else:
                parameter.add_(0.1 * torch.randn_like(parameter))
        return model


def samples(shape: tuple[int, ...]) -> Tensor:
    return torch.randn(3, *shape, generator=torch.Generator().manual_seed(4), dtype=torch.float64)


def everywhere(graph: Graph, pattern: Pattern) -> dict[str, Pattern]:
    return {layer.parameter: pattern for layer in graph.layers if not layer.refusal}


def reordered(model: nn.Module, graph: Graph, patterns: dict[str, Pattern], x: Any, seed: int = 0) -> Permuted:
    """A copy of the model, re-ordered in place."""
    return permute_channels(copy.deepcopy(model), graph, patterns, *networks.call_arguments(x), seed=seed)


def permuted(model: nn.Module, x: Any, pattern: Pattern = NM(1, 4), seed: int = 0) -> Permuted:  # noqa: B008  # frozen
    graph = capture(model, *networks.call_arguments(x))
    return reordered(model, graph, everywhere(graph, pattern), x, seed)


def assert_same_function(model: nn.Module, other: nn.Module, x: Any, tolerance: float = 1e-12) -> None:
    args, kwargs = networks.call_arguments(x)
    with torch.no_grad():
        pairs = zip(*(torch.utils._pytree.tree_leaves(m(*args, **kwargs)) for m in (model, other)), strict=True)
    for a, b in pairs:
        assert float((a - b).abs().max()) <= tolerance * float(a.abs().max())


def movable(model: nn.Module, x: Tensor) -> set[tuple[str, int]]:
    state = model.state_dict(keep_vars=True)
    return {member for space in find_spaces(capture(model, (x,), {}), state) for member in space}


@pytest.mark.parametrize("name", FREE)
def test_function_stays_while_weights_move(name: str) -> None:
    factory, shape, expected = FREE[name]
    model, x = made(factory), samples(shape)
    result = permuted(model, x)
    assert_same_function(model, result.model, x)
    readers = [{consumer.removesuffix(".weight") for consumer in space.consumers} for space in result.spaces]
    assert sorted(map(sorted, readers)) == sorted(map(sorted, expected))
    before, after = model.state_dict(), result.model.state_dict()
    for space in result.spaces:
        assert space.kept_after >= space.kept_before
        if space.kept_after > space.kept_before:  # else the order was the best already
            assert not any(torch.equal(before[name], after[name]) for name in space.consumers)
    assert result.kept_after > result.kept_before


@pytest.mark.parametrize("name", networks.NETWORKS)
def test_function_stays_in_every_network(name: str) -> None:
    model, graph = networks.captured(name)
    x = networks.example(name, 3)
    result = reordered(model, graph, everywhere(graph, NM(1, 2)), x)
    assert_same_function(model, result.model, x)
    assert all(space.kept_after >= space.kept_before for space in result.spaces)


@pytest.mark.parametrize("name", networks.NETWORKS)
def test_any_order_of_every_space_gives_the_same_function(name: str) -> None:
    model, graph = networks.captured(name)
    other = copy.deepcopy(model)
    tensors = other.state_dict(keep_vars=True)
    with torch.no_grad():
        for members in find_spaces(graph, tensors):
            (channels,) = {tensors[member].shape[axis] for member, axis in members}
            for member, axis in members:
                tensors[member].copy_(tensors[member].roll(1, axis))
            assert channels > 1
    assert_same_function(model, other, networks.example(name, 3))


def test_residual_stream_of_a_transformer_moves_as_one() -> None:
    model, graph = networks.captured("attention")
    spaces = [set(space) for space in find_spaces(graph, model.state_dict(keep_vars=True))]
    norms = {(f"norm{i}.{kind}", 0) for i in (1, 2, 3) for kind in ("weight", "bias")}
    made_by = {
        (f"{name}.{kind}", 0) for name in ("embed", "attention.out_proj", "mlp.2") for kind in ("weight", "bias")
    }
    read_by = {("attention.in_proj_weight", 1), ("mlp.0.weight", 1), ("head.weight", 1)}
    assert norms | made_by | read_by in spaces
    assert {("mlp.0.weight", 0), ("mlp.0.bias", 0), ("mlp.2.weight", 1)} in spaces
    assert len(spaces) == 2  # inputs, heads and outputs stay


def test_what_treats_channels_alike_is_followed() -> None:
    def between(x: Tensor) -> Tensor:
        x = F.avg_pool2d(F.pad(F.leaky_relu(x), (1, 1, 1, 1)), 2)
        x = F.interpolate(x, scale_factor=2).softmax(1) / x.mean((1, 2, 3), keepdim=True).abs()
        x = F.layer_norm(x.permute(0, 2, 3, 1), (8,)).permute(0, 3, 1, 2)
        x = torch.cat([x[:, :, 1:], x], 2).flatten(2).unsqueeze(-1)
        return F.max_pool2d(x * x.amax(2, keepdim=True).sigmoid(), (2, 1))

    model, x = made(lambda: Between(between)), samples(IMAGES)
    result = permuted(model, x)
    assert ("second.weight",) in [space.consumers for space in result.spaces]
    assert_same_function(model, result.model, x)


FIXED: dict[str, Callable[[Tensor], Tensor]] = {
    "concatenation": lambda x: torch.cat([x[:, 4:], x[:, :4]], 1),
    "flip": lambda x: x.flip(1),
    "running sum": lambda x: x.cumsum(1),
    "shuffle": lambda x: x.unflatten(1, (2, 4)).transpose(1, 2).flatten(1, 2),
    "group norm": lambda x: F.group_norm(x, 2),
    "constant": lambda x: x * torch.arange(8.0, dtype=x.dtype).view(8, 1, 1),
    "one channel": lambda x: x * x[:, :1],
    "product": lambda x: (torch.eye(8, dtype=x.dtype) * 2 @ x.flatten(2)).unflatten(2, (4, 4)),
}


@pytest.mark.parametrize("name", FIXED)
def test_what_tells_channels_apart_is_fixed(name: str) -> None:
    model, x = made(lambda: Between(FIXED[name])), samples(IMAGES)
    found = movable(model, x)
    assert not {("first.weight", 0), ("second.weight", 1)} & found
    assert {("second.weight", 0), ("head.weight", 1)} <= found
    assert_same_function(model, permuted(model, x).model, x)


class Computed(nn.Module):
    """A computed weight, one under two names, and a parameter of which one element is read."""

    def __init__(self) -> None:
        super().__init__()
        self.first = parametrizations.weight_norm(nn.Linear(4, 8))
        self.twice, self.again, self.between = nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 8)
        self.again.weight = self.twice.weight
        self.scales = nn.Parameter(torch.randn(8))
        self.free, self.head = nn.Linear(8, 8), nn.Linear(8, 2)

    def forward(self, x: Tensor) -> Tensor:
        x = self.twice(torch.relu(self.first(x)) * self.scales[3])
        return self.head(self.free(self.again(self.between(x).relu()).relu()).relu())


def test_shared_and_computed_weights_are_fixed() -> None:
    model, x = made(Computed), samples((4,))
    assert movable(model, x) == {("free.weight", 0), ("free.bias", 0), ("head.weight", 1)}
    assert_same_function(model, permuted(model, x).model, x)


def test_grouped_convolutions_inputs_and_outputs_are_fixed() -> None:
    model = made(lambda: networks.Sequential(nn.Conv2d(2, 8, 1), nn.Conv2d(8, 8, 3, groups=2), nn.Conv2d(8, 8, 1)))
    assert not movable(model, samples(IMAGES))
    multiplied = made(lambda: networks.Sequential(nn.Conv2d(2, 4, 1), nn.Conv2d(4, 8, 3, groups=4), nn.Conv2d(8, 8, 1)))
    assert not movable(multiplied, samples(IMAGES))


def test_channels_spread_over_a_flattened_map_are_fixed() -> None:
    model = made(lambda: networks.Sequential(nn.Conv2d(2, 8, 1), nn.ReLU(), nn.Flatten(), nn.Linear(128, 3)))
    assert not movable(model, samples(IMAGES))


def test_only_nm_patterns_that_fit_count() -> None:
    model, x = made(FREE["mlp"][0]), samples((4,))
    assert permuted(model, x, Unstructured(0.5)).spaces == []
    result = permuted(model, x, NM(1, 16))
    assert [space.consumers for space in result.spaces] == [("4.weight",)]
    assert result.kept_before == result.kept_after  # one group only


def test_planted_large_channels_are_spread_over_groups() -> None:
    model, x = made(lambda: networks.Sequential(nn.Linear(3, 16), nn.ReLU(), nn.Linear(16, 5))), samples((3,))
    large = torch.zeros(16, dtype=torch.bool)
    large[:4] = True
    with torch.no_grad():
        model[2].weight.uniform_(0.1, 0.2).add_(large * 5.0)
    result = permuted(model, x)
    weight = model[2].weight.detach()
    best = float(weight[:, large].sum() / weight.sum())
    assert result.kept_after == pytest.approx(best, rel=1e-12)
    assert result.kept_before < 0.5 * best


@pytest.mark.parametrize("n", [1, 2, 3])
@pytest.mark.parametrize("rows", [1, 4, 16])
def test_best_order_of_eight_channels(n: int, rows: int) -> None:
    generator = torch.Generator().manual_seed(rows)
    halves = [(0, *rest) for rest in combinations(range(1, 8), 3)]
    orders = [torch.tensor([*half, *(c for c in range(8) if c not in half)]) for half in halves]
    for _ in range(5):
        magnitudes = {Group(4, n): torch.rand(8, rows, generator=generator, dtype=torch.float64) ** 3}
        best = max(float(kept_magnitude(magnitudes, order).sum()) for order in orders)
        found = float(kept_magnitude(magnitudes, best_order(magnitudes, generator)).sum())
        assert found == pytest.approx(best, rel=1e-12)


def test_kept_magnitude_is_that_of_the_best_mask() -> None:
    weight = torch.randn(6, 16, 3, 3, dtype=torch.float64)
    order = torch.randperm(16)
    for pattern in (NM(1, 4), NM(2, 4), NM(3, 8)):
        kept = kept_magnitude({pattern.group: weight.abs().movedim(1, 0).flatten(1)}, order)
        moved = weight[:, order].abs()
        assert float(kept.sum()) == pytest.approx(float((moved * pattern.best_mask(moved)).sum()), rel=1e-12)


def test_gains_are_what_each_swap_adds() -> None:
    rows = {pattern: torch.rand(16, 5, dtype=torch.float64) ** 2 for pattern in (Group(4, 2), Group(8, 3), Group(2, 1))}
    rows[Group(4, 2)][:, 0] = 1.0  # ties
    order = torch.randperm(16)
    gains = _gains(rows, order, 1)[0]
    for i, j in combinations(range(16), 2):
        swapped = order.clone()
        swapped[i], swapped[j] = order[j], order[i]
        added = float(kept_magnitude(rows, swapped).sum() - kept_magnitude(rows, order).sum())
        assert float(gains[i, j]) == pytest.approx(added, abs=1e-12)


def test_many_channels_are_searched_in_parties() -> None:
    generator = torch.Generator().manual_seed(0)
    rows = {
        Group(4, 2): torch.rand(148, 20, generator=generator) ** 3,
        Group(2, 1): torch.rand(148, 7, generator=generator),
    }
    order = best_order(rows, generator)
    assert torch.equal(order.sort().values, torch.arange(148))
    assert float(kept_magnitude(rows, order).sum()) > 1.02 * float(kept_magnitude(rows, torch.arange(148)).sum())


def test_two_patterns_on_one_stream() -> None:
    model, x = made(FREE["residual"][0]), samples(IMAGES)
    graph = capture(model, (x,), {})
    patterns: dict[str, Pattern] = {"5.conv1.weight": NM(2, 4), "8.weight": NM(1, 8)}
    result = reordered(model, graph, patterns, x)
    assert [set(space.consumers) for space in result.spaces] == [set(patterns)]
    assert result.kept_after > result.kept_before
    assert_same_function(model, result.model, x)


def test_a_second_run_is_identical() -> None:
    model, x = made(FREE["residual"][0]), samples(IMAGES)
    first, second = permuted(model, x, seed=5), permuted(model, x, seed=5)
    assert first.spaces == second.spaces
    states = first.model.state_dict(), second.model.state_dict()
    assert all(torch.equal(a, b) for a, b in zip(*(state.values() for state in states), strict=True))


def test_the_model_is_re_ordered_in_place_and_keeps_its_mode() -> None:
    model, x = made(FREE["residual"][0]), samples(IMAGES)
    graph = capture(model, (x,), {})
    before = copy.deepcopy(model)
    model.train()
    parameters = dict(model.named_parameters())
    result = permute_channels(model, graph, everywhere(graph, NM(2, 4)), (x,), {})
    assert result.model is model
    assert all(parameters[name] is parameter for name, parameter in model.named_parameters())
    assert all(module.training for module in model.modules())
    assert_same_function(before, model.eval(), x)
    assert not torch.equal(before.state_dict()["8.weight"], model.state_dict()["8.weight"])


def test_half_precision_keeps_its_dtype() -> None:
    model, x = made(FREE["mlp"][0]).bfloat16(), samples((4,)).bfloat16()
    result = permuted(model, x)
    assert {parameter.dtype for parameter in result.model.parameters()} == {torch.bfloat16}
    assert result.kept_after > result.kept_before


def test_other_outputs_are_never_returned(monkeypatch: pytest.MonkeyPatch) -> None:
    model, x = made(FREE["mlp"][0]), samples((4,))
    monkeypatch.setattr(permutation, "find_spaces", lambda graph, tensors: [[("2.weight", 1)]])  # not what makes them
    with pytest.raises(InputError, match="gives other outputs than before"):
        permuted(model, x)


@pytest.mark.parametrize("pattern", [NM(1, 4), NM(2, 4)], ids=str)
def test_embedded_network(pattern: NM) -> None:
    model = embedded.model()
    x = embedded.images()[0][:16]
    graph = capture(model, (x,), {})
    result = reordered(model, graph, everywhere(graph, pattern), x)
    assert_same_function(model, result.model, x, 1e-5)
    streams = [set(space.consumers) for space in result.spaces if len(space.consumers) > 1]
    blocks = {stage: {f"layer{stage}.{block}.conv1.weight" for block in (0, 1, 2)} for stage in (1, 2, 3)}
    next_stage = {stage: {f"layer{stage}.0.conv1.weight", f"layer{stage}.0.downsample.0.weight"} for stage in (2, 3)}
    assert streams == [
        blocks[1] | next_stage[2],
        blocks[2] - next_stage[2] | next_stage[3],
        blocks[3] - next_stage[3] | {"fc.weight"},
    ]
    assert len(result.spaces) == 3 + 9
    assert all(space.kept_after > space.kept_before for space in result.spaces)
    assert result.kept_after > result.kept_before + 0.008


@pytest.mark.parametrize(
    ("dtype", "close", "far"),
    [(torch.float64, 1e-10, 1e-8), (torch.float32, 1e-4, 1e-2), (torch.bfloat16, 1e-2, 0.3)],
)
def test_outputs_may_differ_by_rounding_only(dtype: torch.dtype, close: float, far: float) -> None:
    model, expected = nn.Linear(2, 2).to(dtype), torch.tensor([100.0, 0.0], dtype=dtype)
    _compare(model, [expected], [expected + 100 * close])
    with pytest.raises(InputError, match="gives other outputs than before"):
        _compare(model, [expected], [expected + 100 * far])
