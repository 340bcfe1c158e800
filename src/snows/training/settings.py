"""The figures of a retraining, each checked."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from typing import Any

from ..data.samples import check_count, check_flag
from ..errors import ArgumentError, shown

_LARGEST = 1e30  # of any figure; this refuses NaN, too


@dataclass(frozen=True)
class TrainingSettings:
    """The defaults are the paper's for CIFAR-10 (its section on retraining experiments)."""

    epochs: int = 90
    batch: int = 128
    lr: float = 3e-3
    lr_decay: float = 0.1
    lr_decay_every: int = 30
    momentum: float = 0.9
    weight_decay: float = 5e-5
    crop: int = 0
    flip: bool = False
    amp: bool = False

    def __post_init__(self) -> None:
        for name, least in (("epochs", 1), ("batch", 1), ("lr_decay_every", 1), ("crop", 0)):
            check_count(name, getattr(self, name), least)
        for name, above, up_to in (("lr", 0.0, math.inf), ("lr_decay", 0.0, 1.0)):
            if not above < _number(name, getattr(self, name)) <= up_to:
                bound = "above 0" if math.isinf(up_to) else f"above 0 and at most {up_to:g}"
                raise ArgumentError(f"{name} is {shown(getattr(self, name))}; expected a number {bound}")
        if not 0 <= _number("momentum", self.momentum) < 1:
            raise ArgumentError(f"momentum is {shown(self.momentum)}; expected a number of at least 0 and below 1")
        if _number("weight_decay", self.weight_decay) < 0:
            raise ArgumentError(f"weight_decay is {shown(self.weight_decay)}; expected a number of at least 0")
        for name in ("flip", "amp"):
            check_flag(name, getattr(self, name))
        for name in ("lr", "lr_decay", "momentum", "weight_decay"):  # torch does not take large whole numbers
            object.__setattr__(self, name, float(getattr(self, name)))

    def lr_of(self, epoch: int) -> float:
        """The learning rate of an epoch; the first is 1."""
        return self.lr * self.lr_decay ** ((epoch - 1) // self.lr_decay_every)

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


def _number(name: str, value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not abs(value) <= _LARGEST:
        raise ArgumentError(f"{name} is {shown(value)}; expected a number")
    return float(value)
