"""`snows.prune`: from a trained model and unlabeled samples to a sparse model that still works."""

from __future__ import annotations

import copy
import dataclasses
import time
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn.utils import prune as torch_prune

from .calibration import Samples, read_samples
from .cascade import Event, Memory, cascade
from .errors import ArgumentError, InputError, SnowsWarning
from .graph import Graph, capture
from .graph.layers import layer_name
from .graph.segment import Values
from .masks import Choice, LayerMethod, NetworkMethod, as_method
from .patterns import PatternRules
from .plan import Names, Plan, make_plan
from .progress import ProgressBar
from .recipe import Recipe, as_recipe
from .report import DenseLayer, LayerReport, Report, SolveReport
from .version import __version__

_MICRO_BATCH = {"cpu": 250, "cuda": 1000}  # caches like small pieces, launches like large ones
_LINEARIZED_FACTOR = 6  # bytes held by a linearized segment, as a multiple of its values
_CPU_BYTES = 4 << 30


@dataclass(frozen=True)
class Result:
    """A pruned model with its masks (True = kept) and the report of how it was made."""

    model: nn.Module
    masks: dict[str, Tensor]
    report: Report
    recipe: Recipe
    source: str | None = None  # the name the dense model was built from, if it has one

    def save(self, directory: str | Path) -> Path:
        """Write model.safetensors, masks.safetensors, report.json, report.html and recipe.json; never over other files."""
        from .storage import save

        return save(self, Path(directory))


def prune(
    model: nn.Module,
    calibration: Any,
    pattern: Any = None,
    *,
    mask: Any = "magnitude",
    layers: Names = None,
    exclude: Names = None,
    horizon: int | None = None,
    solver: Literal["newton"] | None = "newton",
    recipe: Recipe | str = "default",
    device: torch.device | str | None = None,
    seed: int = 0,
    progress: bool | Callable[[Event], None] = True,
) -> Result:
    """Prune a trained model without retraining and without labels.

    model        any nn.Module that torch.export can capture; it is left exactly as it was
    calibration  a few thousand unlabeled samples: a tensor, a Dataset, a DataLoader or a re-iterable of batches
    pattern      "N:M" (N kept of every M input channels), a sparsity in (0, 1), NM, Unstructured, or {glob: pattern};
                 may be left out when `mask` says everything
    mask         "magnitude", "random", "wanda", a mask method, {name: bool tensor}, or "weights" (zeros are the mask)
    layers       names or globs to prune; default: every layer but the first and the last. `exclude` takes some out
    horizon      the paper's K; 0 is layer-wise reconstruction; None: the recipe's
    solver       "newton", or None: mask only
    recipe       "default", "paper" or a Recipe
    device       where to work; default: where the model is
    seed         order of the samples and random probes
    progress     True: a progress bar; or a callback that gets each Event
    """
    began = time.perf_counter()
    chosen = as_recipe(recipe)
    if horizon is not None:
        chosen = chosen.replace(horizon=horizon)
    if solver not in ("newton", None):
        raise ArgumentError(f"solver is {solver!r}; expected 'newton', or None for the mask alone")
    if not isinstance(model, nn.Module):
        raise ArgumentError(f"model is a {type(model).__name__}; expected an nn.Module")
    rules = None if pattern is None else PatternRules.parse(pattern)

    with warnings.catch_warnings(record=True) as caught, _own_world(device):
        warnings.simplefilter("always", SnowsWarning)
        work, zeros = working_copy(model, device)
        samples = read_samples(calibration, model).shuffled(seed)
        place = next((p.device for p in work.parameters()), torch.device("cpu"))
        dtype = next((p.dtype for p in work.parameters() if p.is_floating_point()), torch.float32)
        samples = samples.to(place, dtype)
        graph = capture(work, *samples.call_arguments(0, 8))
        given, method = _read_mask(mask, rules, graph, zeros)
        plan = make_plan(graph, rules, chosen.horizon, layers, exclude, given)
        report = _new_report(model, plan, rules, mask, chosen, samples.count, seed, place)
        if place.type == "cuda":
            torch.cuda.reset_peak_memory_stats(place)

        choice = _choose_masks(given, method, graph, plan, seed)
        if solver is None and not isinstance(method, LayerMethod):
            weights = {n: choice.weights.get(n, graph.parameters[n]) * m for n, m in choice.masks.items()}
            solves: dict[str, list[SolveReport]] = {}
        else:
            work_recipe = chosen if solver is not None else chosen.replace(sweeps=1)
            batches, sizes = micro_batches(graph, plan, samples, work_recipe, place)
            solves = {planned.layer.name: [] for planned in plan.pruned}
            bar = ProgressBar() if progress is True else None

            def tell(event: Event) -> None:
                if event.solve is not None:
                    solves[event.layer].append(event.solve)
                if callable(progress):
                    progress(event)
                elif bar is not None:
                    bar.show(event)

            try:
                weights = cascade(
                    graph, plan, batches, sizes, choice.masks, choice.weights,
                    method if isinstance(method, LayerMethod) else None,
                    work_recipe, memory_limits(place), seed, tell, adjust=solver is not None,
                )  # fmt: skip
            finally:
                if bar is not None:
                    bar.close()
        masks = {planned.layer.parameter: choice.masks[planned.layer.parameter] for planned in plan.pruned}
        _check_masks(masks)
        pruned = _with_weights(model, weights)

    report.layers = [
        LayerReport(
            p.layer.name, p.layer.parameter, list(p.layer.shape), "given" if p.pattern is None else str(p.pattern),
            masks[p.layer.parameter].numel(), int(masks[p.layer.parameter].sum()),
            p.horizon if solver is not None else 0, solves.get(p.layer.name, []),
        )
        for p in plan.pruned
    ]  # fmt: skip
    report.network_weights = sum(p.numel() for p in pruned.parameters())
    report.seconds = time.perf_counter() - began
    if place.type == "cuda":
        report.peak_memory_bytes = torch.cuda.max_memory_allocated(place)
    for warning in caught:
        if issubclass(warning.category, SnowsWarning):
            report.warnings.append(str(warning.message))
        warnings.warn(warning.message, warning.category, stacklevel=2)
    return Result(pruned, {name: m.cpu() for name, m in masks.items()}, report, chosen)


