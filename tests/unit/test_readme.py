"""What the README and the other documents name exists. tests/integration/test_pages.py runs what they show."""

from __future__ import annotations

import importlib
import inspect
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import snows
from tests.pages import blocks_of

ROOT = Path(__file__).parents[2]
DOCUMENTS = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]


def test_the_options_of_prune_are_shown_with_their_defaults() -> None:
    (call, *_) = [block.text for block in blocks_of(ROOT / "docs" / "python.md") if block.language == "python"]
    shown: dict[str, Any] = {}
    exec(
        re.sub(r"import snows\s+snows\.prune\(\s*model, calibration, pattern,", "shown.update(", call), {"shown": shown}
    )
    parameters = list(inspect.signature(snows.prune).parameters.values())[3:]
    assert shown == {parameter.name: parameter.default for parameter in parameters}


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_names_of_the_package_exist(document: Path) -> None:
    text = document.read_text(encoding="utf-8")
    for name in re.findall(r"\bsnows((?:\.\w+)+)", text):
        exists(name.removeprefix("."))
    for module, imported in re.findall(r"^from (snows[\w.]*) import (.+)$", text, re.MULTILINE):
        for name in imported.split(","):
            assert hasattr(importlib.import_module(module), name.strip())
    for path in re.findall(r"`((?:snows|benchmarks|tests|docs|scripts)/[\w./]+)`", text):
        assert (ROOT / path).exists() or (ROOT / "src" / path).exists(), path
    for path in re.findall(r"\]\(([\w./]+\.md)\)", text):
        assert (document.parent / path).is_file(), path


def test_figures_are_what_the_results_say() -> None:
    script = ROOT / "scripts" / "draw_docs.py"
    done = subprocess.run([sys.executable, script, "--check"], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    drawn = {path.name for path in (ROOT / "docs" / "figures").iterdir()}
    shown = {name for page in DOCUMENTS for name in re.findall(r"figures/([\w-]+\.\w+)", page.read_text("utf-8"))}
    assert drawn == shown


def exists(name: str) -> None:
    """A public name, or a module and perhaps a name in it."""
    first = name.split(".")[0]
    if first in snows.__all__:
        return
    try:
        importlib.import_module(f"snows.{name}")
    except ImportError:
        module, _, attribute = f"snows.{name}".rpartition(".")
        assert module != "snows", f"snows.{name} does not exist"
        assert hasattr(importlib.import_module(module), attribute), name
