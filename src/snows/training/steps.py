"""One training step: gradients of a batch, and what the optimizer makes of them."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from ..data.batches import Call
from ..devices.cuda_graph import Replayed
from ..devices.device import placed
from ..errors import ArgumentError
from ..evaluation.running import scores_of
from .objectives import Objective
from .settings import TrainingSettings


class Steps:
    """SGD with momentum on one network. On a GPU the passes over batches of one shape are recorded and replayed."""

    def __init__(self, model: nn.Module, objective: Objective, settings: TrainingSettings) -> None:
        self.model, self.objective = model, objective
        self.parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
        if not self.parameters:
            raise ArgumentError("no parameter of the model takes gradients; set requires_grad of those to train")
        first = self.parameters[0]
        self.device, self.dtype, self._amp = first.device, first.dtype, settings.amp
        self.optimizer = torch.optim.SGD(
            self.parameters, lr=settings.lr, momentum=settings.momentum, weight_decay=settings.weight_decay
        )
        self._spec: Any = None
        self._leaves: list[Any] = []
        self._recorded = Replayed(lambda: self._pass(self._leaves, self._spec), self.device)

    def __call__(self, call: Call) -> Tensor:
        """Train on one batch. Its loss stays on the device."""
        given, spec = pytree.tree_flatten((call.args, call.kwargs, call.labels))
        leaves = placed(given, self.device, self.dtype)
        if self._spec is None:
            self._spec = spec
            self._leaves = [leaf.clone() if isinstance(leaf, Tensor) else leaf for leaf in leaves]
        if spec == self._spec and _alike(leaves, self._leaves):
            for recorded, new in zip(self._leaves, leaves, strict=True):
                if isinstance(recorded, Tensor):
                    recorded.copy_(new)
            loss, gradients = self._recorded()
        else:
            loss, gradients = self._pass(leaves, spec)
        for parameter, gradient in zip(self.parameters, gradients, strict=True):
            parameter.grad = gradient
        self.optimizer.step()
        return loss.clone()  # the next pass overwrites it

    def _pass(self, leaves: list[Any], spec: Any) -> tuple[Tensor, tuple[Tensor | None, ...]]:
        """The loss of a batch, and its gradients; None for parameters that it does not depend on."""
        args, kwargs, labels = pytree.tree_unflatten(leaves, spec)
        with torch.autocast(self.device.type, torch.bfloat16, enabled=self._amp):
            outputs = scores_of(self.model(*args, **kwargs))
            loss = self.objective.loss(outputs, args, kwargs, labels)
        return loss.detach(), torch.autograd.grad(loss, self.parameters, allow_unused=True)


def _alike(leaves: list[Any], others: list[Any]) -> bool:
    """Whether a pass that was recorded for the others can take these leaves."""
    return all(
        a.shape == b.shape and a.dtype == b.dtype
        if isinstance(a, Tensor) and isinstance(b, Tensor)
        else a is b or a == b
        for a, b in zip(leaves, others, strict=True)
    )
