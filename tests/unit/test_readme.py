"""What the README and the other documents show runs, and names what exists."""

from __future__ import annotations

import importlib
import inspect
import re
import shlex
from pathlib import Path
from typing import Any

import pytest
import torch
import typer
from safetensors.torch import save_file

import snows
from snows.cli.commands import app
from snows.cli.request import split_patterns
from tests.networks import example, make

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text(encoding="utf-8")
DOCUMENTS = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
PYTHON = re.findall(r"```python\n(.*?)```", README, re.DOTALL)
INLINE = re.findall(r"`(snows\.\w+\([^`]*\))`", README)
COMMANDS = sorted(
    {line for document in DOCUMENTS for line in re.findall(r"^snows \w.*$", document.read_text("utf-8"), re.MULTILINE)}
)


@pytest.fixture
def names(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """What the README takes as given, in a folder of its own."""
    monkeypatch.chdir(tmp_path)
    model, calibration, x = make("mlp"), example("mlp", 32), example("mlp", 16, seed=3)
    save_file({"2.weight": model[2].weight * (torch.arange(64).view(8, 8) % 2)}, "pruned.safetensors")
    y = model(x).argmax(1)
    return {
        "snows": snows,
        "model": model,
        "dense": model,
        "calibration": calibration,
        "pattern": "2:4",
        "x": x,
        "loader": [(x, y)],
        "y": y,
    }


def test_python_blocks_run(names: dict[str, Any]) -> None:
    assert len(PYTHON) == 2
    for block in PYTHON:
        exec(compile(block, "README.md", "exec"), names)
    result, loaded = names["result"], names["model"]
    assert torch.equal(loaded(names["x"]), result.model(names["x"]))
    assert {name: int(mask.sum()) for name, mask in result.masks.items()} == {"2.weight": 32}
    assert not loaded[2].weight[~result.masks["2.weight"]].any()


def test_code_in_sentences_runs(names: dict[str, Any]) -> None:
    assert len(INLINE) >= 4
    for code in INLINE:
        assert eval(code, names) is not None, code


def test_the_options_of_prune_are_shown_with_their_defaults() -> None:
    (call,) = [block for block in PYTHON if "mask=" in block]
    shown: dict[str, Any] = {}
    exec(re.sub(r"snows\.prune\(\s*model, calibration, pattern,", "shown.update(", call), {"shown": shown})
    parameters = list(inspect.signature(snows.prune).parameters.values())[3:]
    assert shown == {parameter.name: parameter.default for parameter in parameters}


@pytest.mark.parametrize("line", COMMANDS)
def test_commands_are_understood(line: str) -> None:
    """As far as the flags and the patterns: most of these models are not here."""
    _, name, *words = shlex.split(line)
    command = typer.main.get_command(app).commands[name]  # type: ignore[attr-defined]
    given = command.make_context(name, words).params
    patterns = given.get("pattern")
    assert split_patterns([patterns] if isinstance(patterns, str) else patterns or []) or not patterns


def test_every_command_is_shown() -> None:
    shown = {line.split()[1] for line in COMMANDS if line in README}
    assert shown == set(typer.main.get_command(app).commands)  # type: ignore[attr-defined]


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
