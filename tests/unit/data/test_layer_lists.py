"""Lists of layers from a file."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from snows.data.layer_lists import KIND, read_layer_list
from snows.errors import ArgumentError, InputError
from snows.plan import as_names


def written(folder: Path, content: object) -> str:
    file = folder / "bench.json"
    file.write_text(content if isinstance(content, str) else json.dumps(content))
    return str(file)


def test_names_of_a_file_beside_other_names(tmp_path: Path) -> None:
    file = written(tmp_path, {"kind": KIND, "prune": ["a.b", "c"]})
    assert read_layer_list(file) == ("a.b", "c")
    assert as_names(f"first, {file}", "layers") == ("first", "a.b", "c")
    assert as_names([file, "*.fc"], "layers") == ("a.b", "c", "*.fc")


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("no json", "cannot read"),
        ([1], "expected a JSON object"),
        ({"kind": "other", "prune": ["a"]}, "which snows bench did not write"),
        ({"kind": KIND, "prune": "a"}, "which snows bench did not write"),
        ({"kind": KIND, "prune": [1]}, "which snows bench did not write"),
    ],
)
def test_other_files_are_refused(tmp_path: Path, content: object, words: str) -> None:
    with pytest.raises(InputError, match=words):
        read_layer_list(written(tmp_path, content))


def test_a_list_without_layers_and_a_missing_file(tmp_path: Path) -> None:
    with pytest.raises(ArgumentError, match=r"^exclude is .*bench\.json, which names no layer: none was faster sparse"):
        as_names(written(tmp_path, {"kind": KIND, "prune": []}), "exclude")
    for argument in ("layers", "exclude"):
        with pytest.raises(InputError, match=f"^{argument} is nothing.json, and there is no such file"):
            as_names("nothing.json", argument)
