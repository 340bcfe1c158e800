"""What can go wrong, as the caller sees it.

SnowsError                 everything raised on purpose
├── ArgumentError          an argument has the wrong form: unknown name, malformed pattern   (exit status 2)
├── InputError             a model, data set, mask or file cannot be used as it is           (exit status 1)
│   └── StatisticsError    a layer's input statistics cannot be used; the run goes on and warns
└── CaptureError           the model cannot be turned into a graph of operations             (exit status 1)

Every message says what was given, what was expected and what to do. Messages may quote names from files: characters
that a terminal would obey are written as escapes, here and nowhere else.
"""

from __future__ import annotations

_LONGEST_QUOTE = 300  # characters of an error of others


def printable(text: str) -> str:
    """The text with escapes for all characters that a terminal would obey, or not show. Line breaks stay."""
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() or c == "\n" else c.encode("unicode_escape").decode() for c in text)


def one_line(text: str) -> str:
    """The same on one line, so that a name with a line break in it cannot look like a line of ours."""
    return printable(" ".join(text.split()))


def as_line(text: str) -> str:
    """The same with its spaces as they are: line breaks become escapes, too."""
    return printable(text).replace("\n", r"\n")


def with_article(noun: str) -> str:
    return f"{'an' if noun[0] in 'aeiouAEIO' else 'a'} {noun}"


def a_type(value: object) -> str:
    """The type of a value, with its article: "an int", "a Tensor"."""
    return with_article(type(value).__name__)


def shown(value: object) -> str:
    """An argument as an error message quotes it. Some tensors cannot be printed."""
    try:
        return repr(value)
    except Exception:
        return a_type(value)


def first_line(error: BaseException) -> str:
    """The part of an error of others that fits into a sentence."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[0][:_LONGEST_QUOTE] if lines else type(error).__name__


def quoted(error: BaseException) -> str:
    """An error of the user's own code on one line, or the beginning of it."""
    text = " ".join(f"{type(error).__name__}: {error}".split())
    return text if len(text) <= _LONGEST_QUOTE else text[: _LONGEST_QUOTE - 2] + " …"


def is_out_of_memory(error: BaseException) -> bool:
    """Python, torch on a GPU, torch on a CPU and the operating system each say it in their own way."""
    if isinstance(error, MemoryError) or type(error).__name__ == "OutOfMemoryError":  # torch is not imported here
        return True
    words = ("DefaultCPUAllocator", "std::bad_alloc", "Cannot allocate memory")
    return isinstance(error, RuntimeError | OSError) and any(word in str(error) for word in words)


class _Message(Exception):  # noqa: N818  # errors and warnings are made of it
    """A message for a terminal."""

    def __init__(self, *arguments: object) -> None:
        super().__init__(*(printable(value) if isinstance(value, str) else value for value in arguments))


class SnowsError(_Message):
    """Base of every error that this package raises on purpose."""


class ArgumentError(SnowsError, ValueError):
    """An argument has the wrong form."""


class InputError(SnowsError, ValueError):
    """A model, data set, mask or file cannot be used as it is."""


class StatisticsError(InputError):
    """A layer's input statistics are not finite, or singular beyond repair."""


class CaptureError(SnowsError):
    """The model cannot be turned into a graph of operations."""


class SnowsWarning(_Message, UserWarning):
    """Something the user should know; the work goes on."""
