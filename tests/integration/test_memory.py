"""Runs within a memory budget: smaller pieces, offloaded activations, and what happens when memory runs out."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import snows
from snows.data import streams
from snows.data.streams import Stream
from snows.devices import offload
from snows.devices.memory import Memory
from snows.devices.weights import bytes_of_run
from snows.devices.working_memory import bytes_at_once
from snows.masks.source import NetworkMasks
from snows.solve import activations, cascade
from snows.solve import layer as layer_solve
from snows.solve.objective import Objective
from tests.networks import example, make

RECIPE = snows.Recipe(horizon=2, sweeps=2, cg_steps=3)
SAMPLES = 40


def run(name: str, recipe: snows.Recipe = RECIPE, **options: Any) -> snows.Result:
    return snows.prune(make(name), example(name, SAMPLES), "2:4", recipe=recipe, progress=False, **options)


def weights(result: snows.Result) -> Tensor:
    return torch.cat([parameter.flatten() for parameter in result.model.parameters()])


def test_a_wrong_size_is_refused() -> None:
    with pytest.raises(snows.ArgumentError, match="expected a size such as '24GiB'"):
        run("mlp", memory="much")


@pytest.mark.parametrize(
    ("room", "samples", "kept"), [(100, 32, True), (24, 24, True), (16, 16, True), (15, 32, False)]
)
def test_products_take_as_many_samples_as_have_room(
    room: int, samples: int, kept: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    taken: set[tuple[int, bool]] = set()
    product = Objective.product

    def watch(self: Objective, kind: Any, weight: Tensor, keep: bool) -> Any:
        taken.add((self.samples, keep))
        return product(self, kind, weight, keep)

    monkeypatch.setattr(Objective, "product", watch)
    monkeypatch.setattr(layer_solve, "linearized_bytes", lambda *_: 10)
    monkeypatch.setattr(Memory, "products", 10 * room)
    run("conv-bn")  # 8 of 40 samples are held out
    assert taken == {(samples, kept)}


@pytest.mark.parametrize("name", ["residual", "attention", "two-inputs", "gated"])
@pytest.mark.parametrize("resident", [0, 33])
@pytest.mark.parametrize("hosted", [0, 5, 40])
def test_offloaded_activations_change_nothing(
    name: str, resident: int, hosted: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(offload, "_LEAST_BYTES", 1)
    monkeypatch.setattr(Memory, "hosted", lambda *_: hosted)
    monkeypatch.setattr("snows.run.micro_batch_size", lambda *_: 16)
    on_device = run(name)
    monkeypatch.setattr(Memory, "resident", lambda *_: resident)
    monkeypatch.setattr(Memory, "targets", lambda *_: 0)  # nothing is kept between passes either
    to_disk: list[bool] = []
    offload_value = Stream._offload

    def watch(stream: Stream, value: Any, disk: bool) -> Any:
        to_disk.append(disk)
        return offload_value(stream, value, disk)

    monkeypatch.setattr(Stream, "_offload", watch)
    offloaded = run(name)
    pieces = 4  # 16, 16 and the rest, and those held out
    assert len(to_disk) % (pieces - resident // 16) == 0 < len(to_disk)
    assert any(to_disk) == (hosted < 40)
    assert torch.equal(weights(on_device), weights(offloaded))


@pytest.mark.parametrize("name", ["residual", "conv1d", "two-outputs", "gated"])
@pytest.mark.parametrize("curvature", ["gauss-newton", "hessian"])
def test_targets_that_are_computed_once_change_nothing(
    name: str, curvature: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where products take some samples of a piece; and the dense stream never moves."""
    recipe = RECIPE.replace(targets="dense-stream", curvature=curvature, product_samples=5)
    moved: list[int] = []
    advance = Stream.advance

    def watch(stream: Stream, position: int) -> None:
        if position != stream.position:
            moved.append(position)
        advance(stream, position)

    monkeypatch.setattr(Stream, "advance", watch)
    once = run(name, recipe=recipe)
    solves = len({layer.group[0] for layer in once.report.layers})
    assert len(moved) == 2 * solves  # only the pruned stream moves, once in each of the two sweeps
    monkeypatch.setattr(activations, "operations_kept", lambda *_: [])
    again = run(name, recipe=recipe)
    assert len(moved) == 2 * solves + 2 * 2 * solves
    assert torch.equal(weights(once), weights(again))


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


