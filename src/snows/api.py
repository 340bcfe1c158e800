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

from .data.preparation import ONE_AT_A_TIME, Prepared, as_device, prepare, with_weights
from .data.samples import Samples
from .data.streams import cut
from .devices.memory import Memory, as_bytes, memory_limits
from .errors import ArgumentError, SnowsWarning
from .events import DenseLayer, SolveReport
from .listeners.progress import ProgressBar
from .masks import Choice, LayerMethod, MaskMethod, NetworkMethod, as_method, default_spread
from .masks.given import given_masks, settle_reference, warn_of_empty_rows
from .masks.statistics import CalibratedNetwork
from .patterns import NM, Pattern, PatternRules
from .patterns.budgets import spread_out
from .patterns.permutation import Permuted, permute_channels
from .plan import Names, Plan, PlannedLayer, make_plan, resolve
from .recipe import Recipe, as_recipe
from .results.disk_journal import open_journal
from .results.folder import describe, digest
from .results.journal import Journal, laid_out
from .results.probe import SAMPLES, first_samples
from .results.report import LayerReport, Report
from .solve.augment import with_mirrored
from .solve.cascade import ChooseAll, Event, cascade
from .solve.distill import Finish
from .solve.estimate import Estimate
from .solve.footprint import micro_batch_size
from .version import __version__

_PERMUTATION_SAMPLES = 8  # on which a permuted network must answer as it did


