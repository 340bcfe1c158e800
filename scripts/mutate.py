"""Do the tests notice small errors? Plants one error at a time in a copy of the source and runs the tests.

    python scripts/mutate.py --sample 60 --seed 1 --out mutants.json

A mutant is killed when a test fails. Tests of the same module run first, then those of the room, then those of the
whole (integration and properties).
"""

from __future__ import annotations

import argparse
import ast
import copy
import dataclasses
import json
import os
import random
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[1]
ROOMS = ("solve", "patterns", "masks", "graph")
TIMEOUT = 600  # seconds; a mutant that hangs is killed
COMPARISONS: dict[type[ast.cmpop], type[ast.cmpop]] = {
    ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt, ast.Eq: ast.NotEq, ast.NotEq: ast.Eq,
    ast.Is: ast.IsNot, ast.IsNot: ast.Is, ast.In: ast.NotIn, ast.NotIn: ast.In,
}  # fmt: skip
ARITHMETIC: dict[type[ast.operator], type[ast.operator]] = {
    ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.Div, ast.Div: ast.Mult, ast.FloorDiv: ast.Mult,
    ast.BitAnd: ast.BitOr, ast.BitOr: ast.BitAnd,
}  # fmt: skip
NAMES = {"min": "max", "max": "min", "argmin": "argmax", "argmax": "argmin", "any": "all", "all": "any"}


@dataclass(frozen=True)
class Mutant:
    file: str
    line: int
    before: str
    after: str
    source: str  # of the whole file

    def describe(self) -> str:
        return f"{self.file}:{self.line}  {self.before}  ->  {self.after}"


def replacements(node: ast.AST) -> Iterator[ast.AST]:
    """The node with one small error."""
    new = copy.deepcopy(node)
    if isinstance(new, ast.Compare) and len(new.ops) == 1 and type(new.ops[0]) in COMPARISONS:
        new.ops = [COMPARISONS[type(new.ops[0])]()]
        yield new
    elif isinstance(new, ast.BinOp | ast.AugAssign) and type(new.op) in ARITHMETIC:
        new.op = ARITHMETIC[type(new.op)]()
        yield new
    elif isinstance(new, ast.BoolOp):
        new.op = ast.Or() if isinstance(new.op, ast.And) else ast.And()
        yield new
    elif isinstance(new, ast.UnaryOp) and isinstance(new.op, ast.Not | ast.USub | ast.Invert):
        yield new.operand
    elif isinstance(new, ast.Constant) and type(new.value) in (bool, int, float):
        value = new.value
        yield ast.copy_location(ast.Constant(not value if value is True or value is False else value + 1), new)
    elif isinstance(new, ast.Name) and new.id in NAMES:
        new.id = NAMES[new.id]
        yield new
    elif isinstance(new, ast.Attribute) and new.attr in NAMES:
        new.attr = NAMES[new.attr]
        yield new
    elif isinstance(new, ast.IfExp):
        new.body, new.orelse = new.orelse, new.body
        yield new
    elif isinstance(new, ast.Expr) and isinstance(new.value, ast.Call) and "warn" not in ast.unparse(new.value.func):
        yield ast.copy_location(ast.Pass(), new)


def without_behaviour(tree: ast.Module) -> set[ast.AST]:
    """Annotations, messages and docstrings."""
    return {inner for node in ast.walk(tree) for part in silent_parts(node) for inner in ast.walk(part)}


def silent_parts(node: ast.AST) -> list[ast.AST]:
    if isinstance(node, ast.FunctionDef):
        arguments = [*node.args.args, *node.args.kwonlyargs, *node.args.posonlyargs]
        return [part for part in (node.returns, *(argument.annotation for argument in arguments)) if part is not None]
    if isinstance(node, ast.AnnAssign):
        return [node.annotation]
    if isinstance(node, ast.Call):
        return [node] if ast.unparse(node.func) in ("warnings.warn", "cast", "TypeVar") else []
    if isinstance(node, ast.ClassDef):
        return list(node.decorator_list)  # frozen or not, a dataclass that nobody changes is the same
    docstring = isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
    return [node] if docstring or isinstance(node, ast.Raise | ast.JoinedStr | ast.ImportFrom | ast.Import) else []


