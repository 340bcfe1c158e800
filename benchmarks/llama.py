"""A Llama in plain PyTorch, with weights that stay in the 4-bit and 8-bit blocks of a GGUF file until they are loaded.

Layers are named as in transformers (`layers.0.self_attn.q_proj` …), and the answers are the same.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

PART_BYTES = 48 << 20  # of one file of an exported model
_CONFIG = "config.json"


@dataclass(frozen=True)
class Shape:
    vocabulary: int
    width: int
    hidden: int
    layers: int
    heads: int
    key_value_heads: int
    theta: float
    epsilon: float


class Norm(nn.Module):
    """Divides by the root mean square; written out, as its fused form has no second derivatives."""

    def __init__(self, width: int, epsilon: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.epsilon = epsilon

    def forward(self, x: Tensor) -> Tensor:
        return self.weight * (x * torch.rsqrt(x.square().mean(-1, keepdim=True) + self.epsilon))


class Attention(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.size, self.theta = shape.width // shape.heads, shape.theta
        few = shape.key_value_heads * self.size
        self.q_proj = nn.Linear(shape.width, shape.width, bias=False)
        self.k_proj = nn.Linear(shape.width, few, bias=False)
        self.v_proj = nn.Linear(shape.width, few, bias=False)
        self.o_proj = nn.Linear(shape.width, shape.width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        cos, sin = self.rotation(x)
        projections = (self.q_proj, self.k_proj, self.v_proj)
        q, k, v = (project(x).unflatten(-1, (-1, self.size)).transpose(1, 2) for project in projections)
        y = F.scaled_dot_product_attention(turn(q, cos, sin), turn(k, cos, sin), v, is_causal=True, enable_gqa=True)
        return self.o_proj(y.transpose(1, 2).flatten(2))

    def rotation(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Cosine and sine of each position's angles: tokens x size of a head."""
        steps = torch.arange(0, self.size, 2, device=x.device, dtype=torch.float32) / self.size
        places = torch.arange(x.shape[1], device=x.device, dtype=torch.float32)
        angles = torch.outer(places, self.theta**-steps).repeat(1, 2)
        return angles.cos().to(x.dtype), angles.sin().to(x.dtype)


