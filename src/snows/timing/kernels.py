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
        return (Kernel("2:4, cuSPARSELt", _semi_structured_refusal, _semi_structured),)
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
