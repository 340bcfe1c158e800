"""The report as a page: one file without scripts, light or dark as the reader prefers."""

from __future__ import annotations

from collections.abc import Mapping
from importlib.resources import files
from typing import Any

from jinja2 import Environment, StrictUndefined


def render(report: Mapping[str, Any], refresh: float | None = None) -> str:
    """The page for the data of a report, as `Report.to_dict` gives it. Names and words in it are escaped.

    While the run has not finished, a browser reads it again after `refresh` seconds.
    """
    environment = Environment(autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    environment.filters["figure"] = _figure
    template = files(__package__).joinpath("report.html.j2").read_text(encoding="utf-8")
    return environment.from_string(template).render(report=report, refresh=refresh)


def _figure(value: object) -> str:
    """A number in four digits, and nothing for a figure that there is not."""
    if value is None:
        return ""
    return f"{value:.4g}" if isinstance(value, float) else str(value)
