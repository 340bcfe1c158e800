"""What an inspection says of every layer, and how its estimates move."""

from __future__ import annotations

import re
from collections.abc import Iterable

import pytest

import snows
from snows import Inspection
from snows.graph import Graph, Layer
from snows.solve.speed import Speed, assumed_speed
from tests.networks import example, make


def inspect(samples: int = 1000, **options: object) -> Inspection:
    return snows.inspect(make("residual"), example("residual", 40), "2:4", samples=samples, **options)


def test_every_layer_is_there_those_that_stay_dense_last() -> None:
    found = inspect(exclude="*shortcut*", horizon=3)
    assert [(layer.name, layer.shape, layer.pattern, layer.horizon) for layer in found.layers[:3]] == [
        ("conv1", (4, 4, 3, 3), "2:4", 3), ("conv2", (4, 4, 3, 3), "2:4", 3), ("last", (4, 4, 1, 1), "2:4", 2),
    ]  # fmt: skip
    dense = {layer.name: layer.reason for layer in found.layers if layer.pattern is None}
    assert list(dense) == [layer.name for layer in found.layers[3:]]
    assert dense["shortcut.0"] == "excluded"
    assert set(dense) == {"stem", "shortcut.0", "head"}
    assert found.model == "Residual"
    assert found.network_weights == sum(parameter.numel() for parameter in make("residual").parameters())


def test_it_is_shown_in_a_line() -> None:
    found = inspect(exclude="*shortcut*", horizon=3)
    assert re.fullmatch(
        r"<Inspection: Residual, 3 layers to prune, 3 left dense; about a second and 0\.\d GiB with 1000 samples>",
        repr(found),
    )


def test_time_is_work_by_speed(monkeypatch: pytest.MonkeyPatch) -> None:
    """At one operation a second, the time of a layer is its number of operations."""

    def one(graph: Graph, layers: Iterable[Layer], *_: object) -> Speed:
        return assumed_speed(graph, layers, 1.0)

    monkeypatch.setattr("snows.evaluation.inspection.measured_speed", one)
    recipe = snows.Recipe(horizon=2, finish_steps=0, sweeps=1, product_samples=100)
    once = inspect(recipe=recipe)
    # later sweeps have the masks of the first, and no closed form
    assert 1.5 * once.seconds < inspect(recipe=recipe.replace(sweeps=3, mask_steps=1)).seconds < 3 * once.seconds
    assert inspect(recipe=recipe.replace(sweeps=3, mask_steps=3)).seconds == pytest.approx(3 * once.seconds, rel=0.1)
    assert inspect(recipe=recipe.replace(horizon=3)).seconds > once.seconds
    assert inspect(recipe=recipe.replace(cg_steps=2 * recipe.cg_steps)).seconds > once.seconds
    # all samples pay for targets and losses, and a fixed number of them for the products
    more = [inspect(samples, recipe=recipe).seconds for samples in (1000, 2000, 3000)]
    assert more[2] - more[1] == pytest.approx(more[1] - more[0])
    assert 0 < more[1] - more[0] < more[0]
    stages = [
        inspect(recipe=recipe.replace(finish_steps=steps, finish_batch=8)).finish_seconds for steps in (5, 10, 15)
    ]
    assert stages[2] - stages[1] == pytest.approx(stages[1] - stages[0])
    assert stages[1] > stages[0] > 0


def test_the_peak_is_that_of_one_layer_and_the_time_that_of_all() -> None:
    found = inspect(recipe=snows.Recipe(finish_steps=7))
    assert found.memory_bytes == sorted(layer.memory_bytes for layer in found.layers)[-1] > 0
    assert found.finish_seconds > 0
    assert found.seconds == pytest.approx(sum(layer.seconds for layer in found.layers) + found.finish_seconds)
    assert inspect(recipe=snows.Recipe(finish_steps=0)).finish_seconds == 0


def test_mirrored_samples_count_twice() -> None:
    once, mirrored = (inspect(recipe=snows.Recipe(mirror=mirror)) for mirror in (False, True))
    assert mirrored.samples == once.samples == 1000
    assert mirrored.memory_bytes == inspect(samples=2000).memory_bytes > once.memory_bytes


def test_within_a_budget() -> None:
    whole = snows.inspect(make("residual"), example("residual", 40), "2:4", samples=100_000)
    within = snows.inspect(make("residual"), example("residual", 40), "2:4", samples=100_000, memory="2MB")
    assert within.memory_bytes < whole.memory_bytes
    with pytest.raises(snows.ArgumentError, match="expected a size"):
        snows.inspect(make("residual"), example("residual", 40), "2:4", memory="much")


def test_weights_that_do_not_fit() -> None:
    model, data = make("residual"), example("residual", 40)
    whole, within = (snows.inspect(model, data, "2:4", memory=memory) for memory in ("1GiB", "10kB"))
    assert (whole.weights_at_rest, whole.room_bytes) == (0, 0)
    assert within.room_bytes == 5000
    assert within.weights_at_rest >= sum(parameter.nbytes for parameter in model.parameters())
    assert within.finish_seconds == 0


def test_several_processes_share_samples_and_products() -> None:
    model, samples = make("conv-bn"), example("conv-bn", 24)
    alone, of_four = (snows.inspect(model, samples, "2:4", samples=4000, world_size=size) for size in (1, 4))
    assert of_four.memory_bytes < alone.memory_bytes
    assert [layer.pattern for layer in of_four.layers] == [layer.pattern for layer in alone.layers]


@pytest.mark.parametrize("world_size", [0, True, "2"])
def test_a_number_of_processes_that_is_none(world_size: object) -> None:
    with pytest.raises(snows.ArgumentError, match="expected a whole number of at least 1"):
        snows.inspect(make("conv-bn"), example("conv-bn", 8), world_size=world_size)  # type: ignore[arg-type]