def mutants_of(path: Path) -> Iterator[Callable[[], Mutant]]:
    text = path.read_text(encoding="utf-8")
    tree = ast.parse(text)
    lines = text.splitlines(keepends=True)
    left_out = without_behaviour(tree)
    for node in ast.walk(tree):
        if node in left_out or not hasattr(node, "lineno"):
            continue
        for new in replacements(node):

            def build(node: ast.AST = node, new: ast.AST = new) -> Mutant:
                before, after = ast.unparse(node), ast.unparse(new)
                source = spliced(lines, node, after)
                return Mutant(str(path.relative_to(ROOT)), node.lineno, before, after, source)  # type: ignore[attr-defined]

            yield build


def spliced(lines: list[str], node: ast.AST, after: str) -> str:
    """The source with the node's text replaced, in parentheses where it is an expression."""
    first, last = node.lineno - 1, node.end_lineno - 1  # type: ignore[attr-defined]
    head = lines[first].encode()[: node.col_offset].decode()  # type: ignore[attr-defined]
    tail = lines[last].encode()[node.end_col_offset :].decode()  # type: ignore[attr-defined]
    inner = f"({after})" if isinstance(node, ast.expr) and not isinstance(node, ast.Name | ast.Constant) else after
    return "".join([*lines[:first], head + inner + tail, *lines[last + 1 :]])


def stages(file: str) -> list[list[str]]:
    """Which tests to run, one list after another."""
    _, _, room, module = Path(file).with_suffix("").parts
    unit = ROOT / "tests" / "unit" / room
    own = sorted(str(path.relative_to(ROOT)) for path in unit.glob(f"test_{module}*.py"))
    return [*([own] if own else []), [str(unit.relative_to(ROOT))], ["tests/integration", "tests/property"]]


def killed_by(mutant: Mutant, tree: Path) -> str | None:
    """The first test that fails with the mutant in place; None if it survives."""
    target = tree / mutant.file
    original = target.read_text(encoding="utf-8")
    target.write_text(mutant.source, encoding="utf-8")
    environment = {**os.environ, "PYTHONPATH": str(tree / "src"), "PYTHONDONTWRITEBYTECODE": "1"}
    try:
        for tests in stages(mutant.file):
            command = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", *tests]
            try:
                ended = subprocess.run(
                    command, cwd=tree, env=environment, capture_output=True, text=True, timeout=TIMEOUT
                )
            except subprocess.TimeoutExpired:
                return "time-out"
            if ended.returncode not in (0, 5):
                failed = [line for line in ended.stdout.splitlines() if line.startswith(("FAILED", "ERROR"))]
                return failed[0][:160] if failed else f"exit status {ended.returncode}"
        return None
    finally:
        target.write_text(original, encoding="utf-8")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sample", type=int, default=60)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--rooms", nargs="*", default=ROOMS)
    parser.add_argument("--out", type=Path, help="a JSON file with every mutant and what killed it")
    options = parser.parse_args()
    files = [path for room in options.rooms for path in sorted((ROOT / "src" / "snows" / room).glob("*.py"))]
    candidates = [build for path in files for build in mutants_of(path)]
    chosen = [build() for build in random.Random(options.seed).sample(candidates, min(options.sample, len(candidates)))]
    print(f"{len(chosen)} of {len(candidates)} mutants")
    results = []
    with tempfile.TemporaryDirectory() as folder:
        tree = Path(folder) / "tree"
        ignore = shutil.ignore_patterns(".git", ".venv", "*.egg-info", "__pycache__", ".*_cache")
        shutil.copytree(ROOT, tree, ignore=ignore)
        for mutant in chosen:
            killer = killed_by(mutant, tree)
            results.append({**dataclasses.asdict(mutant), "killed_by": killer})
            del results[-1]["source"]
            print(f"{'survived' if killer is None else 'killed  '}  {mutant.describe()}", flush=True)
            if options.out:
                options.out.write_text(json.dumps(results, indent=2) + "\n", encoding="utf-8")
    survived = sum(result["killed_by"] is None for result in results)
    print(f"{len(results) - survived} of {len(results)} killed")
    return 0


if __name__ == "__main__":
    sys.exit(main())
