"""Recipes: every choice of the method besides model, data, pattern and mask, as one frozen value."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from .errors import ArgumentError
from .solve.objective import Normalization

SCHEMA = 1
_LEAST_HELD_OUT = 8


@dataclass(frozen=True)
class Recipe:
    """How kept weights are re-adjusted. `DEFAULT` is the best we know; `PAPER` is the paper as written.

    horizon             K, the operations beyond the layer whose outputs are preserved; "auto" and "paper": by the kind
                        of network, from our own measurements or from the paper's table
    sweeps              passes over all layers; from the second on, every other layer is already pruned. "auto": by kind
    mask_steps          sweeps that begin with new masks, at most `sweeps`: each keeps the same share of what the one
                        before kept (1:4 in two steps is 2:4 first), and chooses from re-adjusted weights. "auto": by
                        kind and pattern; 1 for masks that are given
    targets             "dense-stream": the dense network's own activations;
                        "dense-weights": dense weights applied to the pruned network's activations (the paper);
                        "auto": by kind
    normalization       of the K-step loss, see `snows.curvature`
    curvature           "auto": Gauss-Newton where it equals the Hessian, the exact Hessian elsewhere (in transformers
                        that is worse by far, see docs/transformers.md)
    start               "closed-form": the better of least squares (K=0) and the weights so far; "masked": the latter
    preconditioner      "rows": CG preconditioned by the closed form's factors
    ridge               relative damping of the closed form
    newton_steps        per layer and sweep (per mini-batch when `minibatch` is set)
    cg_steps, cg_…      limits of one CG solve: steps, tolerances of the residual, and `cg_least_gain`: a step with less
                        than this share of what all have gained (in the quadratic model) is the last
    damping, relative_… Levenberg-Marquardt damping: absolute, and as a share of the mean diagonal of the curvature
    armijo              sufficient decrease
    precision           of derivatives; losses are always in full precision. "auto": on a GPU bfloat16, where every
                        operation is piecewise linear; "full": the weights' own
    product_samples     samples in curvature products; gradient and line search use all. None: all
    minibatch           samples of one mini-batch for gradient, products and line search alike (Algorithm 2). None: off
    held_out            share of the samples that no weight is fitted to: new weights are kept where the K-step loss of
                        these is lower than before. 0: wherever that of the fitted samples is
    mirror              whether images are fitted mirrored, too, left to right: more samples for nothing but time, where
                        mirror images look alike (photographs do, letters do not)
    finish_steps        of the last stage, in which all kept weights are matched together (`snows.finish`); 0: none;
                        "auto": by kind of network
    finish_batch, …rate samples in one of these steps, and the rate of Adam ("auto": by kind of network)
    """

    horizon: int | Literal["auto", "paper"] = "auto"
    sweeps: int | Literal["auto"] = "auto"
    mask_steps: int | Literal["auto"] = "auto"
    targets: Literal["auto", "dense-stream", "dense-weights"] = "auto"
    normalization: Normalization = "variance"
    curvature: Literal["auto", "gauss-newton", "hessian", "fisher"] = "gauss-newton"
    start: Literal["closed-form", "masked"] = "closed-form"
    preconditioner: Literal["rows"] | None = "rows"
    ridge: float = 1e-6
    newton_steps: int = 1
    cg_steps: int = 20
    cg_absolute_tolerance: float | Literal["paper"] = 0.0
    cg_relative_tolerance: float = 1e-2
    cg_least_gain: float = 0.01
    damping: float = 0.0
    relative_damping: float = 1e-3
    armijo: float = 1e-5
    precision: Literal["auto", "full"] = "auto"
    product_samples: int | None = 1000
    minibatch: int | None = None
    held_out: float = 0.05
    mirror: bool = False
    finish_steps: int | Literal["auto"] = "auto"
    finish_batch: int = 64
    finish_rate: float | Literal["auto"] = "auto"

    def held_out_samples(self, samples: int) -> int:
        """How many of so many samples are held out: enough to judge by, where that leaves most of them."""
        if self.held_out == 0:
            return 0
        return min(max(round(self.held_out * samples), _LEAST_HELD_OUT), samples // 4)

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            problem = _problem(field.name, str(field.type), getattr(self, field.name))
            if problem is not None:
                raise ArgumentError(f"recipe: {field.name} is {getattr(self, field.name)!r}; expected {problem}")

    def replace(self, **changes: Any) -> Recipe:
        unknown = set(changes) - {field.name for field in dataclasses.fields(self)}
        if unknown:
            known = ", ".join(field.name for field in dataclasses.fields(self))
            raise ArgumentError(f"recipe: unknown choice {', '.join(sorted(unknown))}; known are {known}")
        return dataclasses.replace(self, **changes)

    def to_json(self) -> str:
        return json.dumps({"schema": SCHEMA, **dataclasses.asdict(self)}, indent=2)

    @classmethod
    def from_json(cls, text: str) -> Recipe:
        try:
            data = json.loads(text)
        except (ValueError, RecursionError) as error:  # no JSON, a number of thousands of digits, or nested too deep
            raise ArgumentError(f"recipe: not valid JSON ({error})") from error
        if not isinstance(data, dict) or data.pop("schema", None) != SCHEMA:
            raise ArgumentError(f'recipe: expected a JSON object with "schema": {SCHEMA}')
        return DEFAULT.replace(**data)


_CHOICES: Mapping[str, tuple[object, ...]] = {
    "targets": ("auto", "dense-stream", "dense-weights"),
    "normalization": ("variance", "mean", "sum"),
    "curvature": ("auto", "gauss-newton", "hessian", "fisher"),
    "start": ("closed-form", "masked"),
    "preconditioner": ("rows", None),
    "precision": ("auto", "full"),
    "mirror": (False, True),
}
_NAMED: Mapping[str, tuple[object, ...]] = {
    "horizon": ("auto", "paper"),
    "sweeps": ("auto",),
    "mask_steps": ("auto",),
    "cg_absolute_tolerance": ("paper",),
    "finish_steps": ("auto",),
    "finish_rate": ("auto",),
}
_AT_LEAST_ONE = {"sweeps", "mask_steps", "newton_steps", "cg_steps", "product_samples", "minibatch", "finish_batch"}
_BELOW = {"held_out": 1.0}


def _problem(name: str, type_: str, value: object) -> str | None:
    """What a field should have been; None if it is fine."""
    if name in _CHOICES:
        choices = _CHOICES[name]
        return None if value in choices else "one of " + ", ".join(repr(choice) for choice in choices)
    if value in _NAMED.get(name, ()) or (value is None and "None" in type_):
        return None
    least, whole = int(name in _AT_LEAST_ONE), "int" in type_
    below = _BELOW.get(name, math.inf)
    number = isinstance(value, int if whole else (int, float)) and not isinstance(value, bool)
    if number and least <= value < below:  # type: ignore[operator]  # a number, see above
        return None
    names = [repr(word) for word in _NAMED.get(name, ())] + ["None"] * ("None" in type_)
    extra = "".join(f" or {word}" for word in names)
    above = f" and below {below:g}" if below < math.inf else ""
    return f"{'a whole number' if whole else 'a number'} of at least {least}{above}{extra}"


DEFAULT = Recipe()

PAPER = Recipe(
    horizon="paper",  # its hyperparameter table, by architecture family
    sweeps=1,  # Algorithm 3
    mask_steps=1,
    targets="dense-weights",  # Y = f(X, W) on the cascaded inputs X, below Equation (3)
    normalization="mean",  # its code averages each operation's error; its lambda and tolerance are tuned to that
    curvature="auto",  # "exact Hessian products"; Gauss-Newton's are these where all is piecewise linear, and cost less
    start="masked",  # Algorithm 2, line 2
    preconditioner=None,  # Algorithm 1
    newton_steps=1,  # Algorithm 2: one step per mini-batch
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
    finish_steps=0,
)

# For the embedded network on a laptop: short passes. Chosen on calibration images that the demo does not use.
EMBEDDED = DEFAULT.replace(horizon=6, sweeps=2, mask_steps=1, cg_steps=3, product_samples=250)


def as_recipe(given: object) -> Recipe:
    if isinstance(given, Recipe):
        return given
    named = {"default": DEFAULT, "paper": PAPER}
    if isinstance(given, str) and given in named:
        return named[given]
    raise ArgumentError(f"recipe {given!r} is not known; expected 'default', 'paper' or a snows.Recipe")
