"""Objects of the Python interface: odd models, samples, forwards and arguments, and weights at the limits of dtypes.

Whatever is pruned after all must be finite, in the model's own dtypes, and the caller's model as it was.
"""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

import snows
from snows.data.tensors import unusable

from .mutations import odd_value
from .odd_tensors import odd_tensor
from .places import odd_path
from .world import Case

LIGHT = snows.Recipe(sweeps=1, horizon=1, cg_steps=2, finish_steps=0)


def odd_model(case: Case) -> None:
    _prune(case, make_odd_model(case), samples(case))


def make_odd_model(case: Case) -> nn.Module:
    """A parameter, a buffer or a layer of another kind; wrappers; other modes and places; what cannot be copied."""
    rng, model = case.random, case.fresh_model()
    kinds: list[Callable[[], nn.Module]] = [
        lambda: _with_odd_parameter(case, model),
        lambda: _with_odd_parameter(case, model),
        lambda: _with_odd_buffer(case, model),
        lambda: _with_odd_layer(case, model),
        lambda: _wrapped(case, model),
        lambda: model.to(rng.choice([torch.float16, torch.bfloat16, torch.float64, torch.complex64])),
        lambda: model.to("meta"),
        lambda: model.train(),
        lambda: _in_inference_mode(model),
        lambda: nn.Sequential(),
        lambda: nn.ModuleList([model]),
        lambda: _holding(model, threading.Lock()),
        lambda: _holding(model, model(torch.zeros(1, 8))),
    ]
    return rng.choice(kinds)()


def odd_samples(case: Case) -> None:
    """Tensors of every kind, in every form that samples have, and in some that they have not."""
    rng, whole = case.random, samples(case)
    x: Any = odd_tensor(rng, (12, 8)) if rng.random() < 0.8 else whole
    forms: list[Callable[[], Any]] = [
        lambda: x,
        lambda: [x, whole],
        lambda: [(x, torch.zeros(12))],
        lambda: {"input": x},
        lambda: [{"input": x}],
        lambda: [(x,), (whole,)],
        lambda: [((x,),)],
        lambda: torch.utils.data.TensorDataset(x if unusable(x) is None else whole),  # torch collates no others
        lambda: odd_value(rng),
        lambda: [odd_value(rng)],
        lambda: iter([x]),
    ]
    _prune(case, case.fresh_model(), rng.choice(forms)())


def odd_argument(case: Case) -> None:
    """One argument of another type, or of an odd value."""
    rng, values = case.random, odd_arguments(case)
    name = rng.choice([
        "pattern", "mask", "layers", "exclude", "horizon", "solver", "recipe", "effort", "device", "seed", "progress",
        "labels", "permute", "resume", "memory", "model", "calibration",
    ])  # fmt: skip
    options = {name: rng.choice(values)}
    if name == "progress" and callable(options[name]):
        return  # the caller's own code
    if name == "resume" and isinstance(options[name], str | Path):
        options[name] = odd_path(case)
    model = options.pop("model") if name == "model" else case.fresh_model()
    context: AbstractContextManager[Any] = torch.device("meta") if rng.random() < 0.1 else nullcontext()
    with context:
        _prune(case, model, options.pop("calibration", samples(case)), **options)


def odd_forward(case: Case) -> None:
    """Values that are not finite, noise, states, changes in place, branches on sizes, odd outputs."""
    rng = case.random
    size, scale = rng.choice([2, 3, 4, 10, 12, 50]), rng.choice([0.0, 1e-30, 1e30, 3e38, float("nan")])
    forwards: list[Callable[[nn.Module, Tensor], Any]] = [
        lambda net, x: net(x) * scale,
        lambda net, x: net(x).log(),
        lambda net, x: net(x.mul_(2)),
        lambda net, x: net(x) + torch.randn(4),
        lambda net, x: net(x) if x.shape[0] < size else net(x) * 2,
        lambda net, x: net(x) if len(x) < size else net(x) * 2,
        lambda net, x: net(x) if x.numel() != 8 * size else net(x) * 2,
        lambda net, x: torch.cat([net(part) for part in x.split(size)]),
        lambda net, x: net(x[:size]),
        lambda net, x: (net(x), odd_value(rng)),
        lambda net, x: {"a": net(x), "b": None},
        lambda net, x: net(x)[:, :0],
        lambda net, x: (net(x), x[:0]),
        lambda net, x: net(x).argmax(1),
        lambda net, x: net(x).to(torch.complex64),
        lambda net, x: net(x).half(),
        lambda net, x: net(x).to_sparse(),
        lambda net, x: net(x).sum(),
        lambda net, x: None,
        lambda net, x: 1 / 0,
    ]
    _prune(case, _Forward(case.fresh_model(), rng.choice(forwards)).eval(), samples(case))


