"""The sparse kernels of torch: which layers they take, and a module that computes the same with them."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from ..exports.rules import semi_structured_refusal


@dataclass(frozen=True)
class Kernel:
    """One way of torch to compute a layer from its kept weights.

    refusal  why it cannot take a module; None if it can
    pack     the module with packed weights
    """

    name: str
    refusal: Callable[[nn.Module], str | None]
    pack: Callable[[nn.Module], nn.Module]


def kernels_of(device: torch.device) -> tuple[Kernel, ...]:
    """What torch has on this kind of device."""
    if device.type == "cuda":
        return (
            Kernel("2:4, cuSPARSELt", _semi_structured_refusal, _semi_structured),
            Kernel("2:4, cuSPARSELt, searched", searched_refusal, SearchedTwoOfFour),
        )
    if device.type == "cpu":
        return (Kernel("CSR, MKL", csr_refusal, csr),)
    return ()


def _semi_structured_refusal(module: nn.Module) -> str | None:
    return semi_structured_refusal(module, "weight", module.get_parameter("weight").dtype)


def _semi_structured(module: nn.Module) -> nn.Module:
    from ..exports.semi_structured import pack

    return pack(nn.Sequential(copy.deepcopy(module)), ["0.weight"]).get_submodule("0")


def _pointwise_refusal(module: nn.Module) -> str | None:
    """Why a module is no plain product of matrices."""
    if isinstance(module, nn.Linear):
        return None
    if not isinstance(module, nn.Conv2d) or module.groups > 1 or set(module.kernel_size) != {1}:
        return "torch has sparse kernels for linear layers and convolutions of 1x1 without groups"
    if set(module.stride) != {1} or set(module.padding) != {0}:
        return "a 1x1 convolution with stride or padding is no plain product of matrices"
    return None


def searched_refusal(module: nn.Module) -> str | None:
    """As torch's own 2:4 layers, and convolutions of 1x1."""
    refusal = _pointwise_refusal(module)
    if refusal is not None:
        return refusal
    weight = module.get_parameter("weight").detach().flatten(1)
    flat = nn.Linear(weight.shape[1], weight.shape[0], bias=False, device="meta")
    flat.weight = nn.Parameter(weight, requires_grad=False)
    return semi_structured_refusal(flat, "weight", weight.dtype)


class SearchedTwoOfFour(nn.Module):
    """The same product as torch's 2:4 layers, without its two costs: the operand is read and the result is written in
    the layout of the network, and the algorithm is searched for each number of positions, once."""

    _MULTIPLE = 16  # of positions

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        weight = module.get_parameter("weight").detach()
        self.packed = torch._cslt_compress(weight.flatten(1).contiguous())
        bias = module._parameters.get("bias")
        self.bias = None if bias is None else bias.detach()
        self.outputs, self.is_convolution = weight.shape[0], weight.ndim > 2
        self.algorithms: dict[int, int] = {}

    def forward(self, x: Tensor) -> Tensor:
        rows = x.permute(0, 2, 3, 1) if self.is_convolution else x
        y = self.product(rows.reshape(-1, rows.shape[-1])).reshape(*rows.shape[:-1], self.outputs)
        return y.permute(0, 3, 1, 2) if self.is_convolution else y

    def product(self, x: Tensor) -> Tensor:
        """positions x inputs -> positions x outputs."""
        count = x.shape[0]
        if left := -count % self._MULTIPLE:
            x = nn.functional.pad(x, (0, 0, 0, left))
        operand = x.t()
        if count not in self.algorithms:
            found = torch._cslt_sparse_mm_search(self.packed, operand, self.bias, transpose_result=True)
            self.algorithms[count] = int(found)
        algorithm = self.algorithms[count]
        y = torch._cslt_sparse_mm(self.packed, operand, self.bias, transpose_result=True, alg_id=algorithm)
        return y[:count]


def csr_refusal(module: nn.Module) -> str | None:
    """Why torch's products with compressed sparse rows cannot take a module."""
    return _pointwise_refusal(module)


def csr(module: nn.Module) -> nn.Module:
    """The module with its weight as compressed sparse rows."""
    return (SparseRowsConvolution if isinstance(module, nn.Conv2d) else SparseRowsLinear)(module)


class _SparseRows(nn.Module):
    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        with warnings.catch_warnings():  # torch calls the format a beta
            warnings.simplefilter("ignore")
            self.weight = module.get_parameter("weight").detach().flatten(1).to_sparse_csr()
        bias = module._parameters.get("bias")
        self.bias = None if bias is None else bias.detach()[:, None]

    def product(self, x: Tensor) -> Tensor:
        """inputs x positions -> outputs x positions."""
        y: Tensor = self.weight @ x
        return y if self.bias is None else y.add_(self.bias)


class SparseRowsLinear(_SparseRows):
    """The product wants the tokens last, so that inputs and outputs are transposed."""

    def forward(self, x: Tensor) -> Tensor:
        y = self.product(x.reshape(-1, x.shape[-1]).T.contiguous())
        return y.T.reshape(*x.shape[:-1], -1)


class SparseRowsConvolution(_SparseRows):
    """Images are products of channels and positions as they are, one image after the other."""

    def forward(self, x: Tensor) -> Tensor:
        images = [self.product(image.flatten(1)) for image in x]
        stacked: Tensor = torch.stack(images).unflatten(2, x.shape[2:])
        return stacked
