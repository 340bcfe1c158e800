"""Transformers from end to end: language models by the command line, and the libraries' models by name."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from torch import nn

import snows
from snows.data.models import build_model, random_inputs
from tests.libraries import library
from tests.transformers import VOCABULARY, Language, build, token_samples

from .conftest import Outcome, Snows, assert_error

ROOT = Path(__file__).parents[2]
RECIPE = snows.Recipe(horizon=2, sweeps=1, newton_steps=1, cg_steps=2, finish_steps=0)
NET = f"""
import sys
sys.path.insert(0, {str(ROOT)!r})
from tests.transformers import Language, build, token_samples

def model():
    return build(Language)

def tokens():
    return token_samples(24)

def both():
    return {{"tokens": token_samples(24)}}, token_samples(6, seed=2)
"""


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "net.py").write_text(NET)
    (tmp_path / "fast.json").write_text(RECIPE.to_json())
    monkeypatch.chdir(tmp_path)


# Language models


def test_a_language_model_is_pruned_and_its_perplexity_shown(run: Snows) -> None:
    common = ("net.py:model", "--data", "net.py:tokens", "--samples", "16", "--device", "cpu")
    shown = run("prune", *common, "--recipe", "fast.json", "--out", "pruned").shown
    assert "perplexity" in shown
    assert "agreement" in shown
    rows = json.loads(Path("pruned/report.json").read_text())["evaluation"]
    assert [row["network"] for row in rows] == ["dense", "mask only", "SNOWS (K=2)"]
    test = token_samples(24)[16:]
    assert rows[0]["perplexity"] == pytest.approx(snows.perplexity(build(Language), test), rel=1e-5)
    assert rows[0]["agreement"] == 1

    alone = run("evaluate", *common, "--json").data
    assert alone == [{"network": "dense", "perplexity": pytest.approx(rows[0]["perplexity"])}]
    both = run("evaluate", *common, "--pruned", "pruned", "--json").data
    assert both[1]["perplexity"] == pytest.approx(rows[2]["perplexity"], rel=1e-5)
    assert set(both[1]) == {"network", "perplexity", "agreement", "kl"}
    assert "as it was written" in run("verify", "pruned", "--model", "net.py:model").shown


def test_batches_by_name_and_tokens_of_their_own_to_test_on(run: Snows) -> None:
    words = ("net.py:model", "--data", "net.py:both", "--recipe", "fast.json", "--layers", "blocks.1.mlp.*")
    found = run("prune", *words, "--pattern", "0.5", "--mask", "sparsegpt", "--json").data
    test = token_samples(6, seed=2)
    assert found["evaluation"][0]["perplexity"] == pytest.approx(snows.perplexity(build(Language), test), rel=1e-5)


def test_tokens_of_an_npz_file(run: Snows) -> None:
    np.savez("tokens.npz", x=token_samples(20).numpy().astype(np.uint16))
    found = run("evaluate", "net.py:model", "--data", "npz:tokens.npz", "--samples", "14", "--json").data
    assert set(found[0]) == {"network", "perplexity"}
    (layer,) = run(
        "inspect", "net.py:model", "--data", "npz:tokens.npz", "--layers", "blocks.0.mlp.0", "--json"
    ).data["layers"][:1]  # fmt: skip
    assert layer["pattern"] == "2:4"


def test_masks_are_compared_by_perplexity(run: Snows) -> None:
    words = ("net.py:model", "--data", "net.py:tokens", "--samples", "16", "--recipe", "fast.json")
    shown = run("compare", *words, "--mask", "magnitude", "--layers", "blocks.1.mlp.*", "--markdown").shown
    assert "| perplexity | agreement | KL |" in shown
    assert "top-1" not in shown


@pytest.mark.parametrize("mask", ["magnitude", "wanda"])
def test_re_adjusted_weights_predict_more_like_the_dense_model(mask: str) -> None:
    model, tokens, test = build(Language), token_samples(96), token_samples(32, seed=2)
    figures = []
    for solver in (None, "newton"):
        result = snows.prune(
            model, tokens, "2:4", mask=mask, layers="blocks.*", solver=solver, recipe=RECIPE, progress=False
        )
        figures.append(snows.evaluate(result.model, test, dense=model))
    assert figures[1]["kl"] < figures[0]["kl"]


# What `hf:` builds, without the library


class Config:
    def __init__(self, architectures: list[str] | None = None) -> None:
        self.architectures = architectures
        self.model_type = "tiny"
        self.use_cache = True

    def get_text_config(self) -> Config:
        return self


class VisionConfig(Config):
    pass


class OtherConfig(Config):
    pass


class TinyForCausalLM:
    pass


class TinyForImageClassification:
    pass


def pretend(config: Config) -> ModuleType:
    """What `snows.data.models` takes of transformers."""

    def builder(kind: str) -> Any:
        def build_it(*arguments: Any, **options: Any) -> nn.Module:
            made = nn.Linear(1, 1)
            made.kind = (kind, arguments, options)  # type: ignore[assignment]
            return made

        return SimpleNamespace(from_pretrained=build_it, from_config=build_it, __hash__=None)

    module = ModuleType("transformers")
    given: Any = module
    given.AutoConfig = SimpleNamespace(from_pretrained=lambda name: config)
    given.AutoModelForImageClassification = type("Images", (), vars(builder("images")))
    given.AutoModelForCausalLM = type("Language", (), vars(builder("language")))
    for kind in (given.AutoModelForImageClassification, given.AutoModelForCausalLM):
        for method in ("from_pretrained", "from_config"):
            setattr(kind, method, staticmethod(vars(kind)[method]))
    given.MODEL_FOR_IMAGE_CLASSIFICATION_MAPPING = {
        VisionConfig: (TinyForImageClassification,), Config: TinyForImageClassification,
    }  # fmt: skip
    given.MODEL_FOR_CAUSAL_LM_MAPPING = {Config: TinyForCausalLM}
    return module


@pytest.mark.parametrize(
    ("config", "kind"),
    [
        (Config(["TinyForCausalLM"]), "language"),
        (Config(["TinyForImageClassification"]), "images"),
        (Config(), "images"),
        (VisionConfig(["TinyModel"]), "images"),
    ],
)
def test_what_a_checkpoint_was_saved_as_is_built(config: Config, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "transformers", pretend(config))
    made: Any = build_model("hf:some/name")
    assert made.kind == (kind, ("some/name",), {"config": config})
    assert config.use_cache is False
    by_config: Any = build_model("hf:some/name", pretrained=False)
    assert by_config.kind == (kind, (config,), {})


def test_other_checkpoints_are_refused_in_one_sentence(run: Snows, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "transformers", pretend(OtherConfig(["TinyForMaskedLM"])))
    said = (
        "error: hf:some/name is a TinyForMaskedLM; expected an image classifier or a causal language model "
        "(file.py:factory takes any module)\n"
    )
    assert run("prune", "hf:some/name", "--data", "net.py:tokens") == Outcome(1, "", said)


def test_a_name_that_cannot_be_found_is_one_sentence(run: Snows, monkeypatch: pytest.MonkeyPatch) -> None:
    module: Any = pretend(Config())

    def absent(name: str) -> None:
        raise OSError(f"{name} is not a local folder\nand more")

    module.AutoConfig = SimpleNamespace(from_pretrained=absent)
    monkeypatch.setitem(sys.modules, "transformers", module)
    words = "error: hf:no/such cannot be built: no/such is not a local folder (if"
    assert_error(run("inspect", "hf:no/such"), 1, words)


def test_random_inputs_are_what_the_model_takes() -> None:
    assert random_inputs(nn.Linear(1, 1), 2).shape == (2, 3, 224, 224)
    assert random_inputs(nn.Linear(1, 1), 2, 16).shape == (2, 3, 16, 16)
    language: Any = nn.Linear(1, 1)
    language.main_input_name = "input_ids"
    language.config = SimpleNamespace(get_text_config=lambda: SimpleNamespace(vocab_size=VOCABULARY))
    tokens = random_inputs(language, 2)
    assert tokens.shape[0] == 2
    assert not tokens.is_floating_point()
    assert int(tokens.max()) < VOCABULARY


# The libraries' own

in_libraries = [
    pytest.mark.slow,
    *(pytest.mark.filterwarnings(rf"ignore:::{name}(\..*)?$") for name in ("torchvision", "timm", "transformers")),
]
TINY = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 64}
TOKENS = {**TINY, "vocab_size": VOCABULARY, "max_position_embeddings": 32, "num_key_value_heads": 2}
LANGUAGE_MODELS = {
    "Llama": {"bos_token_id": 1, "eos_token_id": 2},
    "Qwen2": {"bos_token_id": 1, "eos_token_id": 2},
    "Gemma": {"head_dim": 8},
    "Gemma2": {"head_dim": 8, "sliding_window": 8},
}


def save_tiny(folder: str, name: str, kind: str, **options: Any) -> nn.Module:
    transformers = library("transformers")
    torch.manual_seed(0)
    model: nn.Module = getattr(transformers, name + kind)(getattr(transformers, f"{name}Config")(**options)).eval()
    model.save_pretrained(folder)  # type: ignore[operator]
    return model


def in_library(test: Any) -> Any:
    for mark in in_libraries:
        test = mark(test)
    return test


@in_library
@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("name", LANGUAGE_MODELS)
def test_language_models_of_a_folder(name: str, tied: bool, run: Snows) -> None:
    options = {**TOKENS, **LANGUAGE_MODELS[name], "tie_word_embeddings": tied}
    own = save_tiny("tiny", name, "ForCausalLM", **options)
    built = build_model("hf:tiny")
    assert type(built) is type(own)
    assert all(torch.equal(a, b) for a, b in zip(own.parameters(), built.parameters(), strict=True))
    np.savez("tokens.npz", x=token_samples(40).numpy())
    common = ("hf:tiny", "--data", "npz:tokens.npz", "--samples", "32", "--device", "cpu")
    found = run("prune", *common, "--pattern", "2:4", "--recipe", "fast.json", "--out", "pruned", "--json").data
    assert len([layer for layer in found["layers"] if ".layers.1." in layer["name"]]) == 7
    assert found["evaluation"][2]["kl"] < found["evaluation"][1]["kl"]
    again = run("evaluate", *common, "--pruned", "pruned", "--json").data
    assert again[1]["perplexity"] == pytest.approx(found["evaluation"][2]["perplexity"], rel=1e-4)
    assert "as it was written" in run("verify", "pruned").shown
    assert run("inspect", "hf:tiny", "--json").data["layers"]
    by_name = {"input_ids": token_samples(16), "attention_mask": torch.ones_like(token_samples(16))}
    assert snows.prune(own, by_name, "2:4", solver=None, progress=False).report.layers


@in_library
def test_weights_of_a_file_for_a_model_of_a_folder() -> None:
    own = save_tiny("tiny", "Llama", "ForCausalLM", **TOKENS, **LANGUAGE_MODELS["Llama"])
    state = {name: 2 * value for name, value in own.state_dict().items()}
    save_file(state, "weights.safetensors")
    built = build_model("hf:tiny", Path("weights.safetensors"))
    assert all(torch.equal(value, state[name]) for name, value in built.state_dict().items())


@in_library
def test_a_vision_transformer_of_a_folder(run: Snows) -> None:
    own = save_tiny("tiny", "ViT", "ForImageClassification", **TINY, image_size=16, patch_size=4, num_labels=3)
    x = np.random.default_rng(0).standard_normal((40, 3, 16, 16)).astype(np.float32)
    np.savez("images.npz", x=x, y=np.arange(40) % 3)
    common = ("hf:tiny", "--data", "npz:images.npz", "--samples", "32")
    found = run("prune", *common, "--recipe", "fast.json", "--out", "pruned", "--json").data
    assert len(found["layers"]) == 12
    assert {"top1", "kl"} < set(run("evaluate", *common, "--pruned", "pruned", "--json").data[1])
    assert len([layer for layer in run("inspect", "hf:tiny", "--json").data["layers"] if layer["pattern"]]) == 12
    one = torch.from_numpy(x[:1])
    own.set_attn_implementation("eager")  # type: ignore[operator]
    with torch.no_grad():
        weights = own(one, output_attentions=True).attentions[-1]
    expected = weights[0, :, 0, 1:].unflatten(1, (4, 4))
    torch.testing.assert_close(snows.attention_map(build_model("hf:tiny"), one[0]), expected, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(snows.attention_map(own, one[0]), expected, rtol=1e-4, atol=1e-5)


@in_library
def test_the_trained_vision_transformer_by_its_name(run: Snows) -> None:
    library("timm")
    weights = ROOT.parent / "shared" / "checkpoints" / "vit_tiny_imagenet.safetensors"
    images = ROOT.parent / "shared" / "data" / "imagenet_val_a.npz"
    if not weights.is_file() or not images.is_file():
        pytest.skip("../shared is not here")
    model = ("timm:vit_tiny_patch16_224", "--weights", weights)
    listed = run("inspect", *model, "--pattern", "2:4", "--json").data["layers"]
    assert len([layer for layer in listed if layer["pattern"]]) == 48

    with np.load(images) as archive:
        jpeg, offsets, labels = archive["jpeg"], archive["offsets"], archive["labels"]
    np.savez("few.npz", jpeg=jpeg[: offsets[80]], offsets=offsets[:81], labels=labels[:80])
    Path("c.toml").write_text("[data]\nmean = 0.5\nstd = 0.5\n")
    common = (*model, "--data", "npz:few.npz", "--config", "c.toml", "--samples", "64")
    assert run("evaluate", *common, "--json").data[0]["top1"] > 0.6
    words = ("--layers", "blocks.11.attn.proj", "--recipe", "fast.json")
    rows = run("prune", *common, *words, "--json").data["evaluation"]
    assert rows[2]["kl"] <= rows[1]["kl"]

    torchvision = ("torchvision:vit_b_16", "--layers", "encoder.layers.encoder_layer_11.*", "--json")
    assert [layer["name"] for layer in run("inspect", *torchvision).data["layers"] if layer["pattern"]] == [
        f"encoder.layers.encoder_layer_11.{name}"
        for name in ("self_attention.in_proj_weight", "self_attention.out_proj", "mlp.0", "mlp.3")
    ]
