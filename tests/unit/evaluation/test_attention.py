"""Attention maps against the weights that a module's own attention has."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from snows import InputError, attention_map
from tests.transformers import HEADS, Language, Vision, build, images, token_samples


def watched(model: nn.Module, module: nn.Module, x: Tensor) -> Tensor:
    """What the module is given."""
    seen: list[Tensor] = []
    handle = module.register_forward_pre_hook(lambda _, arguments: seen.append(arguments[0].detach()))
    with torch.no_grad():
        model(x)
    handle.remove()
    return seen[0]


def by_hand(model: Any, x: Tensor, prefix: int) -> list[list[list[float]]]:
    """heads x rows x columns, one number at a time."""
    last = model.blocks[-1].attention
    q, k, _ = (value[0].detach() for value in last.split(watched(model, last, x)))
    maps = []
    for head in range(HEADS):
        scores = [float(q[head, 0] @ key) / math.sqrt(q.shape[-1]) for key in k[head]]
        shares = [math.exp(score) / sum(map(math.exp, scores)) for score in scores][prefix:]
        maps.append([shares[row * 3 : row * 3 + 3] for row in range(2)])
    return maps


@pytest.mark.parametrize("spelling", ["sdpa", "matmul", "bmm"])
@pytest.mark.parametrize("prefix", [1, 3])
def test_the_class_token_s_attention_in_the_last_attention(spelling: str, prefix: int) -> None:
    model, x = build(Vision, spelling, prefix), images(1)
    found = attention_map(model, x[0])
    assert found.shape == (HEADS, 2, 3)
    torch.testing.assert_close(found, torch.tensor(by_hand(model, x, prefix)), rtol=1e-4, atol=1e-6)
    assert torch.equal(attention_map(model, x), found)


class Packed(nn.Module):
    """torch's own attention, on patches that no convolution cuts."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Linear(3 * 16, 16)
        self.token = nn.Parameter(torch.randn(1, 1, 16))
        self.attention = nn.MultiheadAttention(16, 4, batch_first=True)
        self.head = nn.Linear(16, 2)

    def tokens(self, x: Tensor) -> Tensor:
        patches = x.unfold(2, 4, 4).unfold(3, 4, 4).permute(0, 2, 3, 1, 4, 5).flatten(3).flatten(1, 2)
        return torch.cat([self.token.expand(x.shape[0], -1, -1), self.embed(patches)], 1)

    def forward(self, x: Tensor) -> Tensor:
        x = self.tokens(x)
        return self.head(self.attention(x, x, x, need_weights=False)[0][:, 0])


def test_packed_projections_and_patches_without_a_convolution() -> None:
    model, x = build(Packed), images(1, 8, 16)
    with torch.no_grad():
        tokens = model.tokens(x)
        weights = model.attention(tokens, tokens, tokens, average_attn_weights=False)[1]
    torch.testing.assert_close(attention_map(model, x[0]), weights[0, :, 0, 1:].unflatten(1, (2, 4)))


def test_the_model_is_left_as_it_was() -> None:
    model = build(Vision)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    attention_map(model, images(1)[0])
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert all(parameter.requires_grad for parameter in model.parameters())


@pytest.mark.parametrize(
    ("words", "call"),
    [
        ("the image has shape (2, 3, 8, 12); expected one", lambda: attention_map(build(Vision), images(2))),
        ("the image has shape (1, 12); expected one", lambda: attention_map(build(Language), token_samples(1))),
        (
            "Sequential has no attention; expected a vision transformer",
            lambda: attention_map(nn.Sequential(nn.Conv2d(3, 2, 3), nn.Flatten()).eval(), images(1)),
        ),
        (
            "the last attention is over 6 tokens, which are no class token",
            lambda: attention_map(build(Vision, "sdpa", 0), images(1)),
        ),
    ],
)
def test_wrong_input_gets_one_sentence(words: str, call: Any) -> None:
    with pytest.raises(InputError) as caught:
        call()
    assert str(caught.value).startswith(words)
