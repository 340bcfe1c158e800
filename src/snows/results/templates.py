"""Templates of pages. Whatever is put into them is escaped."""

from __future__ import annotations

from collections.abc import Callable
from importlib.resources import files

from jinja2 import Environment, StrictUndefined, Template


def read_template(package: str, *path: str, **filters: Callable[..., object]) -> Template:
    """The template in a file of a package. It may use these filters."""
    environment = Environment(autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    environment.filters.update(filters)
    return environment.from_string(files(package).joinpath(*path).read_text(encoding="utf-8"))
