"""Which layers are pruned, with which pattern and horizon, and why the others are not."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from snows.errors import ArgumentError, InputError, SnowsWarning
from snows.patterns import PatternRules
from snows.plan import Plan, make_plan
from snows.recipe import Recipe
from snows.solve.settings import resolve
from tests.networks import captured

FIRST, LAST = "first layer (name it in layers= to prune it)", "last layer (name it in layers= to prune it)"


def plan(name: str, pattern: Any = "2:4", horizon: Any = 3, **options: Any) -> Plan:
    rules = None if pattern is None else PatternRules.parse(pattern)
    graph = captured(name)[1]
    return make_plan(graph, rules, resolve(Recipe(horizon=horizon), graph).horizon, **options)


def pruned(made: Plan) -> list[str]:
    return [planned.layer.name for planned in made.pruned]


def dense(made: Plan) -> dict[str, str]:
    return {layer.name: reason for layer, reason in made.dense}


# Default selection


@pytest.mark.parametrize(
    ("name", "chosen", "left"),
    [
        ("mlp", ["2"], {"0": FIRST, "4": LAST}),
        ("conv-bn", ["3", "7"], {"0": FIRST, "11": LAST}),
        ("residual", ["conv1", "conv2", "shortcut.0", "last"], {"stem": FIRST, "head": LAST}),
        ("attention", ["attention.in_proj", "attention.out_proj", "mlp.0", "mlp.2"], {"embed": FIRST, "head": LAST}),
        # both layers that read an input are first, both that give an output are last
        ("two-inputs", ["joint"], {"image": FIRST, "number": FIRST, "head": LAST}),
        ("two-outputs", ["trunk.2", "left.0"], {"trunk.0": FIRST, "left.2": LAST, "right": LAST}),
        ("tied", ["between"], {"first": FIRST, "head": LAST, "twice": "its weight is used in 2 places"}),
    ],
)
def test_all_but_the_first_and_the_last_layers(name: str, chosen: list[str], left: dict[str, str]) -> None:
    made = plan(name)
    names = [name.removesuffix("_weight") for name in pruned(made)]
    assert names == chosen
    found = dense(made)
    assert set(found) == set(left)
    assert all(found[layer].startswith(reason) for layer, reason in left.items())
    positions = [planned.layer.position for planned in made.pruned]
    assert positions == sorted(positions)
    assert all(str(planned.pattern) == "2:4" for planned in made.pruned)
    made.require_layers()


def test_layers_that_do_not_fit_the_pattern_stay_dense_with_the_reason() -> None:
    found = dense(plan("depthwise"))
    assert found["2"] == "its 1 input channels per group are no multiple of 4"
    assert pruned(plan("depthwise", 0.5)) == ["2", "5"]


# By name


@pytest.mark.parametrize(
    ("options", "chosen"),
    [
        ({"layers": "*"}, ["stem", "conv1", "conv2", "shortcut.0", "last", "head"]),
        ({"layers": "conv*"}, ["conv1", "conv2"]),
        ({"layers": "conv1, head"}, ["conv1", "head"]),
        ({"layers": ["head", "shortcut.*"]}, ["shortcut.0", "head"]),
        ({"layers": "conv1.weight"}, ["conv1"]),
        ({"layers": "conv?", "exclude": "*2"}, ["conv1"]),
        ({"exclude": "conv*"}, ["shortcut.0", "last"]),
        ({"exclude": ["conv1.weight", "last,shortcut.0"]}, ["conv2"]),
    ],
)
def test_names_and_globs(options: dict[str, Any], chosen: list[str]) -> None:
    made = plan("residual", 0.5, **options)
    assert sorted(pruned(made)) == sorted(chosen)
    reasons = set(dense(made).values())
    assert reasons <= {"excluded", "not among the chosen layers", FIRST, LAST}


def test_patterns_by_glob() -> None:
    made = plan("residual", {"conv*": "1:4", "last": "dense", "*": 0.5})
    assert {p.layer.name: str(p.pattern) for p in made.pruned} == {"conv1": "1:4", "conv2": "1:4", "shortcut.0": "0.5"}
    assert dense(made)["last"] == "its pattern is 'dense'"
    assert set(made.patterns) == {"conv1.weight", "conv2.weight", "shortcut.0.weight"}


def test_given_masks_say_which_layers_are_pruned() -> None:
    masks = {"stem.weight": torch.ones(4, 2, 3, 3, dtype=torch.bool), "conv1.weight": torch.ones(4, 4, 3, 3).bool()}
    made = plan("residual", None, masks=masks)
    assert pruned(made) == ["stem", "conv1"]
    assert [planned.pattern for planned in made.pruned] == [None, None]
    assert made.patterns == {}
    assert dense(made)["conv2"] == "not in the given mask"
    assert pruned(plan("residual", None, masks=masks, exclude="stem")) == ["conv1"]
    assert pruned(plan("residual", None, masks=masks, layers="stem")) == ["stem"]


@pytest.mark.parametrize(
    ("words", "pattern", "options"),
    [
        (r"^layers='convs' fits no layer; the layers are stem, conv1", "2:4", {"layers": "convs"}),
        (r"^layers='x\*' fits no layer", "2:4", {"layers": ["conv1", "x*"]}),
        (r"^layers is empty; expected names or globs", "2:4", {"layers": " , "}),
        (r"^exclude is empty", "2:4", {"exclude": []}),
        (r"^the pattern for 'fc' fits no layer; the layers are stem", {"fc": "1:4", "*": "2:4"}, {}),
    ],
)
def test_names_that_fit_nothing_are_refused(words: str, pattern: Any, options: dict[str, Any]) -> None:
    with pytest.raises(ArgumentError, match=words):
        plan("residual", pattern, **options)


def test_an_exclusion_that_fits_nothing_is_only_warned_of() -> None:
    with pytest.warns(SnowsWarning, match="exclude='fc' fits no layer; the layers are stem"):
        made = plan("residual", exclude="fc")
    assert len(made.pruned) == 4


def test_nothing_to_prune() -> None:
    made = plan("mlp", exclude="2")
    assert made.pruned == ()
    with pytest.raises(InputError, match=r"^no layer can be pruned: 0: first layer .*; 2: excluded; 4: last layer"):
        made.require_layers()
    with pytest.raises(InputError, match=r"^no layer can be pruned: the model has no layers$"):
        Plan((), ()).require_layers()


# Horizons


def test_horizons_end_with_the_network() -> None:
    """Of 5 operations (linear, ReLU, linear, ReLU, linear) the second layer has two after it."""
    for horizon, expected in ((0, 0), (1, 1), (2, 2), (3, 2), ("auto", 2), ("paper", 2)):
        assert [planned.horizon for planned in plan("mlp", horizon=horizon).pruned] == [expected]
    assert [planned.horizon for planned in plan("mlp", pattern=0.5, horizon="auto", layers="*").pruned] == [4, 2, 0]