@contextmanager
def _own_world(device: torch.device | str | None) -> Iterator[None]:
    """The caller's random state, gradient mode and autograd stay theirs."""
    devices = [torch.device(device)] if device is not None and torch.device(device).type == "cuda" else []
    with (
        torch.random.fork_rng(devices=devices),
        torch.inference_mode(False),
        torch.enable_grad(),
    ):
        yield


def working_copy(model: nn.Module, device: torch.device | str | None) -> tuple[nn.Module, dict[str, Tensor]]:
    """A copy to work on: eval mode, at least float32, no gradients. Also the masks of torch.nn.utils.prune modules."""
    if any(not torch.isfinite(p).all() for p in model.parameters() if p.is_floating_point()):
        bad = [n for n, p in model.named_parameters() if p.is_floating_point() and not torch.isfinite(p).all()]
        raise InputError(f"the model's weights contain NaN or infinity (in {', '.join(bad[:3])}); nothing can be matched")
    if model.training:
        warnings.warn(
            "the model is in train mode; it is run in eval mode (dropout off, batch norm statistics as they are)",
            SnowsWarning,
            stacklevel=3,
        )
    work = _copy(model)
    masks = _absorb_pruning(work)
    half = any(p.dtype in (torch.float16, torch.bfloat16) for p in work.parameters())
    try:
        work = work.to(device=device, dtype=torch.float32 if half else None).eval()
        work = work.to(memory_format=torch.channels_last)  # the layout convolution kernels are fastest in
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        raise InputError(f"the model cannot be moved to device {str(device)!r}: {error}") from error
    for parameter in work.parameters():
        parameter.requires_grad_(False)
    return work, masks


def _copy(model: nn.Module) -> nn.Module:
    try:
        return copy.deepcopy(model)
    except Exception as error:  # deepcopy runs the user's own code
        raise InputError(f"{type(model).__name__} cannot be copied: {error}") from error


def _absorb_pruning(model: nn.Module) -> dict[str, Tensor]:
    """Make torch.nn.utils.prune masks permanent in this copy, and return them by parameter name."""
    masks = {}
    for module_name, module in model.named_modules():
        for buffer, value in list(module.named_buffers(recurse=False)):
            name = buffer.removesuffix("_mask")
            if name != buffer and hasattr(module, f"{name}_orig"):
                torch_prune.remove(module, name)
                masks[f"{module_name}.{name}" if module_name else name] = value.bool()
    return masks


def _read_mask(
    mask: Any, rules: PatternRules | None, graph: Graph, absorbed: dict[str, Tensor]
) -> tuple[dict[str, Tensor] | None, NetworkMethod | LayerMethod | None]:
    """Masks that are given as they are, or the method that will choose them."""
    if isinstance(mask, Mapping):
        return _given_masks(mask, graph), None
    if mask == "weights" or (rules is None and absorbed):
        found = {
            layer.parameter: absorbed.get(layer.parameter, graph.parameters[layer.parameter] != 0)
            for layer in graph.layers
            if layer.parameter in graph.parameters
        }
        found = {n: m.to(graph.parameters[n].device) for n, m in found.items() if not bool(m.all())}
        if not found:
            raise InputError("mask='weights', but no weight of the model is zero; prune it first, or choose a mask method")
        return found, None
    if rules is None:
        raise ArgumentError("no pattern is given; expected one such as '2:4' or 0.7, or masks that say everything")
    return None, as_method(mask)


