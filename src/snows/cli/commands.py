"""The commands, one function each. torch is imported inside them, so that --help is instant.

A new command is one more function with `@app.command()`; its options come from `arguments`.
"""

from __future__ import annotations

import json
import sys
from functools import partial
from typing import TYPE_CHECKING, Any

import typer

from ..errors import ArgumentError, InputError
from ..version import __version__
from .arguments import (
    COMPARED_MASKS,
    CellsOption,
    CheckedModelOption,
    CompactOption,
    ConfigOption,
    DataOption,
    DebugOption,
    DeviceOption,
    EffortOption,
    ExcludeOption,
    ForceOption,
    HorizonOption,
    JsonOption,
    LabelsOption,
    LayersOption,
    MarkdownOption,
    MaskOption,
    MasksOption,
    MemoryOption,
    ModelArgument,
    OutOption,
    PatternOption,
    PatternsOption,
    PermuteOption,
    PrunedOption,
    QuietOption,
    RecipeOption,
    ResumeOption,
    SamplesOption,
    SavedArgument,
    SeedOption,
    VersionOption,
    WeightsOption,
)
from .interruption import Interrupted, keeping_layers, kept_cells
from .request import Request, needs_pattern, read_mask, split_patterns
from .tables import evaluation_table, make_console, print_comparison, print_inspection, print_prune, print_verification

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from torch import Tensor, nn

    from ..api import Result
    from ..data.sources import Data
    from ..recipe import Recipe

app = typer.Typer(
    name="snows",
    help="Prune a trained network without retraining and without labels.",
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)


@app.callback(invoke_without_command=True)
def _top(context: typer.Context, version: VersionOption = False) -> None:
    if version:
        print(f"snows {__version__}")
        raise typer.Exit
    if context.invoked_subcommand is None:
        print(context.get_help(), file=sys.stderr)
        raise typer.Exit(2)


@app.command()
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
    out: OutOption = None,
    compact: CompactOption = False,
    force: ForceOption = False,
    resume: ResumeOption = None,
    memory: MemoryOption = None,
    device: DeviceOption = None,
    seed: SeedOption = 0,
    as_json: JsonOption = False,
    quiet: QuietOption = False,
    config: ConfigOption = None,
    debug: DebugOption = False,
) -> None:
    """Prune a model and re-adjust what is left. Without arguments: the embedded ResNet20, to 1:4.

    Calibration samples need no labels. If the data has more samples than are used, the rest evaluates the result.
    """
    from dataclasses import replace

    from ..api import prune as run
    from ..results.storage import refuse_existing

    if out is not None:
        refuse_existing(out, force)
    elif compact or force:
        raise ArgumentError(f"{'--compact' if compact else '--force'} says how to save; expected --out DIR with it")
    request = Request.read(model, data, weights, samples, seed, config, device, quiet or as_json)
    chosen = request.recipe(recipe, effort)
    if pattern is None and needs_pattern(mask):
        pattern = request.default_pattern
    dense, read = request.model_and_data()
    options: dict[str, Any] = {
        "mask": read_mask(mask), "layers": layers, "exclude": exclude, "seed": seed, "device": request.device,
        "labels": labels, "permute": permute, "memory": memory,
    }  # fmt: skip
    run_with = partial(run, dense, read.samples(labels == "given"), pattern, **options)
    with keeping_layers(resume):
        result = _pruned_and_evaluated(request, dense, read, run_with, chosen, horizon, resume)
        if out is not None:
            replace(result, source=request.model_name).save(out, compact=compact, force=force)
    print_prune(result.report, out, as_json, quiet)


