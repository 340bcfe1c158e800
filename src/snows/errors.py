"""What can go wrong, as the caller sees it.

SnowsError                 everything raised on purpose
├── ArgumentError          an argument has the wrong form: unknown name, malformed pattern   (exit status 2)
├── InputError             a model, data set, mask or file cannot be used as it is           (exit status 1)
│   └── StatisticsError    a layer's input statistics cannot be used; the run goes on and warns
└── CaptureError           the model cannot be turned into a graph of operations             (exit status 1)

Every message says what was given, what was expected and what to do.
"""

from __future__ import annotations


class SnowsError(Exception):
    """Base of every error that this package raises on purpose."""


class ArgumentError(SnowsError, ValueError):
    """An argument has the wrong form."""


class InputError(SnowsError, ValueError):
    """A model, data set, mask or file cannot be used as it is."""


class StatisticsError(InputError):
    """A layer's input statistics are not finite, or singular beyond repair."""


class CaptureError(SnowsError):
    """The model cannot be turned into a graph of operations."""


class SnowsWarning(UserWarning):
    """Something the user should know; the work goes on."""
