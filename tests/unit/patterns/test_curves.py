"""Budgets that read what was measured before."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from snows.errors import ArgumentError, InputError
from snows.patterns import PatternRules, Unstructured, parse_pattern
from snows.patterns.curves import Curves
from tests.unit.patterns.test_budgets import FakeMeasured, spread


def level(sparsity: float, error: float, unstructured: bool = True) -> dict[str, Any]:
    return {"sparsity": sparsity, "unstructured": unstructured, "readjusted": {"error": error}}


def measured(weights: int = 100, **errors: float) -> dict[str, Any]:
    """Layers whose error rises to this one at 0.9, as its square."""
    layers = [
        {
            "name": name,
            "parameter": name,
            "weights": weights,
            "levels": [level(0.75, 9.0, False), *(level(s, most * (s / 0.9) ** 2) for s in (0.9, 0.3, 0.6))],
        }
        for name, most in errors.items()
    ]
    return {"kind": "sensitivity", "schema": 1, "layers": layers}


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "layers.json"
    path.write_text(json.dumps(measured(a=1.0, b=9.0)))
    return path


def test_errors_lie_on_straight_lines_between_measurements(file: Path) -> None:
    found = Curves(str(file)).errors("b", 100, [0, 15, 30, 45, 90, 96])
    # 1 at 0.3, 4 at 0.6 and 9 at 0.9; beyond that the last line goes on. N:M does not count.
    assert found == pytest.approx([0, 0.5, 1, 2.5, 9, 10])


def test_a_file_spreads_like_measurements_of_its_own(file: Path) -> None:
    network = FakeMeasured({"a": (10, 10), "b": (10, 10)})
    network.trials = lambda: pytest.fail("measured again")  # type: ignore[method-assign]
    pattern = parse_pattern(f"0.6 measured={file}")
    assert isinstance(pattern, Unstructured)
    gone = spread(network, pattern)
    assert sum(gone.values()) == 120
    assert gone["b"] < 60 < gone["a"]
    assert spread(network, Unstructured(0.6, "measured", curves=Curves(str(file)))) == gone
    bounded = parse_pattern(f"0.6 measured={file} min=0.5 max=0.72")
    assert isinstance(bounded, Unstructured)
    assert spread(network, bounded)["b"] == 50


def test_the_text_of_a_pattern_names_the_file(file: Path) -> None:
    pattern = parse_pattern(f"0.7 measured={file} flops max=0.9")
    assert isinstance(pattern, Unstructured)
    assert str(pattern) == f"0.7 measured={file} flops max=0.9"
    assert parse_pattern(str(pattern)) == pattern
    rules = PatternRules.parse(f"0.7 measured={file}, head=dense")
    assert [(glob, str(each)) for glob, each in rules.rules] == [("head", "None"), ("*", f"0.7 measured={file}")]
    assert rules.curves == [Curves(str(file))]


def test_the_digest_follows_the_measurements(tmp_path: Path) -> None:
    one, same, other = (tmp_path / f"{name}.json" for name in "abc")
    one.write_text(json.dumps(measured(a=1.0)))
    same.write_text(json.dumps(measured(a=1.0), indent=1))
    other.write_text(json.dumps(measured(a=1.5)))
    assert Curves(str(one)).digest == Curves(str(same)).digest != Curves(str(other)).digest


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (None, "^there is no file .*; `snows sensitivity --out .*` makes one"),
        ("{", "is not valid JSON"),
        ("[]", "holds no measurements; expected a file of `snows sensitivity --out`"),
        ('{"kind": "report", "schema": 1}', "kind 'report', schema 1"),
        (json.dumps({**measured(a=1.0), "schema": 2}), "kind 'sensitivity', schema 2"),
        (json.dumps(measured(a=-1.0)), "sparsities or errors of a are out of range"),
        (json.dumps(measured(a=1.0)).replace("true", "false"), "no sparsity such as 0.5 was measured for a"),
    ],
)
def test_a_wrong_file_is_refused_before_anything_runs(tmp_path: Path, content: str | None, words: str) -> None:
    path = tmp_path / "wrong.json"
    if content is not None:
        path.write_text(content)
    with pytest.raises(InputError, match=words):
        PatternRules.parse(f"0.7 measured={path}")


@pytest.mark.parametrize(
    ("shapes", "words"),
    [
        ({"a": (10, 10), "c": (10, 10)}, r"was not measured with c \(100 weights\): it is not among its layers"),
        ({"a": (10, 10), "b": (10, 12)}, r"was not measured with b \(120 weights\): it has 100 weights there"),
    ],
)
def test_measurements_of_another_network_are_refused(file: Path, shapes: Any, words: str) -> None:
    with pytest.raises(InputError, match=words):
        spread(FakeMeasured(shapes), Unstructured(0.5, "measured", curves=Curves(str(file))))


def test_curves_are_for_measured_budgets(file: Path) -> None:
    with pytest.raises(ArgumentError, match="curves are for the spread 'measured', but spread is 'erk'"):
        Unstructured(0.5, "erk", curves=Curves(str(file)))
