"""One saved result for all tests of the room. Exports stand beside it, each test has its own name for them."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.exported import calibration, images, save


@pytest.fixture(scope="session")
def pruned(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save(tmp_path_factory.mktemp("results") / "pruned", images(), calibration())
