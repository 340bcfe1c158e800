"""The command that prunes."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

from ...devices.distributed.launch import connected
from ...errors import ArgumentError
from ..app import app
from ..arguments import (
    CompactOption,
    ConfigOption,
    DataOption,
    DebugOption,
    DeviceOption,
    EffortOption,
    EventsOption,
    ExcludeOption,
    ForceOption,
    HorizonOption,
    JsonOption,
    LabelsOption,
    LayersOption,
    LiveOption,
    MaskOption,
    MemoryOption,
    MetricOption,
    ModelArgument,
    OutOption,
    PatternOption,
    PermuteOption,
    QuietOption,
    RecipeOption,
    ResumeOption,
    SamplesOption,
    SeedOption,
    TensorBoardOption,
    WeightsOption,
)
from ..interruption import saying
from ..request import Request, read_mask, read_metric, read_pattern
from ..rows import Judge
from ..tables import print_prune
from ..watching import listeners_of

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from torch import nn

    from ...api import Result
    from ...data.sources import Data
    from ...evaluation.metrics import Metric
    from ...events import Listener
    from ...recipe import Recipe

_LAYER_WISE = "layer-wise (K=0)"


@app.command(short_help="Prune a model and re-adjust what is left.")
def prune(
    model: ModelArgument = None,
    data: DataOption = None,
    weights: WeightsOption = None,
    pattern: PatternOption = None,
    mask: MaskOption = "magnitude",
    horizon: HorizonOption = None,
    layers: LayersOption = None,
    exclude: ExcludeOption = None,
    recipe: RecipeOption = None,
    effort: EffortOption = None,
    samples: SamplesOption = None,
    labels: LabelsOption = "model",
    permute: PermuteOption = False,
    metric: MetricOption = None,
    out: OutOption = None,
    compact: CompactOption = False,
    force: ForceOption = False,
    resume: ResumeOption = None,
    memory: MemoryOption = None,
    device: DeviceOption = None,
    seed: SeedOption = 0,
    events: EventsOption = None,
    tensorboard: TensorBoardOption = None,
    live: LiveOption = False,
    as_json: JsonOption = False,
    quiet: QuietOption = False,
    config: ConfigOption = None,
    debug: DebugOption = False,
) -> None:
    """Prune a model and re-adjust what is left. Without arguments: the embedded ResNet20, to 1:4.

    Calibration samples need no labels. If the data has more samples than are used, the rest evaluates the result.
    """
    from dataclasses import replace

    from ...api import prune as run
    from ...results.journal import kept_solves
    from ...results.result import save_or_rescue

    _check_out(out, compact, force, resume)
    request = Request.read(model, data, weights, samples, seed, config, device, quiet or as_json)
    chosen = request.recipe(recipe, effort)
    pattern = read_pattern(pattern, mask, request.default_pattern)
    masks = read_mask(mask)
    judging = read_metric(metric)
    listeners = listeners_of(events, tensorboard, live, out, request.quiet)
    dense, read = request.model_and_data()
    if judging is not None and read.test is None:
        raise ArgumentError(
            "--metric is given, but no samples are left to evaluate on; lower --samples, or let the "
            "data's factory return (calibration, test samples)"
        )
    options: dict[str, Any] = {
        "mask": masks, "layers": layers, "exclude": exclude, "seed": seed, "device": request.device,
        "labels": labels, "permute": permute, "memory": memory,
    }  # fmt: skip
    run_with = partial(run, dense, read.samples(labels == "given"), pattern, **options)
    with connected(request.device), saying(partial(kept_solves, resume, "--resume DIR", "command")):
        result = _pruned_and_evaluated(request, dense, read, run_with, chosen, horizon, resume, judging, listeners)
        if out is not None:
            save_or_rescue(replace(result, source=request.model_name), out, compact, force)
    print_prune(result.report, out, as_json, quiet)


def _check_out(out: Path | None, compact: bool, force: bool, resume: Path | None) -> None:
    from ...results.storage import check_output

    if out is not None:
        check_output(out, force, resume)
    elif compact or force:
        raise ArgumentError(f"{'--compact' if compact else '--force'} says how to save; expected --out DIR with it")


def _pruned_and_evaluated(
    request: Request,
    dense: nn.Module,
    read: Data,
    run: Callable[..., Result],
    recipe: Recipe,
    horizon: int | None,
    resume: Path | None,
    metric: Metric | None,
    listeners: list[Listener],
) -> Result:
    """The result. If there are test samples its report compares it with the mask alone (and the demo with K=0)."""
    from dataclasses import replace

    from ...data.preparation import capturing_once
    from ...evaluation.classes import reference

    show = not request.quiet
    run_whole = partial(run, recipe=recipe, horizon=horizon, progress=[show, *listeners], resume=resume)
    if read.test is None:
        return run_whole()
    with request.step("evaluating the dense network"):  # first: test samples that do not fit cost no time then
        judge = Judge(read, reference(dense, read.test) if metric is None else None, metric)
        rows = [judge.row("dense", dense)]
    with capturing_once(dense):
        with request.step("pruning with the mask alone"):
            others = {"mask only": run(solver=None, progress=False)}
        if request.is_embedded and horizon is None:
            light = recipe.replace(sweeps=1, mask_steps=1)
            others[_LAYER_WISE] = run(recipe=light, horizon=0, progress=show)
        result = run_whole()
    deepest = max(layer.horizon or 0 for layer in result.report.layers)
    networks = {name: other.model for name, other in others.items()} | {f"SNOWS (K={deepest})": result.model}
    with request.step("evaluating"):
        rows += [judge.row(name, network) for name, network in networks.items()]
    report = replace(result.report, evaluation=rows)
    if _LAYER_WISE in others and report.operations is not None:
        report = report.beside(_LAYER_WISE, others[_LAYER_WISE].report)
    return replace(result, report=report)
