"""What a run says about its samples."""

from __future__ import annotations

import warnings

import pytest

from snows.errors import SnowsWarning
from snows.run import open_run
from tests.networks import example

from .test_run import RECIPE, task


def test_few_samples_are_said() -> None:
    """Fewer than eight held out tell little. Without re-adjustment there is nothing to judge."""
    few = example("conv-bn", 31)
    words = "there are only 31 calibration samples: .* losses of the 7 that are held out"
    with pytest.warns(SnowsWarning, match=words), open_run(task(calibration=few)):
        pass
    silent = [task(), task(calibration=few, readjusts=False), task(calibration=few, recipe=RECIPE.replace(held_out=0))]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for asked in silent:
            with open_run(asked):
                pass
