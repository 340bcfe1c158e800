"""One training step: gradients of a batch, and what the optimizer makes of them."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from ..data.batches import Call
from ..devices.cuda_graph import ReplayedOn
from ..devices.device import placed
from ..errors import ArgumentError
from ..evaluation.running import scores_of
from .objectives import Objective
from .settings import TrainingSettings


class Steps:
    """SGD with momentum on one network. On a GPU the passes over batches of one form are recorded and replayed."""

    def __init__(self, model: nn.Module, objective: Objective, settings: TrainingSettings) -> None:
        self.parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
        if not self.parameters:
            raise ArgumentError("no parameter of the model takes gradients; set requires_grad of those to train")
        first = self.parameters[0]
        self.device, self.dtype = first.device, first.dtype
        self.optimizer = torch.optim.SGD(
            self.parameters, lr=settings.lr, momentum=settings.momentum, weight_decay=settings.weight_decay
        )
        self._pass = ReplayedOn(partial(_gradients, model, objective, self.parameters, settings.amp), self.device)

    def __call__(self, call: Call) -> Tensor:
        """Train on one batch. Its loss stays on the device."""
        loss, gradients = self._pass(placed((call.args, call.kwargs, call.labels), self.device, self.dtype))
        for parameter, gradient in zip(self.parameters, gradients, strict=True):
            parameter.grad = gradient
        self.optimizer.step()
        return loss.clone()  # the next pass overwrites it


def _gradients(
    model: nn.Module, objective: Objective, parameters: Sequence[nn.Parameter], amp: bool, inputs: Any
) -> tuple[Tensor, tuple[Tensor | None, ...]]:
    """The loss of a batch, and its gradients; None for parameters that it does not depend on."""
    args, kwargs, labels = inputs
    with torch.autocast(parameters[0].device.type, torch.bfloat16, enabled=amp):
        outputs = scores_of(model(*args, **kwargs))
        loss = objective.loss(outputs, args, kwargs, labels)
    return loss.detach(), torch.autograd.grad(loss, parameters, allow_unused=True)
