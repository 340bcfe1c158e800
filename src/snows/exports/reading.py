"""A saved result as an export needs it: verified, with its model and the stored inputs."""

from __future__ import annotations

from pathlib import Path

from torch import nn

from ..data.usable import copied, require_usable
from ..data.weights import fill, read_state, read_tensors
from ..errors import InputError
from ..reading import as_path, is_folder, look
from ..results import probe
from ..results.manifest import MASKS, PROBE, model_file
from ..results.recorded import recorded_model
from ..results.verification import verify
from .base import Saved


def read_saved(directory: str | Path, model: nn.Module | None = None) -> Saved:
    """The result in a folder, if `snows.verify` finds nothing wrong with it. `model` is copied, not changed."""
    folder = as_path(directory, "directory")
    if model is not None:
        require_usable(model)
    if not is_folder(folder):
        raise InputError(f"there is no folder {folder}")
    network = recorded_model(folder) if model is None else copied(model)
    found = verify(folder, network)
    if not found.ok:
        raise InputError(f"{folder} cannot be used: {found.findings[0]}")
    if look(folder / PROBE) is None:
        raise InputError(f"{folder} stores no inputs to compare outputs on; prune again to get them")
    call, _ = probe.read(*read_tensors(folder / PROBE))
    file = model_file(folder)
    state = read_state(file)
    types = {tensor.dtype for tensor in state.values() if tensor.is_floating_point()}
    if len(types) == 1:  # the result may be in half precision, where the module is not
        network = network.to(types.pop())
    fill(network, state, str(file))
    return Saved(folder, network.cpu().eval().requires_grad_(False), read_state(folder / MASKS), call)
