"""What a mask method is: the two protocols, what a method gives and may ask for, and how a name becomes a method.

A *network* method sees all weights at once, with gradients and a loss; a *layer* method sees one weight with the second
moments of its inputs, when the cascade arrives at the layer. Methods are frozen dataclasses; their fields are options.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from importlib import import_module
from typing import Literal, Protocol, runtime_checkable

from torch import Tensor

from ..errors import ArgumentError, a_type
from ..patterns import Pattern, Spread
from .names import CLASSES, NAMES

Reads = Literal["auto", "dense", "pruned", "refitted"]
Takes = Literal["any", "single weights", "unstructured"]


@dataclass(frozen=True)
class Choice:
    """What a mask method gives: masks, and weights where it changed them.

    Args:
        masks: By parameter name, bool tensors of the weights' shapes, True where a weight is kept.
        weights: By parameter name, new weights for the parameters that the method changed; zero where removed.

    Example:
        >>> import torch, snows
        >>> weight = torch.tensor([[0.5, -2.0]])
        >>> choice = snows.Choice({"fc.weight": weight.abs() > 1})
        >>> choice.masks["fc.weight"], choice.weights
        (tensor([[False,  True]]), {})
    """

    masks: dict[str, Tensor]
    weights: dict[str, Tensor] = field(default_factory=dict)


class Network(Protocol):
    """What a network method may ask for: the weights to prune, their patterns, gradients and the loss."""

    @property
    def weights(self) -> Mapping[str, Tensor]: ...
    @property
    def patterns(self) -> Mapping[str, Pattern]: ...
    @property
    def uses(self) -> Mapping[str, int]: ...  # how often each weight of a layer is used for one sample
    @property
    def seed(self) -> int: ...

    def gradients(self, count: int, batch: int = 1) -> Iterator[tuple[str, Tensor]]:
        """For each layer, `count` gradients of the loss as rows, each the mean over `batch` samples."""

    def loss(self, weights: Mapping[str, Tensor]) -> float:
        """The loss of the network with other weights, on the calibration samples."""


@runtime_checkable
class NetworkMethod(Protocol):
    """A mask method that chooses the masks of all layers together. Any object with this method is one.

    `choose` gets a network with the attributes `weights` and `patterns` (by parameter name), `uses` (how often one
    sample uses each weight of a layer) and `seed`, and the methods `gradients(count, batch)` and `loss(weights)`. It is
    called before the first sweep over the layers, and again in each sweep that begins with new masks (`mask_steps` of a
    recipe). `snows.check_mask_method` checks that a method keeps the rules.

    Attributes:
        spread: Optional; how a sparsity is spread over layers unless the pattern says it. The default is "global": the
            weights of all layers compete.
        takes: Optional; which patterns the method has a form for, see `snows.LayerMethod`.

    Example:
        >>> import torch, snows
        >>> from snows.masks import best_masks
        >>> class Squares:
        ...     def choose(self, network):
        ...         scores = {name: weight**2 for name, weight in network.weights.items()}
        ...         return snows.Choice(best_masks(scores, network.patterns))
        >>> snows.check_mask_method(Squares())
        >>> isinstance(Squares(), snows.NetworkMethod)
        True
    """

    def choose(self, network: Network) -> Choice: ...


@runtime_checkable
class LayerMethod(Protocol):
    """A mask method that chooses the mask of one layer at a time. Any object with this method is one.

    `choose_layer` is called when the cascade arrives at the layer. It gets the `name` of the parameter; its `weight` in
    the layer's own shape (outputs, inputs per group, kernel …); `gram`, the second moment of the layer's inputs (groups
    x columns x columns, with inputs per group x kernel columns); and the layer's `pattern`.
    `snows.check_mask_method` checks that a method keeps the rules.

    Attributes:
        reads: Optional; which inputs `gram` is made of. "pruned" (the default): those in the network pruned so far.
            "dense": those in the dense network. "refitted": as "pruned", and `weight` is refitted to them without a
            mask. "auto": "refitted" if the method's own weights stay, "dense" if they are re-adjusted.
        spread: Optional; how a sparsity is spread over layers unless the pattern says it. The default is "uniform".
        takes: Optional; which patterns the method has a form for. "any" (the default): it leaves masks to the pattern.
            "single weights": it chooses weights itself, anywhere in a layer or within the groups of N:M.
            "unstructured": it chooses weights itself, and knows no groups.

    Example:
        >>> import torch, snows
        >>> class Inputs:
        ...     def choose_layer(self, name, weight, gram, pattern):
        ...         norms = gram.diagonal(dim1=1, dim2=2).sqrt().to(weight.dtype)
        ...         norms = norms.repeat_interleave(len(weight) // len(gram), 0)
        ...         return snows.Choice({name: pattern.best_mask(weight.abs() * norms.view_as(weight))})
        >>> snows.check_mask_method(Inputs())
        >>> _ = torch.manual_seed(0)
        >>> model = torch.nn.Sequential(torch.nn.Linear(8, 4), torch.nn.ReLU(), torch.nn.Linear(4, 2)).eval()
        >>> result = snows.prune(model, torch.randn(64, 8), "2:4", mask=Inputs(), layers="0", progress=False)
        >>> int(result.masks["0.weight"].sum())
        16
    """

    def choose_layer(self, name: str, weight: Tensor, gram: Tensor, pattern: Pattern) -> Choice: ...


MaskMethod = NetworkMethod | LayerMethod


def as_method(given: object) -> MaskMethod:
    """A method from its name, or the method itself; "obc+exchange" improves OBC's masks by exchanges."""
    if isinstance(given, str):
        return _named(given)
    if isinstance(given, type):
        module = "snows." if given.__module__.startswith("snows.") else ""
        raise ArgumentError(
            f"mask is the class {given.__name__}; expected an instance: {module}{given.__name__}(), whose options are "
            "its arguments"
        )
    if isinstance(given, NetworkMethod | LayerMethod):
        return given
    raise ArgumentError(f"mask is {a_type(given)}; expected a name, {{name: bool tensor}} or a mask method")


def _named(name: str) -> MaskMethod:
    if name.endswith("+exchange"):
        method: MaskMethod = method_class("exchange")(name.removesuffix("+exchange"))
        return method
    if name not in CLASSES:
        raise ArgumentError(
            f"mask {name!r} is not known; expected {', '.join(map(repr, NAMES))}, a layer-wise one followed by "
            "'+exchange', 'weights' (the zeros of the given weights), {name: bool tensor}, a file of masks or a mask "
            "method"
        )
    method = method_class(name)()
    return method


def method_class(name: str) -> type:
    """The class of a name in `NAMES`."""
    found: type = getattr(import_module(f".{name}", __package__), CLASSES[name])
    return found


def default_spread(method: MaskMethod) -> Spread:
    """How a method spreads a sparsity over layers unless the pattern says it."""
    spread: Spread = getattr(method, "spread", "global" if isinstance(method, NetworkMethod) else "uniform")
    return spread


def best_masks(scores: Mapping[str, Tensor], patterns: Mapping[str, Pattern]) -> dict[str, Tensor]:
    """The best masks for scores: layer by layer, or for layers ranked together where their pattern says so."""
    masks: dict[str, Tensor] = {}
    for pattern in dict.fromkeys(patterns[name] for name in scores):
        masks |= pattern.best_masks({name: score for name, score in scores.items() if patterns[name] == pattern})
    return {name: masks[name] for name in scores}


def takes_pattern(method: object, pattern: Pattern) -> bool:
    """Whether a method has a form for the pattern, by its attribute `takes` (see `LayerMethod`)."""
    takes: Takes = getattr(method, "takes", "any")
    within_groups = takes == "single weights" and pattern.group is not None
    return takes == "any" or pattern.is_unstructured or within_groups


def require_pattern(method: object, patterns: Mapping[str, Pattern]) -> None:
    """Raise ArgumentError if the method has no form for one of the patterns (by layer)."""
    for name, pattern in patterns.items():
        if not takes_pattern(method, pattern):
            others = ", ".join(repr(name) for name in NAMES if takes_pattern(method_class(name), pattern))
            raise ArgumentError(
                f"{type(method).__name__} has no form for the pattern {pattern} of {name}; expected one of {others}"
            )
