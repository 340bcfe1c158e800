"""The rules that keep the house readable: short functions, short files, one way to ask a pattern."""

from __future__ import annotations

import ast
import shutil
import subprocess
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SOURCE = ROOT / "src" / "snows"
LONGEST_FUNCTION = 60  # lines, its docstring not counted
LONGEST_FILE = {"src": 400, "tests": 500, "scripts": 500}
KINDS = {"NM", "Unstructured"}  # of patterns
MOST_TESTS_OF_KINDS = 3


def modules(folder: Path) -> Iterator[tuple[str, ast.Module]]:
    for path in sorted(folder.rglob("*.py")):
        yield str(path.relative_to(ROOT)), ast.parse(path.read_text(encoding="utf-8"))


def calls(tree: ast.AST, name: str) -> Iterator[ast.Call]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == name:
            yield node


def function_lines(node: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    first = node.body[0]
    docstring = isinstance(first, ast.Expr) and isinstance(first.value, ast.Constant) and ast.get_docstring(node)
    assert node.end_lineno is not None
    assert first.end_lineno is not None
    return node.end_lineno - node.lineno + 1 - (first.end_lineno - first.lineno + 1 if docstring else 0)


@pytest.mark.parametrize("folder", LONGEST_FILE)
def test_files_are_short(folder: str) -> None:
    lengths = {path: len(path.read_text(encoding="utf-8").splitlines()) for path in (ROOT / folder).rglob("*.py")}
    assert lengths
    assert {str(path): n for path, n in lengths.items() if n > LONGEST_FILE[folder]} == {}


def test_functions_are_short() -> None:
    found = {
        f"{path}:{node.name}": function_lines(node)
        for path, tree in modules(SOURCE)
        for node in ast.walk(tree)
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
    }
    assert len(found) > 500
    assert {name: lines for name, lines in found.items() if lines > LONGEST_FUNCTION} == {}


def test_types_are_not_asserted() -> None:
    found = [
        f"{path}:{node.lineno}"
        for path, tree in modules(SOURCE)
        for node in ast.walk(tree)
        if isinstance(node, ast.Assert) and any(calls(node, "isinstance"))
    ]
    assert found == []


def test_patterns_are_asked_not_told_apart() -> None:
    found = [
        f"{path}:{call.lineno}"
        for path, tree in modules(SOURCE)
        for call in calls(tree, "isinstance")
        if KINDS & {node.id for node in ast.walk(call.args[1]) if isinstance(node, ast.Name)}
    ]
    assert len(found) <= MOST_TESTS_OF_KINDS, found
    assert all(place.startswith("src/snows/patterns/") for place in found), found


def test_one_room_reads_environment_variables() -> None:
    readers = {path for path, tree in modules(SOURCE) for node in ast.walk(tree) if reads_environment(node)}
    assert readers == {"src/snows/devices/distributed/launch.py"}


def reads_environment(node: ast.AST) -> bool:
    names = {"environ", "environb", "getenv", "getenvb"}
    imported = isinstance(node, ast.ImportFrom) and node.module == "os" and any(a.name in names for a in node.names)
    return imported or (isinstance(node, ast.Attribute) and node.attr in names)


def test_no_module_has_the_name_of_a_public_function() -> None:
    """Importing such a module would hide the function: `snows.load` would be a module then."""
    import snows

    functions = {name for name in snows.__all__ if callable(getattr(snows, name)) and name.islower()}
    assert functions
    assert functions.isdisjoint(path.stem for path in SOURCE.rglob("*.py"))
    assert functions.isdisjoint(path.name for path in SOURCE.rglob("*") if path.is_dir())


def test_unit_tests_mirror_the_rooms() -> None:
    """tests/unit/ROOM/test_MODULE.py tests src/snows/ROOM/MODULE.py; a few tests look across a whole room."""
    across = {"joint_solves", "house", "public", "docstrings", "benchmarks", "readme", "recipes_of_contributing"}
    for test in (ROOT / "tests" / "unit").rglob("test_*.py"):
        room, name = test.parent.relative_to(ROOT / "tests" / "unit"), test.stem.removeprefix("test_")
        beginnings = [name.rsplit("_", cut)[0] for cut in range(name.count("_") + 1)]  # test_graph_cuts.py: graph.py
        assert name in across or any(
            (SOURCE / room / f"{word}.py").is_file() or (SOURCE / room / word).is_dir() for word in beginnings
        ), test


def test_the_layers_name_every_room() -> None:
    """The contract is exhaustive, so that a new room needs a place in it."""
    contracts = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]["contracts"]
    (layers,) = [contract for contract in contracts if contract["type"] == "layers"]
    assert layers["exhaustive"] is True
    assert layers["containers"] == ["snows"]
    assert "ignore_imports" not in layers


@pytest.mark.parametrize("installed", [False, True])
def test_ci_needs_the_programs_without_which_tests_are_skipped(installed: bool, tmp_path: Path) -> None:
    programs = {"apt-get": 100, "make": 0} | ({"chromium": 0, "tmux": 0} if installed else {})
    for name, status in programs.items():
        (tmp_path / name).write_text(f"#!/bin/sh\necho called {name}\nexit {status}\n")
        (tmp_path / name).chmod(0o755)
    (tmp_path / "dirname").symlink_to(str(shutil.which("dirname")))
    command = [str(shutil.which("bash")), str(ROOT / ".ci" / "run")]
    ci = subprocess.run(command, env={"PATH": str(tmp_path)}, capture_output=True, text=True, check=False)
    if installed:
        assert (ci.returncode, ci.stdout) == (0, "called make\n"), ci
    else:
        assert (ci.returncode, ci.stdout) == (1, "called apt-get\n"), ci
        assert ci.stderr == "chromium could not be installed, so that its tests would be skipped\n"
