"""Many architectures, no line of the package for any one of them: random weights, tiny images, three layers each."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from snows import NM, InputError, Recipe, inspect, prune
from snows.evaluation.inspection import Inspection
from tests.libraries import library

SAMPLES = 8
CLASSES = 10
PATTERN = NM(2, 4)
RECIPE = Recipe(  # a few random samples judge nothing
    horizon=3, sweeps=1, newton_steps=1, cg_steps=3, held_out=0.0, finish_steps=2, finish_batch=2
)
LARGEST_SOLVE = 1e11  # outputs times inputs cubed, of the layers that are pruned: to be quick. The plan covers all
LAYER_MODULES = (
    nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.Linear, nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d,
)  # fmt: skip


def images(size: int) -> Tensor:
    return torch.randn(SAMPLES, 3, size, size, generator=torch.Generator().manual_seed(1))


def tokens(length: int, vocabulary: int) -> dict[str, Tensor]:
    ids = torch.randint(0, vocabulary, (SAMPLES, length), generator=torch.Generator().manual_seed(1))
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids)}


@dataclass(frozen=True)
class Architecture:
    """`build` gets the library, `data` is what a user would calibrate on, `refused` a reason some layer must give."""

    name: str
    library: str
    build: Callable[[Any], nn.Module]
    data: Callable[[], Any]
    fast: bool = False
    refused: str | None = None

    @property
    def parameter(self) -> Any:
        return pytest.param(self, id=f"{self.library}-{self.name}", marks=() if self.fast else pytest.mark.slow)


def torchvision_model(name: str, size: int, fast: bool = False, **options: Any) -> Architecture:
    return Architecture(
        name,
        "torchvision",
        lambda tv: getattr(tv.models, name)(num_classes=CLASSES, **options),
        lambda: images(size),
        fast,
    )


def timm_model(name: str, size: int, refused: str | None = None, **options: Any) -> Architecture:
    return Architecture(
        name, "timm", lambda timm: timm.create_model(name, num_classes=CLASSES, **options), lambda: images(size),
        refused=refused,
    )  # fmt: skip


def timm_mixer(name: str, mlp_ratio: Any, **layers: str) -> Architecture:
    """The layers are named as timm names them."""

    def build(timm: Any) -> nn.Module:
        mixers = timm.models.mlp_mixer
        named = {option: getattr(mixers, layer) for option, layer in layers.items()}
        model: nn.Module = mixers.MlpMixer(
            CLASSES, img_size=32, patch_size=8, num_blocks=3, embed_dim=64, mlp_ratio=mlp_ratio, **named
        )
        return model

    return Architecture(name, "timm", build, lambda: images(32))


def hf_model(
    name: str, data: Callable[[], Any], kind: str = "ForImageClassification", fast: bool = False,
    refused: str | None = None, label: str = "", **options: Any,
) -> Architecture:  # fmt: skip
    def build(transformers: Any) -> nn.Module:
        config = getattr(transformers, f"{name}Config")(**options)
        model: nn.Module = getattr(transformers, f"{name}{kind}")(config)
        return model

    return Architecture(f"{name}{label}", "transformers", build, data, fast, refused)


def hf_images(size: int) -> Callable[[], Tensor]:
    return lambda: images(size)


ENCODER = {"hidden_size": 32, "num_hidden_layers": 3, "num_attention_heads": 2, "intermediate_size": 64}
TRANSFORMER = {**ENCODER, "image_size": 32, "patch_size": 8, "num_labels": CLASSES}
LANGUAGE = {**ENCODER, "vocab_size": 64, "max_position_embeddings": 32}

ARCHITECTURES = [
    torchvision_model("resnet18", 32, fast=True),
    torchvision_model("resnext50_32x4d", 32),
    torchvision_model("wide_resnet50_2", 32),
    torchvision_model("mobilenet_v2", 64),
    torchvision_model("mobilenet_v3_small", 64),
    torchvision_model("efficientnet_b0", 64),
    torchvision_model("efficientnet_v2_s", 64),
    torchvision_model("vgg11", 32),
    torchvision_model("alexnet", 64),
    torchvision_model("densenet121", 32),
    torchvision_model("convnext_tiny", 32),
    torchvision_model("regnet_y_400mf", 32),
    torchvision_model("regnet_x_400mf", 32),
    torchvision_model("shufflenet_v2_x0_5", 64),
    torchvision_model("mnasnet0_5", 64),
    torchvision_model("squeezenet1_1", 64),
    torchvision_model("googlenet", 64, aux_logits=False, init_weights=False),
    torchvision_model("inception_v3", 96, init_weights=False),
    torchvision_model(
        "VisionTransformer", 32, image_size=32, patch_size=8, num_layers=3, num_heads=2, hidden_dim=32, mlp_dim=64
    ),
    torchvision_model(
        "SwinTransformer", 32, patch_size=[2, 2], embed_dim=16, depths=[2, 2], num_heads=[2, 4], window_size=[4, 4]
    ),
    Architecture(
        "SwinTransformerV2", "torchvision",
        lambda tv: tv.models.SwinTransformer(
            [2, 2], 16, [2, 2], [2, 4], [4, 4], num_classes=CLASSES,
            block=tv.models.swin_transformer.SwinTransformerBlockV2,
            downsample_layer=tv.models.swin_transformer.PatchMergingV2,
        ),
        lambda: images(32), refused="the same whatever the data",
    ),
    torchvision_model(
        "MaxVit", 64, input_size=(64, 64), stem_channels=16, partition_size=2, block_channels=[16, 32],
        block_layers=[1, 1], head_dim=8, stochastic_depth_prob=0.0,
    ),
    timm_model("deit_tiny_distilled_patch16_224", 32, img_size=32, depth=3),
    timm_mixer("MlpMixer", (0.5, 4.0)),
    timm_mixer("gMLP", 6, block_layer="SpatialGatingBlock", mlp_layer="GatedMlp"),
    timm_model("levit_128s", 224),
    timm_model("coat_tiny", 64, img_size=64),
    timm_model("coatnet_nano_rw_224", 64, img_size=64),
    timm_model("efficientformer_l1", 224),
    timm_model("mobilevitv2_050", 64),
    timm_model("eva02_tiny_patch14_224", 56, img_size=56, depth=3),
    hf_model("ViT", hf_images(32), fast=True, **TRANSFORMER),
    hf_model("DeiT", hf_images(32), **TRANSFORMER),
    hf_model("Beit", hf_images(32), **TRANSFORMER),
    hf_model(
        "Swin", hf_images(32), image_size=32, patch_size=2, embed_dim=16, depths=[2, 2], num_heads=[2, 4],
        window_size=4, num_labels=CLASSES,
    ),
    hf_model("ConvNext", hf_images(32), hidden_sizes=[16, 32, 32, 64], depths=[1, 1, 2, 1], num_labels=CLASSES),
    hf_model(
        "RegNet", hf_images(32), embedding_size=16, hidden_sizes=[16, 32, 32, 64], depths=[1, 1, 2, 1], groups_width=8,
        num_labels=CLASSES,
    ),
    hf_model(
        "ResNet", hf_images(32), embedding_size=16, hidden_sizes=[32, 32, 64, 64], depths=[1, 1, 2, 1],
        num_labels=CLASSES,
    ),
    # At their default range, activations of these two untrained networks vanish below the smallest float.
    hf_model("MobileNetV1", hf_images(64), depth_multiplier=0.5, initializer_range=0.2, num_labels=CLASSES),
    hf_model("MobileNetV2", hf_images(64), depth_multiplier=0.5, initializer_range=0.2, num_labels=CLASSES),
    hf_model(
        "Pvt", hf_images(64), image_size=64, depths=[1, 1, 1, 1], hidden_sizes=[16, 16, 32, 32],
        num_attention_heads=[1, 2, 2, 4], num_labels=CLASSES,
    ),
    hf_model(
        "Segformer", hf_images(64), depths=[1, 1, 1, 1], hidden_sizes=[16, 16, 32, 32], num_labels=CLASSES,
    ),
    hf_model(
        "DPT", hf_images(32), "ForDepthEstimation", refused="transposed", **{**TRANSFORMER, "num_hidden_layers": 4},
        backbone_out_indices=[0, 1, 2, 3], neck_hidden_sizes=[8, 8, 16, 16], fusion_hidden_size=16,
    ),
    hf_model(
        "Llama", lambda: tokens(12, 64), "ForCausalLM", use_cache=False, num_key_value_heads=1, **LANGUAGE
    ),
    hf_model(
        "Llama", lambda: tokens(12, 64), "ForCausalLM", refused="used in 2 places", use_cache=False,
        num_key_value_heads=2, label="Tied", tie_word_embeddings=True, **LANGUAGE,
    ),
    hf_model(
        "Qwen3", lambda: tokens(12, 64), "ForCausalLM", use_cache=False, num_key_value_heads=1, head_dim=16, **LANGUAGE
    ),
    hf_model("Bert", lambda: tokens(12, 64), "ForSequenceClassification", fast=True, **LANGUAGE),
    hf_model("Roberta", lambda: tokens(12, 64), "ForSequenceClassification", **LANGUAGE),
]  # fmt: skip


# Nothing in these can be pruned, and each layer must say why.
REFUSED = [
    timm_model("nf_resnet26", 64, refused="transformed before it is used"),
    timm_model("resnetv2_50x1_bit", 64, refused="transformed before it is used"),
    hf_model(
        "GPT2", lambda: tokens(12, 64), "LMHeadModel", refused="matrix product", use_cache=False, n_embd=32, n_layer=2,
        n_head=2, vocab_size=64, n_positions=32, bos_token_id=0, eos_token_id=0,
    ),
]  # fmt: skip


# Warnings that libraries give of themselves; this package's own are errors as everywhere.
pytestmark = [
    pytest.mark.filterwarnings(rf"ignore:::{name}(\..*)?$") for name in ("torchvision", "timm", "transformers")
]


def build(architecture: Architecture) -> tuple[nn.Module, Any]:
    source = library(architecture.library)
    torch.manual_seed(0)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # libraries' own, about arguments they pass to themselves
        return architecture.build(source).eval(), architecture.data()


def spread_layers(inspection: Inspection) -> list[str]:
    """Three layers: of the first third, of the middle, of the last third."""
    layers = [layer for layer in inspection.layers if layer.pattern is not None]
    sizes = {layer.name: layer.shape[0] * math.prod(layer.shape[1:]) ** 3 for layer in layers}
    small = [name for name, size in sizes.items() if size <= max(LARGEST_SOLVE, min(sizes.values()))]
    return list(dict.fromkeys(small[len(small) * part // 6] for part in (1, 3, 5)))


def outputs(model: nn.Module, data: Any) -> list[Tensor]:
    with torch.no_grad():
        leaves = pytree.tree_leaves(model(**data) if isinstance(data, dict) else model(data))
    return [leaf for leaf in leaves if isinstance(leaf, Tensor) and leaf.is_floating_point()]


def check_inspection(model: nn.Module, inspection: Inspection, refused: str | None) -> None:
    """Every layer of the model is either planned, with its horizon, or stays dense for a reason that is given."""
    listed = {layer.name: layer for layer in inspection.layers}
    assert len(listed) == len(inspection.layers)
    first_names = {id(value): name.removesuffix(".weight") for name, value in model.named_parameters()}  # tied weights
    for name, module in model.named_modules():
        if isinstance(module, LAYER_MODULES):
            assert first_names.get(id(module.weight), name) in listed, f"{name} is in no list"
    for layer in inspection.layers:
        assert (layer.pattern is None) == bool(layer.reason), layer
        if layer.pattern is not None:
            assert 0 <= layer.horizon <= RECIPE.horizon
            assert layer.memory_bytes > 0
            assert layer.seconds > 0
    if refused is not None:
        reasons = {layer.reason for layer in inspection.layers if layer.reason}
        assert any(refused in reason for reason in reasons), sorted(reasons)


def check_pruned(model: nn.Module, data: Any, chosen: list[str]) -> None:
    result = prune(model, data, PATTERN, layers=chosen, recipe=RECIPE, progress=False)

    assert sorted(layer.name for layer in result.report.layers) == sorted(chosen)
    before, after = dict(model.named_parameters()), dict(result.model.named_parameters())
    for name, mask in result.masks.items():
        assert PATTERN.violations(mask) == 0
        assert int(mask.sum()) * 2 == mask.numel()
        assert not after[name][~mask].any(), f"{name}: a pruned weight is not zero"
    others = [name for name in before.keys() - result.masks.keys() if before[name].ndim != 1]  # no biases, no norms
    assert all(torch.equal(before[name], after[name]) for name in others)
    assert result.report.finish is not None
    for layer in result.report.layers:
        (solve,) = layer.solves
        assert solve.loss <= solve.loss_start <= solve.loss_masked, layer.name
        assert solve.loss < solve.loss_masked, layer.name

    dense, pruned = outputs(model, data), outputs(result.model, data)
    assert [leaf.shape for leaf in dense] == [leaf.shape for leaf in pruned]
    assert all(torch.isfinite(leaf).all() for leaf in pruned)


@pytest.mark.parametrize("architecture", [architecture.parameter for architecture in ARCHITECTURES])
def test_an_architecture_is_inspected_and_pruned(architecture: Architecture) -> None:
    model, data = build(architecture)
    inspection = inspect(model, data, PATTERN, recipe=RECIPE)
    check_inspection(model, inspection, architecture.refused)
    check_pruned(model, data, spread_layers(inspection))


@pytest.mark.parametrize("architecture", [architecture.parameter for architecture in REFUSED])
def test_an_architecture_without_prunable_layers_is_refused_with_the_reason(architecture: Architecture) -> None:
    assert architecture.refused is not None
    model, samples = build(architecture)
    found = inspect(model, samples, PATTERN, recipe=RECIPE)
    assert all(layer.pattern is None for layer in found.layers)
    with pytest.raises(InputError, match=architecture.refused):
        prune(model, samples, PATTERN, recipe=RECIPE, progress=False)
