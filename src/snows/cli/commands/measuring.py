"""Commands that measure networks: accuracy, what a run would take, masks side by side."""

from __future__ import annotations

import json
from typing import Any

from ...devices.distributed.launch import connected
from ...errors import ArgumentError, InputError
from ..app import app
from ..arguments import (
    COMPARED_MASKS,
    CellsOption,
    ConfigOption,
    DataOption,
    DebugOption,
    DeviceOption,
    EffortOption,
    ExcludeOption,
    HorizonOption,
    JsonOption,
    LabelsOption,
    LayersOption,
    MarkdownOption,
    MasksOption,
    MemoryOption,
    MetricOption,
    ModelArgument,
    PatternOption,
    PatternsOption,
    PermuteOption,
    PrunedOption,
    QuietOption,
    RecipeOption,
    SamplesOption,
    SeedOption,
    WeightsOption,
    WorldSizeOption,
)
from ..interruption import Interrupted
from ..request import Request, read_mask, read_metric, read_pattern, split_patterns
from ..rows import Judge
from ..tables import evaluation_table, make_console, print_comparison, print_inspection


@app.command(short_help="Accuracy, agreement, or a metric of your own.")
def evaluate(
    model: ModelArgument = None,
    data: DataOption = None,
    weights: WeightsOption = None,
    pruned: PrunedOption = None,
    metric: MetricOption = None,
    samples: SamplesOption = None,
    device: DeviceOption = None,
    seed: SeedOption = 0,
    as_json: JsonOption = False,
    quiet: QuietOption = False,
    config: ConfigOption = None,
    debug: DebugOption = False,
) -> None:
    """Top-1, top-5 and loss against labels; agreement with the dense network and KL divergence from it.

    For a language model: the perplexity of the tokens. For other networks: --metric.

    Samples that `snows prune` would calibrate on (the first --samples) are left out.
    """
    from ...data.usable import copied
    from ...results.report import finite
    from ...results.storage import load

    request = Request.read(model, data, weights, samples, seed, config, device, quiet or as_json)
    judging = read_metric(metric)
    dense, read = request.model_and_data()
    networks = {"dense": dense}
    if pruned is not None:
        networks["pruned"] = load(pruned, copied(dense))
    if read.test is None:
        raise InputError(
            "no samples are left to evaluate on: all of them are used for calibration; "
            f"lower --samples ({request.samples}), or let the data's factory return (calibration, test samples)"
        )
    if judging is None and pruned is None and not read.has_labels and not read.has_tokens:
        raise InputError("the data has no labels: pass --pruned DIR to compare with the dense network, or give labels")
    with request.step("evaluating"):
        judge = Judge(read, None if pruned is None else dense, judging)
        rows = [judge.row(name, network) for name, network in networks.items()]
    if as_json:
        print(json.dumps(finite(rows), indent=2))
    elif not quiet:
        make_console().print(evaluation_table(rows, read.test_count))


@app.command(short_help="What a run would do to each layer, and what it takes.")
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
    world_size: WorldSizeOption = 1,
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

    from ...evaluation.inspection import inspect as look

    request = Request.read(model, data, weights, samples, 0, config, device, quiet or as_json)
    pattern = read_pattern(pattern, "magnitude", request.default_pattern)
    with request.step("reading and capturing the model"):
        network = request.model(pretrained=request.is_embedded)
        calibration = request.data().calibration if request.data_name else request.random_samples(network)
        as_many_as_there_are = samples is None and request.data_name is not None
        found = look(
            network, calibration, pattern, layers=layers, exclude=exclude, horizon=horizon,
            recipe=request.recipe(recipe, effort), samples=None if as_many_as_there_are else request.samples,
            device=request.device, memory=memory, world_size=world_size,
        )  # fmt: skip
    if as_json:
        totals = {"seconds": found.seconds, "memory_bytes": found.memory_bytes, "flops": found.flops.to_dict()}
        print(json.dumps({**asdict(found), **totals}, indent=2))
    elif not quiet:
        print_inspection(found)


@app.command(short_help="Mask methods and patterns side by side.")
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
    """Prune with every mask to every pattern, without and with SNOWS; one table with time and memory.

    A network that cannot be made is a row with the reason, and the others go on.
    """
    from ...evaluation.cells import plan_cells
    from ...evaluation.comparison import compare as run
    from ...evaluation.table import ComparisonInterrupted, kept_networks

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
        with connected(request.device):
            found = run(dense, read.samples(labels == "given"), patterns, masks, **options)
    except ComparisonInterrupted as stop:
        print_comparison(stop.comparison, as_json, markdown, quiet)
        raise Interrupted(kept_networks(stop.comparison, out, "--out DIR", "command")) from stop
    print_comparison(found, as_json, markdown, quiet)
    if len(found.failed) == len(found.pruned):
        raise InputError(f"nothing could be compared: {found.failed[0].name}: {found.failed[0].error}")
