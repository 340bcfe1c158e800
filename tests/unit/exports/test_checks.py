"""Whether removed weights are found to be zero in what a format wrote."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import snows
from snows.errors import InputError
from snows.exports import formats
from snows.exports.base import Saved, Written
from snows.exports.checks import check_zeros
from tests.exported import QUICK, seeded

KEPT = torch.tensor([[True, False, True], [False, True, True]])


def saved(*weights: Tensor) -> Saved:
    model = nn.Sequential(*[nn.Linear(3, 2, bias=False) for _ in weights])
    for layer, weight in zip(model, weights, strict=True):
        layer.weight = nn.Parameter(weight)
    return Saved(Path(), model, {f"{i}.weight": KEPT for i in range(len(weights))}, ((), {}))


def check(model: Saved, **constants: Tensor) -> int:
    return check_zeros(model, Written(None, constants), "the file")


ONE, OTHER = KEPT * 1.0, KEPT * 2.0
NOTHING = torch.zeros(2, 3)
MISSING = r"the file holds no weight with the zeros of \d.weight"


def test_constants_under_other_names_and_in_other_orders() -> None:
    assert check(saved(ONE), renamed=ONE) == 2
    assert check(saved(ONE), transposed=ONE.T.contiguous()) == 2
    assert check(saved(ONE, OTHER), b=OTHER.T, a=ONE) == 4


@pytest.mark.parametrize("constant", [torch.ones(2, 3), torch.zeros(2, 3), torch.ones(6), KEPT[:1] * 1.0, ONE.flip(1)])
def test_a_lost_zero_is_noticed(constant: Tensor) -> None:
    with pytest.raises(InputError, match=MISSING):
        check(saved(ONE), w=constant)


def test_a_weight_of_which_nothing_is_left() -> None:
    assert check(saved(NOTHING), w=NOTHING) == 2
    assert check(saved(NOTHING, ONE, NOTHING), v=ONE, w=NOTHING) == 6
    with pytest.raises(InputError, match=MISSING):
        check(saved(NOTHING), w=ONE)


def test_equal_weights_may_be_stored_once_and_others_not() -> None:
    assert check(saved(ONE, ONE.clone()), w=ONE) == 4
    with pytest.raises(InputError, match=MISSING):
        check(saved(ONE, OTHER), w=ONE)


class Attention(nn.Module):
    """A packed query, key and value as torch has it, a layer twice, and one of which nothing is kept."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Linear(8, 32)
        self.attention = nn.MultiheadAttention(32, 4, batch_first=True)
        self.encoder = nn.TransformerEncoderLayer(32, 4, 64, dropout=0.0, batch_first=True)
        self.gone, self.one, self.same = nn.Linear(32, 32), nn.Linear(32, 32), nn.Linear(32, 32)
        self.head = nn.Linear(32, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x)
        x = x + self.attention(x, x, x, need_weights=False)[0]
        x = torch.relu(self.gone(self.encoder(x))) + x
        return self.head(self.same(torch.relu(self.one(x))).mean(1))


def attention() -> nn.Module:
    model = seeded(Attention())
    model.same.load_state_dict(model.one.state_dict())
    return model


@pytest.fixture(scope="module")
def pruned(tmp_path_factory: pytest.TempPathFactory) -> Path:
    model, x = attention(), torch.randn(16, 6, 8, generator=torch.Generator().manual_seed(0))
    masks = snows.prune(model, x, "2:4", layers="*", solver=None, recipe=QUICK, progress=False).masks
    masks["gone.weight"] = torch.zeros_like(masks["gone.weight"])
    assert "attention.in_proj_weight" in masks
    with pytest.warns(snows.SnowsWarning, match="the mask of gone removes every weight"):
        result = snows.prune(model, x, mask=masks, solver=None, recipe=QUICK, progress=False)
    return result.save(tmp_path_factory.mktemp("results") / "pruned")


@pytest.mark.parametrize("name", [name for name in formats.FORMATS if name != "hf"])
def test_attention_of_torch_in_every_format(name: str, pruned: Path, tmp_path: Path) -> None:
    if missing := formats.FORMATS[name].missing:
        pytest.skip(f"{missing[0]} is not installed")
    exported = snows.export(pruned, name, attention(), out=tmp_path / "out")
    assert exported.removed == sum(int((~mask).sum()) for mask in snows.load_masks(pruned).values())
    if name == "torch-2:4":  # what the fast path of torch computes without calling the layers takes no packed weights
        assert exported.facts["pack"] == ["gone.weight", "one.weight", "same.weight"]
        inside = ("attention.out_proj", "encoder.self_attn.out_proj", "encoder.linear1", "encoder.linear2")
        reasons = {exported.facts["dense"][f"{layer}.weight"] for layer in inside}
        assert reasons == {"its module is not called with one tensor"}
