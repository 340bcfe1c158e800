"""Messages quote names from files, which a terminal must not obey."""

from __future__ import annotations

import warnings

import pytest

import snows
from snows.errors import a_type, first_line, one_line, printable

EVIL = "w\x1b]0;owned\x07\x1b[2J\r\x9b31m\u202ex"


def test_text_without_control_characters_stays() -> None:
    assert printable("conv1.weight: größer 🙂\nnext") == "conv1.weight: größer 🙂\nnext"


def test_control_characters_become_escapes() -> None:
    assert printable(EVIL).isprintable()
    assert printable(EVIL) == r"w\x1b]0;owned\x07\x1b[2J\r\x9b31m\u202ex"
    assert printable("\udcff") == r"\udcff"


def test_one_line_has_no_line_breaks() -> None:
    assert one_line("a\n  b\x1b") == r"a b\x1b"


@pytest.mark.parametrize("kind", [snows.InputError, snows.ArgumentError, snows.CaptureError, snows.SnowsWarning])
def test_every_message_is_printable(kind: type[Exception]) -> None:
    assert str(kind(f"{EVIL} is wrong")).isprintable()


def test_warnings_are_printable() -> None:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        warnings.warn(EVIL, snows.SnowsWarning, stacklevel=1)
    assert str(caught[0].message).isprintable()


@pytest.mark.parametrize(
    ("message", "line"),
    [("", "Odd"), ("\n \n", "Odd"), ("\n  why \nwhere", "why"), ("x" * 500, "x" * 300)],
)
def test_the_first_line_of_an_error_of_others(message: str, line: str) -> None:
    class Odd(Exception):  # noqa: N818
        pass

    assert first_line(Odd(message)) == line


@pytest.mark.parametrize(
    ("value", "text"), [(3, "an int"), ("x", "a str"), ({}, "a dict"), (print, "a builtin_function_or_method")]
)
def test_a_type_has_its_article(value: object, text: str) -> None:
    assert a_type(value) == text
