"""Every test of the command line runs in a folder with `net.py` and the recipe `fast.json`."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

FAST = """{"schema": 1, "horizon": 2, "sweeps": 1, "cg_steps": 2}"""


@pytest.fixture(scope="module", autouse=True)
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("work")
    shutil.copy(Path(__file__).with_name("net.py"), folder)
    (folder / "fast.json").write_text(FAST)
    return folder


@pytest.fixture(autouse=True)
def here(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(place)
