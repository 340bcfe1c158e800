"""The kind of a network: what defaults are chosen by."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from snows.graph.kind import NetworkKind, is_image, kind_of
from tests.graphs import Builder, random
from tests.networks import captured

PLAIN = NetworkKind(attention=False, images=False, large_inputs=False, grouped=False, layers=0)
aten = torch.ops.aten


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("mlp", replace(PLAIN, layers=3)),
        ("residual", replace(PLAIN, layers=6)),
        ("grouped", replace(PLAIN, layers=4, grouped=True)),
        ("depthwise", replace(PLAIN, layers=4, grouped=True)),
        ("attention", replace(PLAIN, layers=6, attention=True)),
    ],
)
def test_kinds_of_tiny_networks(name: str, expected: NetworkKind) -> None:
    assert kind_of(captured(name)[1]) == expected


def kind_with_inputs(*values: Tensor) -> NetworkKind:
    builder = Builder()
    for value in values:
        builder.call(aten.relu.default, builder.input(value))
    return kind_of(builder.build())


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.float16])
def test_a_large_input_is_as_large_as_an_image_of_128_pixels_in_any_dtype(dtype: torch.dtype) -> None:
    assert kind_with_inputs(torch.empty(2, 3, 128, 128, dtype=dtype)).large_inputs
    assert not kind_with_inputs(torch.empty(2, 3, 128, 127, dtype=dtype)).large_inputs
    assert not kind_with_inputs(torch.empty(2, 3, 112, 112, dtype=dtype)).large_inputs


def test_one_input_among_several_is_enough() -> None:
    kind = kind_with_inputs(random(2, 5), torch.empty(2, 3, 128, 128), torch.tensor(1.0))
    assert kind.large_inputs
    assert kind.images


@pytest.mark.parametrize(
    ("shape", "expected"),
    [
        ((2, 3, 16, 16), True), ((2, 4, 16, 40), True), ((2, 1, 40, 16), True), ((2, 5, 16, 16), False),
        ((2, 3, 15, 16), False), ((2, 3, 16, 15), False), ((2, 3, 16), False), ((2, 3, 16, 16, 16), False),
    ],
)  # fmt: skip
def test_images_are_told_by_their_shape(shape: tuple[int, ...], expected: bool) -> None:
    assert is_image(torch.empty(shape)) == expected


def test_what_is_no_image() -> None:
    assert not is_image(torch.zeros(2, 3, 16, 16, dtype=torch.int64))
    assert not is_image("an image")
    assert not is_image(None)
