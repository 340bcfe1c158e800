"""The command line. torch is imported inside commands only, so that --help is instant."""

from __future__ import annotations

import json
import sys
import traceback
import warnings
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NoReturn, Optional

import typer

from ..allocation import keep_freed_memory
from ..errors import ArgumentError, InputError, SnowsError, SnowsWarning
from ..version import __version__
from .request import Setting, read_masks
from .tables import evaluation_table, make_console, print_comparison, print_inspection, print_prune, print_verification

if TYPE_CHECKING:
    from torch import Tensor, nn

    from ..data.sources import Data

app = typer.Typer(
    name="snows",
    help="Prune a trained network without retraining and without labels.",
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)

_MASKS = "magnitude, random, wanda, sparsegpt, obc, alps, exchange, woodfisher, cbs, chita, falcon, cap"
_COMPARED_MASKS = "magnitude,wanda,sparsegpt,obc,alps,exchange"
_INTERRUPTED = 130
_UsageError: Any = typer.BadParameter.__base__  # of the click that typer brings, or of the one beside it

ModelArgument = Annotated[
    Optional[str],  # noqa: UP045  # typer reads this at run time
    typer.Argument(
        help="resnet20-fashion (embedded, the default), torchvision:NAME, timm:NAME, hf:NAME or hf:FOLDER, or "
        "file.py:factory (which runs your own code).",
        show_default=False,
    ),
]
DataOption = Annotated[
    Optional[str],  # noqa: UP045
    typer.Option(
        "--data",
        help="fashion (embedded, the default for the embedded model), folder:DIR (class folders), npz:FILE "
        "(arrays x, y or jpeg, offsets, labels; tokens as whole numbers x), or file.py:factory (which runs your own "
        "code).",
        show_default=False,
    ),
]
WeightsOption = Annotated[
    Optional[Path],  # noqa: UP045
    typer.Option(
        "--weights", help="Weights for the model: .safetensors, or .pt with tensors only.", show_default=False
    ),
]
PatternOption = Annotated[
    Optional[str],  # noqa: UP045
    typer.Option(
        "--pattern",
        help="N:M (N kept of every M input channels), a sparsity such as 0.7, or several: '1:4, layer1.*=2:4, "
        "head=dense'. [default: 1:4 for the embedded model, else 2:4; not needed with --mask weights]",
        show_default=False,
    ),
]
LayersOption = Annotated[
    Optional[str],  # noqa: UP045
    typer.Option(
        "--layers", help="Names or globs to prune, with commas. [default: all but first and last]", show_default=False
    ),
]
ExcludeOption = Annotated[
    Optional[str],  # noqa: UP045
    typer.Option("--exclude", help="Names or globs to leave dense, with commas.", show_default=False),
]
HorizonOption = Annotated[
    Optional[int],  # noqa: UP045
    typer.Option(
        "--horizon", min=0, help="K: operations beyond a layer whose outputs are preserved.", show_default=False
    ),
]
RecipeOption = Annotated[str, typer.Option("--recipe", help="default, paper, or a recipe.json.")]
SamplesOption = Annotated[
    Optional[int],  # noqa: UP045
    typer.Option(
        "--samples",
        min=1,
        help="Calibration samples. [default: 1000 for the embedded data, else 3000]",
        show_default=False,
    ),
]
LabelsOption = Annotated[
    str,
    typer.Option(
        "--labels", help="Of masks that need a loss: model (the model's own predictions) or given (the data's)."
    ),
]
PermuteOption = Annotated[
    bool, typer.Option("--permute", help="Re-order channels before an N:M mask is chosen; the function stays the same.")
]
MemoryOption = Annotated[
    Optional[str],  # noqa: UP045
    typer.Option(
        "--memory", help="Of the device, to be used at most, such as 24GiB; default: what is free.", show_default=False
    ),
]
DeviceOption = Annotated[
    Optional[str],  # noqa: UP045
    typer.Option("--device", help="cpu, cuda, mps … [default: an accelerator if there is one]", show_default=False),
]
SeedOption = Annotated[int, typer.Option("--seed", help="Order of the samples and random probes.")]
JsonOption = Annotated[bool, typer.Option("--json", help="Print JSON instead of tables.")]
QuietOption = Annotated[bool, typer.Option("--quiet", help="No progress bars and no tables.")]
ConfigOption = Annotated[
    Optional[Path],  # noqa: UP045
    typer.Option(
        "--config", help="A TOML file: [data] mean, std, size; [recipe] any choice of a recipe.", show_default=False
    ),
]
DebugOption = Annotated[bool, typer.Option("--debug", help="With a failure, also print where it came from.")]


