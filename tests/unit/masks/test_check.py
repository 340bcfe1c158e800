"""The check for methods written elsewhere."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from snows.errors import ArgumentError, InputError
from snows.masks import NAMES, Choice, MaskMethod, Network, as_method
from snows.masks.check import check_mask_method
from snows.masks.chita import CHITA
from snows.masks.falcon import FALCON
from snows.masks.magnitude import Magnitude
from snows.masks.wanda import Wanda
from snows.masks.woodfisher import WoodFisher
from snows.patterns import NM, Pattern, Unstructured


@pytest.mark.parametrize("name", NAMES)
def test_the_methods_of_the_package_pass_the_check(name: str) -> None:
    check_mask_method(name)
    check_mask_method(as_method(name))


@pytest.mark.parametrize("method", [CHITA(steps=20, block=None), WoodFisher(batch=4), FALCON(solver=CHITA(steps=5))])
def test_so_do_they_with_other_options(method: MaskMethod) -> None:
    check_mask_method(method)


class OneLayer:
    """A layer method that does well: what it lets a test change is its answer."""

    def __init__(self, change: Callable[[Choice, Tensor, Pattern], Any]) -> None:
        self.change = change

    def choose_layer(self, name: str, weight: Tensor, gram: Tensor, pattern: Pattern) -> Choice:
        mask = pattern.best_mask(weight.abs())
        result: Choice = self.change(Choice({name: mask}, {name: weight * mask}), weight, pattern)
        return result


def with_mask(change: Callable[[Tensor], Tensor]) -> Callable[[Choice, Tensor, Pattern], Choice]:
    return lambda choice, weight, pattern: Choice({name: change(mask) for name, mask in choice.masks.items()})


def with_weight(change: Callable[[Tensor], Tensor]) -> Callable[[Choice, Tensor, Pattern], Choice]:
    return lambda choice, weight, pattern: Choice(choice.masks, {n: change(w) for n, w in choice.weights.items()})


def along_outputs(choice: Choice, weight: Tensor, pattern: Pattern) -> Choice:
    """N:M along the wrong dimension, where there are enough outputs for it."""
    if isinstance(pattern, NM) and weight.shape[0] % pattern.m == 0:
        return Choice({name: pattern.best_mask(weight.abs().transpose(0, 1)).transpose(0, 1) for name in choice.masks})
    return choice


def in_place(choice: Choice, weight: Tensor, pattern: Pattern) -> Choice:
    weight.mul_(next(iter(choice.masks.values())))
    return choice


def refusing(choice: Choice, weight: Tensor, pattern: Pattern) -> Choice:
    raise ArgumentError("this method has no patterns at all")


BROKEN = {
    "an inverted mask": (with_mask(torch.logical_not), r"it removes 34 of linear; expected 14 \(True means kept\)"),
    "one too many": (with_mask(lambda m: m & (torch.arange(m.numel()).view(m.shape) > 0)), "linear; expected 14"),
    "a mask of numbers": (with_mask(lambda m: m.float()), r"the mask of linear is torch\.float32; expected bool"),
    "a flat mask": (with_mask(torch.flatten), r"the mask of linear has shape \(48,\); expected \(6, 8\)"),
    "no mask": (lambda c, w, p: Choice({}, c.weights), r"it gives masks for \[\]; expected \['linear'\]"),
    "another name": (
        lambda c, w, p: Choice(dict.fromkeys(["weight"], c.masks["linear"])),
        r"it gives masks for \['weight'\]; expected \['linear'\]",
    ),
    "another weight": (
        lambda c, w, p: Choice(c.masks, {"bias": torch.zeros(6)}),
        "it gives a weight for 'bias', which it was not asked for",
    ),
    "N:M along outputs": (along_outputs, r"conv 1:4.*groups of conv do not keep 1 of 4 input channels"),
    "weights changed in place": (in_place, "it changes the weights it is given; expected work on a copy"),
    "weights that are removed and not zero": (with_weight(lambda w: w + 1), "linear is not zero where it is removed"),
    "weights that are not finite": (with_weight(lambda w: w / 0), "its weight of linear is not finite"),
    "one weight that is not finite": (
        with_weight(lambda w: w.where(w.abs() < w.abs().max(), torch.inf)), "its weight of linear is not finite",
    ),
    "weights in double precision": (with_weight(torch.Tensor.double), r"torch\.float64 of shape \(6, 8\); expected as"),
    "weights that are flat": (with_weight(torch.flatten), r"of linear is torch\.float32 of shape \(48,\); expected as"),
    "chance": (
        with_weight(lambda w: w * torch.rand(())),
        "it answers otherwise when asked again; expected random numbers from a seed only",
    ),
    "masks alone": (lambda c, w, p: c.masks, r"it returns a dict; expected a snows\.Choice"),
    "every pattern refused": (refusing, "OneLayer: it refuses every pattern that was tried"),
}  # fmt: skip


@pytest.mark.parametrize("kind", BROKEN)
def test_broken_layer_methods_are_told_what_is_wrong(kind: str) -> None:
    change, words = BROKEN[kind]
    with pytest.raises(InputError, match=words) as caught:
        check_mask_method(OneLayer(change))
    assert str(caught.value).startswith("OneLayer")


def test_a_layer_method_may_change_nothing_and_refuse_some_patterns() -> None:
    def only_unstructured(choice: Choice, weight: Tensor, pattern: Pattern) -> Choice:
        if isinstance(pattern, NM):
            raise ArgumentError("no N:M here")
        return Choice(choice.masks)

    check_mask_method(OneLayer(only_unstructured))
    check_mask_method(OneLayer(lambda choice, weight, pattern: choice))


def test_the_gram_matrix_is_not_to_be_changed_and_reads_is_one_of_four() -> None:
    class Damps(Wanda):
        def choose_layer(self, name: str, weight: Tensor, gram: Tensor, pattern: Pattern) -> Choice:
            gram.diagonal(dim1=1, dim2=2).add_(1)
            return super().choose_layer(name, weight, gram, pattern)

    with pytest.raises(InputError, match=r"Damps \(linear 0\.3 uniform\): it changes the Gram matrix it is given"):
        check_mask_method(Damps())
    with pytest.raises(InputError, match=r"its attribute reads is 'sparse'; expected one of \('auto', 'dense', 'pru"):
        check_mask_method(Wanda(reads="sparse"))  # type: ignore[arg-type]
    odd = Damps()
    object.__setattr__(odd, "takes", "everything")
    with pytest.raises(InputError, match=r"its attribute takes is 'everything'; expected one of \('any', 'single"):
        check_mask_method(odd)


class WholeNetwork:
    def __init__(self, change: Callable[[dict[str, Tensor], Network], dict[str, Tensor]]) -> None:
        self.change = change

    def choose(self, network: Network) -> Choice:
        return Choice(self.change(Magnitude().choose(network).masks, network))


def evenly(masks: dict[str, Tensor], network: Network) -> dict[str, Tensor]:
    """One share for all, whatever their patterns say."""
    together = dict.fromkeys(masks, Unstructured(0.5, "global"))
    unstructured = not any(isinstance(pattern, NM) for pattern in network.patterns.values())
    return {n: together[n].best_mask(network.weights[n].abs()) for n in masks} if unstructured else masks


def cut_off(masks: dict[str, Tensor], network: Network) -> dict[str, Tensor]:
    """The right number in sum, but the first layer loses everything."""
    pattern = network.patterns["linear"]
    if isinstance(pattern, NM) or pattern.spread != "global":
        return masks
    gone = torch.ones(sum(mask.numel() for mask in masks.values()), dtype=torch.bool)
    gone[: round(pattern.sparsity * len(gone))] = False
    parts = gone.split([mask.numel() for mask in masks.values()])
    return {name: part.view_as(masks[name]) for name, part in zip(masks, parts, strict=True)}


def scaled_gradients(masks: dict[str, Tensor], network: Network) -> dict[str, Tensor]:
    for _, rows in network.gradients(1000):
        rows /= rows.norm()
    return masks


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (evenly, "it removes 24 of linear; expected 14"),
        (cut_off, "it removes 48 of linear; expected 0 to 45"),
        (scaled_gradients, "it changes the gradients it is given"),
        (
            lambda masks, network: {n: m for n, m in masks.items() if n != "conv"},
            "it gives masks for .*'grouped', 'lin",
        ),
    ],
)
def test_broken_network_methods_are_told_what_is_wrong(change: Any, words: str) -> None:
    with pytest.raises(InputError, match=words):
        check_mask_method(WholeNetwork(change))


def test_what_is_no_method_is_refused() -> None:
    with pytest.raises(ArgumentError, match="mask is an object; expected a name"):
        check_mask_method(object())
    with pytest.raises(ArgumentError, match="mask 'magic' is not known"):
        check_mask_method("magic")
