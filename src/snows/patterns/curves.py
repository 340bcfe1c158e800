"""Curves: what pruning each layer alone to several sparsities was measured to do.

`snows sensitivity` keeps them in a file. A budget reads them in place of measurements of its own: "0.7 measured=FILE".
"""

from __future__ import annotations

import hashlib
import itertools
import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from ..errors import InputError
from ..reading import look, read_text

KIND, SCHEMA = "sensitivity", 1

Points = tuple[tuple[float, float], ...]  # sparsity and error, the sparsities rising


@dataclass(frozen=True)
class Curves:
    """For each layer, by the name of its weight, the errors of the network's outputs at some sparsities.

    Attributes:
        source: The file that holds them, as text names it. It is read when it is needed.
        given: The same data as text, where they do not come from a file.
    """

    source: str
    given: str | None = field(default=None, repr=False)

    @cached_property
    def layers(self) -> dict[str, tuple[int, Points]]:
        """The number of weights of each layer, and what was measured.

        Raises:
            InputError: There is no such file, or it holds something else.
        """
        text = self._text()  # says itself what is wrong
        try:
            data = json.loads(text)
        except (ValueError, RecursionError) as error:
            raise InputError(f"{self.source} is not valid JSON: {error}") from error
        try:
            if (data["kind"], data["schema"]) != (KIND, SCHEMA):
                raise ValueError(f"kind {data['kind']!r}, schema {data['schema']!r}")
            return {str(layer["parameter"]): (int(layer["weights"]), _points(layer)) for layer in data["layers"]}
        except (TypeError, KeyError, ValueError, AttributeError) as error:
            raise InputError(
                f"{self.source} holds no measurements; expected a file of `snows sensitivity --out` ({error})"
            ) from error

    def _text(self) -> str:
        if self.given is not None:
            return self.given
        path = Path(self.source)
        if look(path) is None:
            raise InputError(f"there is no file {path}; `snows sensitivity --out {path}` makes one")
        return read_text(path)

    def errors(self, name: str, size: int, counts: Iterable[int]) -> list[float]:
        """What removing so many of the layer's `size` weights does: along straight lines between the measurements."""
        measured, points = self.layers.get(name, (0, ()))
        if measured != size:
            known = f"it has {measured} weights there" if measured else "it is not among its layers"
            raise InputError(
                f"{self.source} was not measured with {name} ({size} weights): {known}; measure this network and these "
                "layers with `snows sensitivity`"
            )
        return [_between(((0.0, 0.0), *points), count / size) for count in counts]

    @property
    def digest(self) -> str:
        """Of all that decides a budget."""
        return hashlib.sha256(json.dumps(self.layers).encode()).hexdigest()[:16]


def _points(layer: Mapping[str, Any]) -> Points:
    """What was measured of the unstructured patterns of a layer, with its weights re-adjusted."""
    found = {
        float(level["sparsity"]): float(level["readjusted"]["error"])
        for level in layer["levels"]
        if level["unstructured"]
    }
    if not found:
        raise ValueError(f"no sparsity such as 0.5 was measured for {layer['name']}")
    if not all(0 < sparsity < 1 and 0 <= error < math.inf for sparsity, error in found.items()):
        raise ValueError(f"sparsities or errors of {layer['name']} are out of range")
    return tuple(sorted(found.items()))


def _between(points: Sequence[tuple[float, float]], at: float) -> float:
    """The value at a place, along straight lines; beyond the last point along the last of them."""
    pairs = list(itertools.pairwise(points))
    (x0, y0), (x1, y1) = next((pair for pair in pairs if at <= pair[1][0]), pairs[-1])
    return y0 + (y1 - y0) * (at - x0) / (x1 - x0)
