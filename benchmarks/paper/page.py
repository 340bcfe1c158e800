"""The tables and figures of docs/paper.md, from the results."""

from __future__ import annotations

import json
import re
from pathlib import Path

from .entries import ENTRIES


def write(results: Path, docs: Path) -> None:
    """Replace what stands between the marks of each entry that has results. All else on the page stays."""
    path = docs / "paper.md"
    text = path.read_text()
    for name in ENTRIES:
        file = results / f"{name}.json"
        if file.exists():
            text = between_marks(text, name, section(name, json.loads(file.read_text()), docs / "paper"))
    path.write_text(text)


def section(name: str, found: dict, figures: Path) -> str:  # type: ignore[type-arg]
    entry, rows, made = ENTRIES[name], found["rows"], found["environment"]
    parts = [entry.table(rows)] if entry.table else []
    for figure, drawing in (entry.draw(rows) if entry.draw else {}).items():
        figures.mkdir(exist_ok=True)
        (figures / f"{figure}.svg").write_text(drawing)
        parts.append(f"![{figure}](paper/{figure}.svg)")
    parts.append(f"*{made['device']}, snows {made['snows']}, torch {made['torch']}, commit {made['commit'][:7]}.*")
    return "\n\n".join(part.strip() for part in parts)


def between_marks(text: str, name: str, new: str) -> str:
    begin, end = f"<!-- {name}:begin -->", f"<!-- {name}:end -->"
    pattern = re.compile(re.escape(begin) + ".*?" + re.escape(end), re.DOTALL)
    assert pattern.search(text), f"docs/paper.md has no marks for {name}"
    return pattern.sub(lambda _: f"{begin}\n{new}\n{end}", text)