def fill_a_gpu() -> None:
    raise torch.OutOfMemoryError("CUDA out of memory")


def fill_a_cpu() -> None:
    torch.empty(1 << 55)  # torch says this in a RuntimeError


def fill_python() -> None:
    bytearray(1 << 62)


EVERY_MEMORY = pytest.mark.parametrize("fill", [fill_a_gpu, fill_a_cpu, fill_python])


@EVERY_MEMORY
def test_a_run_goes_on_with_smaller_pieces_after_memory_ran_out(
    monkeypatch: pytest.MonkeyPatch, fill: Callable[[], None]
) -> None:
    solve, sizes = cascade.solve_layer, []

    def crowded(problem: Any, *arguments: Any) -> Any:
        sizes.append(problem.sizes[0])
        if problem.sizes[0] > 10:
            fill()
        return solve(problem, *arguments)

    monkeypatch.setattr(cascade, "solve_layer", crowded)
    with pytest.warns(snows.SnowsWarning, match="out of memory at .*: going on with"):
        result = run("residual")
    assert sizes[:3] == [32, 16, 8]
    assert set(sizes[3:]) == {8}
    messages = [warning.partition(": ")[2] for warning in result.report.warnings]
    assert messages == [f"going on with {n} samples at a time instead of {2 * n}" for n in (16, 8)]
    monkeypatch.undo()
    assert torch.isfinite(weights(result)).all()
    assert {name: mask.sum() for name, mask in result.masks.items()} == {
        name: mask.sum() for name, mask in run("residual").masks.items()
    }


@EVERY_MEMORY
def test_what_never_fits_is_an_error(monkeypatch: pytest.MonkeyPatch, fill: Callable[[], None]) -> None:
    monkeypatch.setattr(cascade, "solve_layer", lambda *_: fill())
    with (
        pytest.warns(snows.SnowsWarning, match="going on with"),
        pytest.raises(torch.OutOfMemoryError, match=r"^2 does not fit .*, not even with single samples$"),
    ):
        run("mlp")


@pytest.mark.parametrize("fill", [fill_a_cpu, fill_python])
def test_memory_that_runs_out_elsewhere_is_one_kind_of_error(
    monkeypatch: pytest.MonkeyPatch, fill: Callable[[], None]
) -> None:
    """While masks are chosen, for one."""
    monkeypatch.setattr(NetworkMasks, "before_sweep", lambda *_: fill())
    with pytest.raises(torch.OutOfMemoryError, match=r"^out of memory \(.*\); take fewer samples"):
        run("mlp", mask="woodfisher")


def test_mask_methods_work_within_the_budget() -> None:
    seen = []

    class Watched(snows.OBC):
        def choose_layer(self, *given: Any) -> Any:
            seen.append(bytes_at_once(torch.device("cpu")))
            return super().choose_layer(*given)

    within = run("residual", mask=Watched(), memory="40kB")
    assert set(seen) == {int(0.3 * (40_000 - bytes_of_run(make("residual"))))}
    assert bytes_at_once(torch.device("cpu")) > 40_000  # elsewhere
    for name, mask in run("residual", mask="obc").masks.items():
        assert torch.equal(mask, within.masks[name])


def test_on_a_cpu_activations_beyond_the_budget_go_to_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    """By default none do here: there is room for all."""
    written: list[int] = []
    on_disk = streams.on_disk
    monkeypatch.setattr(streams, "on_disk", lambda value: written.append(value.nbytes) or on_disk(value))
    run("residual")
    assert not written
    run("residual", memory="40kB")
    assert sum(written) > 40_000
