"""Frozen masks: zeros that stay zero while a network is trained by any loop.

A guard holds one weight. It is told of the three ways by which training reaches a weight:

- Gradients: a hook on the parameter clears those of removed weights, also before AMP or a gradient norm looks at them.
- Optimizers: after each step of a torch.optim optimizer, removed weights are set to zero. This covers momentum from
  before the freeze, and optimizers that mix the entries of a matrix (Muon, Shampoo).
- Loading: after `load_state_dict`, removed weights are set to zero.

Nothing of this is in the forward pass, so a frozen network is compiled and exported as before. The module keeps its
parameters, their names and its state dict. Copies and pickles of the module carry their own guards.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeVar
from weakref import WeakSet

import torch
from torch import Tensor, nn
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.utils.hooks import RemovableHandle

from ..data.tensors import is_8_bit_float, is_mask, unusable
from ..data.usable import require_module, require_python
from ..errors import ArgumentError, InputError, SnowsWarning, a_type
from ..results.storage import load_masks

_Module = TypeVar("_Module", bound=nn.Module)
_WRAPPERS = ("_orig_mod.", "module.")  # of torch.compile and DataParallel


def freeze(model: _Module, masks: Mapping[str, Tensor] | str | Path) -> _Module:
    """Keep removed weights at zero while the model is trained, by whatever loop and optimizer.

    After every backward pass the gradients of removed weights are zero; after every step of a torch optimizer and every
    `load_state_dict` the weights are. This needs no change to the training code, and changes neither the state dict nor
    the forward pass. Copies and pickles of the model are frozen, too.

    Not covered: weights that code writes by itself outside of an optimizer, and FSDP or DeepSpeed ZeRO-3, which replace
    the parameters.

    Args:
        model: The model to train. Weights that a mask removes are set to zero in it.
        masks: {parameter name: tensor of bools, or of 0 and 1}, as `Result.masks`; or the folder of a saved result. A
            weight that is frozen already gets the new mask.

    Returns:
        The model itself.

    Raises:
        ArgumentError: A mask has a name that the model does not have, or holds something else than a mask.
        InputError: A mask does not fit its weight, or the folder cannot be read.

    Example:
        >>> import torch, snows
        >>> model = torch.nn.Linear(4, 2)
        >>> kept = torch.tensor([[True, True, False, False]] * 2)
        >>> with torch.no_grad():
        ...     _ = model.weight.mul_(kept)
        >>> _ = snows.freeze(model, {"weight": kept})
        >>> optimizer = torch.optim.AdamW(model.parameters())
        >>> for _ in range(3):
        ...     model(torch.randn(8, 4)).square().sum().backward()
        ...     optimizer.step()
        >>> bool((model.weight != 0).equal(kept))
        True
    """
    require_module(model, "model")
    require_python(model, "model")
    given = load_masks(masks) if isinstance(masks, str | Path) else masks
    frozen = _matched(model, given)
    changed = sum(int(parameter.detach()[~kept].count_nonzero()) for parameter, kept in frozen.values())
    if changed:
        warnings.warn(
            f"{changed:,} weights that the masks remove were not zero in the {type(model).__name__}, and are now",
            SnowsWarning,
            stacklevel=2,
        )
    masks_by_id = {id(parameter): kept for parameter, kept in frozen.values()}
    for module in model.modules():
        for name, parameter in module._parameters.items():
            if parameter is not None and id(parameter) in masks_by_id:  # tied weights have several modules
                _remove(module, name)
                module.register_load_state_dict_post_hook(_Guard(module, name, parameter, masks_by_id[id(parameter)]))
    return model


def unfreeze(model: _Module) -> _Module:
    """Make a frozen model ordinary again. Its weights stay as they are, bit for bit.

    Args:
        model: A model, frozen or not.

    Returns:
        The model itself.

    Example:
        >>> import torch, snows
        >>> model = torch.nn.Linear(4, 2)
        >>> with torch.no_grad():
        ...     _ = model.weight.zero_()
        >>> _ = snows.unfreeze(snows.freeze(model, {"weight": torch.zeros(2, 4)}))
        >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        >>> model(torch.ones(8, 4)).sum().backward()
        >>> optimizer.step()
        >>> bool(model.weight.any())
        True
    """
    require_module(model, "model")
    require_python(model, "model")
    for module in model.modules():
        for name in list(module._parameters):
            _remove(module, name)
    return model


class _Guard:
    """Keeps one parameter of one module at zero where its mask removes. It is the module's load_state_dict hook."""

    def __init__(self, module: nn.Module, name: str, parameter: nn.Parameter, kept: Tensor) -> None:
        self.module, self.name, self.parameter = module, name, parameter
        self.removed = ~kept
        self._watch()
        self.hold()

    def hold(self) -> None:
        """Set removed weights to zero."""
        current = self.module._parameters.get(self.name)
        if current is None:
            raise InputError(
                f"the frozen parameter {self.name!r} of a {type(self.module).__name__} is gone; call snows.unfreeze "
                "before the model's parameters are replaced (as FSDP does)"
            )
        if current is not self.parameter:  # as load_state_dict(assign=True) does
            self._handle.remove()
            self.parameter = current
            self._watch()
        with torch.no_grad():
            current.masked_fill_(self._removed_on(current), 0)

    def release(self) -> None:
        self._handle.remove()
        _GUARDS.discard(self)

    def __call__(self, module: nn.Module, incompatible_keys: Any) -> None:
        """After load_state_dict."""
        self.hold()

    def _watch(self) -> None:
        parameter, trained = self.parameter, self.parameter.requires_grad
        parameter.requires_grad_(True)  # a hook is only taken then, and works later, too
        self._handle: RemovableHandle = parameter.register_hook(self._without_removed)
        parameter.requires_grad_(trained)
        _GUARDS.add(self)
        _watch_optimizers()

    def _without_removed(self, gradient: Tensor) -> Tensor:
        return gradient.masked_fill(self._removed_on(gradient), 0)  # a product would turn infinity into NaN

    def _removed_on(self, tensor: Tensor) -> Tensor:
        if self.removed.device != tensor.device:
            self.removed = self.removed.to(tensor.device)
        return self.removed

    # A copied or unpickled parameter has lost its hook.

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in self.__dict__.items() if name != "_handle"}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._watch()


