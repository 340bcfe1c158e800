"""The table of formats: every one has a writer, and says what it needs."""

from __future__ import annotations

import importlib
from importlib.util import find_spec

import pytest

from snows.errors import ArgumentError, InputError
from snows.exports import formats
from snows.exports.formats import FORMATS, find_format


def test_every_format_has_a_writer() -> None:
    for form in FORMATS.values():
        if not form.missing:
            assert callable(importlib.import_module(f"snows.exports.{form.module}").write)


def test_an_unknown_format_is_answered_with_the_known_ones() -> None:
    with pytest.raises(ArgumentError, match="the format 'tflite' is not known; expected onnx, tensorrt, openvino"):
        find_format("tflite")


@pytest.mark.parametrize("name", ["marlin-24", "sparse-24"])
def test_dead_formats_are_refused_with_the_reason(name: str) -> None:
    with pytest.raises(ArgumentError, match=f"'{name}' is not offered, as vLLM removed"):
        find_format(name)


def test_a_missing_package_is_one_sentence_with_the_line_that_installs_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(formats, "find_spec", lambda name: None if name == "onnxruntime" else find_spec(name))
    line = r"onnx needs onnxruntime, which is not installed; install with: pip install onnx onnxscript onnxruntime$"
    with pytest.raises(InputError, match=line):
        find_format("onnx")


def test_formats_of_torch_alone_need_nothing() -> None:
    assert [name for name, form in FORMATS.items() if not form.packages] == ["torch-2:4", "torch-export", "safetensors"]