@dataclass(frozen=True)
class Result:
    """A pruned model with its masks (True = kept) and the report of how it was made."""

    model: nn.Module
    masks: dict[str, Tensor]
    report: Report
    recipe: Recipe
    source: str | None = None  # the name the dense model was built from, if it has one
    probe: tuple[tuple[Any, ...], dict[str, Any]] | None = None  # a few inputs, kept with the answers when saved

    def save(self, directory: str | Path, *, compact: bool = False, force: bool = False) -> Path:
        """Write model, masks, probe, report, recipe and manifest into a new folder; never over other files.

        compact  store kept weights only (model.compact.safetensors, which `snows.load` expands)
        force    replace a folder that holds another saved result, and nothing else
        """
        from .results.storage import save

        return save(self, Path(directory), compact, force)


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
    labels: Literal["model", "given"] = "model",
    permute: bool = False,
    resume: str | Path | None = None,
    memory: int | str | None = None,
) -> Result:
    """Prune a trained model without retraining and without labels. Calls from several threads take turns.

    model        any nn.Module that torch.export can capture; it is left exactly as it was
    calibration  a few thousand unlabeled samples: a tensor, a Dataset, a DataLoader or a re-iterable of batches
    pattern      "N:M" (N kept of every M input channels), a sparsity in (0, 1), NM, Unstructured, or {glob: pattern};
                 may be left out when `mask` says everything
    mask         "magnitude", "random", "wanda", a mask method; or masks from elsewhere: {name: tensor of bools, or of 0
                 and 1}, a file of masks or of pruned weights, a pruned copy of the model, or "weights" (the zeros of
                 the model's weights). A model with masks of torch.nn.utils.prune or NVIDIA's ASP brings its own
    layers       names or globs to prune; default: every layer but the first and the last. `exclude` takes some out
    horizon      the paper's K; 0 is layer-wise reconstruction; None: the recipe's
    solver       "newton", or None: mask only
    recipe       "default", "paper" or a Recipe
    device       where to work; default: where the model is
    seed         order of the samples and random probes
    progress     True: a progress bar; or a callback that gets each Event
    labels       of the mask methods that take gradients of a loss: "model", the network's own predictions, or "given",
                 those that come with the calibration batches
    permute      re-order channels first, so that fewer large weights compete within the groups of an N:M pattern; the
                 network computes what it did
    resume       a folder that keeps every finished layer. The same call goes on where it was stopped and ends with the
                 same weights; a folder of another model, of other data or choices is refused
    memory       of the device, to be used at most: "24GiB" or a number of bytes; default: what is free. Samples are
                 taken in pieces that fit, and activations that do not rest in the host's memory or on disk
    """
    began = time.perf_counter()
    if not isinstance(model, nn.Module):
        raise ArgumentError(f"model is a {type(model).__name__}; expected an nn.Module")
    if solver not in ("newton", None):
        raise ArgumentError(f"solver is {solver!r}; expected 'newton', or None for the mask alone")
    if labels not in ("model", "given"):
        raise ArgumentError(f"labels is {labels!r}; expected 'model' or 'given'")
    chosen = as_recipe(recipe)
    if horizon is not None:
        chosen = chosen.replace(horizon=horizon)
    rules = None if pattern is None else PatternRules.parse(pattern)
    budget = as_bytes(memory)

    solves: dict[str, list[SolveReport]] = {}
    with (
        ONE_AT_A_TIME,
        warnings.catch_warnings(record=True) as caught,
        _own_world(device),
        _telling(progress, solves) as (tell, say),
    ):
        warnings.simplefilter("always", SnowsWarning)
        world = prepare(model, calibration, device, seed, labels == "given")
        _reset_peak_memory(world.device)
        limits = memory_limits(world.device, budget)
        given, method = _read_mask(mask, rules, world)
        concrete = resolve(chosen, world.graph, world.device.type, rules)
        if given is not None or solver is None:
            concrete = concrete.replace(mask_steps=1)
        plan = make_plan(world.graph, rules, concrete.horizon, layers, exclude, given)
        plan.require_layers()
        permuted = _permute(model, world, plan, given, seed) if permute else None
        if permuted is not None:
            model = permuted.model
            world = prepare(model, calibration, device, seed, labels == "given")
            plan = make_plan(world.graph, rules, concrete.horizon, layers, exclude, given)
        settings = {
            "pattern": None if rules is None else str(rules), "mask": describe(mask), "layers": describe(layers),
            "exclude": describe(exclude), "solver": solver, "labels": labels, "permute": permute, "seed": seed,
            "memory": budget,
        }  # fmt: skip
        expected: int | None = None
        journal = open_journal(resume, lambda: _settings(world, chosen, settings), world.device)
        held_out = concrete.held_out_samples(world.samples.count) if solver is not None else 0
        fitted, judged = world.samples.split(world.samples.count - held_out)
        if concrete.mirror:
            fitted = with_mirrored(fitted).shuffled(seed)
        choose, plan_of_method = _mask_choice(given, method, world, fitted, plan, seed, journal, limits)
        if solver is None and not isinstance(method, LayerMethod):
            dense = world.graph.parameters
            choice = choose(0, plan_of_method.patterns, dense)
            choice = Choice(choice.masks, {n: choice.weights.get(n, dense[n]) * m for n, m in choice.masks.items()})
        else:
            size = micro_batch_size(world.graph, plan, fitted.count, concrete, world.device, limits)
            if solver is not None and world.device.type != "cpu":
                count = fitted.count + judged.count
                expected = Estimate(world.graph, plan, concrete, limits, world.device, count, size).peak()
                say(f"about {expected / 2**30:.1f} GiB of the device's memory will be used")
            choice = cascade(
                world.graph,
                plan_of_method,
                cut(fitted, judged, [node.name for node in world.graph.inputs], size),
                choose,
                method if isinstance(method, LayerMethod) else None,
                concrete if solver is not None else concrete.replace(sweeps=1),
                limits,
                seed,
                tell,
                adjust=solver is not None,
                journal=journal,
            )
        masks, weights = choice.masks, choice.weights
        warn_of_empty_rows(masks)
        finished = None
        if solver is not None and concrete.finish_steps:
            last = Finish(world.graph, masks, fitted, judged, concrete, limits, seed)
            finished = last.run({**world.graph.parameters, **weights}, _told(concrete, masks, tell))
            weights = finished.parameters
        pruned = with_weights(model, weights)

    report = _report(model, plan, masks, solves, solver is not None)
    report.pattern = "given" if rules is None else str(rules)
    brought = method is None and not (isinstance(mask, str) and mask == "weights")
    report.mask = "given" if brought else mask if isinstance(mask, str) else repr(mask)
    report.recipe = dataclasses.asdict(chosen)
    report.finish = None if finished is None else finished.report
    if permuted is not None:
        report.permutation = {"kept_before": permuted.kept_before, "kept_after": permuted.kept_after}
    report.samples, report.held_out_samples, report.seed = world.samples.count, held_out, seed
    report.device, report.peak_memory_bytes = _device_facts(world.device)
    report.expected_memory_bytes = expected
    report.warnings = list(dict.fromkeys(str(w.message) for w in caught if issubclass(w.category, SnowsWarning)))
    report.seconds, report.recalled_solves = time.perf_counter() - began, journal.recalled
    for warning in caught:
        warnings.warn(warning.message, warning.category, stacklevel=2)
    dtype = next(p.dtype for p in model.parameters() if p.is_floating_point())
    probe = first_samples(*world.samples.call_arguments(0, SAMPLES), dtype)
    return Result(pruned, {name: kept.cpu() for name, kept in masks.items()}, report, chosen, probe=probe)


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
) -> Iterator[tuple[Callable[[Event], None], Callable[[str], None]]]:
    """Where the cascade's events go: into the report, and to the caller's callback or the progress bar; and where the
    bar's reader is told something in words."""
    bar = ProgressBar() if progress is True else None

    def tell(event: Event) -> None:
        if event.solve is not None:
            for layer in event.layers:
                solves.setdefault(layer, []).append(event.solve)
        if bar is not None:
            bar.show(event)
        elif callable(progress):
            progress(event)

    try:
        yield tell, bar.say if bar is not None else lambda words: None
    finally:
        if bar is not None:
            bar.close()


