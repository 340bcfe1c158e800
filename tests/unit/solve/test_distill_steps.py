"""The steps of the last stage on a tiny network: samples, rates, pieces, and which point is kept."""

from __future__ import annotations

import math
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from snows.data.samples import Samples, read_samples
from snows.devices.distributed.ranks import ALONE, Ranks
from snows.devices.memory import Memory
from snows.errors import SnowsWarning
from snows.events import Distilled, DistillStep, Event
from snows.graph import Graph, capture
from snows.solve import distill as module
from snows.solve.distill import Distillation, _Best, _Match, _pieces, _schedule, _Trained, _weights
from snows.solve.settings import DistillSettings
from tests.networks import captured, example, make

PLENTY = Memory(1 << 34)
CPU = torch.device("cpu")
SETTINGS = DistillSettings(steps=20, batch=4, rate=1e-2, half_precision=False)


def samples(count: int) -> Samples:
    return read_samples(example("mlp", count), make("mlp"))


def stage(held_out: int = 6, memory: Memory = PLENTY, graph: Graph | None = None, **settings: Any) -> Distillation:
    graph = graph or captured("mlp")[1]
    masks = {"2.weight": torch.arange(64).view(8, 8) % 3 > 0}
    fitted, judged = samples(20 + held_out).split(20)
    return Distillation(graph, masks, fitted, judged, replace(SETTINGS, **settings), memory, seed=5)


def start(given: Distillation) -> dict[str, Tensor]:
    parameters = given.graph.parameters
    return {**parameters, **{name: parameters[name] * mask for name, mask in given.masks.items()}}


# Learning rate


@pytest.mark.parametrize(
    ("progress", "share"),
    [(0.0, 0.0), (0.025, 0.5), (0.05, 1.0), (0.525, 0.5), (0.2875, 0.5 + math.sqrt(0.125)), (1.0, 0.0)],
)
def test_the_rate_rises_shortly_and_falls_like_a_cosine(progress: float, share: float) -> None:
    assert _schedule(progress) == pytest.approx(share, abs=1e-12)


def test_each_step_has_its_rate(monkeypatch: pytest.MonkeyPatch) -> None:
    rates: list[float] = []
    options: list[dict[str, Any]] = []
    adam = torch.optim.Adam

    class Watched(adam):
        def __init__(self, variables: Any, **given: Any) -> None:
            options.append(given)
            super().__init__(variables, **given)

        def step(self, closure: Any = None) -> None:
            rates.append(self.param_groups[0]["lr"])
            super().step()

    monkeypatch.setattr(torch.optim, "Adam", Watched)
    given = stage(steps=8)
    given.run(start(given))
    assert rates == pytest.approx([1e-2 * _schedule(step / 8) for step in range(1, 9)])
    assert options == [{"lr": 1e-2, "betas": (0.9, 0.99), "fused": True}]


# Samples


def drawn(given: Distillation, monkeypatch: pytest.MonkeyPatch) -> list[Tensor]:
    """The indices of the samples that each pass of training takes."""
    passes: list[Tensor] = []
    with monkeypatch.context() as patch:

        def watch(pool: Samples, indices: Tensor, ranks: Ranks) -> list[Any]:
            passes.append(indices)
            return pool.at(indices)

        patch.setattr(Samples, "at_shared", watch)
        given.run(start(given))
    return passes


def test_samples_are_drawn_with_the_seed_of_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    draws = [drawn(replace(stage(steps=1), seed=seed), monkeypatch)[0].tolist() for seed in (1, 1, 2)]
    assert draws[0] == draws[1]
    assert draws[0] != draws[2]
    counts = torch.cat(drawn(stage(steps=200, batch=20), monkeypatch)).bincount(minlength=20)
    assert counts.min() > 120  # of 200 for each
    assert counts.sum() == 4000


def test_inputs_without_samples_are_the_same_in_every_pass() -> None:
    pool = replace(samples(4), leaves=[samples(4).leaves[0], torch.tensor(7), "word"])
    x, scalar, word = pool.at_shared(torch.tensor([3, 0]), ALONE)
    assert torch.equal(x, samples(4).leaves[0][[3, 0]])
    assert scalar == 7
    assert word == "word"


