"""Every function that runs a model or fills it refuses one that it cannot run or fill, in the same words."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import snows
from snows import InputError
from tests.integration.test_prune_odd import MODELS, X, network, replaced, with_buffer, with_weight

Y = torch.arange(24) % 4
QUIET: dict[str, Any] = {"progress": False}
Verb = Callable[[nn.Module, Path], Any]


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    result = snows.prune(network(), X, "2:4", layers="2", solver=None, progress=False)
    return result.save(tmp_path_factory.mktemp("saved") / "out")


def export(model: nn.Module, saved: Path) -> Any:
    return snows.export(saved, "safetensors", model, out=saved.parent / "exported", force=True)


def retrain(teacher: nn.Module, saved: Path) -> Any:
    return snows.retrain(saved, X, model=network(), teacher=teacher, epochs=1, held_out=0.5, **QUIET)


RUN: dict[str, Verb] = {
    "evaluate": lambda model, _: snows.evaluate(model, X, Y),
    "evaluate, dense": lambda model, _: snows.evaluate(network(), X, Y, dense=model),
    "linear_probe": lambda model, _: snows.linear_probe(model, X, Y, X, Y),
    "retrain, teacher": retrain,
}
PRUNE: dict[str, Verb] = {
    "prune": lambda model, _: snows.prune(model, X, "2:4", **QUIET),
    "inspect": lambda model, _: snows.inspect(model, X),
    "sensitivity": lambda model, _: snows.sensitivity(model, X, "2:4", **QUIET),
    "compare": lambda model, _: snows.compare(model, X, "2:4", "magnitude", test=X, **QUIET),
}
FILL: dict[str, Verb] = {
    "load": lambda model, saved: snows.load(saved, model),
    "verify": lambda model, saved: snows.verify(saved, model),
    "export": export,
    "bench": lambda model, saved: snows.bench(saved, model, batches=[1], engines=[], limit=1, **QUIET),
}
FREEZE: dict[str, Verb] = {"freeze": lambda model, saved: snows.freeze(model, saved)}
ALL = {**RUN, **PRUNE, **FILL, **FREEZE}

EMPTY = ("meta", "one weight on meta", "a buffer on meta", "lazy")
WRAPPED = ("DataParallel", "DataParallel inside", "torch.compile")


@pytest.mark.parametrize("case", EMPTY)
@pytest.mark.parametrize("verb", ALL)
def test_a_model_without_values_is_refused(verb: str, case: str, saved: Path) -> None:
    """torch computes with such tensors, and fills them, without a word."""
    words, make = MODELS[case]
    words = words.replace("the model", "the (model|dense network|teacher)")
    with pytest.raises(InputError, match=words) as refused:
        ALL[verb](make(), saved)
    assert "run the model once on a batch" in str(refused.value) or "on the CPU or a GPU" in str(refused.value)


@pytest.mark.filterwarnings("ignore")  # torch's own
@pytest.mark.parametrize("case", WRAPPED)
@pytest.mark.parametrize("verb", {**PRUNE, **FILL})
def test_a_wrapped_model_is_refused_with_the_name_of_the_module_inside(verb: str, case: str, saved: Path) -> None:
    words, make = MODELS[case]
    with pytest.raises(InputError, match=words):
        ALL[verb](make(), saved)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("case", ["torch.jit", "torch.jit inside"])
@pytest.mark.parametrize("verb", ["compare", "export", "bench", "freeze", "retrain, teacher"])
def test_a_model_of_torch_jit_is_refused(verb: str, case: str, saved: Path) -> None:
    words, make = MODELS[case]
    with pytest.raises(InputError, match=words.replace("the model", "the (model|teacher)")):
        ALL[verb](make(), saved)


@pytest.mark.filterwarnings("ignore")
def test_a_forward_without_a_signature_is_refused() -> None:
    with pytest.raises(InputError, match=r"has no signature, as after torch\.jit\.trace; give the module that it was"):
        snows.evaluate(MODELS["torch.jit"][1](), X, Y)


def holding(value: Any) -> nn.Module:
    model = network()
    model.cache = value
    return model


COPYING = {**PRUNE, **FILL, "retrain, teacher": retrain}
del COPYING["load"]  # it fills the model that it was given


@pytest.mark.parametrize("verb", COPYING)
def test_a_model_that_cannot_be_copied_is_refused(verb: str, saved: Path) -> None:
    with pytest.raises(InputError, match=r"^Sequential cannot be copied \(cannot pickle .*\); take out what keeps"):
        ALL[verb](holding(threading.Lock()), saved)


@pytest.mark.parametrize("verb", sorted(COPYING.keys() - {"bench"}))
def test_a_tensor_that_a_forward_left_behind_is_copied(verb: str, saved: Path) -> None:
    """deepcopy refuses tensors that were computed."""
    left = network()(X)
    assert not left.is_leaf
    ALL[verb](holding(left), saved)


@pytest.mark.filterwarnings("ignore")  # nested tensors of this layout are a prototype
def test_what_cannot_be_filled_is_said(saved: Path) -> None:
    nested = with_buffer(torch.nested.nested_tensor([torch.ones(2), torch.ones(3)], layout=torch.strided))
    with pytest.raises(InputError, match="table of Sequential is a nested tensor; nothing can be loaded into it"):
        snows.load(saved, nested)


def test_what_cannot_be_trained_is_not_frozen(saved: Path) -> None:
    with torch.inference_mode():
        fixed = network()
    with pytest.raises(InputError, match=r"^'2.weight' was made in torch\.inference_mode"):
        snows.freeze(fixed, saved)
    with pytest.raises(InputError, match=r"^'2.weight' is torch\.float8_e4m3fn; expected a weight that can be trained"):
        snows.freeze(with_weight(lambda weight: weight.to(torch.float8_e4m3fn)), saved)
    with pytest.raises(InputError, match=r"^'2.weight' is sparse \(.*\); expected a dense weight that can be trained"):
        snows.freeze(with_weight(lambda weight: weight.to_sparse()), saved)
    with pytest.raises(InputError, match=r"^the submodule 2 of the model is compiled by torch\.jit"):
        snows.unfreeze(replaced(lambda layer: torch.jit.script(layer)))


def test_a_teacher_may_have_another_precision(saved: Path) -> None:
    same, double = retrain(network(), saved), retrain(network().double(), saved)
    assert torch.allclose(double.model[2].weight, same.model[2].weight, atol=1e-6)
