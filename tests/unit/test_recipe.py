"""Recipes: frozen values with checked fields, read and written as JSON."""

from __future__ import annotations

import dataclasses
import json
import math
from typing import Any

import pytest

from snows.errors import ArgumentError
from snows.recipe import BEST, DEFAULT, FAST, PAPER, Recipe, as_recipe

RECIPES = {"default": DEFAULT, "paper": PAPER, "fast": FAST, "best": BEST}
FIELDS = [field.name for field in dataclasses.fields(Recipe)]


@pytest.mark.parametrize("name", RECIPES)
def test_recipes_are_frozen_printable_and_round_trip_through_json(name: str) -> None:
    recipe = RECIPES[name]
    with pytest.raises(dataclasses.FrozenInstanceError):
        recipe.sweeps = 7  # type: ignore[misc]
    assert all(f"{field}=" in str(recipe) for field in FIELDS)
    assert Recipe.from_json(recipe.to_json()) == recipe
    assert set(json.loads(recipe.to_json())) == {"schema", *FIELDS}
    assert recipe.replace() == recipe
    assert hash(recipe) == hash(recipe.replace())


def test_the_paper_as_written() -> None:
    """The values of its hyperparameter table and algorithms; a change of these is no longer the paper."""
    paper = {
        "horizon": "paper", "sweeps": 1, "mask_steps": 1, "targets": "dense-weights", "normalization": "mean",
        "curvature": "auto", "start": "masked", "preconditioner": None, "newton_steps": 1,
        "cg_absolute_tolerance": "paper", "cg_relative_tolerance": 0.0, "cg_least_gain": 0.0, "damping": 1e-4,
        "relative_damping": 0.0, "precision": "full", "product_samples": None, "finish_steps": 0,
    }  # fmt: skip
    assert {name: getattr(PAPER, name) for name in paper} == paper


WRONG: dict[str, list[Any]] = {
    "horizon": [-1, 2.5, "deep", None, True, [3]],
    "sweeps": [0, 1.5, "2", None, True],
    "mask_steps": [0, 1.5, "2", None, True],
    "targets": ["dense", None, 0],
    "normalization": ["none", None, ["sum"]],
    "curvature": ["newton", None, 1],
    "start": ["zero", None],
    "preconditioner": ["jacobi", False],
    "ridge": [-1e-9, "0", None, math.nan, math.inf, True],
    "newton_steps": [0, -1, 1.0, None],
    "cg_steps": [0, 2.5, None],
    "cg_absolute_tolerance": [-1.0, None, math.nan],
    "cg_relative_tolerance": [-1.0, "small", math.inf],
    "cg_least_gain": [-0.1, "little", math.nan, None],
    "damping": [-1e-4, None, math.nan],
    "relative_damping": [-1e-4, None, math.inf],
    "armijo": [-1, "1e-5", math.nan],
    "precision": ["half", None],
    "mirror": ["yes", None, 2],
    "product_samples": [0, 10.0, "all"],
    "minibatch": [0, -5, 2.5, "all"],
    "finish_steps": [-1, 1.5, "many", None],
    "finish_batch": [0, -1, 1.5, None],
    "finish_rate": [-0.1, "fast", None, math.nan],
    "effort": ["slow", "paper", None, 1],
    "held_out": [-0.1, 1, 1.5, "some", None, math.nan],
}


@pytest.mark.parametrize(("field", "value"), [(field, value) for field, values in WRONG.items() for value in values])
def test_a_wrong_value_is_refused_in_one_sentence(field: str, value: Any) -> None:
    for build in (lambda: Recipe(**{field: value}), lambda: PAPER.replace(**{field: value})):
        with pytest.raises(ArgumentError) as caught:
            build()
        message = str(caught.value)
        assert message.startswith(f"recipe: {field} is {value!r}; expected ")
        assert "\n" not in message


def test_every_field_has_wrong_values_here() -> None:
    assert set(WRONG) == set(FIELDS)


def test_values_at_the_edge_are_taken() -> None:
    edges = {"horizon": 0, "sweeps": 1, "ridge": 0, "damping": 0.0, "product_samples": None, "minibatch": 1}
    assert DEFAULT.replace(**edges).minibatch == 1
    assert DEFAULT.replace(horizon="paper").horizon == "paper"


def test_a_file_may_name_some_choices_only() -> None:
    assert Recipe.from_json('{"schema": 1, "sweeps": 5}') == DEFAULT.replace(sweeps=5)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("{", "recipe: not valid JSON"),
        ("[]", 'recipe: expected a JSON object with "schema": 1'),
        ("3", 'recipe: expected a JSON object with "schema": 1'),
        ("{}", 'recipe: expected a JSON object with "schema": 1'),
        ('{"schema": 2}', 'recipe: expected a JSON object with "schema": 1'),
        ('{"schema": 1, "steps": 3, "lambda": 1}', "recipe: unknown choice lambda, steps; known are horizon, sweeps"),
        ('{"schema": 1, "damping": NaN}', "recipe: damping is nan; expected a number of at least 0"),
        ('{"schema": 1, "damping": Infinity}', "recipe: damping is inf; expected a number of at least 0"),
        ('{"schema": 1, "sweeps": "2"}', "recipe: sweeps is '2'; expected a whole number of at least 1"),
    ],
)
def test_a_wrong_file_is_refused_in_one_sentence(text: str, words: str) -> None:
    with pytest.raises(ArgumentError) as caught:
        Recipe.from_json(text)
    assert str(caught.value).startswith(words)
    assert "\n" not in str(caught.value)


def test_recipes_by_name() -> None:
    assert as_recipe("default") is DEFAULT
    assert as_recipe("paper") is PAPER
    assert as_recipe(FAST) is FAST
    for unknown in ("best", 3, {"sweeps": 1}):
        with pytest.raises(ArgumentError, match=r"is not known; expected 'default', 'paper' or a snows\.Recipe"):
            as_recipe(unknown)


def test_the_effort_gives_the_recipe_if_there_is_none() -> None:
    assert [as_recipe(None, effort) for effort in ("fast", "default", "best")] == [FAST, DEFAULT, BEST]
    assert as_recipe("paper", "fast") is PAPER
    assert as_recipe("default", "fast") is DEFAULT
    for unknown in ("slow", None, 1):
        with pytest.raises(ArgumentError, match=r"effort is .*; expected 'fast', 'default' or 'best'"):
            as_recipe(None, unknown)


@pytest.mark.parametrize("text", ['{"schema": 1, "self": 3}', '{"schema": 1, "changes": 3}'])
def test_any_unknown_key_is_refused(text: str) -> None:
    with pytest.raises(ArgumentError, match="unknown choice"):
        Recipe.from_json(text)


@pytest.mark.parametrize("field", ["sweeps", "ridge", "minibatch", "finish_rate", "held_out"])
@pytest.mark.parametrize(
    "value", [10**400, -(10**5000), float("inf"), 1e300], ids=["digits", "negative", "inf", "1e300"]
)
def test_numbers_that_cannot_be_computed_with_are_refused(field: str, value: object) -> None:
    with pytest.raises(ArgumentError, match=f"recipe: {field} is "):
        Recipe(**{field: value})
