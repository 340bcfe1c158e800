"""The site is made without a warning, and every link in it leads somewhere."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

import pytest

ROOT = Path(__file__).parents[2]
FETCHED = {"script", "img", "link", "iframe", "source"}


class Page(HTMLParser):
    """The places of a page that can be linked to, its links, and what it loads."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.places: set[str] = {"", "top"}  # browsers take both for the beginning of a page
        self.links: list[str] = []
        self.loaded: list[str] = []
        self.feed(path.read_text(encoding="utf-8"))

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = {name: value for name, value in attrs if value}
        self.places |= {given[name] for name in ("id", "name") if name in given}
        for name in ("href", "src"):
            if name in given:
                self.links.append(given[name])
                if tag in FETCHED:
                    self.loaded.append(given[name])


@pytest.fixture(scope="module")
def pages(tmp_path_factory: pytest.TempPathFactory) -> dict[Path, Page]:
    out = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "sphinx", "-q", "-W", "--keep-going", "-b", "html", ROOT / "docs", out]
    done = subprocess.run([*map(str, command)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return {path: Page(path) for path in sorted(out.rglob("*.html"))}


def broken_links(pages: dict[Path, Page]) -> Iterator[str]:
    for path, page in pages.items():
        for link in page.links:
            parts = urlsplit(link)
            if parts.scheme or parts.netloc:
                continue
            target = (path.parent / unquote(parts.path)).resolve() if parts.path else path
            if not target.is_file():
                yield f"{path.name}: {link} is no file"
            elif target in pages and unquote(parts.fragment) not in pages[target].places:
                yield f"{path.name}: {link} is no place on that page"


def test_every_link_inside_the_site_resolves(pages: dict[Path, Page]) -> None:
    assert len(pages) > 5
    assert sum(len(page.links) for page in pages.values()) > 100
    assert list(broken_links(pages)) == []


def test_a_broken_link_would_be_seen(tmp_path: Path) -> None:
    page = tmp_path / "page.html"
    page.write_text('<a href="nowhere.html">a</a> <a href="#nothing">b</a> <a href="#here" id="here">c</a>')
    assert [text.split(" is ")[0] for text in broken_links({page: Page(page)})] == [
        "page.html: nowhere.html",
        "page.html: #nothing",
    ]


def test_pages_load_nothing_from_elsewhere(pages: dict[Path, Page]) -> None:
    assert [link for page in pages.values() for link in page.loaded if urlsplit(link).netloc] == []


def test_every_page_is_in_the_table_of_contents(pages: dict[Path, Page]) -> None:
    """Sphinx warns of a page that is not, and the build fails on warnings; here the pages are counted."""
    written = {path.relative_to(ROOT / "docs").with_suffix("") for path in (ROOT / "docs").rglob("*.md")}
    made = {str(path) for path in pages}
    assert [name for name in written if not any(path.endswith(f"/{name}.html") for path in made)] == []


def test_every_public_name_is_in_the_reference(pages: dict[Path, Page]) -> None:
    import snows

    reference = next(page for path, page in pages.items() if path.name == "api.html" and "_modules" not in path.parts)
    documented = {place.rpartition(".")[2] for place in reference.places}
    assert [name for name in snows.__all__ if name not in documented and name != "__version__"] == []
