"""Tensors on disk: files mapped into memory. The operating system reads a page when it is used, and drops it when
memory is short."""

from __future__ import annotations

import os
import tempfile
import warnings

import torch
from torch import Tensor

from ..errors import SnowsWarning

_LEAST_BYTES = 1 << 12  # a page; anything smaller is not worth a file


def on_disk(value: Tensor) -> Tensor:
    """A copy of the tensor that lives in a file. The file is deleted at once and lasts as long as the tensor.

    The copy stays in host memory if the disk is full, and on Windows, which cannot delete mapped files.
    """
    copy = torch.empty_like(value, device="cpu").copy_(value)  # dense, in the memory layout of the value
    bytes_ = copy.as_strided((copy.numel(),), (1,)).view(torch.uint8)
    if len(bytes_) < _LEAST_BYTES or os.name == "nt":
        return copy
    try:
        mapped = _mapped(bytes_)
    except OSError as error:
        warnings.warn(
            f"activations stay in memory because {tempfile.gettempdir()} cannot be written to "
            f"({error.strerror or error}); set TMPDIR to another folder",
            SnowsWarning,
            stacklevel=2,
        )
        return copy
    return mapped.view(copy.dtype).as_strided(copy.shape, copy.stride())


def _mapped(bytes_: Tensor) -> Tensor:
    handle, path = tempfile.mkstemp(prefix="snows-")
    try:
        with os.fdopen(handle, "wb") as file:
            bytes_.numpy().tofile(file)  # a full disk is an error here; written through the mapping it would be a crash
        return torch.from_file(path, shared=False, size=len(bytes_), dtype=torch.uint8)
    finally:
        os.unlink(path)
