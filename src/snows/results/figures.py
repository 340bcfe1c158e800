"""Numbers as a reader wants them: three digits, and the same words everywhere."""

from __future__ import annotations

import math
from typing import Any

_SUPERSCRIPTS = str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹")
_SUFFIXES = ((1e12, " T"), (1e9, " G"), (1e6, " M"), (1e3, " k"))
_TITLES = {
    "top1": "top-1 accuracy", "top5": "top-5 accuracy",
    "kl": "KL to dense",
}  # fmt: skip
_SHARES = ("top1", "top5", "agreement")


def figure(value: object) -> str:
    """A number in three digits; nothing for a figure that there is not."""
    if value is None:
        return ""
    if not isinstance(value, float):
        return f"{value:,}" if isinstance(value, int) else str(value)
    if not math.isfinite(value):
        return str(value)
    if value == 0 or 1e-4 <= abs(value) < 1e5:
        return _three_digits(value)
    digits, power = f"{value:.1e}".split("e")
    return f"{digits} × 10{str(int(power)).translate(_SUPERSCRIPTS)}"


def _three_digits(value: float) -> str:
    decimals = 0 if value == 0 else max(0, 2 - math.floor(math.log10(abs(value))))
    text = f"{value:.{decimals}f}"
    return text.rstrip("0").rstrip(".") if "." in text else text


def percent(share: float | None) -> str:
    """A share in percent, with one digit behind the point."""
    return "" if share is None else f"{100 * share:.1f} %"


def amount(value: float) -> str:
    """A large number in three digits: 11.7 M."""
    for size, suffix in _SUFFIXES:
        if abs(value) >= size:
            return _three_digits(value / size) + suffix
    return _three_digits(float(value))


def time_taken(seconds: float) -> str:
    """A time as a figure, such as "12 min". `words.duration` says it in a sentence."""
    if seconds >= 5400:
        return f"{_three_digits(seconds / 3600)} h"
    return f"{_three_digits(seconds / 60)} min" if seconds >= 90 else f"{_three_digits(seconds)} s"


def memory(size: float) -> str:
    return f"{_three_digits(size / 2**30)} GiB" if size >= 2**30 else f"{_three_digits(size / 2**20)} MiB"


def measure_title(key: str) -> str:
    """How a figure of an evaluation is called."""
    return _TITLES.get(key, key)


def is_share(key: str) -> bool:
    return key in _SHARES


def measured(key: str, value: Any) -> str:
    """A figure of an evaluation."""
    if is_share(key) and isinstance(value, float):
        return f"{100 * value:.2f} %"
    return figure(value)
