"""Runs within a memory budget: smaller pieces, activations at rest in the host's memory, and backing off."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import snows
from snows.data import streams
from snows.data.streams import Stream
from snows.devices import offload as disk
from snows.devices.memory import Memory, _host_bytes, as_bytes, memory_limits
from snows.devices.working_memory import bytes_at_once
from snows.patterns import PatternRules
from snows.plan import make_plan
from snows.solve import activations, cascade
from snows.solve import layer as layer_solve
from snows.solve.footprint import operations_kept
from snows.solve.objective import Objective
from tests.networks import captured, example, make

RECIPE = snows.Recipe(horizon=2, sweeps=2, cg_steps=3)
SAMPLES = 40


def run(name: str, recipe: snows.Recipe = RECIPE, **options: Any) -> snows.Result:
    return snows.prune(make(name), example(name, SAMPLES), "2:4", recipe=recipe, progress=False, **options)


def weights(result: snows.Result) -> Tensor:
    return torch.cat([parameter.flatten() for parameter in result.model.parameters()])


@pytest.mark.parametrize(
    ("given", "size"),
    [
        ("24GiB", 24 * 2**30), ("24 gib", 24 * 2**30), ("800MB", 800 * 10**6), ("1.5k", 1500), ("512", 512),
        ("1e9", 10**9), (4096, 4096), ("2Ti", 2 * 2**40), (None, None),
    ],
)  # fmt: skip
def test_sizes_as_people_write_them(given: Any, size: int | None) -> None:
    assert as_bytes(given) == size


@pytest.mark.parametrize("given", ["", "lots", "-1GiB", "0", 0, -5, True, 2.5, "1e999", "24 gigs", "GiB", "9" * 400])
def test_other_words_are_refused(given: Any) -> None:
    with pytest.raises(snows.ArgumentError, match="expected a size such as '24GiB'"):
        run("mlp", memory=given)


@pytest.mark.parametrize(
    ("room", "samples", "kept"), [(100, 32, True), (24, 24, True), (16, 16, True), (15, 32, False)]
)
def test_products_take_as_many_samples_as_have_room(
    room: int, samples: int, kept: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    taken: set[tuple[int, bool]] = set()
    product = Objective.product

    def noted(self: Objective, kind: Any, weight: Tensor, keep: bool) -> Any:
        taken.add((self.samples, keep))
        return product(self, kind, weight, keep)

    monkeypatch.setattr(Objective, "product", noted)
    monkeypatch.setattr(layer_solve, "linearized_bytes", lambda *_: 10)
    monkeypatch.setattr(Memory, "products", 10 * room)
    run("conv-bn")  # 8 of 40 samples are held out
    assert taken == {(samples, kept)}


def test_fitting_samples_are_whole_pieces() -> None:
    limits = Memory(1000)  # of which 200 are for products
    assert limits.fitting_samples(60, 4, piece=20) == 40
    assert limits.fitting_samples(60, 4, piece=60) == 50
    assert limits.fitting_samples(50, 4, piece=20) == 50


def test_a_budget_is_shared_out() -> None:
    limits = memory_limits(torch.device("cpu"), 1000)
    assert limits.total == 1000
    assert limits.held + limits.products + limits.factors <= 1000
    for live in (1, 10, 1000):  # of one sample: activations first, then targets
        own = Memory(1000)
        assert 2 * live * own.resident(live, 40) + own.targets(live, 40) <= own.held
        assert limits.resident(live, 40) == own.resident(live, 40)
        assert limits.hosted(live) == 0  # on a CPU the host's memory is what the budget is of: beyond lies the disk
        assert own.hosted(live) >= 40
    assert memory_limits(torch.device("cpu")).total == memory_limits(torch.device("cpu")).total > 2**30


@pytest.mark.parametrize("name", ["residual", "attention", "two-inputs", "gated"])
@pytest.mark.parametrize("resident", [0, 33])
@pytest.mark.parametrize("hosted", [0, 5, 40])
def test_activations_that_rest_elsewhere_change_nothing(
    name: str, resident: int, hosted: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(disk, "_LEAST_BYTES", 1)
    monkeypatch.setattr(Memory, "hosted", lambda *_: hosted)
    monkeypatch.setattr("snows.run.micro_batch_size", lambda *_: 16)
    plain = run(name)
    monkeypatch.setattr(Memory, "resident", lambda *_: resident)
    monkeypatch.setattr(Memory, "targets", lambda *_: 0)  # nothing is kept between passes either
    moved: list[int] = []
    at_rest = Stream._offload

    def watch(stream: Stream, value: Any, disk: bool) -> Any:
        moved.append(disk)
        return at_rest(stream, value, disk)

    monkeypatch.setattr(Stream, "_offload", watch)
    offloaded = run(name)
    pieces = 4  # 16, 16 and the rest, and those held out
    assert len(moved) % (pieces - resident // 16) == 0 < len(moved)
    assert any(moved) == (hosted < 40)
    assert torch.equal(weights(plain), weights(offloaded))


@pytest.mark.parametrize("name", ["residual", "conv1d", "two-outputs", "gated"])
@pytest.mark.parametrize("curvature", ["gauss-newton", "hessian"])
def test_targets_that_are_computed_once_change_nothing(
    name: str, curvature: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where products take some samples of a piece; and from the second sweep on the dense network is not run."""
    recipe = RECIPE.replace(targets="dense-stream", curvature=curvature, product_samples=5)
    moved: list[int] = []
    advance = Stream.advance

    def watch(stream: Stream, position: int) -> None:
        moved.append(position)
        advance(stream, position)

    monkeypatch.setattr(Stream, "advance", watch)
    once = run(name, recipe=recipe)
    solves = len({layer.group[0] for layer in once.report.layers})
    assert len(moved) == (2 + 1) * solves
    monkeypatch.setattr(activations, "operations_kept", lambda *_: [])
    again = run(name, recipe=recipe)
    assert len(moved) == (2 + 1) * solves + 2 * 2 * solves
    assert torch.equal(weights(once), weights(again))


