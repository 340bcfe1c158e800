"""Which layers are pruned, with which pattern and horizon, and why the others are not."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from snows.errors import ArgumentError, InputError, SnowsWarning
from snows.graph import capture
from snows.patterns import NM, PatternRules
from snows.plan import Plan, as_names, make_plan
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


def half_of_groups(*shape: int) -> Tensor:
    """A 2:4 mask."""
    return NM(2, 4).best_mask(torch.rand(shape, generator=torch.Generator().manual_seed(0)))


def test_a_pattern_holds_for_a_given_mask_that_keeps_it() -> None:
    masks = {"conv1.weight": half_of_groups(4, 4, 3, 3), "conv2.weight": half_of_groups(4, 4, 3, 3)}
    made = plan("residual", "2:4", masks=masks)
    assert [planned.pattern for planned in made.pruned] == [NM(2, 4)] * 2
    assert [planned.required_pattern for planned in made.pruned] == [NM(2, 4)] * 2
    assert plan("residual", 0.5, masks=masks).patterns == {}  # of a budget a single mask tells nothing
    assert plan("residual", {"*": "dense"}, masks=masks).patterns == {}


@pytest.mark.parametrize(
    ("name", "layer", "shape", "words"),
    [
        (
            "residual",
            "conv1",
            (4, 4, 3, 3),
            r"^conv1 is not 1:4: the given mask breaks it in 36 places; the mask is used",
        ),
        (
            "depthwise",
            "2",
            (6, 1, 3, 3),
            "^2 is not 1:4: its 1 input channels per group are no multiple of 4; the mask",
        ),
    ],
)
def test_another_given_mask_is_used_unchanged_with_a_warning(
    name: str, layer: str, shape: tuple[int, ...], words: str
) -> None:
    masks = {f"{layer}.weight": torch.ones(shape, dtype=torch.bool)}
    with pytest.warns(SnowsWarning, match=words):
        made = plan(name, "1:4", masks=masks)
    assert pruned(made) == [layer]
    with pytest.raises(InputError, match=f"^{layer} has a given mask, and no pattern"):
        _ = made.pruned[0].required_pattern


def test_patterns_are_replaced_and_reached_in_steps() -> None:
    made = plan("residual", {"conv*": "1:4", "*": 0.75})
    half = made.on_the_way(0.5)
    assert {name: str(pattern) for name, pattern in half.patterns.items()} == {
        "conv1.weight": "2:4", "conv2.weight": "2:4", "shortcut.0.weight": "0.5", "last.weight": "0.5",
    }  # fmt: skip
    assert made.on_the_way(1) == made
    other = made.with_patterns({"last.weight": NM(2, 4)})
    assert other.patterns == {**made.patterns, "last.weight": NM(2, 4)}
    assert other.dense == made.dense


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        (None, None),
        ("conv1", ("conv1",)),
        ("conv1, head", ("conv1", "head")),
        (["b", "a,c"], ("b", "a", "c")),
        ({"b", "a", "c"}, ("a", "b", "c")),
        (frozenset({"z", "y"}), ("y", "z")),
        ((name for name in ("b", "a")), ("b", "a")),
    ],
)
def test_names_become_a_tuple(given: Any, expected: tuple[str, ...] | None) -> None:
    assert as_names(given, "layers") == expected


def test_hints_name_twelve_layers() -> None:
    model = nn.Sequential(*(nn.Linear(4, 4) for _ in range(14))).eval()
    graph = capture(model, (torch.randn(2, 4),), {})
    with pytest.raises(ArgumentError, match=r"the layers are 0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11 and 2 more$"):
        make_plan(graph, PatternRules.parse("2:4"), 0, layers="fc")
    with pytest.raises(InputError, match=r"; 7: excluded; and 6 more$"):
        make_plan(graph, PatternRules.parse("2:4"), 0, exclude="*").require_layers()


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
