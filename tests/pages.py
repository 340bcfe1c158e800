"""Code blocks of Markdown pages: README.md and docs."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]

_BLOCK = re.compile(
    r"(?P<marks>(?:^ *<!-- [^\n]* -->\n+)*)^(?P<indent> *)```(?P<language>[^\n`]*)\n(?P<text>.*?)^(?P=indent)```$",
    re.MULTILINE | re.DOTALL,
)
_MARK = re.compile(r"<!-- (?P<word>not run|before|run)(?:: (?P<text>.*))? -->")


@dataclass(frozen=True)
class Block:
    """A fenced block, and the marks in comments right before it.

    Attributes:
        not_run: Why the block cannot run here. Its syntax is checked all the same.
        before: Code that prepares what the block takes as given.
        run: Whether a console block is run; others are only parsed.
    """

    page: Path
    line: int
    language: str
    text: str
    not_run: str
    before: str
    run: bool

    def __str__(self) -> str:
        return f"{self.page.name}:{self.line}"


def blocks_of(page: Path, text: str | None = None) -> list[Block]:
    text = page.read_text(encoding="utf-8") if text is None else text
    return [_block(page, text, match) for match in _BLOCK.finditer(text)]


def _block(page: Path, text: str, match: re.Match[str]) -> Block:
    marks = list(_MARK.finditer(match["marks"]))
    words = {mark["word"]: mark["text"] or "" for mark in marks}
    indent = len(match["indent"])
    lines = [line[indent:] if line.strip() else "" for line in match["text"].splitlines()]
    return Block(
        page,
        text[: match.end("marks")].count("\n") + 1,
        match["language"].strip(),
        "\n".join(lines) + "\n",
        not_run=words.get("not run", ""),
        before="\n".join(mark["text"] or "" for mark in marks if mark["word"] == "before"),
        run="run" in words,
    )


def commands_of(page: Path) -> list[str]:
    """The lines of its console blocks that call `snows`."""
    consoles = [block for block in blocks_of(page) if block.language in ("", "console")]
    return [line for block in consoles for line in block.text.splitlines() if line.startswith("snows ")]