def test_targets_are_computed_once_where_there_is_room_for_all() -> None:
    _, graph = captured("residual")
    plan = make_plan(graph, PatternRules.parse("2:4"), 2)
    recipe = RECIPE.replace(targets="dense-stream")
    kept = operations_kept(graph, plan, 100, recipe, Memory(1 << 30))
    outputs = {name for p in plan.pruned for name in graph.segment([p.layer], p.horizon).outputs}
    assert {node.name for node in kept} == outputs
    size = sum(node.meta["bytes"] for node in kept)
    size += max(graph.segment([p.layer], p.horizon).cost.prelude_bytes for p in plan.pruned)
    live = max(graph.live_bytes(p.layer.position) for p in plan.pruned)
    enough = 2 * (size + 2 * live) * 100  # a half is for what is held
    assert operations_kept(graph, plan, 100, recipe, Memory(enough)) == kept
    assert operations_kept(graph, plan, 101, recipe, Memory(enough)) == []
    _, other = captured("attention")  # whose samples are along the second axis
    assert operations_kept(other, make_plan(other, PatternRules.parse("2:4"), 2), 100, recipe, Memory(1 << 30)) == []
    theirs = recipe.replace(targets="dense-weights")
    assert operations_kept(graph, plan, 100, theirs, Memory(1 << 30)) == []


def test_a_small_budget_takes_smaller_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes: set[int] = set()
    init = Stream.__init__

    def watch(stream: Stream, *arguments: Any) -> None:
        init(stream, *arguments)
        sizes.add(stream.sizes[0])

    monkeypatch.setattr(Stream, "__init__", watch)
    result = run("residual", memory="40kB")
    assert max(sizes) < 10
    assert all(solve.loss <= solve.loss_masked for layer in result.report.layers for solve in layer.solves)


def test_out_of_memory_it_backs_off_and_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    solve, sizes = cascade.solve_layer, []

    def crowded(problem: Any, *arguments: Any) -> Any:
        sizes.append(problem.sizes[0])
        if problem.sizes[0] > 10:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return solve(problem, *arguments)

    monkeypatch.setattr(cascade, "solve_layer", crowded)
    with pytest.warns(snows.SnowsWarning, match="out of memory at .*: going on with"):
        result = run("residual")
    assert sizes[:3] == [32, 16, 8]
    assert set(sizes[3:]) == {8}
    said = [warning.partition(": ")[2] for warning in result.report.warnings]
    assert said == [f"going on with {n} samples at a time instead of {2 * n}" for n in (16, 8)]
    monkeypatch.undo()
    assert torch.isfinite(weights(result)).all()
    assert {name: mask.sum() for name, mask in result.masks.items()} == {
        name: mask.sum() for name, mask in run("residual").masks.items()
    }


def test_what_never_fits_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: Any) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(cascade, "solve_layer", full)
    with (
        pytest.warns(snows.SnowsWarning, match="going on with"),
        pytest.raises(torch.OutOfMemoryError, match=r"^2 does not fit .*, not even with single samples$"),
    ):
        run("mlp")


def test_mask_methods_work_within_the_budget() -> None:
    seen = []

    class Watched(snows.OBC):
        def choose_layer(self, *given: Any) -> Any:
            seen.append(bytes_at_once(torch.device("cpu")))
            return super().choose_layer(*given)

    within = run("residual", mask=Watched(), memory="40kB")
    assert set(seen) == {int(0.3 * 40_000)}
    assert bytes_at_once(torch.device("cpu")) > 40_000  # elsewhere
    for name, mask in run("residual", mask="obc").masks.items():
        assert torch.equal(mask, within.masks[name])


def test_the_hosts_memory_is_known() -> None:
    assert 2**28 < _host_bytes() < 2**48
    limits = memory_limits(torch.device("mps"), 1000)
    assert limits == Memory(1000, _host_bytes() // 2)


def test_on_a_cpu_activations_beyond_the_budget_rest_on_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    """And with what is free, when there is enough, none does."""
    written: list[int] = []
    on_disk = streams.on_disk
    monkeypatch.setattr(streams, "on_disk", lambda value: written.append(value.nbytes) or on_disk(value))
    run("residual")
    assert not written
    run("residual", memory="40kB")
    assert sum(written) > 40_000
