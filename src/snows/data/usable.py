"""Which modules can be pruned: plain ones, of parameters with values that torch can compute with."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from ..errors import ArgumentError, InputError
from .tensors import is_8_bit_float, unusable

_WRAPPERS = {  # classes that call another module, and their attribute that holds it
    nn.DataParallel: "module",
    nn.parallel.DistributedDataParallel: "module",
}
_COMPILED = "_orig_mod"  # of what torch.compile returns; its class is not imported, as that takes a second


def require_module(model: object, name: str) -> None:
    if not isinstance(model, nn.Module):
        raise ArgumentError(f"{name} is a {type(model).__name__}; expected an nn.Module")


def require_usable(model: nn.Module) -> None:
    """Refuse wrappers, modules of torch.jit, and parameters or buffers that hold no numbers."""
    require_module(model, "model")
    for name, module in model.named_modules():
        if isinstance(module, torch.jit.ScriptModule):
            raise InputError(
                f"{_place(name)} is compiled by torch.jit, which torch.export cannot capture; give the module that it "
                "was made of"
            )
        attribute = _wrapped(module)
        if attribute is not None:
            inner = f"{name}.{attribute}" if name else f"model.{attribute}"
            raise InputError(
                f"{_place(name)} is wrapped in {type(module).__name__}; give the module inside, which is {inner}"
            )
    for name, tensor in _tensors(model):
        problem = _problem(tensor)
        if problem is not None:
            raise InputError(f"{name} of the model is {problem}")


def _place(name: str) -> str:
    return f"the submodule {name}" if name else "the model"


def _wrapped(module: nn.Module) -> str | None:
    """The attribute in which a wrapper holds the module; None if it is no wrapper."""
    if _COMPILED in module._modules:
        return _COMPILED
    return next((attribute for kind, attribute in _WRAPPERS.items() if isinstance(module, kind)), None)


def _tensors(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    yield from model.named_parameters()
    yield from model.named_buffers()


def _problem(tensor: Tensor) -> str | None:
    """What is wrong with a parameter or a buffer, and what to do; None if nothing is."""
    if is_lazy(tensor):
        return "lazy and has no shape yet; run the model once on a batch first"
    if tensor.is_meta:
        return "without values (on the device meta); load its weights first"
    if isinstance(tensor, nn.Parameter) and (is_8_bit_float(tensor) or tensor.is_complex()):
        return f"{tensor.dtype}; expected float64, float32, bfloat16 or float16, such as those of model.float()"
    problem = unusable(tensor)
    return None if problem is None else f"{problem}; expected a dense tensor with values"
