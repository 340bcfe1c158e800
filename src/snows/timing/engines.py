"""Whole networks: in torch, in ONNX Runtime and in OpenVINO."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ..data.usable import copied
from ..errors import ArgumentError, InputError
from ..exports import onnx_file, openvino_ir
from ..exports.base import Saved
from ..exports.formats import FORMATS, find_format
from ..graph.capture import Call
from .kernels import Kernel
from .layers import LayerCase
from .modes import modes_of

FORMAT_OF = {"torch": None, "onnxruntime": "onnx", "openvino": "openvino"}
_LEAST_SPARSITY = 0.5  # OpenVINO is to pack weights with this share of zeros or more

Calls = dict[str, Callable[[], Any]]  # by what the weights are


@dataclass(frozen=True)
class Setting:
    """One engine in one mode: the calls at a batch size, which are timed in turns."""

    engine: str
    mode: str
    calls: Callable[[int], Calls]


def check_engines(names: Iterable[str] | None, device: torch.device) -> tuple[str, ...]:
    """The engines to time: those that were named, or torch and, on a CPU, those that are installed."""
    if names is None:
        others = [engine for engine, form in FORMAT_OF.items() if form and not FORMATS[form].missing]
        return ("torch", *(others if device.type == "cpu" else []))
    chosen = tuple(names)
    for name in chosen:
        if name not in FORMAT_OF:
            raise ArgumentError(f"the engine {name!r} is not known; expected {', '.join(FORMAT_OF)}")
        if form := FORMAT_OF[name]:
            find_format(form)  # refuses what is not installed
            if device.type != "cpu":
                raise InputError(f"{name} is timed on the CPU only; the device is {device}")
    return chosen


def packed(model: nn.Module, chosen: Mapping[str, tuple[LayerCase, Kernel]]) -> nn.Module:
    """The model with sparse kernels in these layers."""
    found = copied(model)
    for name, (case, kernel) in chosen.items():
        found.set_submodule(name, kernel.pack(case.module))
    return found


def torch_settings(
    models: Mapping[str, nn.Module], calls: Mapping[int, Call], modes: Iterable[str], device: torch.device
) -> list[Setting]:
    """In torch, by mode; the models are named by what their weights are."""
    known = modes_of(device)

    def make(mode: Callable[[Callable[[], Any]], Callable[[], Any]], batch: int) -> Calls:
        args, kwargs = calls[batch]
        return {name: mode(partial(model, *args, **kwargs)) for name, model in models.items()}

    return [Setting("torch", name, partial(make, known[name])) for name in modes]


@dataclass(frozen=True)
class Exports:
    """The same network in other engines, written when it is first needed."""

    saved: Saved
    folder: Path

    @cached_property
    def onnx(self) -> Path:
        onnx_file.write(self.saved, self.folder)
        return self.folder / onnx_file.FILE

    @cached_property
    def openvino(self) -> Path:
        openvino_ir.write(self.saved, self.folder)
        return self.folder / openvino_ir.FILE

    def settings(self, engine: str, calls: Mapping[int, Call]) -> list[Setting]:
        """ONNX Runtime has no sparse kernels. OpenVINO packs sparse weights where its CPU can."""

        def in_onnx_runtime(batch: int) -> Calls:
            run = onnx_file.runner(self.onnx, torch.get_num_threads())
            return {"dense": partial(run, calls[batch])}

        def in_openvino(batch: int) -> Calls:
            threads = {"INFERENCE_NUM_THREADS": torch.get_num_threads(), **openvino_ir.EXACT}
            rates = {"dense": 1.0, "sparse": _LEAST_SPARSITY}
            runs = {
                name: openvino_ir.runner(self.openvino, {**threads, openvino_ir.SPARSE_RATE: rate})
                for name, rate in rates.items()
            }
            return {name: partial(run, calls[batch]) for name, run in runs.items()}

        return [Setting(engine, "float32", in_onnx_runtime if engine == "onnxruntime" else in_openvino)]