def limits_of_dtypes(case: Case) -> None:
    """Weights and samples near the largest and the smallest numbers of a dtype."""
    rng, model = case.random, case.fresh_model()
    dtype = rng.choice([torch.float16, torch.float16, torch.bfloat16, torch.float32, torch.float64])
    top = torch.finfo(dtype).max
    with torch.no_grad():
        for parameter in model.parameters():
            if rng.random() < 0.5:
                parameter.uniform_(-1, 1) if rng.random() < 0.5 else parameter.uniform_(0.2, 1)
                parameter.mul_(min(top, 1e30) * rng.choice([0.99, 0.5, 1e-2, 1e-4, 1e-9]))
    model.to(dtype)
    x = torch.full((12, 8), 1e-4) if rng.random() < 0.3 else torch.randn(12, 8) * rng.choice([1e-30, 1e-4, 1, 1e4])
    options = {"layers": "*", "mask": rng.choice(["magnitude", "wanda", "sparsegpt", "obc"])}
    _prune(case, model, x, solver=rng.choice(["newton", None]), **options)


TARGETS: dict[Callable[[Case], None], int] = {
    odd_model: 2, odd_samples: 2, odd_argument: 3, odd_forward: 1, limits_of_dtypes: 1,
}  # fmt: skip


class _Forward(nn.Module):
    def __init__(self, net: nn.Module, of: Callable[[nn.Module, Tensor], Any]) -> None:
        super().__init__()
        self.net, self.of = net, of

    def forward(self, x: Tensor) -> Any:
        return self.of(self.net, x)


def samples(case: Case) -> Tensor:
    return torch.randn(12, 8, generator=torch.Generator().manual_seed(case.random.randrange(99)))


def _prune(case: Case, model: Any, x: Any, **options: Any) -> None:
    """And look at the result, if there is one."""
    before = _weights(model)
    options = {"pattern": "2:4", "recipe": LIGHT, "progress": False, **options}
    result = snows.prune(model, x, **options)
    after = dict(result.model.named_parameters())
    if not all(value.isfinite().all() for value in after.values()):
        raise ValueError("the result is not finite")
    if any(name in after and after[name].dtype != value.dtype for name, value in before.items()):
        raise TypeError("the result has other dtypes")
    if any(not torch.equal(value, now) for value, now in zip(before.values(), _weights(model).values(), strict=True)):
        raise ValueError("the caller's model was changed")


def _weights(model: Any) -> dict[str, Tensor]:
    if not isinstance(model, nn.Module):
        return {}
    own = model.named_parameters()
    return {name: value.detach().clone() for name, value in own if not is_lazy(value) and unusable(value) is None}


def _with_odd_parameter(case: Case, model: nn.Module) -> nn.Module:
    name = case.random.choice(["0", "2", "4"])
    layer = model.get_submodule(name)
    tensor = odd_tensor(case.random, tuple(layer.weight.shape))
    layer.weight = nn.Parameter(tensor.detach(), requires_grad=False)
    return model


def _with_odd_buffer(case: Case, model: nn.Module) -> nn.Module:
    model.register_buffer("odd", odd_tensor(case.random, (2, 4)), persistent=case.random.random() < 0.5)
    return model


def _with_odd_layer(case: Case, model: nn.Module) -> nn.Module:
    module: Any = model
    place = case.random.choice([0, 1, 2, 3, 4])
    module[place] = case.random.choice([
        nn.Linear(8, 0), nn.Linear(0, 8), nn.LazyLinear(8), nn.Identity(), nn.Dropout(0.5), nn.Embedding(4, 8),
        nn.Conv1d(8, 8, 1), nn.LSTM(8, 8), nn.BatchNorm1d(8), nn.Flatten(0), nn.Bilinear(8, 8, 8), nn.Softmax(0),
    ])  # fmt: skip
    return model.eval()


def _wrapped(case: Case, model: nn.Module) -> nn.Module:
    wrappers: list[Callable[[nn.Module], Any]] = [
        nn.DataParallel,
        torch.jit.script,
        lambda inner: torch.jit.trace(inner, torch.randn(2, 8)),
        nn.utils.parametrizations.weight_norm,
    ]
    wrap, module = case.random.choice(wrappers), model
    if case.random.random() < 0.5 or wrap is nn.utils.parametrizations.weight_norm:
        places: Any = module
        places[2] = wrap(places[2])
        return module
    wrapped: nn.Module = wrap(module)
    return wrapped


def _holding(model: nn.Module, value: Any) -> nn.Module:
    model.cache = value
    return model


def _in_inference_mode(model: nn.Module) -> nn.Module:
    with torch.inference_mode():
        return copy.deepcopy(model)


def odd_arguments(case: Case) -> list[Any]:
    rng = case.random
    return [
        odd_value(rng), odd_value(rng), odd_value(rng), odd_tensor(rng, (8, 8)), {"2.weight": odd_tensor(rng, (8, 8))},
        {"2": odd_value(rng)}, {5: "2:4"}, [5, None], {1, "a"}, b"2", object(), print, nn.Linear, case.fresh_model(),
        complex(1, 2), range(3), 10**30, -1, True, "meta", "cuda:99", Path("x"), threading.Lock(), float("nan"),
    ]  # fmt: skip
