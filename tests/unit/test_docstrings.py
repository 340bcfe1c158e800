"""Examples in docstrings run, and give what they say."""

from __future__ import annotations

import doctest
import importlib
import inspect
from pathlib import Path

import pytest
import torch

import snows

SOURCE = Path(__file__).parents[2] / "src"
WITH_EXAMPLES = sorted(
    ".".join(path.relative_to(SOURCE).with_suffix("").parts)
    for path in (SOURCE / "snows").rglob("*.py")
    if ">>> " in path.read_text(encoding="utf-8")
)


@pytest.mark.parametrize("name", WITH_EXAMPLES)
def test_examples_run(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with torch.random.fork_rng():
        torch.manual_seed(0)
        failed, attempted = doctest.testmod(importlib.import_module(name))
    assert attempted > 0
    assert failed == 0, "the output above says which"


def test_every_public_name_has_an_example() -> None:
    public = {name: getattr(snows, name) for name in snows.__all__ if callable(getattr(snows, name))}
    shown = {
        name: doctest.DocTestParser().get_examples(inspect.getdoc(value) or "")
        for name, value in public.items()
        if not (isinstance(value, type) and issubclass(value, Exception))  # errors are raised, not made by users
    }
    assert len(shown) > 30
    assert [name for name, examples in shown.items() if not examples] == []
