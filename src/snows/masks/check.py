"""A check for mask methods written elsewhere: it tries one on small layers and names the rule that it breaks."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import get_args

import torch
from torch import Tensor

from ..errors import ArgumentError, InputError, a_type
from ..patterns import NM, Pattern, Unstructured
from .base import Choice, MaskMethod, NetworkMethod, Reads, Takes, as_method

_SHAPES = {"linear": (6, 8), "conv": (4, 8, 3, 3), "grouped": (6, 4, 3, 1), "depthwise": (8, 1, 3, 3)}
_GROUPS = {"linear": 1, "conv": 1, "grouped": 2, "depthwise": 8}
_PATTERNS: tuple[Pattern, ...] = (Unstructured(0.3, "uniform"), Unstructured(0.8, "global"), NM(1, 4), NM(2, 4))
_SAMPLES = 24


def check_mask_method(method: object) -> None:
    """Try a mask method on small layers with several patterns, and name the rule that it breaks.

    The rules: a `snows.Choice` with a mask for every weight it was given, bool, of the weight's shape, True where kept;
    exactly as many removed as the pattern says; new weights finite, of the same shape and dtype, zero where removed;
    nothing changed in place; the same answer when asked again. Refusing a pattern by an ArgumentError is fine.

    Args:
        method: A method's name or object, see `snows.LayerMethod` and `snows.NetworkMethod`.

    Raises:
        InputError: If it breaks a rule, or refuses every pattern.
        ArgumentError: If it is no mask method.

    Example:
        >>> import snows
        >>> snows.check_mask_method(snows.Wanda())
        >>> class Everything:
        ...     def choose_layer(self, name, weight, gram, pattern):
        ...         return snows.Choice({name: weight.bool()})
        >>> snows.check_mask_method(Everything())
        Traceback (most recent call last):
            ...
        snows.errors.InputError: Everything (linear 0.3 uniform): it removes 0 of linear; expected 14 (True means kept)
    """
    method = as_method(method)
    name = type(method).__name__
    for attribute, choices in (("reads", get_args(Reads)), ("takes", get_args(Takes))):
        given = getattr(method, attribute, choices[0])
        _rule(given in choices, f"{name}: its attribute {attribute} is {given!r}; expected one of {choices}")
    taken = [_takes(method, patterns) for patterns in _cases(isinstance(method, NetworkMethod))]
    _rule(any(taken), f"{name}: it refuses every pattern that was tried")


def _cases(together: bool) -> Iterator[dict[str, Pattern]]:
    """One layer at a time for layer methods; for network methods all layers that take a pattern, and a mixture."""
    for pattern in _PATTERNS:
        able = [name for name, shape in _SHAPES.items() if pattern.refusal(torch.Size(shape)) is None]
        yield from [dict.fromkeys(able, pattern)] if together else [{name: pattern} for name in able]
    if together:
        yield dict(zip(_SHAPES, (_PATTERNS[3], _PATTERNS[0], _PATTERNS[1], _PATTERNS[1]), strict=True))


def _takes(method: MaskMethod, patterns: Mapping[str, Pattern]) -> bool:
    """Whether the method takes the patterns. Raises InputError if it takes them and breaks a rule."""
    toy, again, untouched = (_Toy(patterns) for _ in range(3))
    try:
        choice, second = toy.ask(method), again.ask(method)
        _rule(isinstance(choice, Choice), f"it returns {a_type(choice)}; expected a snows.Choice")
        for what, tensors in toy.inputs.items():
            _rule(
                _equal(tensors, untouched.inputs[what]), f"it changes the {what} it is given; expected work on a copy"
            )
        _check_masks(choice.masks, toy)
        _check_weights(choice, toy)
        same = _equal(choice.masks, second.masks) and _equal(choice.weights, second.weights)
        _rule(same, "it answers otherwise when asked again; expected random numbers from a seed only")
    except ArgumentError:
        return False
    except InputError as error:
        where = ", ".join(f"{name} {pattern}" for name, pattern in patterns.items())
        raise InputError(f"{type(method).__name__} ({where}): {error}") from error
    return True


def _check_masks(masks: Mapping[str, Tensor], toy: _Toy) -> None:
    _rule(masks.keys() == toy.weights.keys(), f"it gives masks for {sorted(masks)}; expected {sorted(toy.weights)}")
    for name, mask in masks.items():
        shape = _SHAPES[name]
        _rule(mask.dtype == torch.bool, f"the mask of {name} is {mask.dtype}; expected bool, True where kept")
        _rule(mask.shape == shape, f"the mask of {name} has shape {tuple(mask.shape)}; expected {shape}")
    for pattern in dict.fromkeys(toy.patterns.values()):
        complaint = pattern.complaint({name: mask for name, mask in masks.items() if toy.patterns[name] == pattern})
        _rule(complaint is None, str(complaint))


def _check_weights(choice: Choice, toy: _Toy) -> None:
    for name, weight in choice.weights.items():
        _rule(name in toy.weights, f"it gives a weight for {name!r}, which it was not asked for")
        same = weight.shape == toy.weights[name].shape and weight.dtype == toy.weights[name].dtype
        _rule(same, f"its weight of {name} is {weight.dtype} of shape {tuple(weight.shape)}; expected as it was given")
        _rule(bool(torch.isfinite(weight).all()), f"its weight of {name} is not finite")
        _rule(not weight[~choice.masks[name]].any(), f"its weight of {name} is not zero where it is removed")


class _Toy:
    """Random layers as a `Network`, in the dtypes and memory layouts of a real run. Its loss is quadratic."""

    seed = 0

    def __init__(self, patterns: Mapping[str, Pattern]) -> None:
        draw = torch.Generator().manual_seed(0)
        self.patterns: Mapping[str, Pattern] = patterns
        self.uses: Mapping[str, int] = {name: 1 if name == "linear" else 9 for name in patterns}
        self.weights: Mapping[str, Tensor] = {name: torch.randn(_SHAPES[name], generator=draw) for name in patterns}
        self.rows = {n: torch.randn(_SAMPLES, w.numel(), generator=draw) for n, w in self.weights.items()}
        x = {n: torch.randn(_GROUPS[n], 90, w[0].numel(), generator=draw) for n, w in self.weights.items()}
        self.grams = {name: (patches.mT @ patches / 90).double() for name, patches in x.items()}
        for weight in self.weights.values():
            weight.data = weight.to(memory_format=torch.channels_last if weight.ndim == 4 else torch.preserve_format)
        self.inputs = {"weights": self.weights, "gradients": self.rows, "Gram matrix": self.grams}

    def gradients(self, count: int, batch: int = 1) -> Iterator[tuple[str, Tensor]]:
        yield from ((name, rows[:count]) for name, rows in self.rows.items())

    def loss(self, weights: Mapping[str, Tensor]) -> float:
        moved = {name: (weight - self.weights[name]).flatten() for name, weight in weights.items()}
        return sum(float((self.rows[name] @ change).square().mean()) for name, change in moved.items())

    def ask(self, method: MaskMethod) -> Choice:
        if isinstance(method, NetworkMethod):
            return method.choose(self)
        ((name, weight),) = self.weights.items()
        return method.choose_layer(name, weight, self.grams[name], self.patterns[name])


def _equal(one: Mapping[str, Tensor], two: Mapping[str, Tensor]) -> bool:
    return one.keys() == two.keys() and all(torch.equal(one[name], two[name]) for name in one)


def _rule(holds: bool, sentence: str) -> None:
    if not holds:
        raise InputError(sentence)