def _pruned_and_evaluated(
    request: Request,
    dense: nn.Module,
    read: Data,
    run: Callable[..., Result],
    recipe: Recipe,
    horizon: int | None,
    resume: Path | None,
) -> Result:
    """The result. If there are test samples its report compares it with the mask alone (and the demo with K=0)."""
    from dataclasses import replace

    from ..data.preparation import capturing_once
    from ..evaluation.classes import reference

    show = not request.quiet
    run_whole = partial(run, recipe=recipe, horizon=horizon, progress=show, resume=resume)
    if read.test is None:
        return run_whole()
    with request.step("evaluating the dense network"):  # first: test samples that do not fit cost no time then
        expected = reference(dense, read.test)
        rows = [_row("dense", dense, read, expected)]
    with capturing_once(dense):
        with request.step("pruning with the mask alone"):
            networks = {"mask only": run(solver=None, progress=False).model}
        if request.is_embedded and horizon is None:
            light = recipe.replace(sweeps=1, mask_steps=1)
            networks["layer-wise (K=0)"] = run(recipe=light, horizon=0, progress=show).model
        result = run_whole()
    deepest = max(layer.horizon or 0 for layer in result.report.layers)
    networks[f"SNOWS (K={deepest})"] = result.model
    with request.step("evaluating"):
        rows += [_row(name, network, read, expected) for name, network in networks.items()]
    return replace(result, report=replace(result.report, evaluation=rows))


@app.command()
def evaluate(
    model: ModelArgument = None,
    data: DataOption = None,
    weights: WeightsOption = None,
    pruned: PrunedOption = None,
    samples: SamplesOption = None,
    device: DeviceOption = None,
    seed: SeedOption = 0,
    as_json: JsonOption = False,
    quiet: QuietOption = False,
    config: ConfigOption = None,
    debug: DebugOption = False,
) -> None:
    """Top-1, top-5 and loss against labels; agreement with the dense network and KL divergence from it.

    For a language model: the perplexity of the tokens.

    Samples that `snows prune` would calibrate on (the first --samples) are left out.
    """
    from copy import deepcopy

    from ..results.report import finite
    from ..results.storage import load

    request = Request.read(model, data, weights, samples, seed, config, device, quiet or as_json)
    dense, read = request.model_and_data()
    networks = {"dense": dense}
    if pruned is not None:
        networks["pruned"] = load(pruned, deepcopy(dense))
    if read.test is None:
        raise InputError(
            "no samples are left to evaluate on: all of them are used for calibration; "
            f"lower --samples ({request.samples})"
        )
    if read.test_labels is None and pruned is None and not read.has_tokens:
        raise InputError("the data has no labels: pass --pruned DIR to compare with the dense network, or give labels")
    with request.step("evaluating"):
        expected = None if pruned is None else dense
        rows = [_row(name, network, read, expected) for name, network in networks.items()]
    if as_json:
        print(json.dumps(finite(rows), indent=2))
    elif not quiet:
        make_console().print(evaluation_table(rows, len(read.test)))


def _row(name: str, network: nn.Module, read: Data, dense: nn.Module | Tensor | None) -> dict[str, Any]:
    """A network's name, and its figures on the test samples."""
    from ..evaluation.classes import evaluate as measure

    assert read.test is not None
    return {"network": name, **measure(network, read.test, read.test_labels, dense)}


@app.command()
def inspect(
    model: ModelArgument = None,
    data: DataOption = None,
    weights: WeightsOption = None,
    pattern: PatternOption = None,
    horizon: HorizonOption = None,
    layers: LayersOption = None,
    exclude: ExcludeOption = None,
    recipe: RecipeOption = None,
    effort: EffortOption = None,
    samples: SamplesOption = None,
    device: DeviceOption = None,
    memory: MemoryOption = None,
    as_json: JsonOption = False,
    quiet: QuietOption = False,
    config: ConfigOption = None,
    debug: DebugOption = False,
) -> None:
    """Each layer: its shape, whether it takes the pattern (if not, why), its horizon, estimates of memory and time.

    Data is not needed for models that take images, nor for language models of Hugging Face: random samples are used.
    The size of the images comes from --config ([data] size).
    """
    from dataclasses import asdict

    from ..evaluation.inspection import inspect as look

    request = Request.read(model, data, weights, samples, 0, config, device, quiet or as_json)
    with request.step("reading and capturing the model"):
        network = request.model(pretrained=request.is_embedded)
        calibration = request.data().calibration if request.data_name else request.random_samples(network)
        found = look(
            network, calibration, request.default_pattern if pattern is None else pattern, layers=layers,
            exclude=exclude, horizon=horizon, recipe=request.recipe(recipe, effort), samples=request.samples,
            device=request.device, memory=memory,
        )  # fmt: skip
    if as_json:
        totals = {"seconds": found.seconds, "memory_bytes": found.memory_bytes}
        print(json.dumps({**asdict(found), **totals}, indent=2))
    elif not quiet:
        print_inspection(found)


