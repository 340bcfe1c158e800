"""Which modules can be pruned: plain ones that can be copied, of parameters that torch can compute with."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from ..errors import ArgumentError, InputError, a_type, first_line
from .tensors import is_8_bit_float, unusable

_WRAPPERS = {  # classes that call another module, and their attribute that holds it
    nn.DataParallel: "module",
    nn.parallel.DistributedDataParallel: "module",
}
_COMPILED = "_orig_mod"  # of what torch.compile returns; its class is not imported, as that takes a second


def require_module(model: object, name: str) -> None:
    """Refuse what is no module, and modules that hold no values: torch reads and fills such tensors without a word."""
    if not isinstance(model, nn.Module):
        raise ArgumentError(f"{name} is {a_type(model)}; expected an nn.Module")
    for tensor_name, tensor in _tensors(model):
        problem = _emptiness(tensor)
        if problem is not None:
            raise InputError(f"{tensor_name} of the {name} is {problem}")


def require_unwrapped(model: nn.Module) -> None:
    """Refuse modules that hold the network in another one, which gives its parameters other names."""
    for name, module in model.named_modules():
        attribute = _wrapped(module)
        if attribute is not None:
            inner = f"{name}.{attribute}" if name else f"model.{attribute}"
            place = f"the submodule {name}" if name else "the model"
            raise InputError(f"{place} is wrapped in {type(module).__name__}; give the module inside, which is {inner}")


def require_python(model: nn.Module, what: str) -> None:
    """Refuse modules of torch.jit, which have neither hooks nor a signature, and which nothing can capture."""
    for name, module in model.named_modules():
        if isinstance(module, torch.jit.ScriptModule):
            place = f"the submodule {name} of the {what}" if name else f"the {what}"
            raise InputError(f"{place} is compiled by torch.jit; give the module that it was made of")


def require_usable(model: nn.Module) -> None:
    """Refuse, besides, parameters or buffers that torch cannot compute with."""
    require_module(model, "model")
    require_python(model, "model")
    require_unwrapped(model)
    for name, tensor in _tensors(model):
        problem = _problem(tensor)
        if problem is not None:
            raise InputError(f"{name} of the model is {problem}")


def signature_of(model: nn.Module) -> inspect.Signature:
    """Of its forward, without self."""
    try:
        return inspect.signature(model.forward)
    except ValueError as error:
        raise InputError(
            f"the forward of {type(model).__name__} has no signature, as after torch.jit.trace; give the module that "
            "it was made of"
        ) from error


def copied(model: nn.Module, instead: Mapping[nn.Parameter, Tensor] | None = None) -> nn.Module:
    """A copy of the caller's model, on its device.

    Some parameters are the tensors `instead`, which are not copied, if they are like the parameters.

    Raises:
        InputError: Something that it holds cannot be copied.
    """
    # deepcopy refuses tensors that were computed, which reparametrized modules hold: these are cloned.
    computed = (t for m in model.modules() for t in vars(m).values() if isinstance(t, Tensor) and not t.is_leaf)
    memo: dict[int, Any] = {id(tensor): tensor.detach().clone() for tensor in computed}
    pairs = ({} if instead is None else instead).items()
    memo |= {id(p): nn.Parameter(tensor, p.requires_grad) for p, tensor in pairs if _alike(p, tensor)}
    try:
        return copy.deepcopy(model, memo)
    except Exception as error:  # deepcopy runs the user's own code
        raise InputError(
            f"{type(model).__name__} cannot be copied ({first_line(error)}); take out what keeps copy.deepcopy from it"
        ) from error


def _alike(parameter: nn.Parameter, tensor: Tensor) -> bool:
    """Whether the tensor differs from the parameter in its values only."""
    plain = type(parameter) is nn.Parameter and type(tensor) is Tensor
    properties = ((each.dtype, each.device, each.shape, each.stride()) for each in (parameter, tensor))
    return plain and len(set(properties)) == 1


def _wrapped(module: nn.Module) -> str | None:
    """The attribute in which a wrapper holds the module; None if it is no wrapper."""
    if _COMPILED in module._modules:
        return _COMPILED
    return next((attribute for kind, attribute in _WRAPPERS.items() if isinstance(module, kind)), None)


def _tensors(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    yield from model.named_parameters()
    yield from model.named_buffers()


def _emptiness(tensor: Tensor) -> str | None:
    """Why a parameter or a buffer holds no values, and what to do; None if it holds some."""
    if is_lazy(tensor):
        return "lazy and has no shape yet; run the model once on a batch first"
    if tensor.is_meta:
        return "without values (on the device meta); make the model on the CPU or a GPU"
    return None


def _problem(tensor: Tensor) -> str | None:
    """What else keeps torch from computing with a parameter or a buffer, and what to do; None if nothing does."""
    if isinstance(tensor, nn.Parameter) and (is_8_bit_float(tensor) or tensor.is_complex()):
        return f"{tensor.dtype}; expected float64, float32, bfloat16 or float16, such as those of model.float()"
    problem = unusable(tensor)
    return None if problem is None else f"{problem}; expected a dense tensor with values"