_GUARDS: WeakSet[_Guard] = WeakSet()
_watching: list[RemovableHandle] = []


def _watch_optimizers() -> None:
    """Hold frozen weights after each step of any torch optimizer in this process."""
    if not _watching:
        _watching.append(register_optimizer_step_post_hook(_after_step))


def _after_step(optimizer: torch.optim.Optimizer, *_: Any) -> None:
    stepped = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
    for guard in list(_GUARDS):
        if id(guard.module._parameters.get(guard.name, guard.parameter)) in stepped:
            guard.hold()


def _remove(module: nn.Module, name: str) -> None:
    """Take the guard of a parameter away, if it has one."""
    hooks = module._load_state_dict_post_hooks
    for key, hook in list(hooks.items()):
        if isinstance(hook, _Guard) and hook.name == name:
            hook.release()
            del hooks[key]


def _matched(model: nn.Module, masks: Mapping[str, Tensor]) -> dict[str, tuple[nn.Parameter, Tensor]]:
    """Each mask as bools beside its parameter."""
    if not isinstance(masks, Mapping) or not masks:
        raise ArgumentError(
            f"masks is {'empty' if masks == {} else a_type(masks)}; expected {{parameter name: tensor}} "
            "or the folder of a saved result"
        )
    own = dict(model.named_parameters(remove_duplicate=False))
    named = {_unwrapped(name): parameter for name, parameter in own.items()} | own
    found: dict[str, tuple[nn.Parameter, Tensor]] = {}
    seen: dict[int, str] = {}
    for name, mask in masks.items():
        if name not in named:
            raise ArgumentError(
                f"the masks name {name!r}, which is no parameter of {type(model).__name__}; its parameters are "
                f"{', '.join(list(own)[:6])}{' …' if len(own) > 6 else ''}"
            )
        parameter = named[name]
        found[name] = parameter, _fitting(name, mask, parameter)
        other = seen.setdefault(id(parameter), name)
        if not torch.equal(found[other][1], found[name][1]):
            raise InputError(f"{other} and {name} are one tied weight, and their masks differ; give one mask for both")
    return found


def _unwrapped(name: str) -> str:
    while name.startswith(_WRAPPERS):  # in any order, as wrappers are wrapped
        for prefix in _WRAPPERS:
            name = name.removeprefix(prefix)
    return name


def _fitting(name: str, mask: Tensor, parameter: nn.Parameter) -> Tensor:
    """The mask as bools on the device of its parameter."""
    if not isinstance(mask, Tensor):
        raise ArgumentError(f"the mask of {name!r} is {a_type(mask)}; expected a tensor of bools")
    problem = unusable(mask)
    if problem is not None:
        raise InputError(f"the mask of {name!r} is {problem}; expected a dense tensor of bools")
    if not is_mask(mask):
        raise ArgumentError(
            f"the mask of {name!r} is {mask.dtype} with values other than 0 and 1; expected bools, True = kept"
        )
    _require_trainable(name, parameter)
    if mask.shape != parameter.shape:
        raise InputError(
            f"the mask of {name!r} has shape {tuple(mask.shape)}; the parameter has shape {tuple(parameter.shape)}"
        )
    return mask.to(parameter.device) != 0


def _require_trainable(name: str, parameter: nn.Parameter) -> None:
    problem = unusable(parameter)
    if problem is not None:
        raise InputError(f"{name!r} is {problem}; expected a dense weight that can be trained")
    if not parameter.is_floating_point() or is_8_bit_float(parameter):
        raise InputError(f"{name!r} is {parameter.dtype}; expected a weight that can be trained, such as float32")
    if parameter.is_inference():
        raise InputError(f"{name!r} was made in torch.inference_mode, so it cannot be trained; copy the model outside")
