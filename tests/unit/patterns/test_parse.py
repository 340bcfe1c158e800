"""Patterns from text, numbers and mappings."""

from __future__ import annotations

import math
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from snows.errors import ArgumentError
from snows.patterns import NM, SPREADS, Pattern, PatternRules, Unstructured, parse_pattern
from snows.patterns.parse import KINDS

nm_patterns = st.tuples(st.integers(1, 999), st.integers(1, 999)).map(lambda pair: NM(pair[0], sum(pair)))


@st.composite
def unstructured_patterns(draw: st.DrawFn) -> Unstructured:
    shares = st.floats(0, 1, exclude_min=True, exclude_max=True)
    least, sparsity, most = sorted(draw(st.tuples(shares, shares, shares)))
    of = draw(st.sampled_from(["weights", "flops"]))
    spreads = [None, "uniform", "measured"] if of == "flops" else [None, *SPREADS]
    spread: Any = draw(st.sampled_from(spreads))
    bounds = {"least": least} if draw(st.booleans()) else {}
    bounds |= {"most": draw(st.sampled_from([most, 1.0]))} if draw(st.booleans()) else {}
    return Unstructured(sparsity, spread, of, **bounds)  # type: ignore[arg-type]


def patterns() -> st.SearchStrategy[Pattern]:
    return st.one_of(nm_patterns, unstructured_patterns())


@given(pattern=patterns())
def test_every_pattern_is_read_back_from_its_text(pattern: Pattern) -> None:
    assert parse_pattern(str(pattern)) == pattern
    assert parse_pattern(pattern) is pattern
    assert [kind.parse(str(pattern)) for kind in KINDS if not isinstance(pattern, kind)] == [None]
    assert PatternRules.parse(str(pattern)) == PatternRules.parse(pattern) == PatternRules((("*", pattern),))


@given(pattern=patterns(), other=patterns())
def test_rules_are_read_back_from_their_text(pattern: Pattern, other: Pattern) -> None:
    rules = PatternRules.parse({"*": pattern, "layer1.*": other, "0": None})
    assert rules.rules[-1] == ("*", pattern)
    assert PatternRules.parse(str(rules)) == rules
    assert PatternRules.parse(f"{pattern}, layer1.* = {other},, 0=dense") == rules


@pytest.mark.parametrize("number", [0.7, np.float32(0.5), Fraction(1, 3), 1e-5])
def test_numbers_are_sparsities(number: Any) -> None:
    assert parse_pattern(number) == Unstructured(float(number))


def test_dense_is_no_pattern() -> None:
    assert parse_pattern("dense") is None
    assert parse_pattern(None) is None
    assert str(PatternRules.parse("dense")) == "dense"
    assert PatternRules.parse(None).of("anything") is None


@pytest.mark.parametrize(
    "text", ["-1:4", "1.5", "0", "1", 0, 1, 1.0, True, -0.5, "half", "", "2:4:8", [2, 4], math.nan]
)
def test_what_is_no_pattern_is_refused_with_what_is_expected(text: object) -> None:
    with pytest.raises(
        ArgumentError, match=r"^pattern .* is not understood; expected 'N:M' .* a sparsity between 0"
    ) as e:
        parse_pattern(text)
    assert repr(text) in str(e.value)
    assert ", ".join(SPREADS) in str(e.value)


def test_patterns_of_other_kinds_are_taken_as_they_are() -> None:
    @dataclass(frozen=True)
    class Odd(Pattern):
        sparsity: float = 0.5

        def __str__(self) -> str:
            return "odd"

        def best_mask(self, score: Tensor) -> Tensor:
            return score > 0

        def violations(self, mask: Tensor) -> int:
            return 0

    assert parse_pattern(Odd()) is not None
    assert PatternRules.parse({"a": Odd(), "b": "2:4"}).of("a") == Odd()
    assert str(PatternRules.parse(Odd())) == "odd"


def test_the_first_glob_that_matches_decides_and_the_rest_comes_last() -> None:
    rules = PatternRules.parse("1:4, layer1.*=2:4, layer1.fc=dense")
    assert rules.of("layer1.conv") == rules.of("layer1.fc") == NM(2, 4)
    assert rules.of("head") == NM(1, 4)
    assert rules.unmatched(["layer1.conv", "head"]) == ["layer1.fc"]
    assert PatternRules.parse({"head": "dense"}).of("other") is None
    assert PatternRules.parse("Layer1.*=2:4").of("layer1.conv") is None


def test_options_of_a_sparsity_are_no_names() -> None:
    rules = PatternRules.parse("0.7 erk max=0.9, layer1.* = 0.5 measured flops min=0.1, 0=2:4")
    assert rules.of("layer1.conv") == Unstructured(0.5, "measured", "flops", least=0.1)
    assert rules.of("0") == NM(2, 4)
    assert rules.of("head") == Unstructured(0.7, "erk", most=0.9)
    assert PatternRules.parse("0 =2:4").rules == (("0", NM(2, 4)),)


def test_two_patterns_for_all_layers_are_refused() -> None:
    with pytest.raises(
        ArgumentError, match=r"'1:4, 0\.5 max=0\.9, a=2:4' names 2 patterns for all layers; expected one"
    ):
        PatternRules.parse("1:4, 0.5 max=0.9, a=2:4")
