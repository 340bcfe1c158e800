"""What the libraries of models know about the pixels that a model was trained on."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from snows.data.models import known_normalization
from tests.libraries import library

IMAGENET = ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225))


@pytest.mark.filterwarnings(r"ignore:::transformers(\..*)?$")
def test_hugging_face(tmp_path: Path) -> None:
    library("transformers")
    facts = {"image_processor_type": "ViTImageProcessor", "image_mean": [0.5, 0.4, 0.3], "image_std": [0.2, 0.2, 0.1]}
    (tmp_path / "preprocessor_config.json").write_text(json.dumps(facts))
    assert known_normalization(f"hf:{tmp_path}") == ((0.5, 0.4, 0.3), (0.2, 0.2, 0.1))
    (tmp_path / "preprocessor_config.json").write_text("{}")  # as of a language model
    assert known_normalization(f"hf:{tmp_path}") is None


def test_torchvision() -> None:
    library("torchvision")
    assert known_normalization("torchvision:resnet18") == IMAGENET
    assert known_normalization("torchvision:no_such_model") is None


def test_timm() -> None:
    library("timm")
    assert known_normalization("timm:resnet18") == IMAGENET
    assert known_normalization("timm:vit_tiny_patch16_224.augreg_in21k_ft_in1k") == ((0.5,) * 3, (0.5,) * 3)
    assert known_normalization("timm:no_such_model") is None


@pytest.mark.parametrize("name", ["resnet20-fashion", "net.py:model", "timm:", "nowhere:resnet18"])
def test_others_are_not_known(name: str) -> None:
    assert known_normalization(name) is None
