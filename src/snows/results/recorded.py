"""The model that a saved result was made from, by the name that its folder records."""

from __future__ import annotations

from pathlib import Path

from torch import nn

from ..data.models import build_model, is_code
from ..errors import InputError
from .manifest import recorded_source


def recorded_model(folder: Path, trust: bool = False, can_trust: bool = False) -> nn.Module:
    """A new model, without weights. Code that the folder names is only run if it is trusted.

    `can_trust` says whether the caller could have asked for that, for the message.
    """
    source = recorded_source(folder)
    if source is None:
        raise InputError(f"{folder} does not record which model it was made from; give the model")
    if is_code(source) and not trust:
        instead = ", or trust=True," if can_trust else ""
        raise InputError(
            f"{folder} was made from {source}, and code that a folder names is not run; give the model{instead} if you "
            "know the code"
        )
    return build_model(source, pretrained=False)
