"""Recipes: every choice of the method besides model, data, pattern and mask, as the user writes it.

A recipe may leave choices open ("auto", "paper", None). `snows.solve.settings` resolves them for one network.
"""

from __future__ import annotations

import dataclasses
import json
import reprlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

from .errors import ArgumentError, shown

SCHEMA = 1

LEAST_HELD_OUT = 8
_MOST = 10**9  # of any choice: a number with hundreds of digits cannot be computed with


@dataclass(frozen=True)
class _Check:
    """Which values a field takes, and how an error message describes them."""

    accepts: Callable[[Any], bool]
    expected: str


def _one_of(default: Any, *others: Any) -> Any:
    values = (default, *others)
    expected = "one of " + ", ".join(repr(value) for value in values)
    return _checked(default, lambda value: type(value) in map(type, values) and value in values, expected)


def _whole(default: Any, *words: Any, least: int = 0) -> Any:
    """A whole number, or one of the words."""
    return _checked(
        default, lambda v: v in words or (type(v) is int and least <= v <= _MOST), f"a whole number{_of(least, words)}"
    )


def _number(default: Any, *words: Any, below: float = _MOST) -> Any:
    """A number of at least 0, or one of the words."""

    def accepts(value: Any) -> bool:
        return value in words or (type(value) in (int, float) and 0 <= value < below)

    return _checked(default, accepts, f"a number{_of(0, words, below)}")


def _of(least: int, words: tuple[Any, ...], below: float = _MOST) -> str:
    above = f" and below {below:g}" if below < _MOST else ""
    return f" of at least {least}{above}" + "".join(f" or {word!r}" for word in words)


def _shown(value: Any) -> str:
    """A value in an error message. Python refuses to write whole numbers of thousands of digits."""
    if isinstance(value, int) and abs(value) > _MOST:
        return f"a number beyond {_MOST:,}"
    return reprlib.repr(value)


def _checked(default: Any, accepts: Callable[[Any], bool], expected: str) -> Any:
    return dataclasses.field(default=default, metadata={"check": _Check(accepts, expected)})


