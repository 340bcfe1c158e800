"""Several processes prune as one does: the same masks, the same weights up to rounding, the same bits on all."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.distributed.cases import CASES
from tests.distributed.torchrun import torchrun

RANKS = (2, 3)


@pytest.fixture(scope="session")
def of_ranks(tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[int, int], dict[str, Any]]:
    """What every rank found, by the number of ranks and its own. One start for all cases."""
    folder = tmp_path_factory.mktemp("ranks")
    for ranks in RANKS:
        process = torchrun(ranks, "tests.distributed.on_a_rank", str(folder))
        _, errors = process.communicate(timeout=600)
        assert process.returncode == 0, errors
    return {
        (ranks, rank): torch.load(Path(folder) / f"{ranks}-{rank}.pt", weights_only=True)
        for ranks in RANKS
        for rank in range(ranks)
    }


@pytest.mark.parametrize("name", CASES)
def test_ranks_prune_as_one_process(name: str, of_ranks: dict[tuple[int, int], dict[str, Any]]) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        alone = CASES[name].run()
    weights = alone.model.state_dict()
    for ranks in RANKS:
        first = of_ranks[ranks, 0][name]
        for parameter, mask in alone.masks.items():
            assert torch.equal(first["masks"][parameter], mask)
        for key, value in weights.items():
            ours = first["weights"][key]
            assert float((ours - value).abs().max()) <= 1e-6 * max(float(value.abs().max()), 1e-12), (ranks, key)
        for rank in range(1, ranks):
            other = of_ranks[ranks, rank][name]
            assert all(torch.equal(other["weights"][key], first["weights"][key]) for key in weights)
            assert all(torch.equal(other["masks"][key], first["masks"][key]) for key in alone.masks)
