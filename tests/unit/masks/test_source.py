"""Where masks come from: given ones, a method for all layers, or one that sees the statistics it asks for."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import Tensor

from snows.data.moments import Moments
from snows.data.preparation import Prepared
from snows.data.samples import read_samples
from snows.devices.working_memory import bytes_at_once
from snows.errors import ArgumentError
from snows.masks import Choice
from snows.masks.magnitude import Magnitude
from snows.masks.source import GivenMasks, LayerMasks, NetworkMasks, read_mask
from snows.patterns import NM, Pattern, PatternRules
from snows.plan import PlannedLayer, make_plan
from tests.masks import FakeNetwork
from tests.networks import captured, example

MLP = captured("mlp")[1]
(PLANNED,) = make_plan(MLP, PatternRules.parse("2:4"), 0).pruned
NAME = PLANNED.layer.parameter
WEIGHTS = MLP.parameters


@dataclass(frozen=True)
class Statistics:
    """Gram matrices that tell dense from pruned inputs; `asked` is what was read."""

    asked: list[tuple[str, int]] = field(default_factory=list)

    def dense_gram(self, index: int = 0) -> Tensor:
        self.asked.append(("dense", index))
        return torch.eye(8, dtype=torch.float64)[None]

    def moments(self, index: int = 0) -> Moments:
        self.asked.append(("moments", index))
        gram = 2 * torch.eye(8, dtype=torch.float64)[None]
        # the best weights for the targets are those of the layer, times three
        return Moments(gram, 3 * gram @ WEIGHTS[NAME].double().T)


@dataclass
class Recorder:
    """Keeps what it is asked."""

    reads: str
    seen: list[tuple[str, Tensor, Tensor, Pattern, int]] = field(default_factory=list)

    def choose_layer(self, name: str, weight: Tensor, gram: Tensor, pattern: Pattern) -> Choice:
        self.seen.append((name, weight, gram, pattern, bytes_at_once(torch.device("cpu"))))
        return Choice({name: weight > 0}, {name: weight.clamp(min=0)})


@pytest.mark.parametrize(
    ("reads", "readjusted", "asked", "scale", "factor"),
    [
        ("dense", True, "dense", 1, 1),
        ("dense", False, "dense", 1, 1),
        ("pruned", True, "moments", 2, 1),
        ("pruned", False, "moments", 2, 1),
        ("refitted", True, "moments", 2, 3),
        ("auto", True, "dense", 1, 1),
        ("auto", False, "moments", 2, 3),
    ],
)
def test_layer_methods_get_the_statistics_they_read(
    reads: str, readjusted: bool, asked: str, scale: float, factor: float
) -> None:
    method, statistics = Recorder(reads), Statistics()
    source = LayerMasks(method, readjusted, most_bytes=1234)
    assert source.by_layer
    assert source.before_sweep({NAME: NM(2, 4)}, WEIGHTS) == Choice({})
    choice = source.at_layers([PLANNED], statistics, WEIGHTS)
    assert statistics.asked == [(asked, 0)]
    ((name, weight, gram, pattern, most_bytes),) = method.seen
    assert (name, pattern, most_bytes) == (NAME, NM(2, 4), 1234)
    torch.testing.assert_close(gram, scale * torch.eye(8, dtype=torch.float64)[None])
    torch.testing.assert_close(weight, factor * WEIGHTS[NAME], rtol=1e-3, atol=1e-3)
    assert weight.shape == WEIGHTS[NAME].shape
    assert torch.equal(choice.masks[NAME], weight > 0)
    assert torch.equal(choice.weights[NAME], weight.clamp(min=0))
    assert bytes_at_once(torch.device("cpu")) > 1234


def test_methods_that_do_not_say_read_pruned_inputs() -> None:
    method, statistics = Recorder("dense"), Statistics()
    del method.reads
    LayerMasks(method, True, 1 << 20).at_layers([PLANNED], statistics, WEIGHTS)
    assert statistics.asked == [("moments", 0)]


def test_layers_that_are_solved_together_are_asked_one_by_one() -> None:
    method, statistics = Recorder("dense"), Statistics()
    choice = LayerMasks(method, True, 1 << 20).at_layers(planned_pair(), statistics, WEIGHTS)
    assert statistics.asked == [("dense", 0), ("dense", 1)]
    assert list(choice.masks) == list(choice.weights) == ["2.weight", "4.weight"]


def planned_pair() -> list[PlannedLayer]:
    return list(make_plan(MLP, PatternRules.parse("2:4"), 0, layers="2, 4").pruned)


def test_given_masks_are_used_as_they_are() -> None:
    masks = {NAME: torch.zeros(2, 2, dtype=torch.bool)}
    source = GivenMasks(masks)
    assert not source.by_layer
    assert source.before_sweep({}, {}).masks == masks
    assert source.at_layers([PLANNED], Statistics(), WEIGHTS) == Choice({})


def test_network_methods_see_the_weights_of_the_moment() -> None:
    seen: list[Any] = []

    def network(patterns: Any, weights: Any) -> FakeNetwork:
        seen.append((patterns, weights))
        return FakeNetwork({"a": (2, 4)}, NM(2, 4))

    source = NetworkMasks(Magnitude(), network)
    assert not source.by_layer
    patterns, weights = {"a": NM(2, 4)}, {"a": torch.ones(2, 4)}
    assert list(source.before_sweep(patterns, weights).masks) == ["a"]
    assert seen == [(patterns, weights)]
    assert source.at_layers([PLANNED], Statistics(), WEIGHTS) == Choice({})
    with pytest.raises(ArgumentError, match=r"the mask method Magnitude\(\) gave no mask for b, c$"):
        source.before_sweep({"a": NM(2, 4), "b": NM(2, 4), "c": NM(2, 4)}, weights)


def test_words_objects_and_tensors_as_masks() -> None:
    prepared = Prepared(
        captured("mlp")[0], MLP, read_samples(example("mlp", 8), captured("mlp")[0], False), torch.device("cpu"), {}, {}
    )
    rules = PatternRules.parse("2:4")
    assert read_mask("magnitude", rules, prepared) == (None, Magnitude())
    given, method = read_mask({NAME: torch.ones_like(WEIGHTS[NAME], dtype=torch.bool)}, rules, prepared)
    assert method is None
    assert given is not None
    assert list(given) == [NAME]
    with pytest.raises(ArgumentError, match="no pattern is given; expected one such as '2:4' or 0"):
        read_mask("magnitude", None, prepared)
