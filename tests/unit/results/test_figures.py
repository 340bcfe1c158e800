"""Numbers as words."""

from __future__ import annotations

import math

import pytest

from snows.results.figures import amount, figure, measured, memory, percent, time_taken


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (None, ""), (0.0, "0"), (3, "3"), (12345, "12,345"), (1.0, "1"), (0.12345, "0.123"), (0.00012345, "0.000123"),
        (-2.5, "-2.5"), (1234.5, "1234"), (99.96, "100"), (0.000012345, "1.2 × 10⁻⁵"), (2.5e7, "2.5 × 10⁷"),
        (math.inf, "inf"), (math.nan, "nan"), ("word", "word"),
    ],
)  # fmt: skip
def test_figures_have_three_digits(value: object, text: str) -> None:
    assert figure(value) == text


def test_units() -> None:
    assert [percent(share) for share in (None, 0.75, 0.7436)] == ["", "75.0 %", "74.4 %"]
    assert [amount(value) for value in (0, 272_474, 25_557_032, 4.1e9, 2e12)] == [
        "0",
        "272 k",
        "25.6 M",
        "4.1 G",
        "2 T",
    ]
    assert [time_taken(value) for value in (0.1234, 12.34, 89, 90, 7200)] == [
        "0.123 s",
        "12.3 s",
        "89 s",
        "1.5 min",
        "2 h",
    ]
    assert [memory(value) for value in (1 << 20, 3 << 29)] == ["1 MiB", "1.5 GiB"]


def test_figures_of_an_evaluation() -> None:
    assert measured("top1", 0.91234) == "91.23 %"
    assert measured("kl", 0.041123) == "0.0411"
    assert measured("top1", None) == ""
