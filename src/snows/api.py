"""`snows.prune`: from a trained model and unlabeled samples to a sparse model that still works."""

from __future__ import annotations

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

from .cascade import Event, cascade
from .errors import ArgumentError, SnowsWarning
from .given import masks_from_mapping, masks_from_weights, warn_of_empty_rows
from .graph.segment import Values
from .masks import Choice, LayerMethod, MaskMethod, NetworkMethod, as_method
from .memory import memory_limits, micro_batch_size
from .patterns import PatternRules
from .plan import Names, Plan, make_plan, resolve
from .preparation import Prepared, as_device, prepare, with_weights
from .progress import ProgressBar
from .recipe import Recipe, as_recipe
from .report import DenseLayer, LayerReport, Report, SolveReport
from .version import __version__


@dataclass(frozen=True)
class Result:
    """A pruned model with its masks (True = kept) and the report of how it was made."""

    model: nn.Module
    masks: dict[str, Tensor]
    report: Report
    recipe: Recipe
    source: str | None = None  # the name the dense model was built from, if it has one

    def save(self, directory: str | Path) -> Path:
        """Write model, masks, report and recipe into a new folder; never over other files."""
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
    if not isinstance(model, nn.Module):
        raise ArgumentError(f"model is a {type(model).__name__}; expected an nn.Module")
    if solver not in ("newton", None):
        raise ArgumentError(f"solver is {solver!r}; expected 'newton', or None for the mask alone")
    chosen = as_recipe(recipe)
    if horizon is not None:
        chosen = chosen.replace(horizon=horizon)
    rules = None if pattern is None else PatternRules.parse(pattern)

    with warnings.catch_warnings(record=True) as caught, _own_world(device):
        warnings.simplefilter("always", SnowsWarning)
        world = prepare(model, calibration, device, seed)
        _reset_peak_memory(world.device)
        given, method = _read_mask(mask, rules, world)
        concrete = resolve(chosen, world.graph)
        plan = make_plan(world.graph, rules, concrete.horizon, layers, exclude, given)
        plan.require_layers()
        choice = _choose_masks(given, method, world, plan, seed)
        solves: dict[str, list[SolveReport]] = {planned.layer.name: [] for planned in plan.pruned}
        if solver is None and not isinstance(method, LayerMethod):
            weights = {
                name: choice.weights.get(name, world.graph.parameters[name]) * kept
                for name, kept in choice.masks.items()
            }
        else:
            with _telling(progress, solves) as tell:
                weights = cascade(
                    world.graph,
                    plan,
                    *_micro_batches(world, plan, concrete),
                    choice,
                    method if isinstance(method, LayerMethod) else None,
                    concrete if solver is not None else concrete.replace(sweeps=1),
                    memory_limits(world.device),
                    seed,
                    tell,
                    adjust=solver is not None,
                )
        masks = {planned.layer.parameter: choice.masks[planned.layer.parameter] for planned in plan.pruned}
        warn_of_empty_rows(masks)
        pruned = with_weights(model, weights)

    report = _report(model, plan, masks, solves, solver is not None)
    report.pattern = "given" if rules is None else str(rules)
    report.mask = mask if isinstance(mask, str) else "given" if isinstance(mask, Mapping) else repr(mask)
    report.recipe = dataclasses.asdict(chosen)
    report.samples, report.seed = world.samples.count, seed
    report.device, report.peak_memory_bytes = _device_facts(world.device)
    report.warnings = [str(w.message) for w in caught if issubclass(w.category, SnowsWarning)]
    report.seconds = time.perf_counter() - began
    for warning in caught:
        warnings.warn(warning.message, warning.category, stacklevel=2)
    return Result(pruned, {name: kept.cpu() for name, kept in masks.items()}, report, chosen)


@contextmanager
def _own_world(device: torch.device | str | None) -> Iterator[None]:
    """The caller's random state and gradient mode stay theirs."""
    place = as_device(device)
    cuda = place is not None and place.type == "cuda" and torch.cuda.is_available()
    with (
        torch.random.fork_rng(devices=[place] if cuda else []),
        torch.inference_mode(False),
        torch.enable_grad(),
    ):
        yield


@contextmanager
def _telling(
    progress: bool | Callable[[Event], None], solves: dict[str, list[SolveReport]]
) -> Iterator[Callable[[Event], None]]:
    """Where the cascade's events go: into the report, and to the caller's callback or the progress bar."""
    bar = ProgressBar() if progress is True else None

    def tell(event: Event) -> None:
        if event.solve is not None:
            solves[event.layer].append(event.solve)
        if bar is not None:
            bar.show(event)
        elif callable(progress):
            progress(event)

    try:
        yield tell
    finally:
        if bar is not None:
            bar.close()


def _read_mask(
    mask: Any, rules: PatternRules | None, world: Prepared
) -> tuple[dict[str, Tensor] | None, MaskMethod | None]:
    """Masks that are given as they are, or the method that will choose them."""
    if isinstance(mask, Mapping):
        return masks_from_mapping(mask, world.graph), None
    if (isinstance(mask, str) and mask == "weights") or (rules is None and world.absorbed):
        return masks_from_weights(world.graph, world.absorbed), None
    if rules is None:
        raise ArgumentError("no pattern is given; expected one such as '2:4' or 0.7, or masks that say everything")
    return None, as_method(mask)


def _choose_masks(
    given: dict[str, Tensor] | None, method: MaskMethod | None, world: Prepared, plan: Plan, seed: int
) -> Choice:
    if given is not None:
        return Choice({planned.layer.parameter: given[planned.layer.parameter] for planned in plan.pruned})
    if isinstance(method, NetworkMethod):
        return method.choose({name: world.graph.parameters[name] for name in plan.patterns}, plan.patterns, seed)
    return Choice({})  # a layer method fills it in on the way


def _micro_batches(world: Prepared, plan: Plan, recipe: Recipe) -> tuple[list[Values], tuple[int, ...]]:
    """The samples as named inputs of the graph, in pieces."""
    count = world.samples.count
    size = micro_batch_size(world.graph, plan, count, recipe, world.device)
    starts = range(0, count, size)
    names = [node.name for node in world.graph.inputs]
    batches = [dict(zip(names, world.samples.rows(i, i + size), strict=True)) for i in starts]
    return batches, tuple(min(size, count - i) for i in starts)


def _reset_peak_memory(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)


def _device_facts(device: torch.device) -> tuple[str, int | None]:
    if device.type == "cuda":
        return torch.cuda.get_device_name(device), torch.cuda.max_memory_allocated(device)
    return str(device), None


def _report(
    model: nn.Module, plan: Plan, masks: dict[str, Tensor], solves: dict[str, list[SolveReport]], solved: bool
) -> Report:
    def layer_report(index: int) -> LayerReport:
        planned = plan.pruned[index]
        layer, mask = planned.layer, masks[planned.layer.parameter]
        return LayerReport(
            name=layer.name,
            parameter=layer.parameter,
            shape=list(layer.shape),
            pattern="given" if planned.pattern is None else str(planned.pattern),
            weights=mask.numel(),
            kept=int(mask.sum()),
            horizon=planned.horizon if solved else None,
            solves=solves[layer.name],
        )

    return Report(
        model=type(model).__name__,
        layers=[layer_report(index) for index in range(len(plan.pruned))],
        dense_layers=[DenseLayer(layer.name, list(layer.shape), reason) for layer, reason in plan.dense],
        network_weights=sum(parameter.numel() for parameter in model.parameters()),
        versions={"snows": __version__, "torch": str(torch.__version__)},
    )
