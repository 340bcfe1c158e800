"""Real architectures as ONNX and in OpenVINO: the same outputs to 1e-4 at three batch sizes, zeros kept."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import snows
from tests.libraries import library

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


class UNet(nn.Module):
    """Two levels down and up again, with skips, transposed convolutions and group norms."""

    def __init__(self) -> None:
        super().__init__()
        self.down1, self.down2 = self._block(4, 16), self._block(16, 32)
        self.middle = self._block(32, 64)
        self.grow2, self.up2 = nn.ConvTranspose2d(64, 32, 2, 2), self._block(64, 32)
        self.up1, self.last = self._block(48, 16), nn.Conv2d(16, 2, 1)

    @staticmethod
    def _block(inputs: int, outputs: int) -> nn.Sequential:
        first = [nn.Conv2d(inputs, outputs, 3, padding=1), nn.GroupNorm(4, outputs), nn.SiLU()]
        return nn.Sequential(*first, nn.Conv2d(outputs, outputs, 3, padding=1), nn.BatchNorm2d(outputs), nn.ReLU())

    def forward(self, x: Tensor) -> Tensor:
        a = self.down1(x)
        b = self.down2(F.max_pool2d(a, 2))
        y = self.up2(torch.cat([self.grow2(self.middle(F.max_pool2d(b, 2))), b], 1))
        y = F.interpolate(y, scale_factor=2, mode="bilinear", align_corners=False)
        return self.last(self.up1(torch.cat([y, a], 1)))


def tokens(samples: int) -> Tensor:
    return torch.randint(0, 64, (samples, 12))


def plain_llama() -> nn.Module:
    llama = importlib.import_module("llama")
    return llama.Llama(llama.Shape(64, 32, 64, 2, 4, 2, 10000.0, 1e-5))


def llama_of_transformers() -> nn.Module:
    transformers = library("transformers")
    config = transformers.LlamaConfig(
        vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=32, bos_token_id=1, eos_token_id=2, use_cache=False,
    )  # fmt: skip
    return transformers.LlamaForCausalLM(config)


def of_benchmarks(name: str) -> Callable[[], nn.Module]:
    return lambda: getattr(importlib.import_module("networks"), name)()


QUICK: dict[str, tuple[Callable[[], nn.Module], Callable[[int], Any]]] = {
    "resnet20": (of_benchmarks("ResNet20"), lambda n: torch.randn(n, 3, 32, 32)),
    "unet": (UNet, lambda n: torch.randn(n, 4, 16, 16)),
    "llama": (plain_llama, tokens),
}
SLOW: dict[str, tuple[Callable[[], nn.Module], Callable[[int], Any]]] = {
    "resnet50": (of_benchmarks("ResNet50"), lambda n: torch.randn(n, 3, 96, 96)),
    "mobilenet": (of_benchmarks("MobileNetV1"), lambda n: torch.randn(n, 3, 96, 96)),
    "vit": (of_benchmarks("ViT"), lambda n: torch.randn(n, 3, 224, 224)),
    "llama-of-transformers": (llama_of_transformers, tokens),
}


def exported(name: str, to: str, place: Path, monkeypatch: pytest.MonkeyPatch) -> snows.Exported:
    """A network with random weights, half of them removed by magnitude, exported."""
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    make, inputs = {**QUICK, **SLOW}[name]
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = make().eval()
        for module in model.modules():  # outputs that are not all alike
            if isinstance(module, nn.BatchNorm2d):
                module.running_var.uniform_(0.5, 1.5)
                module.running_mean.normal_(0, 0.1)
        result = snows.prune(model, inputs(8), 0.5, solver=None, progress=False)
        result.save(place / "pruned")
    for module in ("networks", "llama"):
        sys.modules.pop(module, None)
    return snows.export(place / "pruned", to, model)


def check(found: snows.Exported) -> None:
    assert max(found.differences.values()) <= 1e-4
    assert set(found.differences) == {1, 2, 3}
    assert found.removed > 0


@pytest.mark.parametrize("to", ["onnx", "openvino"])
@pytest.mark.parametrize("name", QUICK)
def test_small_networks(name: str, to: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    check(exported(name, to, tmp_path, monkeypatch))


@pytest.mark.slow
@pytest.mark.filterwarnings(r"ignore:::transformers(\..*)?$")
@pytest.mark.parametrize("to", ["onnx", "openvino"])
@pytest.mark.parametrize("name", SLOW)
def test_large_networks(name: str, to: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    check(exported(name, to, tmp_path, monkeypatch))


@pytest.mark.slow
@pytest.mark.filterwarnings(r"ignore:::transformers(\..*)?$")
def test_a_folder_for_from_pretrained(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = exported("llama-of-transformers", "hf", tmp_path, monkeypatch)
    check(found)
    assert {"config.json", "model.safetensors"} <= set(found.files)
