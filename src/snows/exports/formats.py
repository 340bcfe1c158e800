"""The formats that a saved result can be exported to. Each has a module of this room, which is imported when needed."""

from __future__ import annotations

from dataclasses import dataclass
from importlib.util import find_spec

from ..errors import ArgumentError, InputError, shown


@dataclass(frozen=True)
class Format:
    """One format: the module with its `write`, and the packages that it needs."""

    module: str
    packages: tuple[str, ...]

    @property
    def missing(self) -> list[str]:
        """Packages that are not installed."""
        return [package for package in self.packages if find_spec(package) is None]


_ONNX = ("onnx", "onnxscript", "onnxruntime")

FORMATS = {
    "onnx": Format("onnx_file", _ONNX),
    "tensorrt": Format("tensorrt_rules", _ONNX),
    "openvino": Format("openvino_ir", ("openvino",)),
    "coreml": Format("coreml_package", ("coremltools",)),
    "torch-2:4": Format("semi_structured", ()),
    "torch-export": Format("program", ()),
    "hf": Format("hugging_face", ("transformers",)),
    "safetensors": Format("weight_files", ()),
}
# Formats that people may ask for.
_DEAD = ("compressed-tensors", "sparse-24", "sparse24", "marlin-24", "marlin24")


def find_format(name: str) -> Format:
    """The format of this name, if all that it needs is installed."""
    if isinstance(name, str) and name in _DEAD:
        raise ArgumentError(
            f"the format {name!r} is not offered, as vLLM removed its sparse kernels in 2026 and nothing else runs it; "
            f"expected {', '.join(FORMATS)}"
        )
    if not isinstance(name, str) or name not in FORMATS:
        raise ArgumentError(f"the format {shown(name)} is not known; expected {', '.join(FORMATS)}")
    if missing := FORMATS[name].missing:
        raise InputError(
            f"{name} needs {', '.join(missing)}, which {'is' if len(missing) == 1 else 'are'} not installed; "
            f"install with: pip install {' '.join(FORMATS[name].packages)}"
        )
    return FORMATS[name]
