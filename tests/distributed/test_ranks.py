"""Several processes prune as one does: the same masks, the same weights up to rounding, the same bits on all."""

from __future__ import annotations

import json
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch

import snows
from tests.distributed.cases import (
    CASES,
    COMPARED,
    DATASET,
    IN_PIECES,
    MEMORY_OF_LAST_STAGE,
    MEMORY_OF_ROWS,
    OUT_OF_MEMORY,
    READ,
    SENSITIVITY,
    SINGLE,
    compared,
    full_memory_of_last_stage,
    sensitivity,
)
from tests.distributed.on_a_rank import losses
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
    for ranks in RANKS:
        require_same([of_ranks[ranks, rank][name] for rank in range(ranks)], alone)


def require_same(found: list[dict[str, Any]], alone: snows.Result) -> None:
    """Masks and weights of one process, and the same bits on every rank."""
    first, *others = found
    for parameter, mask in alone.masks.items():
        assert torch.equal(first["masks"][parameter], mask)
    for key, value in alone.model.state_dict().items():
        assert float((first["weights"][key] - value).abs().max()) <= 1e-6 * max(float(value.abs().max()), 1e-12), key
        assert all(torch.equal(other["weights"][key], first["weights"][key]) for other in others)


@pytest.mark.parametrize("name", SINGLE)
def test_losses_in_single_precision_are_those_of_one_process(
    name: str, of_ranks: dict[tuple[int, int], dict[str, Any]]
) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        alone = SINGLE[name].run()
    for ranks in RANKS:
        first, *others = (of_ranks[ranks, rank][name] for rank in range(ranks))
        assert len(first["losses"]) == len(losses(alone)) > 0
        for found, expected in zip(first["losses"], losses(alone), strict=True):
            assert abs(found - expected) <= 1e-3 * expected
        for other in others:
            assert other["losses"] == first["losses"]
            assert all(torch.equal(other["weights"][key], value) for key, value in first["weights"].items())


def test_all_ranks_try_the_last_stage_again_when_one_runs_out_of_memory(
    of_ranks: dict[tuple[int, int], dict[str, Any]],
) -> None:
    """In the first of several pieces, of which each is read by all ranks together."""
    with full_memory_of_last_stage(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        alone = IN_PIECES.run()
    for ranks in RANKS:
        found = [of_ranks[ranks, rank][MEMORY_OF_LAST_STAGE] for rank in range(ranks)]
        require_same(found, alone)
        assert all(any("out of memory in the last stage" in text for text in each["warnings"]) for each in found)


def test_all_ranks_try_again_when_one_runs_out_of_memory(of_ranks: dict[tuple[int, int], dict[str, Any]]) -> None:
    alone = CASES["residual"].run()
    for ranks in RANKS:
        found = [of_ranks[ranks, rank][OUT_OF_MEMORY] for rank in range(ranks)]
        require_same(found, alone)
        assert all(any("out of memory at conv1" in text for text in each["warnings"]) for each in found)


def test_a_comparison_has_the_same_rows(of_ranks: dict[tuple[int, int], dict[str, Any]]) -> None:
    alone = compared()
    for ranks in RANKS:
        for rank in range(ranks):
            assert of_ranks[ranks, rank][COMPARED] == alone


def test_all_ranks_choose_a_mask_again_when_one_runs_out_of_memory(
    of_ranks: dict[tuple[int, int], dict[str, Any]],
) -> None:
    alone = CASES["mask obc"].run()
    for ranks in RANKS:
        found = [of_ranks[ranks, rank][MEMORY_OF_ROWS] for rank in range(ranks)]
        require_same(found, alone)
        assert all(sum("out of memory at" in text for text in each["warnings"]) == 2 for each in found)


def test_layers_that_are_measured_alone_are_shared(of_ranks: dict[tuple[int, int], dict[str, Any]]) -> None:
    alone = sensitivity()
    layers = len(json.loads(alone)["layers"])
    for ranks in RANKS:
        texts, counts = zip(*(of_ranks[ranks, rank][SENSITIVITY] for rank in range(ranks)), strict=True)
        assert set(texts) == {alone}
        assert sum(counts) == layers
        assert max(counts) < layers


def test_every_rank_reads_its_share_of_a_dataset(of_ranks: dict[tuple[int, int], dict[str, Any]]) -> None:
    """And a few samples more, by which the network is captured and the result is shown."""
    samples = CASES[DATASET].samples
    for ranks in RANKS:
        read = [set(of_ranks[ranks, rank][READ]) for rank in range(ranks)]
        assert set.union(*read) == set(range(samples))
        assert max(map(len, read)) <= samples / ranks + 100