@app.command()
def compare(
    model: ModelArgument = None,
    data: DataOption = None,
    weights: WeightsOption = None,
    pattern: PatternsOption = None,
    mask: MasksOption = None,
    horizon: HorizonOption = None,
    layers: LayersOption = None,
    exclude: ExcludeOption = None,
    recipe: RecipeOption = None,
    effort: EffortOption = None,
    samples: SamplesOption = None,
    labels: LabelsOption = "model",
    permute: PermuteOption = False,
    out: CellsOption = None,
    memory: MemoryOption = None,
    device: DeviceOption = None,
    seed: SeedOption = 0,
    as_json: JsonOption = False,
    markdown: MarkdownOption = False,
    quiet: QuietOption = False,
    config: ConfigOption = None,
    debug: DebugOption = False,
) -> None:
    """Every mask to every pattern, each without and with SNOWS, in one table with time and memory.

    A network that cannot be made is a row with the reason, and the others go on.
    """
    from ..evaluation.cells import plan_cells
    from ..evaluation.comparison import compare as run
    from ..evaluation.table import ComparisonInterrupted

    if as_json and markdown:
        raise ArgumentError("--json and --markdown are both given; expected one of them")
    request = Request.read(model, data, weights, samples, seed, config, device, quiet or as_json or markdown)
    chosen = request.recipe(recipe, effort)
    patterns = split_patterns(pattern or [request.default_pattern])
    names = [name.strip() for words in mask or [COMPARED_MASKS] for name in words.split(",")]
    masks = {name: read_mask(name) for name in names}
    plan_cells(patterns, masks)  # refuses wrong names before anything is read
    dense, read = request.model_and_data()
    options: dict[str, Any] = {
        "test": read.test, "test_labels": read.test_labels, "labels": labels, "layers": layers, "exclude": exclude,
        "horizon": horizon, "recipe": chosen, "device": request.device, "seed": seed, "permute": permute,
        "memory": memory, "out": out, "progress": not request.quiet,
    }  # fmt: skip
    try:
        found = run(dense, read.samples(labels == "given"), patterns, masks, **options)
    except ComparisonInterrupted as stop:
        print_comparison(stop.comparison, as_json, markdown, quiet)
        raise Interrupted(kept_cells(len(stop.comparison.pruned), out)) from stop
    print_comparison(found, as_json, markdown, quiet)
    if len(found.failed) == len(found.pruned):
        raise InputError(f"nothing could be compared: {found.failed[0].name}: {found.failed[0].error}")


@app.command()
def verify(
    directory: SavedArgument,
    model: CheckedModelOption = None,
    as_json: JsonOption = False,
    quiet: QuietOption = False,
    debug: DebugOption = False,
) -> None:
    """Check a saved result: every byte as written, patterns, exact zeros, and the recorded outputs.

    Prints one sentence for everything that is wrong; the exit status is then 1.
    """
    from ..results.verification import verify as check

    network = None
    if model is not None:
        from ..data.models import build_model

        network = build_model(model, pretrained=False)
    found = check(directory, network)
    print_verification(directory, found, as_json, quiet)
    if not found.ok:
        raise typer.Exit(1)
