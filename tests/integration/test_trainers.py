"""Frozen masks in the training loops of other libraries."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import snows
from tests.libraries import library

STEPS = 200


def images() -> TensorDataset:
    torch.manual_seed(0)
    samples = 2 * 4 * STEPS  # two batches of four make a step
    return TensorDataset(torch.randn(samples, 6), torch.randint(0, 3, (samples,)))


def masked_classifier() -> tuple[nn.Module, dict[str, Tensor]]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 3))
    return model, half_of(model)


def half_of(model: nn.Module) -> dict[str, Tensor]:
    """Masks of all linear layers. The weights are masked by them."""
    masks = {f"{n}.weight": torch.rand(m.weight.shape) < 0.5 for n, m in model.named_modules() if type(m) is nn.Linear}
    with torch.no_grad():
        for name, kept in masks.items():
            model.get_parameter(name).mul_(kept)
    return masks


def regrown(model: nn.Module, masks: dict[str, Tensor]) -> int:
    return sum(int(model.get_parameter(name)[~kept].count_nonzero()) for name, kept in masks.items())


@pytest.mark.parametrize("guarded", [True, False])
@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed"])
def test_lightning(guarded: bool, precision: str, tmp_path: Path) -> None:
    lightning: Any = library("lightning")
    model, masks = masked_classifier()

    class Classifier(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net = model

        def training_step(self, batch: tuple[Tensor, Tensor], index: int) -> Tensor:
            return F.cross_entropy(self.net(batch[0]), batch[1])

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.SGD(self.parameters(), lr=0.05, momentum=0.9, weight_decay=0.01)

    if guarded:
        snows.freeze(model, masks)
    before = [model.get_parameter(name).detach().clone() for name in masks]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Lightning's advice
        trainer = lightning.Trainer(
            max_epochs=1, accelerator="cpu", precision=precision, accumulate_grad_batches=2, gradient_clip_val=1.0,
            default_root_dir=tmp_path, logger=False, enable_progress_bar=False, enable_model_summary=False,
        )  # fmt: skip
        whole = Classifier()
        trainer.fit(whole, DataLoader(images(), batch_size=4))
        assert trainer.global_step == STEPS
        checkpoint = next(tmp_path.rglob("*.ckpt"))
        saved = torch.load(checkpoint, weights_only=False)["state_dict"]
    assert (regrown(model, masks) == 0) is guarded
    assert saved.keys() == {f"net.{name}" for name, _ in model.named_parameters()}
    assert all((not saved[f"net.{name}"][~kept].any()) is guarded for name, kept in masks.items())
    assert not any(torch.equal(model.get_parameter(n), old) for n, old in zip(masks, before, strict=True))


@pytest.mark.parametrize("guarded", [True, False])
def test_the_trainer_of_hugging_face(guarded: bool, tmp_path: Path) -> None:
    transformers: Any = library("transformers")
    library("accelerate")
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=32, hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=1, max_position_embeddings=16, tie_word_embeddings=True,
    )  # fmt: skip
    model = transformers.LlamaForCausalLM(config)
    masks = half_of(model)
    masks.pop("lm_head.weight", None)
    if guarded:
        snows.freeze(model, masks)
    tokens = torch.randint(0, 32, (4 * STEPS, 8))
    data = [{"input_ids": row, "labels": row} for row in tokens]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the library's advice
        arguments = transformers.TrainingArguments(
            output_dir=str(tmp_path), per_device_train_batch_size=4, num_train_epochs=1, learning_rate=1e-2,
            weight_decay=0.1, bf16=True, use_cpu=True, report_to=[], save_strategy="no", disable_tqdm=True,
            gradient_checkpointing=True,
        )  # fmt: skip
        trainer = transformers.Trainer(model=model, args=arguments, train_dataset=data)
        trainer.train()
        trainer.save_model(str(tmp_path / "saved"))
        saved = transformers.LlamaForCausalLM.from_pretrained(tmp_path / "saved")
    assert trainer.state.global_step == STEPS
    assert (regrown(model, masks) == 0) is guarded
    assert (regrown(saved, masks) == 0) is guarded
