"""Tensors that rest on disk: files mapped into memory, which the operating system reads when they are touched and drops
when memory is short."""

from __future__ import annotations

import os
import tempfile
import warnings

import torch
from torch import Tensor

from ..errors import SnowsWarning

_LEAST_BYTES = 1 << 12  # a page: less is not worth a file


def on_disk(value: Tensor) -> Tensor:
    """The same values, on the host: in a file that is deleted at once and lives as long as the tensor does.

    Where a disk has no room they stay in memory. (So they do on Windows, where mapped files cannot be deleted.)
    """
    copy = torch.empty_like(value, device="cpu").copy_(value)  # whose elements lie side by side, in the value's order
    bytes_ = copy.as_strided((copy.numel(),), (1,)).view(torch.uint8)
    if len(bytes_) < _LEAST_BYTES or os.name == "nt":
        return copy
    try:
        mapped = _mapped(bytes_)
    except OSError as error:
        warnings.warn(
            f"activations stay in memory, as {tempfile.gettempdir()} does not take them ({error.strerror or error}); "
            "TMPDIR names another folder",
            SnowsWarning,
            stacklevel=2,
        )
        return copy
    return mapped.view(copy.dtype).as_strided(copy.shape, copy.stride())


def _mapped(bytes_: Tensor) -> Tensor:
    handle, path = tempfile.mkstemp(prefix="snows-")
    try:
        with os.fdopen(handle, "wb") as file:
            bytes_.numpy().tofile(file)  # not through the mapping: a full disk is an error here, and a crash there
        return torch.from_file(path, shared=False, size=len(bytes_), dtype=torch.uint8)
    finally:
        os.unlink(path)
