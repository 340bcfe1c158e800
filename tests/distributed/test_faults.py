"""A rank that dies ends the run on all of them, with a sentence, and any number of ranks goes on with it."""

from __future__ import annotations

import time
import warnings
from pathlib import Path

import pytest
import torch

import snows
from snows.results.journal import count_solves
from tests.distributed.cases import CASES
from tests.distributed.torchrun import torchrun
from tests.networks import make

DYING, STUCK = "tests.distributed.dying", "tests.distributed.stuck"


def finish(ranks: int, script: str, *words: str) -> tuple[int, str, float]:
    """Exit status, standard error, and seconds."""
    began = time.monotonic()
    process = torchrun(ranks, script, *words)
    _, errors = process.communicate(timeout=300)
    return process.returncode, errors, time.monotonic() - began


@pytest.mark.parametrize(
    ("victim", "again"),
    [(1, 2), pytest.param(0, 3, marks=pytest.mark.slow), pytest.param(2, 1, marks=pytest.mark.slow)],
)
def test_a_killed_rank_ends_the_run(victim: int, again: int, tmp_path: Path) -> None:
    resume, out = tmp_path / "resume", tmp_path / "out"
    status, errors, seconds = finish(3, DYING, str(resume), str(out), str(victim), "9")
    assert status != 0
    assert errors.count(f"rank {victim} of 3 is gone or hangs, so all ranks stop") >= 1, errors
    assert seconds < 60
    kept = count_solves(resume)
    assert kept > 0
    assert not out.exists()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        alone = CASES["residual"].run()
        if again == 1:
            CASES["residual"].run(resume=resume).save(out)
        else:
            assert finish(again, DYING, str(resume), str(out))[0] == 0
    resumed = snows.load(out, make("residual")).state_dict()
    assert count_solves(resume) > kept
    for name, value in alone.model.state_dict().items():
        torch.testing.assert_close(resumed[name], value, rtol=1e-6, atol=1e-9)


@pytest.mark.parametrize("where", ["call", "leaving"])
def test_the_sentence_is_said_wherever_the_others_are(where: str) -> None:
    status, errors, seconds = finish(2, STUCK, where)
    assert status != 0
    assert errors.count("rror: rank 1 of 2 is gone or hangs, so all ranks stop") == 1, errors
    assert seconds < 60
