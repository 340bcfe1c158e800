"""Every code block of README and docs runs, in the order of its page, with the embedded network as `model`.

Blocks that cannot run say why in the page's source, `<!-- not run: reason -->`; their syntax is checked.
`<!-- before: code -->` prepares what a block takes as given. Console blocks are parsed; after `<!-- run -->`, run.
"""

from __future__ import annotations

import json
import re
import shlex
import sys
import tomllib
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import typer

import snows
from snows.cli import main as command_line
from snows.cli.commands import app
from snows.cli.request import split_patterns
from snows.data import embedded
from tests.pages import PAGES, ROOT, Block, blocks_of, commands_of

WITH_PYTHON = [page for page in PAGES if any(block.language == "python" for block in blocks_of(page))]
BLOCKS = [block for page in PAGES for block in blocks_of(page)]
RUN = [block for block in BLOCKS if block.run]
COMMANDS = sorted({line for page in PAGES for line in commands_of(page)})
PROGRAMS = {"snows", "make", "pip", "python", "git", "jupyter", "tensorboard", "torchrun"}
UNCHECKED = {"text", "bibtex"}  # drawings and the like


def page_name(page: Path) -> str:
    return page.relative_to(ROOT).as_posix()


@pytest.fixture
def names(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """What every page takes as given, in a folder of its own. Images are cut small, and few, to be quick."""
    monkeypatch.chdir(tmp_path)
    x, _, test, labels = embedded.images()
    model = embedded.model()
    return {
        "__name__": "page",
        "snows": snows,
        "torch": torch,
        "model": model,
        "dense": model,
        "calibration": x[:24, :, 6:22, 6:22],
        "images": x[:24, :, 6:22, 6:22],
        "pattern": "2:4",
        "test": test[:16],
        "labels": labels[:16],
    }


@pytest.mark.filterwarnings("ignore::snows.SnowsWarning")  # of samples that are so few and small
@pytest.mark.parametrize("page", WITH_PYTHON, ids=page_name)
def test_python_blocks_run(page: Path, names: dict[str, Any], quick: None) -> None:
    for block in blocks_of(page):
        if block.language != "python":
            continue
        code = compile("\n" * (block.line) + block.text, str(page), "exec")
        if not block.not_run:
            exec(compile(block.before, f"before {block}", "exec"), names)
            exec(code, names)


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Runs of the pages are as short as may be; other tests see to what the default is worth."""
    from snows import recipe

    shortest = {"horizon": 0, "sweeps": 1, "mask_steps": 1}
    short = {name: chosen.replace(**shortest) for name, chosen in recipe.EFFORTS.items()}
    monkeypatch.setattr(recipe, "EFFORTS", short)


@pytest.mark.parametrize("block", RUN, ids=str)
def test_marked_console_blocks_run(
    block: Block, quick: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    for line in block.text.splitlines():
        monkeypatch.setattr(sys, "argv", shlex.split(line, comments=True))
        with pytest.raises(SystemExit) as stop, warnings.catch_warnings():
            command_line.main()
        assert not stop.value.code, f"{line}: {capsys.readouterr().err}"


@pytest.mark.parametrize("line", COMMANDS)
def test_commands_are_understood(line: str) -> None:
    """As far as the flags and the patterns: most of these models are not here."""
    _, name, *words = shlex.split(line, comments=True)
    if name.startswith("-"):
        return  # such as snows --help
    command = typer.main.get_command(app).commands[name]  # type: ignore[attr-defined]
    given = command.make_context(name, words).params
    patterns = given.get("pattern")
    assert split_patterns([patterns] if isinstance(patterns, str) else patterns or []) or not patterns


def test_every_block_is_of_a_kind_that_is_checked() -> None:
    for block in BLOCKS:
        if block.language == "json":
            json.loads(block.text)
        elif block.language == "toml":
            tomllib.loads(block.text)
        elif block.language in ("", "console"):
            check_console(block)
        else:
            known = block.language == "python" or block.language in UNCHECKED or block.language.startswith("{")
            assert known, f"{block}: a block of {block.language!r}; no test knows what to do with it"


def check_console(block: Block) -> None:
    """Lines call programs that are known; targets of make and scripts of the repository exist."""
    targets = re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE)
    for line in block.text.replace("\\\n", " ").splitlines():
        words = shlex.split(line, comments=True)
        while words and "=" in words[0]:  # settings of the environment
            words = words[1:]
        if not words:
            continue
        assert words[0] in PROGRAMS, f"{block}: {words[0]!r} is no program that is known; is this ```text?"
        if words[0] == "make":
            assert words[1] in targets, f"{block}: make has no {words[1]!r}"
        for word in words[1:]:
            if re.fullmatch(r"(benchmarks|scripts|examples|docs)/\S+\.py", word):
                assert (ROOT / word).is_file(), f"{block}: there is no {word}"


def test_a_wrong_block_would_be_seen() -> None:
    text = "<!-- not run: no network -->\n\n```python\nprint(1\n```\n\n  ```\n  sonws prune\n  ```\n"
    python, console = blocks_of(Path("page.md"), text)
    assert (python.not_run, python.line, console.text) == ("no network", 3, "sonws prune\n")
    with pytest.raises(SyntaxError):
        compile(python.text, "page.md", "exec")
    with pytest.raises(AssertionError, match="sonws"):
        check_console(console)


def test_every_command_is_shown() -> None:
    shown = {line.split()[1] for line in COMMANDS}
    assert set(typer.main.get_command(app).commands) <= shown  # type: ignore[attr-defined]