def turn(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary positions: the first half of a head's entries are turned against the second."""
    first, second = x.chunk(2, -1)
    return x * cos + torch.cat([-second, first], -1) * sin


class MLP(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(shape.width, shape.hidden, bias=False)
        self.up_proj = nn.Linear(shape.width, shape.hidden, bias=False)
        self.down_proj = nn.Linear(shape.hidden, shape.width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class Block(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.input_layernorm = Norm(shape.width, shape.epsilon)
        self.self_attn = Attention(shape)
        self.post_attention_layernorm = Norm(shape.width, shape.epsilon)
        self.mlp = MLP(shape)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.self_attn(self.input_layernorm(x))
        return x + self.mlp(self.post_attention_layernorm(x))


class Llama(nn.Module):
    """Tokens to scores of the next one; what embeds tokens also scores them."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(shape.vocabulary, shape.width)
        self.layers = nn.ModuleList(Block(shape) for _ in range(shape.layers))
        self.norm = Norm(shape.width, shape.epsilon)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed_tokens(tokens)
        for layer in self.layers:
            x = layer(x)
        return F.linear(self.norm(x), self.embed_tokens.weight)


# Weights in blocks of 32 along their inputs. Names end in how a weight is stored.


def unpack(blocks: Mapping[str, Tensor]) -> dict[str, Tensor]:
    kinds = {"q4_1": _from_q4_1, "q8_0": _from_q8_0, "f32": lambda value: value}
    split = {name: name.rpartition(".") for name in blocks}
    return {split[name][0]: kinds[split[name][2]](value) for name, value in blocks.items()}


def _from_q4_1(rows: Tensor) -> Tensor:
    """Blocks of 20 bytes: a scale and a minimum in float16, and 16 bytes with the low halves first."""
    blocks = rows.unflatten(1, (-1, 20))
    scale, least = blocks[..., :4].contiguous().view(torch.float16).float().chunk(2, -1)
    numbers = torch.cat([blocks[..., 4:] & 15, blocks[..., 4:] >> 4], -1)
    return (scale * numbers + least).flatten(1)


def _from_q8_0(rows: Tensor) -> Tensor:
    """Blocks of 34 bytes: a scale in float16, and 32 signed numbers."""
    blocks = rows.unflatten(1, (-1, 34))
    scale = blocks[..., :2].contiguous().view(torch.float16).float()
    return (scale * blocks[..., 2:].contiguous().view(torch.int8)).flatten(1)


def build(shape: Shape, blocks: Mapping[str, Tensor]) -> Llama:
    model = Llama(shape)
    model.load_state_dict(unpack(blocks))
    return model.eval()


def save(folder: Path, shape: Shape, blocks: Mapping[str, Tensor], facts: Mapping[str, Any]) -> None:
    """config.json, and the blocks in files of moderate size."""
    parts: list[dict[str, Tensor]] = [{}]
    for name, value in blocks.items():
        if sum(v.nbytes for v in parts[-1].values()) + value.nbytes > PART_BYTES:
            parts.append({})
        parts[-1][name] = value.contiguous()
    folder.mkdir(parents=True, exist_ok=True)
    for number, part in enumerate(parts):
        place = folder / f"part{number}"
        place.mkdir(exist_ok=True)
        save_file(part, place / "model.safetensors")
    (folder / _CONFIG).write_text(json.dumps({"shape": asdict(shape), "parts": len(parts), **facts}, indent=2) + "\n")


def load(folder: Path) -> tuple[Llama, dict[str, Any]]:
    facts = json.loads((folder / _CONFIG).read_text())
    blocks: dict[str, Tensor] = {}
    for number in range(facts.pop("parts")):
        blocks |= load_file(folder / f"part{number}" / "model.safetensors")
    return build(Shape(**facts.pop("shape")), blocks), facts


def read_gguf(path: Path) -> tuple[Shape, dict[str, Tensor]]:
    """A Llama with tied embeddings, its weights as they are stored."""
    from gguf import GGUFReader

    reader = GGUFReader(path)

    def field(name: str) -> Any:
        return reader.fields[f"llama.{name}"].contents()

    heads = {"attn_q": field("attention.head_count"), "attn_k": field("attention.head_count_kv")}
    shape = Shape(
        vocabulary=field("vocab_size"), width=field("embedding_length"), hidden=field("feed_forward_length"),
        layers=field("block_count"), heads=heads["attn_q"], key_value_heads=heads["attn_k"],
        theta=field("rope.freq_base"), epsilon=field("attention.layer_norm_rms_epsilon"),
    )  # fmt: skip
    blocks = {}
    for tensor in reader.tensors:
        value = torch.from_numpy(tensor.data.copy())
        kind = tensor.name.split(".")[-2]
        if kind in heads:  # there, entries that are turned against each other are neighbours
            value = value.unflatten(0, (heads[kind], -1, 2)).transpose(1, 2).flatten(0, 2)
        blocks[f"{_own_name(tensor.name)}.{tensor.tensor_type.name.lower()}"] = value
    return shape, blocks


def _own_name(name: str) -> str:
    names = {
        "token_embd": "embed_tokens", "output_norm": "norm", "attn_norm": "input_layernorm",
        "ffn_norm": "post_attention_layernorm", "attn_q": "self_attn.q_proj", "attn_k": "self_attn.k_proj",
        "attn_v": "self_attn.v_proj", "attn_output": "self_attn.o_proj", "ffn_gate": "mlp.gate_proj",
        "ffn_up": "mlp.up_proj", "ffn_down": "mlp.down_proj", "blk": "layers",
    }  # fmt: skip
    return ".".join(names.get(part, part) for part in name.split("."))