def _read_mask(
    mask: Any, rules: PatternRules | None, world: Prepared
) -> tuple[dict[str, Tensor] | None, MaskMethod | None]:
    """Masks that are given as they are, or the method that will choose them."""
    given = given_masks(mask, world)
    if given is None and rules is None and world.own_masks:
        given = given_masks("weights", world)
    if given is not None:
        return given, None
    if rules is None:
        raise ArgumentError("no pattern is given; expected one such as '2:4' or 0.7, or masks that say everything")
    return None, as_method(mask)


def _permute(model: nn.Module, world: Prepared, plan: Plan, given: dict[str, Tensor] | None, seed: int) -> Permuted:
    """The same network with channels re-ordered for the N:M patterns of the plan."""
    if given is not None:
        raise ArgumentError("permute re-orders channels, which a given mask would not follow; leave one of them out")
    if not any(isinstance(pattern, NM) for pattern in plan.patterns.values()):
        raise ArgumentError("permute is for N:M patterns; expected one such as '2:4'")
    first = next(model.parameters())
    args, kwargs = world.samples.to(first.device, first.dtype).call_arguments(0, _PERMUTATION_SAMPLES)
    return permute_channels(model, world.graph, plan.patterns, args, kwargs, seed)


def _mask_choice(
    given: dict[str, Tensor] | None,
    method: MaskMethod | None,
    world: Prepared,
    samples: Samples,
    plan: Plan,
    seed: int,
    journal: Journal,
    limits: Memory,
) -> tuple[ChooseAll, Plan]:
    """How masks of all layers are chosen together, and the plan with each layer's own sparsity."""
    if method is None:
        assert given is not None
        masks = {planned.layer.parameter: given[planned.layer.parameter] for planned in plan.pruned}
        settle_reference(world, masks)
        return lambda sweep, patterns, weights: Choice(masks), plan

    def network(patterns: Mapping[str, Pattern], weights: Mapping[str, Tensor]) -> CalibratedNetwork:
        return CalibratedNetwork(world.graph, samples, patterns, seed, samples.labels, limits.choosing, weights)

    together = isinstance(method, NetworkMethod)
    dense = network(plan.patterns, world.graph.parameters)
    plan = plan.with_patterns(spread_out(plan.patterns, dense, default_spread(method), together))
    if not isinstance(method, NetworkMethod):
        return lambda sweep, patterns, weights: Choice({}), plan  # it fills them in on the way

    def choose(sweep: int, patterns: Mapping[str, Pattern], weights: Mapping[str, Tensor]) -> Choice:
        choice = journal.recall_choice(sweep)
        if choice is None:
            choice = method.choose(network(patterns, weights))
            missing = [name for name in patterns if name not in choice.masks]
            if missing:
                raise ArgumentError(f"the mask method {method!r} gave no mask for {', '.join(missing[:3])}")
            choice = Choice(laid_out(choice.masks), laid_out(choice.weights))
            journal.record_choice(sweep, choice)
        return choice

    return choose, plan


def _told(recipe: Recipe, masks: dict[str, Tensor], tell: Callable[[Event], None]) -> Callable[[int], None]:
    """Of the last stage, each step as an event."""
    steps, sweeps = recipe.finish_steps, recipe.sweeps
    assert isinstance(steps, int)
    assert isinstance(sweeps, int)
    layers = tuple(name.removesuffix(".weight") for name in masks)
    return lambda step: tell(Event(layers, step, steps, sweeps, sweeps, finishing=True))


def _settings(world: Prepared, recipe: Recipe, choices: dict[str, Any]) -> dict[str, Any]:
    """What decides the result of a run."""
    return {
        "weights": digest(world.graph.parameters),
        "calibration": digest([world.samples.leaves, world.samples.labels]),
        "samples": world.samples.count,
        **choices,
        "recipe": dataclasses.asdict(recipe),
        "device": _device_facts(world.device)[0],
        "versions": {"snows": __version__, "torch": str(torch.__version__)},
    }


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
    together = {p.layer.name: [other.layer.name for other in group] for group in plan.groups for p in group}

    def layer_report(planned: PlannedLayer) -> LayerReport:
        layer, mask = planned.layer, masks[planned.layer.parameter]
        return LayerReport(
            name=layer.name,
            parameter=layer.parameter,
            shape=list(layer.shape),
            pattern="given" if planned.pattern is None else str(planned.pattern),
            weights=mask.numel(),
            kept=int(mask.sum()),
            horizon=planned.horizon if solved else None,
            group=together[layer.name],
            solves=solves.get(layer.name, []),
        )

    return Report(
        model=type(model).__name__,
        layers=[layer_report(planned) for planned in plan.pruned],
        dense_layers=[DenseLayer(layer.name, list(layer.shape), reason) for layer, reason in plan.dense],
        network_weights=sum(parameter.numel() for parameter in model.parameters()),
        versions={"snows": __version__, "torch": str(torch.__version__)},
    )
