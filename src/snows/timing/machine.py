"""What was measured on: device, processor, threads, versions."""

from __future__ import annotations

import os
import platform
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

from ..version import __version__

_PACKAGES = ("onnxruntime", "openvino")


def describe_machine(device: torch.device) -> dict[str, Any]:
    versions = {"snows": __version__, "torch": torch.__version__, **_installed()}
    found = {
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else str(device),
        "cpu": processor(),
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "threads": torch.get_num_threads(),
        "capability": torch.backends.cpu.get_cpu_capability(),
        "amx": torch.cpu._is_amx_tile_supported(),
        "versions": versions,
    }
    if device.type == "cuda":
        versions["cuda"] = str(torch.version.cuda)
    return found


def processor() -> str:
    """The processor's name as Linux says it, or as Python does."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = []
    named = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return named[0] if named else platform.processor() or platform.machine()


def _installed() -> dict[str, str]:
    found = {}
    for package in _PACKAGES:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            continue
    return found
