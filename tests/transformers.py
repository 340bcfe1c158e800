"""Tiny transformers without libraries: a causal language model, and vision transformers in several spellings."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

VOCABULARY = 24
WIDTH, HEADS = 16, 2


class Attention(nn.Module):
    """Self-attention, fused (`sdpa`), with a softmax of its own (`matmul`), or on samples and heads at once (`bmm`)."""

    def __init__(self, spelling: str, causal: bool = False) -> None:
        super().__init__()
        self.spelling, self.causal = spelling, causal
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH)
        self.out = nn.Linear(WIDTH, WIDTH)

    def split(self, x: Tensor) -> tuple[Tensor, ...]:
        """Query, key and value: samples x heads x tokens x width of a head."""
        return self.qkv(x).unflatten(-1, (3, HEADS, WIDTH // HEADS)).permute(2, 0, 3, 1, 4).unbind(0)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.split(x)
        if self.spelling == "sdpa":
            y = F.scaled_dot_product_attention(q, k, v, is_causal=self.causal)
        elif self.spelling == "matmul":
            y = (q @ k.mT * q.shape[-1] ** -0.5).softmax(-1) @ v
        else:
            q, k, v = (value.flatten(0, 1) for value in (q, k, v))
            y = torch.bmm(torch.bmm(q * q.shape[-1] ** -0.5, k.mT).softmax(-1), v).unflatten(0, (-1, HEADS))
        return self.out(y.transpose(1, 2).flatten(2))


class Block(nn.Module):
    def __init__(self, spelling: str, causal: bool = False) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.attention = Attention(spelling, causal)
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 2 * WIDTH), nn.GELU(), nn.Linear(2 * WIDTH, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm1(x))
        return x + self.mlp(self.norm2(x))


class Vision(nn.Module):
    """Patches of 4 x 4 pixels behind `prefix` tokens of its own, the first of which is classified."""

    def __init__(self, spelling: str = "sdpa", prefix: int = 1, height: int = 8, width: int = 12) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, WIDTH, 4, stride=4)
        self.prefix = nn.Parameter(torch.randn(1, prefix, WIDTH)) if prefix else None
        self.positions = nn.Parameter(torch.randn(1, prefix + (height // 4) * (width // 4), WIDTH))
        self.blocks = nn.Sequential(Block(spelling), Block(spelling))
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, 3)

    def features(self, x: Tensor) -> Tensor:
        return self.norm(self.blocks(self.tokens(x)))[:, 0]

    def tokens(self, x: Tensor) -> Tensor:
        x = self.patches(x).flatten(2).mT
        if self.prefix is not None:
            x = torch.cat([self.prefix.expand(x.shape[0], -1, -1), x], 1)
        return x + self.positions

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.features(x))


class Language(nn.Module):
    """Two causal blocks; the output projection is the embedding."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.positions = nn.Parameter(0.3 * torch.randn(1, 16, WIDTH))
        self.dropout = nn.Dropout(0.5)
        self.blocks = nn.Sequential(Block("sdpa", causal=True), Block("sdpa", causal=True))
        self.norm = nn.LayerNorm(WIDTH)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.dropout(self.embedding(tokens) + self.positions[:, : tokens.shape[1]])
        return F.linear(self.norm(self.blocks(x)), self.embedding.weight)


def build(kind: type[nn.Module], *arguments: object, **options: object) -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return kind(*arguments, **options).eval()


def token_samples(samples: int, length: int = 12, seed: int = 1) -> Tensor:
    return torch.randint(0, VOCABULARY, (samples, length), generator=torch.Generator().manual_seed(seed))


def images(samples: int, height: int = 8, width: int = 12, seed: int = 1) -> Tensor:
    return torch.randn(samples, 3, height, width, generator=torch.Generator().manual_seed(seed))
