"""Code run as an ordinary user, whom permissions hold for, also where the tests are run by root."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import snows

ROOT = hasattr(os, "geteuid") and os.geteuid() == 0
AS_NOBODY = ["setpriv", "--reuid=65534", "--regid=65534", "--clear-groups"]


def as_ordinary_user(code: str, folder: Path) -> str:
    """What a process prints that is not root: this one, or one that gives its rights away."""
    if ROOT and shutil.which("setpriv") is None:
        pytest.skip("setpriv is needed to act as an ordinary user")
    for place in (folder, *folder.parents):  # pytest's folders are closed to others
        if place.stat().st_uid == os.geteuid() and place != Path(place.anchor):
            place.chmod(place.stat().st_mode | 0o055)
    source = str(Path(snows.__file__).parents[1])
    words = [*(AS_NOBODY if ROOT else []), sys.executable, "-c", code]
    found = subprocess.run(words, cwd=folder, env={"PYTHONPATH": source}, capture_output=True, text=True, check=False)
    assert found.returncode == 0, found.stderr
    return found.stdout
