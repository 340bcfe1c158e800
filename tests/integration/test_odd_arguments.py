"""Arguments of a wrong type, or of odd values, to every function: refused in a sentence that says what is expected."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import snows
from snows import ArgumentError, InputError

X = torch.randn(24, 8, generator=torch.Generator().manual_seed(0))
Y = torch.arange(24) % 4
MASKS = {"2.weight": torch.ones(8, 8, dtype=torch.bool)}
SPARSE, META, BITS = X.to_sparse(), X.to("meta"), torch.zeros(8, 8, dtype=torch.uint8).view(torch.bits8)
Call = Callable[[nn.Module, Path], Any]


def network() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 4)).eval()


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    result = snows.prune(network(), X, "2:4", solver=None, progress=False)
    return result.save(tmp_path_factory.mktemp("saved") / "out")


NO_FOLDERS: dict[str, tuple[str, Callable[[Any, Path], Any]]] = {
    "load": ("directory", lambda given, saved: snows.load(given, network())),
    "load_masks": ("directory", lambda given, saved: snows.load_masks(given)),
    "verify": ("directory", lambda given, saved: snows.verify(given)),
    "export": ("directory", lambda given, saved: snows.export(given, "safetensors")),
    "export to": ("out", lambda given, saved: snows.export(saved, "safetensors", network(), out=given)),
    "bench": ("directory", lambda given, saved: snows.bench(given, progress=False)),
    "compare": ("out", lambda given, saved: snows.compare(network(), X, "2:4", "magnitude", test=X, out=given)),
    "retrain": ("resume", lambda given, saved: retrain(saved, resume=given)),
    "save": ("directory", lambda given, saved: snows.prune(network(), X, "2:4", **QUICK).save(given)),
}
QUICK: dict[str, Any] = {"solver": None, "progress": False}


def retrain(pruned: Any, **options: Any) -> snows.Result:
    options = {"data": (X, Y), "model": network(), "epochs": 1, "progress": False, **options}
    return snows.retrain(pruned, options.pop("data"), **options)


@pytest.mark.parametrize("given", [5, True, b"x", "", ["a"]])
@pytest.mark.parametrize("verb", NO_FOLDERS)
def test_what_is_no_path_is_refused(verb: str, given: Any, saved: Path) -> None:
    name, call = NO_FOLDERS[verb]
    with pytest.raises(ArgumentError, match=f"^{name} is .*; expected the path of a folder$"):
        call(given, saved)


@pytest.mark.parametrize("given", [5, torch.ones(2), b"x", object(), nn.Linear])
def test_what_is_no_module_is_refused(given: Any, saved: Path, tmp_path: Path) -> None:
    for call in (
        lambda: snows.load(saved, given), lambda: snows.verify(saved, given), lambda: retrain(saved, model=given),
        lambda: snows.export(saved, "safetensors", given, out=tmp_path / "out"), lambda: snows.freeze(given, MASKS),
        lambda: snows.unfreeze(given), lambda: snows.evaluate(given, X, Y), lambda: snows.inspect(given, X),
        lambda: snows.sensitivity(given, X), lambda: snows.linear_probe(given, X, Y, X, Y),
        lambda: snows.compare(given, X, "2:4", "magnitude"),
    ):  # fmt: skip
        with pytest.raises(ArgumentError, match=r"^model is an? .*; expected an nn\.Module$"):
            call()
    with pytest.raises(ArgumentError, match=r"^teacher is an? .*; expected an nn\.Module$"):
        retrain(saved, teacher=given)


ODD: dict[str, tuple[type[Exception], str, Call]] = {
    "labels by number": (ArgumentError, "^labels are an int; expected", lambda m, s: snows.evaluate(m, X, 5)),
    "labels in a dict": (ArgumentError, "^labels are a dict; expected", lambda m, s: snows.evaluate(m, X, {"a": 1})),
    "labels on meta": (ArgumentError, "^labels are a tensor that is without", lambda m, s: snows.evaluate(m, X, META)),
    "a batch of tensors": (ArgumentError, "^batch is tensor", lambda m, s: snows.evaluate(m, X, Y, batch=X)),  # type: ignore[arg-type]
    "a batch of none": (ArgumentError, "^batch is 0; expected a whole", lambda m, s: snows.evaluate(m, X, Y, batch=0)),
    "other scores": (
        InputError, r"^the dense scores are torch\.float32 of shape \(24, 8\)", lambda m, s: snows.evaluate(m, X, Y, X),
    ),
    "scores that are bools": (
        InputError, r"^the dense scores are torch\.bool", lambda m, s: snows.evaluate(m, X, Y, X[:, :4] > 0),
    ),
    "sparse scores": (ArgumentError, "^dense is a Tensor", lambda m, s: snows.evaluate(m, X, Y, SPARSE)),
    "samples in a list": (ArgumentError, "^samples is", lambda m, s: snows.inspect(m, X, samples=[1])),  # type: ignore[arg-type]
    "sparse samples": (ArgumentError, "^train is sparse", lambda m, s: snows.linear_probe(m, SPARSE, Y, X, Y)),
    "samples that are none": (ArgumentError, "^test is an int", lambda m, s: snows.linear_probe(m, X, Y, 5, Y)),  # type: ignore[arg-type]
    "other test samples": (
        InputError, "expected the same kind and shape", lambda m, s: snows.linear_probe(m, X, Y, X[:, :5], Y),
    ),
    "a mask on meta": (
        InputError, "^the mask of '2.weight' is without values",
        lambda m, s: snows.freeze(m, {"2.weight": torch.ones(8, 8, device="meta")}),
    ),
    "a mask of bits": (
        InputError, r"^the mask of '2.weight' is torch\.bits8", lambda m, s: snows.freeze(m, {"2.weight": BITS}),
    ),
    "a rate of hundreds of digits": (ArgumentError, "^lr is 10+; expected", lambda m, s: retrain(s, lr=10**400)),
    "flip in a word": (ArgumentError, "^flip is 'no'; expected True or False", lambda m, s: retrain(s, flip="no")),
    "a format that is a list": (
        ArgumentError, r"^the format \['onnx'\] is not known", lambda m, s: snows.export(s, ["onnx"]),  # type: ignore[arg-type]
    ),
    "trust in a word": (ArgumentError, "^trust is 'no'", lambda m, s: snows.load(s, m, trust="no")),  # type: ignore[arg-type]
    "force in a word": (ArgumentError, "^force is 'no'", lambda m, s: snows.export(s, "hf", m, force="no")),  # type: ignore[arg-type]
    "a seed of a comparison": (
        ArgumentError, "^seed is", lambda m, s: snows.compare(m, X, "2:4", "magnitude", test=X, seed=range(3)),  # type: ignore[arg-type]
    ),
    "a limit of none": (ArgumentError, "^limit is None; expected", lambda m, s: snows.bench(s, m, limit=None)),  # type: ignore[arg-type]
    "labels of a comparison on meta": (
        InputError, "^a tensor of the data is without values",
        lambda m, s: snows.compare(m, [(X, META)], "2:4", "magnitude", test=X, progress=False),
    ),
    "a device of bits": (ArgumentError, "^device a? ?.*is not known", lambda m, s: snows.inspect(m, X, device=BITS)),  # type: ignore[arg-type]
}  # fmt: skip


@pytest.mark.parametrize("case", ODD)
def test_odd_arguments_are_refused_in_a_sentence(case: str, saved: Path) -> None:
    kind, words, call = ODD[case]
    with pytest.raises(kind, match=words):
        call(network(), saved)
