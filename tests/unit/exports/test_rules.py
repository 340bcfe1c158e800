"""Which modules a network calls."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from snows.exports.rules import input_shapes


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 8)
        self.block = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
        self.never = nn.Linear(8, 8)
        self.pair = nn.Bilinear(8, 8, 2)

    def forward(self, x: Tensor) -> Tensor:
        y = self.block(self.first(x))
        return self.pair(y, y)


def test_modules_that_are_called_with_one_tensor() -> None:
    """Layers inside of torch's attention are not called on its fast path. The model is as it was afterwards."""
    model, x = Net().eval().requires_grad_(False), torch.randn(3, 5, 4)
    model.first.forward = own = model.first.forward  # somebody's wrapper
    found = {name: input_shapes(model, ((x,), {})).get(module) for name, module in model.named_modules()}
    shapes = {name: shape for name, shape in found.items() if shape is not None}
    assert shapes == {"": (3, 5, 4), "first": (3, 5, 4), "block": (3, 5, 8)}
    assert [name for name, module in model.named_modules() if "forward" in module.__dict__] == ["first"]
    assert model.first.__dict__["forward"] is own