@app.callback(invoke_without_command=True)
def _top(
    context: typer.Context, version: Annotated[bool, typer.Option("--version", help="Print the version.")] = False
) -> None:
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
    mask: Annotated[
        str,
        typer.Option(
            "--mask",
            help=f"{_MASKS}, weights (zeros are the mask), or a file of masks or of pruned weights (.safetensors, .pt, "
            ".pth).",
        ),
    ] = "magnitude",
    horizon: HorizonOption = None,
    layers: LayersOption = None,
    exclude: ExcludeOption = None,
    recipe: RecipeOption = "default",
    samples: SamplesOption = None,
    labels: LabelsOption = "model",
    permute: PermuteOption = False,
    out: Annotated[
        Optional[Path],  # noqa: UP045
        typer.Option("--out", help="A new folder for model, masks, report and recipe.", show_default=False),
    ] = None,
    compact: Annotated[
        bool, typer.Option("--compact", help="Save kept weights only: a smaller file, which snows expands.")
    ] = False,
    force: Annotated[
        bool, typer.Option("--force", help="Replace the folder of --out if it holds another saved result.")
    ] = False,
    resume: Annotated[
        Optional[Path],  # noqa: UP045
        typer.Option(
            "--resume",
            help="A folder that keeps every finished layer: the same command goes on where it was stopped.",
            show_default=False,
        ),
    ] = None,
    memory: MemoryOption = None,
    device: DeviceOption = None,
    seed: SeedOption = 0,
    as_json: JsonOption = False,
    quiet: QuietOption = False,
    config: ConfigOption = None,
    debug: DebugOption = False,
) -> None:
    """Prune a model and re-adjust what is left. Without arguments: the embedded ResNet20, to 1:4.

    Calibration samples carry no labels. Where the data has more samples than are used, the rest evaluates the result.
    """
    from ..api import prune as run
    from ..data.preparation import capturing_once
    from ..evaluation.classes import reference
    from ..masks.given import is_mask_file
    from ..results.storage import refuse_existing

    if out is not None:
        refuse_existing(out, force)
    elif compact or force:
        raise ArgumentError(f"{'--compact' if compact else '--force'} says how to save; expected --out DIR with it")
    setting = Setting.read(model, data, weights, samples, seed, config, device, quiet or as_json)
    chosen = setting.recipe(recipe)
    if pattern is None and mask != "weights" and not is_mask_file(mask):
        pattern = setting.default_pattern
    setting.require_data()
    with setting.step("reading the model and the data"):
        dense, read = setting.model(), setting.data()
    common: dict[str, Any] = {
        "mask": read_masks(mask), "layers": layers, "exclude": exclude, "seed": seed, "device": setting.device,
        "labels": labels, "permute": permute, "memory": memory,
    }  # fmt: skip
    calibration = read.samples(labels == "given")
    rows = []
    if read.test is not None:
        with setting.step("evaluating the dense network"):  # first, so that what does not fit is said before the work
            expected = reference(dense, read.test)
            rows = [{"network": "dense", **_figures(dense, read, expected)}]
    with capturing_once(dense):
        with setting.step("pruning with the mask alone"):
            mask_only = run(dense, calibration, pattern, solver=None, progress=False, **common)
        show = not (quiet or as_json)
        if setting.is_embedded and horizon is None:
            light = chosen.replace(sweeps=1, mask_steps=1)
            layerwise = run(dense, calibration, pattern, recipe=light, horizon=0, progress=show, **common)
        else:
            layerwise = None
        result = run(
            dense, calibration, pattern, recipe=chosen, horizon=horizon, progress=show, resume=resume, **common
        )
    networks = [("mask only", mask_only.model)]
    networks += [("layer-wise (K=0)", layerwise.model)] if layerwise else []
    deepest = max(layer.horizon or 0 for layer in result.report.layers)
    networks += [(f"SNOWS (K={deepest})", result.model)]
    if read.test is not None:
        with setting.step("evaluating"):
            rows += [{"network": name, **_figures(network, read, expected)} for name, network in networks]
    result.report.evaluation = rows
    result = _with_source(result, setting.model_name)
    if out is not None:
        result.save(out, compact=compact, force=force)
    print_prune(result.report, out, as_json, quiet)


