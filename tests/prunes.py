"""Small prunes for tests: how they are run, and what holds of every result."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import snows
from snows.solve.newton import NewtonOutcome
from tests.networks import example, make

SAMPLES = 24
QUICK = snows.Recipe(horizon=3, sweeps=2, cg_steps=5)


def quick(name: str, pattern: Any = None, **options: Any) -> snows.Result:
    options = {"recipe": QUICK, "progress": False, **options}
    return snows.prune(make(name), example(name, SAMPLES), pattern, **options)


def check(result: snows.Result, model: nn.Module) -> None:
    """What holds of every result."""
    dense = model.state_dict()
    assert type(result.model) is type(model)
    assert set(result.masks) == {layer.parameter for layer in result.report.layers}
    for name, tensor in result.model.state_dict().items():
        if name in result.masks:
            mask = result.masks[name]
            assert mask.dtype == torch.bool
            assert not tensor[~mask].any()
            assert torch.isfinite(tensor).all()
        else:
            assert torch.equal(tensor, dense[name])
    for layer in result.report.layers:
        assert layer.kept == int(result.masks[layer.parameter].sum())
        for solve in layer.solves:
            if solve.outcome != NewtonOutcome.MASK_ONLY.value:
                assert not solve.held_out > solve.held_out_masked  # NaN where nothing is held out
                assert solve.loss <= solve.loss_start or solve.kept != "solved"
                # The same number where the masked weights are the start, computed with and without gradients.
                assert solve.loss_start <= solve.loss_masked * (1 + 1e-6)
    total = sum(int((~mask).sum()) for mask in result.masks.values())
    assert result.report.sparsity == pytest.approx(total / sum(mask.numel() for mask in result.masks.values()))
    assert result.report.network_sparsity == pytest.approx(total / sum(p.numel() for p in model.parameters()))


ALL_LAYERS = {
    "mlp": "2:4", "conv-bn": "2:4", "residual": "2:4", "grouped": 0.3, "depthwise": 0.3, "conv1d": 0.3, "conv3d": 0.3,
    "padded": "2:4", "attention": "2:4", "gated": "2:4", "shared-relu": "1:4", "tied": "2:4", "two-outputs": "2:4",
    "dict-output": 0.3, "two-inputs": "2:4",
}  # fmt: skip


def weights(result: snows.Result) -> Tensor:
    return torch.cat([parameter.flatten() for parameter in result.model.parameters()])