def _given_masks(mask: Mapping[Any, Any], graph: Graph) -> dict[str, Tensor]:
    by_name = {layer.parameter: layer for layer in graph.layers} | {layer.name: layer for layer in graph.layers}
    found: dict[str, Tensor] = {}
    for name, value in mask.items():
        layer = by_name.get(str(name)) or by_name.get(layer_name(str(name)))
        if layer is None:
            known = ", ".join(layer.name for layer in graph.layers[:12])
            raise ArgumentError(f"the mask names {name!r}, which is no layer of the model; its layers are {known} …")
        if layer.refusal is not None:
            raise InputError(f"the mask names {name!r}, which cannot be pruned: {layer.refusal}")
        if not isinstance(value, Tensor) or value.dtype != torch.bool:
            kind = value.dtype if isinstance(value, Tensor) else type(value).__name__
            raise ArgumentError(f"the mask of {name!r} is {kind}; expected a bool tensor, True where a weight is kept")
        if value.shape != layer.shape:
            raise InputError(
                f"the mask of {name!r} has shape {tuple(value.shape)}; the weight has shape {tuple(layer.shape)}"
            )
        found[layer.parameter] = value.to(graph.parameters[layer.parameter].device)
    if not found:
        raise ArgumentError("the given mask is empty; expected {name: bool tensor} with at least one layer")
    return found


def _choose_masks(
    given: dict[str, Tensor] | None, method: NetworkMethod | LayerMethod | None, graph: Graph, plan: Plan, seed: int
) -> Choice:
    if given is not None:
        return Choice({p.layer.parameter: given[p.layer.parameter] for p in plan.pruned})
    if isinstance(method, NetworkMethod):
        return method.choose({name: graph.parameters[name] for name in plan.patterns}, plan.patterns, seed)
    return Choice({})


def _check_masks(masks: Mapping[str, Tensor]) -> None:
    for name, mask in masks.items():
        empty = int((~mask.flatten(1).any(1)).sum())
        if empty:
            warnings.warn(
                f"the mask of {layer_name(name)} removes every weight of {empty} of its {mask.shape[0]} outputs",
                SnowsWarning,
                stacklevel=3,
            )


def micro_batches(
    graph: Graph, plan: Plan, samples: Samples, recipe: Recipe, device: torch.device
) -> tuple[list[Values], tuple[int, ...]]:
    """The samples as named inputs of the graph, in pieces whose linearized segments fit the memory."""
    largest = max(graph.cost(p.layer, p.horizon).bytes for p in plan.pruned)
    limit = memory_limits(device).products // (_LINEARIZED_FACTOR * max(largest, 1))
    wanted = recipe.minibatch or recipe.product_samples or samples.count
    size = max(1, min(wanted, _MICRO_BATCH.get(device.type, 250), limit, samples.count))
    starts = range(0, samples.count, size)
    names = [node.name for node in graph.inputs]
    batches = [dict(zip(names, samples.rows(i, i + size), strict=True)) for i in starts]
    return batches, tuple(min(size, samples.count - i) for i in starts)


def memory_limits(device: torch.device) -> Memory:
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        return Memory(targets=int(0.3 * free), products=int(0.3 * free))
    return Memory(targets=_CPU_BYTES, products=_CPU_BYTES)


def _with_weights(model: nn.Module, weights: Mapping[str, Tensor]) -> nn.Module:
    """A new module of the same class with these weights, in the model's own dtype, device and mode."""
    result = _copy(model)
    _absorb_pruning(result)
    parameters = dict(result.named_parameters(remove_duplicate=False))
    with torch.no_grad():
        for name, weight in weights.items():
            parameters[name].copy_(weight)
    return result


def _new_report(
    model: nn.Module,
    plan: Plan,
    rules: PatternRules | None,
    mask: Any,
    recipe: Recipe,
    samples: int,
    seed: int,
    device: torch.device,
) -> Report:
    return Report(
        model=type(model).__name__,
        pattern="given" if rules is None else str(rules),
        mask=mask if isinstance(mask, str) else "given" if isinstance(mask, Mapping) else repr(mask),
        recipe=dataclasses.asdict(recipe),
        samples=samples,
        seed=seed,
        device=torch.cuda.get_device_name(device) if device.type == "cuda" else str(device),
        dense_layers=[DenseLayer(layer.name, list(layer.shape), reason) for layer, reason in plan.dense],
        versions={"snows": __version__, "torch": torch.__version__},
    )

