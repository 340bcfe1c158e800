"""What is said about masks."""

from __future__ import annotations

import warnings

import torch

from snows import SnowsWarning
from snows.masks.given import warn_of_empty_rows


def said(**empty: int) -> list[str]:
    """The warnings for layers with so many empty rows of eight."""
    masks = {f"{name}.weight": torch.arange(8)[:, None].expand(8, 4) >= count for name, count in empty.items()}
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", SnowsWarning)
        warn_of_empty_rows(masks)
    return [str(each.message) for each in caught]


def test_empty_rows_are_one_warning_for_all_layers() -> None:
    assert said(a=0) == []
    assert said(a=0, b=2) == ["the mask of b removes every weight of 2 of its 8 outputs"]
    assert said(a=1, b=2) == ["the masks of 2 layers remove every weight of some outputs: 1 of 8 in a, 2 of 8 in b"]
    assert said(a=1, b=2, c=3, d=4, e=5) == [
        "the masks of 5 layers remove every weight of some outputs: 1 of 8 in a, 2 of 8 in b, 3 of 8 in c and in 2 more"
    ]