def sizes_of(given: Distillation, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many samples each pass of training takes."""
    return [len(indices) for indices in drawn(given, monkeypatch)]


def test_a_batch_is_no_more_than_there_are_samples(monkeypatch: pytest.MonkeyPatch) -> None:
    assert sizes_of(stage(steps=2, batch=7), monkeypatch) == [7, 7]
    assert sizes_of(stage(steps=1, batch=64), monkeypatch) == [20]


def test_pieces_of_a_batch_fit_the_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    graph = captured("mlp")[1]
    needed = 4 * sum(int(node.meta["bytes"]) for node in graph.nodes)
    totals = (8 * needed, 8 * needed - 1, 2 * needed, 1)
    assert [_pieces(graph, 8, Memory(total), CPU) for total in totals] == [1, 2, 4, 8]
    assert sizes_of(stage(steps=2, batch=8, memory=Memory(4 * needed)), monkeypatch) == [4, 4, 4, 4]


def test_pieces_of_a_batch_are_one_step() -> None:
    """Their gradients are a mean: with the same samples in each of them it is the gradient of one."""
    one = stage(held_out=0, steps=1, batch=4)
    same = replace(one.fitted, leaves=[one.fitted.leaves[0][:1].repeat(20, 1)])
    one = replace(one, fitted=same)
    needed = 4 * sum(int(node.meta["bytes"]) for node in one.graph.nodes)
    four = replace(one, memory=Memory(needed))
    for name, value in one.run(start(one))[0].items():
        torch.testing.assert_close(four.run(start(one))[0][name], value)


def test_after_memory_ran_out_pieces_are_halved_until_single_samples(monkeypatch: pytest.MonkeyPatch) -> None:
    tried: list[tuple[int, int]] = []
    emptied: list[int] = []

    def full(self: Distillation, parameters: Any, pieces: int, size: int, notify: Any) -> None:
        tried.append((pieces, size))
        raise torch.OutOfMemoryError

    monkeypatch.setattr(Distillation, "_train", full)
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: emptied.append(1))
    given = stage(batch=6)
    with pytest.warns(SnowsWarning) as caught, pytest.raises(torch.OutOfMemoryError):
        given.run(start(given))
    assert tried == [(1, 6), (2, 3), (4, 1), (6, 1)]
    assert len(emptied) == 3
    assert [str(each.message).split("on with ")[1] for each in caught] == [
        f"{size} samples at a time" for size in (3, 1, 1)
    ]


# What is kept


@pytest.mark.parametrize(
    ("losses", "best"),
    [([5.0, 4.0, 3.0], 2), ([5.0, 4.0, 4.5], 1), ([5.0, 5.0, 6.0], 0), ([5.0, math.nan, 4.0], 2), ([5.0, 6.0, 7.0], 0)],
)
def test_the_best_point_is_kept(losses: list[float], best: int) -> None:
    values = iter(losses)
    match: Any = SimpleNamespace(mean_loss=lambda samples, parameters, size: next(values))
    trained: Any = SimpleNamespace(masked=lambda: {"w": current.clone()})
    current = torch.zeros(())
    kept = _Best(match, samples(2), 1, trained)
    for number in (1, 2):
        current.fill_(number)
        kept.update(10 * number)
    assert float(kept.values["w"]) == best
    assert (kept.loss_before, kept.loss) == (5.0, losses[best])
    assert [step for step, _ in kept.curve] == [0, 10, 20]
    assert str([loss for _, loss in kept.curve]) == str(losses)  # NaN among them


@pytest.mark.parametrize(
    ("steps", "evaluated"), [(3, [1, 2, 3]), (20, list(range(2, 21, 2))), (25, [*range(2, 25, 2), 25])]
)
def test_held_out_samples_are_looked_at_now_and_then_and_at_the_end(
    steps: int, evaluated: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    events: list[Event] = []
    seen: list[int] = []
    monkeypatch.setattr(_Best, "update", lambda self, step: seen.append(len(events)))
    given = stage(steps=steps)
    ended = given.run(start(given), events.append)[1]
    assert seen == evaluated
    assert events == [DistillStep(step, steps) for step in range(1, steps + 1)]
    assert ended.steps == steps


@pytest.mark.parametrize(("held_out", "judged"), [(6, 6), (0, 20)])
def test_held_out_samples_judge_or_else_the_fitted_ones(
    held_out: int, judged: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    counts: set[int] = set()
    mean_loss = _Match.mean_loss

    def watch(self: _Match, samples: Samples, parameters: Any, size: int) -> float:
        counts.add(samples.count)
        return mean_loss(self, samples, parameters, size)

    monkeypatch.setattr(_Match, "mean_loss", watch)
    given = stage(held_out)
    changed, ended = given.run(start(given))
    assert counts == {judged}
    assert isinstance(ended, Distilled)
    match = _Match(given.graph, given.fitted)
    pool = given.held_out if held_out else given.fitted
    assert ended.loss == pytest.approx(match.mean_loss(pool, changed, 4))
    assert ended.loss < ended.loss_before == pytest.approx(match.mean_loss(pool, start(given), 4))


def test_seconds_are_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = iter([10.0, 12.5])
    monkeypatch.setattr(module.time, "perf_counter", lambda: next(clock))
    given = stage(steps=1)
    assert given.run(start(given))[1].seconds == 2.5


@pytest.mark.parametrize(("room", "moved"), [(0, True), (-2, False)])
def test_samples_move_to_the_device_if_they_fit(room: int, moved: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[int] = []
    move = Samples.moved
    monkeypatch.setattr(Samples, "moved", lambda self: calls.append(1) or move(self))
    given = stage(steps=1, batch=1)
    given = replace(given, memory=Memory(2 * given.fitted.bytes + room))  # of which a half is for what is held
    given.run(start(given))
    assert len(calls) == moved


# Precision


@pytest.mark.parametrize(
    ("asked", "cuda", "dtype", "network", "expected"),
    [
        (True, True, torch.float32, "mlp", "half"),
        (True, True, torch.float32, "attention", "mixed"),
        (False, True, torch.float32, "mlp", "full"),
        (True, False, torch.float32, "mlp", "full"),
        (True, True, torch.float64, "mlp", "full"),
    ],
)
def test_precision_of_gradients(asked: bool, cuda: bool, dtype: torch.dtype, network: str, expected: str) -> None:
    given = stage(graph=captured(network)[1], half_precision=asked)
    example: Any = SimpleNamespace(is_cuda=cuda, dtype=dtype)
    assert given._precision(example) == expected


# Variables and the loss


def test_variables_are_copies_under_their_masks() -> None:
    given = stage()
    parameters = given.graph.parameters
    trained = _Trained(parameters, given.masks, ["0.bias"])
    assert list(trained.variables) == ["2.weight", "0.bias"]
    assert all(variable.requires_grad for variable in trained.variables.values())
    masked = trained.masked()
    assert torch.equal(masked["2.weight"], parameters["2.weight"] * given.masks["2.weight"])
    assert torch.equal(masked["0.bias"], parameters["0.bias"])
    with torch.no_grad():
        trained.variables["0.bias"].add_(1)
    assert not torch.equal(trained.variables["0.bias"], parameters["0.bias"])


class Constant(nn.Module):
    """One operation never varies, and one output holds no numbers that could be matched."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 2)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        x = torch.relu(torch.relu(self.first(x) * 0) + x)
        y = self.second(x)
        return y, y.argmax(-1)


def test_each_operation_is_weighed_by_its_variance() -> None:
    x = torch.randn(8, 4, generator=torch.Generator().manual_seed(0))
    graph = capture(Constant().eval(), (x,), {})
    outputs = graph.outputs
    nodes = list(dict.fromkeys([*graph.operations, *outputs]))
    values = {node.name: torch.randn(9, generator=torch.Generator().manual_seed(i)) for i, node in enumerate(nodes)}
    values[nodes[0].name] = torch.ones(9)
    index = next(node for node in outputs if "argmax" in node.name)
    values[index.name] = torch.arange(9)
    weights = _weights(values, nodes, set(outputs))
    assert set(weights) == {node.name for node in nodes} - {index.name}
    inner = len(nodes) - 2
    for node in nodes:
        if node is not index:
            share = 0.1 / 2 if node in outputs else 0.9 / inner
            assert weights[node.name] == pytest.approx(share / max(float(values[node.name].var()), 1e-12))


def test_a_network_of_outputs_alone_is_weighed() -> None:
    graph = captured("mlp")[1]
    output = graph.outputs[0]
    values = {output.name: torch.tensor([0.0, 2.0])}
    assert _weights(values, [output], {output}) == {output.name: pytest.approx(0.05)}


def test_variances_are_those_of_the_first_samples() -> None:
    many = samples(100)
    match = _Match(captured("mlp")[1], many)
    few = _Match(captured("mlp")[1], replace(many, leaves=[many.leaves[0][:64]], count=64))
    fewer = _Match(captured("mlp")[1], replace(many, leaves=[many.leaves[0][:63]], count=63))
    assert match.weights == few.weights != fewer.weights


def test_the_mean_loss_is_over_all_samples() -> None:
    given, pool = stage(), samples(10)
    match = _Match(given.graph, pool)
    parameters = start(given)
    single = [float(match.loss(pool.rows(i, i + 1), parameters)) for i in range(10)]
    assert match.mean_loss(pool, parameters, 4) == pytest.approx(sum(single) / 10)
    assert match.mean_loss(pool, parameters, 10) == pytest.approx(sum(single) / 10)


def test_only_images_are_seen_in_views(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "random_views", lambda image, generator: image + 1)
    vector, image = torch.zeros(2, 5), torch.zeros(2, 3, 16, 16)
    one, other, word = module._views([vector, image, "word"], torch.Generator())
    assert one is vector
    assert (other == 1).all()
    assert word == "word"
