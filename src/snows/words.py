"""Numbers as people say them."""

from __future__ import annotations


def duration(seconds: float) -> str:
    """A time as people say it: "40 seconds", "12 minutes", "3.5 hours".

    Example:
        >>> duration(40), duration(700), duration(9000)
        ('40 seconds', '12 minutes', '2.5 hours')
    """
    if seconds < 1.5:
        return "a second"
    if seconds < 90:
        return f"{seconds:.0f} seconds"
    if seconds < 90 * 60:
        return f"{seconds / 60:.0f} minutes"
    return f"{seconds / 3600:.1f} hours"


def counted(number: int, noun: str) -> str:
    """A number with its noun.

    Example:
        >>> counted(1, "layer"), counted(20, "layer")
        ('1 layer', '20 layers')
    """
    return f"{number} {noun}{'' if number == 1 else 's'}"


def to_pattern(pattern: str) -> str:
    """What a network is pruned to. Masks from elsewhere have no pattern.

    Example:
        >>> to_pattern("2:4"), to_pattern("given")
        ('to 2:4', 'with given masks')
    """
    return "with given masks" if pattern == "given" else f"to {pattern}"