@app.command()
def evaluate(
    model: ModelArgument = None,
    data: DataOption = None,
    weights: WeightsOption = None,
    pruned: Annotated[
        Optional[Path],  # noqa: UP045
        typer.Option(
            "--pruned", help="A folder written by `snows prune --out`, compared with the model.", show_default=False
        ),
    ] = None,
    samples: SamplesOption = None,
    device: DeviceOption = None,
    seed: SeedOption = 0,
    as_json: JsonOption = False,
    quiet: QuietOption = False,
    config: ConfigOption = None,
    debug: DebugOption = False,
) -> None:
    """Top-1, top-5 and loss against labels; agreement with the dense network and KL divergence from it.

    Of a language model: the perplexity of the tokens.

    Samples that `snows prune` would calibrate on (the first --samples) are left out.
    """
    from copy import deepcopy

    from ..results.report import finite
    from ..results.storage import load

    setting = Setting.read(model, data, weights, samples, seed, config, device, quiet or as_json)
    setting.require_data()
    with setting.step("reading the model and the data"):
        dense, read = setting.model(), setting.data()
        networks = [("dense", dense)]
        if pruned is not None:
            networks.append(("pruned", load(pruned, deepcopy(dense))))
    if read.test is None:
        raise InputError(
            f"no samples are left to evaluate on: all are used to calibrate; lower --samples ({setting.samples})"
        )
    if read.test_labels is None and pruned is None and not read.has_tokens:
        raise InputError("the data has no labels: pass --pruned DIR to compare with the dense network, or give labels")
    with setting.step("evaluating"):
        rows = [{"network": name, **_figures(net, read, dense if pruned else None)} for name, net in networks]
    if as_json:
        print(json.dumps(finite(rows), indent=2))
    elif not quiet:
        make_console().print(evaluation_table(rows, len(read.test)))


@app.command()
def inspect(
    model: ModelArgument = None,
    data: DataOption = None,
    weights: WeightsOption = None,
    pattern: PatternOption = None,
    horizon: HorizonOption = None,
    layers: LayersOption = None,
    exclude: ExcludeOption = None,
    recipe: RecipeOption = "default",
    samples: SamplesOption = None,
    device: DeviceOption = None,
    memory: MemoryOption = None,
    as_json: JsonOption = False,
    quiet: QuietOption = False,
    config: ConfigOption = None,
    debug: DebugOption = False,
) -> None:
    """Each layer: its shape, whether it takes the pattern (if not, why), its horizon, estimates of memory and time.

    Needs no data for models that take images: random ones of the size in --config ([data] size) do; nor for language
    models of Hugging Face.
    """
    import dataclasses

    from ..evaluation.inspection import inspect as look

    setting = Setting.read(model, data, weights, samples, 0, config, device, quiet or as_json)
    with setting.step("reading and capturing the model"):
        network = setting.model(pretrained=setting.is_embedded)
        calibration = setting.data().calibration if setting.data_name else setting.random_samples(network)
        wanted = setting.default_pattern if pattern is None else pattern
        found = look(
            network, calibration, wanted, layers=layers, exclude=exclude, horizon=horizon,
            recipe=setting.recipe(recipe), samples=setting.samples, device=setting.device, memory=memory,
        )  # fmt: skip
    if as_json:
        data_out = {**dataclasses.asdict(found), "seconds": found.seconds, "memory_bytes": found.memory_bytes}
        print(json.dumps(data_out, indent=2))
    elif not quiet:
        print_inspection(found)


@app.command()
def compare(
    model: ModelArgument = None,
    data: DataOption = None,
    weights: WeightsOption = None,
    pattern: Annotated[
        Optional[list[str]],  # noqa: UP045
        typer.Option(
            "--pattern",
            help="Patterns, with commas or by repeating the flag: --pattern 1:4,2:4 --pattern 0.7. One that names "
            "layers stands alone: --pattern '1:4, layer1.*=2:4'. [default: 1:4 for the embedded model, else 2:4]",
            show_default=False,
        ),
    ] = None,
    mask: Annotated[
        Optional[list[str]],  # noqa: UP045
        typer.Option(
            "--mask",
            help="Masks as of `snows prune`, with commas or by repeating the flag; those that say everything (weights, "
            f"a masks.safetensors) take no pattern. [default: {_COMPARED_MASKS}]",
            show_default=False,
        ),
    ] = None,
    horizon: HorizonOption = None,
    layers: LayersOption = None,
    exclude: ExcludeOption = None,
    recipe: RecipeOption = "default",
    samples: SamplesOption = None,
    labels: LabelsOption = "model",
    permute: PermuteOption = False,
    out: Annotated[
        Optional[Path],  # noqa: UP045
        typer.Option(
            "--out",
            help="A folder that keeps every finished cell, comparison.json and comparison.md. The same command goes on "
            "where it was stopped.",
            show_default=False,
        ),
    ] = None,
    memory: MemoryOption = None,
    device: DeviceOption = None,
    seed: SeedOption = 0,
    as_json: JsonOption = False,
    markdown: Annotated[bool, typer.Option("--markdown", help="Print a Markdown table.")] = False,
    quiet: QuietOption = False,
    config: ConfigOption = None,
    debug: DebugOption = False,
) -> None:
    """Every mask to every pattern, each without and with SNOWS, in one table with time and memory.

    A network that cannot be made is a row that says why, and the others go on.
    """
    from ..evaluation.comparison import compare as run
    from ..evaluation.comparison import plan_cells
    from ..evaluation.table import ComparisonInterrupted

    if as_json and markdown:
        raise ArgumentError("--json and --markdown are both given; expected one of them")
    setting = Setting.read(model, data, weights, samples, seed, config, device, quiet or as_json or markdown)
    chosen = setting.recipe(recipe)
    patterns = _split_patterns(pattern or [setting.default_pattern])
    named = [name.strip() for words in mask or [_COMPARED_MASKS] for name in words.split(",")]
    masks = {name: read_masks(name) for name in named}
    plan_cells(patterns, masks)  # wrong names are said before anything is read
    setting.require_data()
    with setting.step("reading the model and the data"):
        dense, read = setting.model(), setting.data()
    options: dict[str, Any] = {
        "labels": labels, "layers": layers, "exclude": exclude, "horizon": horizon, "recipe": chosen,
        "device": setting.device, "seed": seed, "permute": permute, "memory": memory, "out": out,
        "progress": not setting.quiet,
    }  # fmt: skip
    try:
        found = run(
            dense,
            read.samples(labels == "given"),
            patterns,
            masks,
            test=read.test,
            test_labels=read.test_labels,
            **options,
        )
    except ComparisonInterrupted as stopped:
        print_comparison(stopped.comparison, as_json, markdown, quiet)
        kept = "the same command goes on from here" if out else "pass --out DIR to go on from here the next time"
        print(f"interrupted; {len(stopped.comparison.pruned)} finished; {kept}", file=sys.stderr)
        sys.exit(_INTERRUPTED)
    print_comparison(found, as_json, markdown, quiet)
    if len(found.failed) == len(found.pruned):
        raise InputError(f"nothing could be compared: {found.failed[0].name}: {found.failed[0].error}")


