"""Core ML: a package with sparse weights. Converting works on any machine; running needs one of Apple's."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..graph.capture import quietly
from .base import Saved, Written, blamed_on
from .sizes import total_bytes
from .trace import trace

FILE = "model.mlpackage"
_LARGEST_BATCH = 64
_ZERO = 1e-12  # below what half precision can say
_LEAST_SPARSITY = 0.1  # a sparse weight needs one bit more for each place


def write(saved: Saved, folder: Path) -> Written:
    with quietly():  # on other systems than macOS it says that it cannot run models
        import coremltools
        import coremltools.optimize.coreml as optimize

    program = trace(saved, largest=_LARGEST_BATCH)
    with blamed_on(f"{saved.name} cannot be converted by coremltools"), quietly():
        target = coremltools.target.iOS16  # the first with sparse weights
        dense = coremltools.convert(program.run_decompositions({}), minimum_deployment_target=target)
        rule = optimize.OpThresholdPrunerConfig(threshold=_ZERO, minimum_sparsity_percentile=_LEAST_SPARSITY)
        sparse = optimize.prune_weights(dense, optimize.OptimizationConfig(global_config=rule))
    with quietly():
        sparse.save(folder / FILE)
        stored = coremltools.models.MLModel(str(folder / FILE), skip_model_load=True)
        constants = _constants(optimize, optimize.decompress_weights(stored))
        dense_bytes = _saved_bytes(dense)
    facts = {"coremltools": coremltools.__version__, "precision": "float16", "dense_bytes": dense_bytes}
    note = (
        "Weights are float16, and those of a tenth zeros or more are stored sparse. Not run: Core ML runs on Apple's "
        "systems only. Compare outputs there."
    )
    return Written(None, constants, facts, (note,))


def _constants(optimize: Any, model: Any) -> dict[str, Tensor]:
    found = optimize.get_weights_metadata(model, weight_threshold=0)
    return {name: torch.from_numpy(entry.val.copy()) for name, entry in found.items()}


def _saved_bytes(model: Any) -> int:
    """What the package takes without sparse weights."""
    with tempfile.TemporaryDirectory() as place:
        path = Path(place) / FILE
        model.save(path)
        return total_bytes(path)
