"""Wrong input gets one clear sentence, doubtful input a warning."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import snows
from snows import ArgumentError, CaptureError, InputError, SnowsWarning
from tests.networks import example, make
from tests.prunes import SAMPLES, quick


def one_shot() -> Iterator[Tensor]:
    yield torch.randn(4, 6)


def broken_weights() -> nn.Module:
    model = make("mlp")
    model[2].weight[0, 0] = torch.nan
    return model


def broken_data() -> Tensor:
    x = example("mlp", SAMPLES)
    x[3, 1] = torch.inf
    return x


X = example("mlp", SAMPLES)
ERRORS: dict[str, tuple[type[Exception], str, Callable[[], Any]]] = {
    "no module": (ArgumentError, r"^model is a str; expected an nn\.Module$", lambda: snows.prune("resnet", X, "2:4")),
    "shape of the data": (
        InputError,
        r"^Sequential does not run on the data \(inputs of shape \[\(2, 5\)\]\)",
        lambda: snows.prune(make("mlp"), torch.randn(9, 5), "2:4"),
    ),
    "no batches": (InputError, "^the calibration data has no batches", lambda: snows.prune(make("mlp"), [], "2:4")),
    "no samples": (InputError, "^the calibration data has no batches", lambda: snows.prune(make("mlp"), X[:0], "2:4")),
    "one-shot generator": (InputError, "one-shot generator", lambda: snows.prune(make("mlp"), one_shot(), "2:4")),
    "no data": (InputError, "^the calibration data is an int", lambda: snows.prune(make("mlp"), 3, "2:4")),
    "a path": (InputError, "^the calibration data is a str", lambda: snows.prune(make("mlp"), "images/", "2:4")),
    "batches of numbers": (InputError, "^a calibration batch is an int", lambda: snows.prune(make("mlp"), [1], "2:4")),
    "batches without batch dimension": (
        InputError, "no tensor with a batch dimension", lambda: snows.prune(make("mlp"), [torch.tensor(1.0)], "2:4"),
    ),
    "samples of different shapes": (
        InputError,
        r"differ in the shape of their samples: \[\(5,\), \(6,\)\]",
        lambda: snows.prune(make("mlp"), [X, torch.randn(3, 5)], "2:4"),
    ),
    "batches of different structure": (
        InputError, "differ in their structure", lambda: snows.prune(make("mlp"), [X, {"input": X}], "2:4"),
    ),
    "inputs of different length": (
        InputError,
        r"have \[3, 4\] samples",
        lambda: snows.prune(
            make("two-inputs"), {"image": torch.randn(3, 2, 3, 3), "number": torch.randn(4, 3)}, "2:4"
        ),
    ),
    "unknown keyword": (
        InputError, "has the keys pixels, which the model's forward does not take",
        lambda: snows.prune(make("mlp"), {"pixels": X}, "2:4"),
    ),
    "NaN in the weights": (
        InputError, r"^the model's weights contain NaN or infinity \(in 2\.weight\)",
        lambda: snows.prune(broken_weights(), X, "2:4"),
    ),
    "infinity in the data": (
        InputError, "^the calibration data contains NaN or infinity",
        lambda: snows.prune(make("mlp"), broken_data(), "2:4"),
    ),
    "pattern that fits no layer": (
        InputError, "^no layer can be pruned: .*no multiple of 16", lambda: snows.prune(make("mlp"), X, "2:16"),
    ),
    "nothing between first and last": (
        InputError,
        "^no layer can be pruned: .*name it in layers= to prune it",
        lambda: snows.prune(nn.Linear(6, 2).double().eval(), X, "2:4"),
    ),
    "pattern of an unknown layer": (
        ArgumentError, "^the pattern for 'fc9' fits no layer; the layers are 0, 2, 4",
        lambda: snows.prune(make("mlp"), X, {"*": "2:4", "fc9": "1:4"}),
    ),
    "malformed pattern": (ArgumentError, "^pattern '5:4'", lambda: snows.prune(make("mlp"), X, "5:4")),
    "no pattern": (ArgumentError, "^no pattern is given", lambda: snows.prune(make("mlp"), X)),
    "unknown layer": (
        ArgumentError, r"^layers='head\*' fits no layer; the layers are 0, 2, 4",
        lambda: snows.prune(make("mlp"), X, "2:4", layers="head*"),
    ),
    "empty layers": (ArgumentError, "^layers is empty", lambda: snows.prune(make("mlp"), X, "2:4", layers=[])),
    "unknown mask": (
        ArgumentError, "^mask 'fisher' is not known", lambda: snows.prune(make("mlp"), X, "2:4", mask="fisher"),
    ),
    "a mask that is nothing": (ArgumentError, "^mask is a float", lambda: snows.prune(make("mlp"), X, "2:4", mask=0.5)),
    "weights without zeros": (
        InputError, "^mask='weights', but no weight of the model is zero",
        lambda: snows.prune(make("mlp"), X, mask="weights"),
    ),
    "mask of a wrong shape": (
        InputError, r"^the mask of '2' has shape \(8, 4\); the weight has shape \(8, 8\)",
        lambda: snows.prune(make("mlp"), X, mask={"2": torch.ones(8, 4, dtype=torch.bool)}),
    ),
    "mask of other values": (
        ArgumentError, r"^the mask of '2' is torch\.float32 with values other than 0 and 1; expected a bool tensor",
        lambda: snows.prune(make("mlp"), X, mask={"2": torch.full((8, 8), 0.5)}),
    ),
    "mask of an unknown layer": (
        ArgumentError, "^the mask names 'fc9', which is no layer of the model",
        lambda: snows.prune(make("mlp"), X, mask={"fc9": torch.ones(8, 8, dtype=torch.bool)}),
    ),
    "mask of a tied layer": (
        InputError, "^the mask names 'twice', which cannot be pruned: its weight is used in 2 places",
        lambda: snows.prune(make("tied"), X[:, :5], mask={"twice": torch.ones(4, 4, dtype=torch.bool)}),
    ),
    "no masks": (ArgumentError, "^the given mask is empty", lambda: snows.prune(make("mlp"), X, mask={})),
    "unknown recipe": (
        ArgumentError, "^recipe 'best' is not known", lambda: snows.prune(make("mlp"), X, "2:4", recipe="best"),
    ),
    "unknown solver": (ArgumentError, "^solver is 'adam'", lambda: snows.prune(make("mlp"), X, "2:4", solver="adam")),
    "negative horizon": (
        ArgumentError, "^recipe: horizon is -1; expected a whole number of at least 0",
        lambda: snows.prune(make("mlp"), X, "2:4", horizon=-1),
    ),
    "unknown choice of a recipe": (
        ArgumentError, "^recipe: unknown choice steps; known are horizon", lambda: snows.Recipe().replace(steps=3),
    ),
    "wrong choice of a recipe": (
        ArgumentError, "^recipe: targets is 'dense'; expected one of", lambda: snows.Recipe(targets="dense"),
    ),
    "unknown device": (
        ArgumentError, "^device 'gpu' is not known", lambda: snows.prune(make("mlp"), X, "2:4", device="gpu"),
    ),
    "a device that is not there": (
        InputError, "^the model cannot be moved to the device",
        lambda: snows.prune(make("mlp"), X, "2:4", device="cuda:99"),
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", ERRORS)
def test_wrong_input_gets_one_clear_sentence(case: str) -> None:
    kind, words, call = ERRORS[case]
    with pytest.raises(kind, match=words) as caught:
        call()
    assert "\n" not in str(caught.value)
    assert type(caught.value) is kind


def test_a_model_that_cannot_be_captured_is_said_so() -> None:
    class Branching(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc = nn.Linear(6, 6)

        def forward(self, x: Tensor) -> Tensor:
            return self.fc(x) if x.mean() > 0 else x

    with pytest.raises(CaptureError, match=r"^Branching cannot be captured by torch\.export"):
        snows.prune(Branching().eval(), X.float(), "2:4")


WARNINGS: dict[str, tuple[str, Callable[[], Any]]] = {
    "unnormalized images": (
        "look unnormalized",
        lambda: snows.prune(make("conv-bn"), torch.rand(6, 2, 4, 4) * 255, "2:4", solver=None, progress=False),
    ),
    "a row without weights": (
        "the mask of 2 removes every weight of 1 of its 8 outputs",
        lambda: quick("mlp", mask={"2": torch.arange(8)[:, None].expand(8, 8) > 0}),
    ),
    "an exclusion that fits nothing": ("exclude='fc9' fits no layer", lambda: quick("mlp", "2:4", exclude="fc9")),
}


@pytest.mark.parametrize("case", WARNINGS)
def test_warnings_are_given_and_kept_in_the_report(case: str) -> None:
    words, call = WARNINGS[case]
    with pytest.warns(SnowsWarning, match=words):
        result = call()
    assert any(words in warning for warning in result.report.warnings)


def test_what_is_no_image_is_not_mirrored() -> None:
    with pytest.raises(snows.ArgumentError, match="mirror is for images"):
        snows.prune(make("mlp"), example("mlp", 20), "2:4", recipe=snows.Recipe(mirror=True), progress=False)
    with pytest.raises(snows.ArgumentError, match="expected one of 'auto', False, True"):
        snows.Recipe(mirror="yes")  # type: ignore[arg-type]