@app.command()
def verify(
    directory: Annotated[
        Path, typer.Argument(metavar="DIR", help="A folder written by `snows prune --out`.", show_default=False)
    ],
    model: Annotated[
        Optional[str],  # noqa: UP045
        typer.Option(
            "--model",
            help="The model to run on the stored inputs, as of `snows prune`. [default: the recorded one, unless that "
            "is code of your own]",
            show_default=False,
        ),
    ] = None,
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


def _split_patterns(texts: list[str]) -> list[str]:
    """Patterns are separated by commas, as are the parts of one that names layers: such a text is one pattern."""
    from ..patterns.base import PatternRules

    patterns = []
    for text in texts:
        parts = [part.strip() for part in text.split(",")]
        names_layers = any(glob != "*" for part in parts for glob, _ in PatternRules.parse(part).rules)
        patterns += [text] if names_layers else parts
    return patterns


def _figures(network: nn.Module, read: Data, dense: nn.Module | Tensor | None) -> dict[str, float]:
    from ..evaluation.classes import evaluate as measure

    assert read.test is not None
    return measure(network, read.test, read.test_labels, dense)


def _with_source(result: Any, name: str) -> Any:
    from dataclasses import replace

    return replace(result, source=name)


def main() -> None:
    """Run the command line; every failure on purpose is one sentence on standard error."""
    said: set[str] = set()  # several runs of one command warn of the same thing

    def show(message: Warning | str, category: type[Warning], *_: Any, **__: Any) -> None:
        if issubclass(category, SnowsWarning) and str(message) not in said:  # what libraries warn of is not for users
            said.add(str(message))
            print(f"warning: {message}", file=sys.stderr)

    warnings.showwarning = show
    keep_freed_memory()
    try:
        status = app(standalone_mode=False)
    except SnowsError as error:
        _fail(str(error), 2 if isinstance(error, ArgumentError) else 1)
    except _UsageError as error:
        _fail(f"{error.format_message()} (see `snows --help`)", 2)
    except OSError as error:  # a name that is too long, a folder that may not be read, a full disk …
        _fail(f"{error.filename}: {error.strerror}" if error.filename else str(error), 1)
    except MemoryError:
        _fail("out of memory; use fewer --samples or a shorter --horizon", 1)
    except RuntimeError as error:
        if type(error).__name__ != "OutOfMemoryError":  # torch's, which is not imported here
            raise
        _fail("the device is out of memory; use fewer --samples or a shorter --horizon", 1)
    if status == _INTERRUPTED:
        print("interrupted; nothing was saved", file=sys.stderr)
    sys.exit(status)


def _fail(sentence: str, status: int) -> NoReturn:
    if "--debug" in sys.argv:  # looked for here: what failed may be the reading of the flags
        traceback.print_exc()
    print(f"error: {' '.join(sentence.split())}", file=sys.stderr)
    sys.exit(status)


if __name__ == "__main__":
    main()