@dataclass(frozen=True)
class Recipe:
    """How kept weights are re-adjusted. The default is the best we know; "paper" is the paper as written.

    Args:
        horizon: K, how many operations beyond the layer have their outputs preserved. "auto": by the kind of network,
            from our measurements; "paper": from the paper's table.
        sweeps: Passes over all layers. From the second on, all other layers are already pruned. "auto": by the kind of
            network.
        mask_steps: Sweeps that begin with new masks, at most `sweeps`. Each keeps the same share of what the one before
            kept (1:4 in two steps is 2:4 first) and chooses from re-adjusted weights. "auto": by the kind of network
            and the pattern. Masks that are given are used in one step.
        targets: What the outputs should match. "dense-stream": the dense network's own activations; "dense-weights":
            dense weights applied to the pruned network's activations (the paper); "auto": by the kind of network.
        normalization: Of the K-step loss, see `snows.solve.objective`.
        curvature: "auto" takes Gauss-Newton products where they equal the Hessian's, and the exact Hessian elsewhere
            (in transformers that is much worse, see docs/appendix/transformers.md).
        start: "closed-form": least squares (K=0), unless the masked weights are better; "masked": the masked weights.
        preconditioner: "rows": CG is preconditioned with the factors of the closed form; None: it is not.
        ridge: Relative damping of the closed form.
        newton_steps: For each layer and sweep, or for each mini-batch where `minibatch` is set.
        cg_steps: At most so many in one CG solve.
        cg_absolute_tolerance: CG ends when the norm of the residual is below it. "paper": from the paper's table.
        cg_relative_tolerance: The same, relative to the right-hand side.
        cg_least_gain: CG ends at a step with less than this share of what all its steps have gained, in the quadratic
            model.
        damping: Levenberg-Marquardt damping.
        relative_damping: The same, as a share of the mean diagonal of the curvature.
        armijo: How much a step must lower the loss, in Armijo's condition.
        precision: Of derivatives; losses are always in full precision. "auto": bfloat16 on a GPU where every operation
            is piecewise linear; "full": that of the weights.
        product_samples: Samples in curvature products; gradients and line searches use all. None: all.
        minibatch: Samples of one mini-batch, for gradient, products and line search (Algorithm 2). None: all samples.
        held_out: Share of the samples that no weight is fitted to. New weights are kept where they lower the K-step
            loss of these samples. 0: where they lower that of the fitted samples.
        mirror: Also fit images mirrored left to right. More samples for nothing but time, where mirror images look
            natural (photographs, not letters). "auto": where few samples are expected (effort "fast", convolutional
            networks of large images).
        finish_steps: Steps of the last stage, in which all kept weights are trained together to match the dense
            network. 0: no such stage; "auto": by the kind of network.
        finish_batch: Samples in one of these steps.
        finish_rate: Learning rate of Adam in these steps. "auto": by the kind of network.
        effort: What "auto" means in the other fields: "fast" is for a laptop and a few hundred samples, "best" for a
            GPU and patience. The recipe that `prune(effort="fast")` takes is `FAST`, which also has fewer CG steps.

    Raises:
        ArgumentError: A value is not one of those above.

    Example:
        >>> recipe = Recipe(horizon=6, sweeps=2)
        >>> recipe.replace(sweeps=1).horizon
        6
        >>> Recipe.from_json(recipe.to_json()) == recipe
        True
    """

    horizon: int | Literal["auto", "paper"] = _whole("auto", "auto", "paper")
    sweeps: int | Literal["auto"] = _whole("auto", "auto", least=1)
    mask_steps: int | Literal["auto"] = _whole("auto", "auto", least=1)
    targets: Literal["auto", "dense-stream", "dense-weights"] = _one_of("auto", "dense-stream", "dense-weights")
    normalization: Literal["variance", "mean", "sum"] = _one_of("variance", "mean", "sum")
    curvature: Literal["auto", "gauss-newton", "hessian", "fisher"] = _one_of(
        "gauss-newton", "auto", "hessian", "fisher"
    )
    start: Literal["closed-form", "masked"] = _one_of("closed-form", "masked")
    preconditioner: Literal["rows"] | None = _one_of("rows", None)
    ridge: float = _number(1e-6)
    newton_steps: int = _whole(1, least=1)
    cg_steps: int = _whole(20, least=1)
    cg_absolute_tolerance: float | Literal["paper"] = _number(0.0, "paper")
    cg_relative_tolerance: float = _number(1e-2)
    cg_least_gain: float = _number(0.01)
    damping: float = _number(0.0)
    relative_damping: float = _number(1e-3)
    armijo: float = _number(1e-5)
    precision: Literal["auto", "full"] = _one_of("auto", "full")
    product_samples: int | None = _whole(1000, None, least=1)
    minibatch: int | None = _whole(None, None, least=1)
    held_out: float = _number(0.05, below=1)
    mirror: bool | Literal["auto"] = _one_of("auto", False, True)
    finish_steps: int | Literal["auto"] = _whole("auto", "auto")
    finish_batch: int = _whole(64, least=1)
    finish_rate: float | Literal["auto"] = _number("auto", "auto")
    effort: Literal["default", "fast", "best"] = _one_of("default", "fast", "best")

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            value, check = getattr(self, field.name), field.metadata["check"]
            if not check.accepts(value):
                raise ArgumentError(f"recipe: {field.name} is {_shown(value)}; expected {check.expected}")

    def held_out_samples(self, samples: int) -> int:
        """How many of so many samples are held out: enough to judge by, where that leaves most of them."""
        if self.held_out == 0:
            return 0
        return min(max(round(self.held_out * samples), LEAST_HELD_OUT), samples // 4)

    @property
    def may_mirror(self) -> bool:
        """Whether images are mirrored for some kind of network."""
        return self.mirror is True or (self.mirror == "auto" and self.effort == "fast")

    def replace(self, /, **changes: Any) -> Recipe:
        """The same recipe with some choices changed."""
        known = [field.name for field in dataclasses.fields(self)]
        unknown = sorted(set(changes) - set(known))
        if unknown:
            raise ArgumentError(f"recipe: unknown choice {', '.join(unknown)}; known are {', '.join(known)}")
        return dataclasses.replace(self, **changes)

    def to_json(self) -> str:
        return json.dumps({"schema": SCHEMA, **dataclasses.asdict(self)}, indent=2)

    @classmethod
    def from_json(cls, text: str) -> Recipe:
        """A recipe from JSON. Choices that the text leaves out are the defaults."""
        try:
            data = json.loads(text)
        except (ValueError, RecursionError) as error:  # no JSON, a number of thousands of digits, or nested too deep
            raise ArgumentError(f"recipe: not valid JSON ({error})") from error
        if not isinstance(data, dict) or data.pop("schema", None) != SCHEMA:
            raise ArgumentError(f'recipe: expected a JSON object with "schema": {SCHEMA}')
        return DEFAULT.replace(**data)


DEFAULT = Recipe()

PAPER = Recipe(
    horizon="paper",  # its hyperparameter table, by architecture family
    sweeps=1,  # Algorithm 3
    mask_steps=1,
    targets="dense-weights",  # Y = f(X, W) on the cascaded inputs X, below Equation (3)
    normalization="mean",  # its code averages each operation's error; its lambda and tolerance are tuned to that
    curvature="auto",  # "exact Hessian products"; Gauss-Newton's are these where all is piecewise linear, and cheaper
    start="masked",  # Algorithm 2, line 2
    preconditioner=None,  # Algorithm 1
    newton_steps=1,  # Algorithm 2: one step for each mini-batch
    cg_steps=200,  # not in the paper; its ablation goes from 5 to 500
    cg_absolute_tolerance="paper",  # hyperparameter table: 1e-3, for transformers 5e-4
    cg_relative_tolerance=0.0,
    cg_least_gain=0.0,
    damping=1e-4,  # lambda, hyperparameter table
    relative_damping=0.0,
    precision="full",
    product_samples=None,
    minibatch=256,  # not in the paper
    held_out=0.0,  # every step that passes Armijo's test is kept
    mirror=False,
    finish_steps=0,
)

# Short products: with a few hundred samples they are exact enough, and a CPU takes most of its time for them.
FAST = DEFAULT.replace(effort="fast", cg_steps=3, product_samples=125)
BEST = DEFAULT.replace(effort="best")

EFFORTS = {"fast": FAST, "default": DEFAULT, "best": BEST}
Effort = Literal["fast", "default", "best"]


def as_recipe(given: object, effort: object = "default") -> Recipe:
    """A recipe by name, or the recipe itself; without one, the recipe of an effort."""
    if isinstance(given, Recipe):
        return given
    if given is None:
        if isinstance(effort, str) and effort in EFFORTS:
            return EFFORTS[effort]
        raise ArgumentError(f"effort is {shown(effort)}; expected 'fast', 'default' or 'best'")
    named = {"default": DEFAULT, "paper": PAPER}
    if isinstance(given, str) and given in named:
        return named[given]
    raise ArgumentError(f"recipe {shown(given)} is not known; expected 'default', 'paper' or a snows.Recipe")
