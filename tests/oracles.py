"""Independent answers: dense matrices in float64 from eager PyTorch, least squares by lstsq, masks by trying them all.

Nothing here reads a captured graph. Operations are watched by forward hooks on the eager model; whether an operation
depends on a weight is what autograd says of its output.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from itertools import combinations
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.func import functional_call

from .networks import call_arguments

COUNTED = (
    nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.Linear, nn.ReLU, nn.ReLU6, nn.LeakyReLU, nn.GELU, nn.SiLU, nn.Sigmoid,
    nn.Hardswish, nn.LayerNorm,
)  # fmt: skip


class _PlainAttention:
    """nn.MultiheadAttention written out: two operations, the attention and its output projection."""

    def __init__(self, module: nn.MultiheadAttention, seen: list[Tensor]) -> None:
        self.module, self.seen = module, seen

    def __call__(self, query: Tensor, *_: Any, **__: Any) -> tuple[Tensor, None]:
        module = self.module
        batch, tokens, width = query.shape
        packed = query @ module.in_proj_weight.T + module.in_proj_bias
        heads = packed.view(batch, tokens, 3, module.num_heads, -1).permute(2, 0, 3, 1, 4)
        q, k, v = heads[0], heads[1], heads[2]
        scores = torch.softmax(q @ k.transpose(-1, -2) / math.sqrt(q.shape[-1]), -1)
        attended = (scores @ v).transpose(1, 2).reshape(batch, tokens, width)
        self.seen.append(attended)
        result = attended @ module.out_proj.weight.T + module.out_proj.bias
        self.seen.append(result)
        return result, None


def operations(model: nn.Module, inputs: Any, parameters: Mapping[str, Tensor]) -> list[Tensor]:
    """The outputs of all counted operations of the eager model, in order of execution."""
    seen: list[Tensor] = []
    undo: list[Callable[[], None]] = []
    inner = {id(m.out_proj) for m in model.modules() if isinstance(m, nn.MultiheadAttention)}
    for module in model.modules():
        if isinstance(module, nn.MultiheadAttention):
            module.forward = _PlainAttention(module, seen)  # type: ignore[assignment]
            undo.append(lambda module=module: delattr(module, "forward"))
        elif isinstance(module, COUNTED) and id(module) not in inner:
            # cloned: an in-place operation that follows must not reach back into what was seen
            undo.append(module.register_forward_hook(lambda _m, _a, out: seen.append(out.clone())).remove)
    try:
        functional_call(model, dict(parameters), *call_arguments(inputs))
    finally:
        for step in undo:
            step()
    return seen


def dependent_indices(
    model: nn.Module, inputs: Any, parameters: Mapping[str, Tensor], name: str, horizon: int
) -> list[int]:
    """Which operations are operations 0 … K after the layer: those that autograd connects with its weight."""
    variable = parameters[name].detach().clone().requires_grad_()
    with torch.enable_grad():
        seen = operations(model, inputs, {**parameters, name: variable})
    return [index for index, value in enumerate(seen) if value.requires_grad][: horizon + 1]


class KStepLoss:
    """The K-step loss of one layer, on the eager model from its inputs on.

    `current` are the parameters of the partly pruned network; `earlier` names the parameters of the layers before this
    one, which "dense-weights" targets take from the pruned network as well.
    """

    def __init__(
        self,
        model: nn.Module,
        inputs: Any,
        current: Mapping[str, Tensor],
        name: str,
        horizon: int,
        targets_from: str,
        normalization: str,
        earlier: set[str],
    ) -> None:
        self.model, self.inputs, self.current, self.name, self.horizon = model, inputs, dict(current), name, horizon
        dense = {key: value.detach() for key, value in model.state_dict().items()}
        teacher = (
            dense if targets_from == "dense-stream" else {k: current[k] if k in earlier else dense[k] for k in dense}
        )
        self.which = dependent_indices(model, inputs, current, name, horizon)
        with torch.no_grad():
            seen = operations(model, inputs, teacher)
        self.targets = [seen[index] for index in self.which]
        self.samples = len(next(iter(inputs.values())) if isinstance(inputs, dict) else inputs)
        self.factors = []
        for target in self.targets:
            elements = target.numel() / self.samples
            variance = float(((target - target.mean()) ** 2).mean())
            self.factors.append(
                {
                    "sum": 1.0,
                    "mean": 1 / (self.samples * elements),
                    "variance": 1 / (self.samples * elements * variance),
                }[normalization]
            )
        self.normalization = normalization

    def outputs(self, weight: Tensor) -> list[Tensor]:
        seen = operations(self.model, self.inputs, {**self.current, self.name: weight})
        return [seen[index] for index in self.which]

    def __call__(self, weight: Tensor) -> Tensor:
        terms = zip(self.outputs(weight), self.targets, self.factors, strict=True)
        return sum(factor * ((output - target) ** 2).sum() for output, target, factor in terms)

    def hessian(self, weight: Tensor) -> Tensor:
        size = weight.numel()
        matrix = torch.autograd.functional.hessian(self, weight)
        return matrix.reshape(size, size)

    def jacobian(self, weight: Tensor) -> list[Tensor]:
        """One matrix for each operation, a column at a time in forward mode."""
        columns = []
        for direction in torch.eye(weight.numel(), dtype=weight.dtype):
            with forward_ad.dual_level():
                outputs = self.outputs(forward_ad.make_dual(weight.detach(), direction.view_as(weight)))
                columns.append([forward_ad.unpack_dual(output).tangent.flatten() for output in outputs])
        return [torch.stack(column, 1) for column in zip(*columns, strict=True)]

    def gauss_newton(self, weight: Tensor, jacobian: list[Tensor] | None = None) -> Tensor:
        jacobian = self.jacobian(weight) if jacobian is None else jacobian[: len(self.factors)]
        return sum(2 * c * part.T @ part for c, part in zip(self.factors, jacobian, strict=True))

    def fisher(self, weight: Tensor) -> Tensor:
        """(1/n) sum_i g_i g_i^T, one sample at a time through the eager model."""
        matrix = torch.zeros(weight.numel(), weight.numel(), dtype=weight.dtype)
        for sample in range(self.samples):
            one = (
                {key: value[sample : sample + 1] for key, value in self.inputs.items()}
                if isinstance(self.inputs, dict)
                else self.inputs[sample : sample + 1]
            )
            variable = weight.detach().clone().requires_grad_()
            seen = operations(self.model, one, {**self.current, self.name: variable})
            loss = torch.zeros((), dtype=weight.dtype)
            for index, target, factor in zip(self.which, self.targets, self.factors, strict=True):
                # a sample's own loss is normalized by one sample, not by n
                own = factor if self.normalization == "sum" else factor * self.samples
                loss = loss + own * ((seen[index] - target[sample : sample + 1]) ** 2).sum()
            (gradient,) = torch.autograd.grad(loss, variable)
            matrix += torch.outer(gradient.flatten(), gradient.flatten()) / self.samples
        return matrix


def finite_difference(loss: Callable[[Tensor], Tensor], weight: Tensor, v: Tensor, step: float = 1e-5) -> Tensor:
    """Equation (5): the Hessian product as a central difference of the gradient."""

    def gradient(at: Tensor) -> Tensor:
        variable = at.detach().clone().requires_grad_()
        return torch.autograd.grad(loss(variable), variable)[0]

    return (gradient(weight + step * v) - gradient(weight - step * v)) / (2 * step)


def layer_input_output(model: nn.Module, name: str, inputs: Any) -> tuple[Tensor, Tensor]:
    """What a module reads and gives in the eager model."""
    seen: list[tuple[Tensor, Tensor]] = []
    hook = model.get_submodule(name).register_forward_hook(lambda _m, args, out: seen.append((args[0], out)))
    try:
        with torch.no_grad():
            args, kwargs = call_arguments(inputs)
            model(*args, **kwargs)
    finally:
        hook.remove()
    return seen[0]


def patches(module: nn.Module, x: Tensor) -> list[Tensor]:
    """For each group, positions x columns. Convolutions in two dimensions by unfold, or linear layers."""
    if isinstance(module, nn.Linear):
        return [x.reshape(-1, x.shape[-1])]
    assert isinstance(module, nn.Conv2d)
    per_group = x.shape[1] // module.groups
    return [
        F.unfold(part, module.kernel_size, module.dilation, module.padding, module.stride)  # batch, columns, positions
        .transpose(1, 2)
        .reshape(-1, per_group * math.prod(module.kernel_size))
        for part in x.split(per_group, 1)
    ]


def restricted_least_squares(module: nn.Module, x: Tensor, y: Tensor, mask: Tensor) -> Tensor:
    """Each row of the weight by lstsq on its kept columns, the bias being what it is."""
    if module.bias is not None:
        y = y - (module.bias.view(-1, 1, 1) if isinstance(module, nn.Conv2d) else module.bias)
    outputs = (y.movedim(1, -1) if isinstance(module, nn.Conv2d) else y).reshape(-1, mask.shape[0])
    groups = patches(module, x)
    rows_per_group = mask.shape[0] // len(groups)
    weight = torch.zeros(mask.shape[0], math.prod(mask.shape[1:]), dtype=x.dtype)
    for row, kept in enumerate(mask.flatten(1)):
        table = groups[row // rows_per_group][:, kept]
        weight[row, kept] = torch.linalg.lstsq(table, outputs[:, row : row + 1], driver="gelsd").solution[:, 0]
    return weight.view(mask.shape)


def best_nm_score(score: Tensor, n: int, m: int) -> float:
    """The largest total score of any N:M mask along dimension 1, by trying every choice in every group."""
    total = 0.0
    groups = score.movedim(1, -1).reshape(-1, m)
    for group in groups.tolist():
        total += max(sum(group[i] for i in chosen) for chosen in combinations(range(m), n))
    return total


def best_unstructured_score(score: Tensor, kept: int) -> float:
    values = score.flatten().tolist()
    return max(sum(values[i] for i in chosen) for chosen in combinations(range(len(values)), kept))
