"""The command line. torch is imported inside commands only, so that --help is instant."""

from __future__ import annotations

import json
import sys
import tomllib
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NoReturn, Optional

import typer
from rich.console import Console
from rich.table import Table

from .errors import ArgumentError, InputError, SnowsError, SnowsWarning
from .version import __version__

if TYPE_CHECKING:
    from torch import nn

    from .data import Data, DataConfig
    from .inspection import Inspection
    from .recipe import Recipe
    from .report import Report

app = typer.Typer(
    name="snows",
    help="Prune a trained network without retraining and without labels.",
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)

EMBEDDED_MODEL, EMBEDDED_DATA = "resnet20-fashion", "fashion"
_INTERRUPTED = 130
_UsageError: Any = typer.BadParameter.__base__  # of the click that typer brings, or of the one beside it

ModelArgument = Annotated[
    Optional[str],  # noqa: UP045  # typer reads this at run time
    typer.Argument(
        help="resnet20-fashion (embedded, the default), torchvision:NAME, timm:NAME, hf:NAME, or file.py:factory "
        "(which runs your own code).",
        show_default=False,
    ),
]
DataOption = Annotated[
    Optional[str],  # noqa: UP045
    typer.Option(
        "--data",
        help="fashion (embedded, the default for the embedded model), folder:DIR (class folders), npz:FILE "
        "(arrays x, y or jpeg, offsets, labels), or file.py:factory (which runs your own code).",
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
        typer.Option("--mask", help="magnitude, random, wanda, weights (zeros are the mask), or a masks.safetensors."),
    ] = "magnitude",
    horizon: HorizonOption = None,
    layers: LayersOption = None,
    exclude: ExcludeOption = None,
    recipe: RecipeOption = "default",
    samples: SamplesOption = None,
    out: Annotated[
        Optional[Path],  # noqa: UP045
        typer.Option("--out", help="A new folder for model, masks, report and recipe.", show_default=False),
    ] = None,
    device: DeviceOption = None,
    seed: SeedOption = 0,
    as_json: JsonOption = False,
    quiet: QuietOption = False,
    config: ConfigOption = None,
) -> None:
    """Prune a model and re-adjust what is left. Without arguments: the embedded ResNet20, to 1:4.

    Calibration samples carry no labels. Where the data has more samples than are used, the rest evaluates the result.
    """
    from .api import prune as run
    from .storage import refuse_existing

    if out is not None:
        refuse_existing(out)
    setting = Setting.read(model, data, weights, samples, seed, config, device, quiet or as_json)
    chosen = setting.recipe(recipe)
    if pattern is None and mask != "weights" and not mask.endswith(".safetensors"):
        pattern = setting.default_pattern
    with setting.step("reading the model and the data"):
        dense, read = setting.model(), setting.data()
    common: dict[str, Any] = {
        "mask": _read_masks(mask), "layers": layers, "exclude": exclude, "seed": seed, "device": setting.device,
    }  # fmt: skip
    rows = []
    if read.test is not None:
        with setting.step("evaluating the dense network"):  # first, so that what does not fit is said before the work
            rows = [{"network": "dense", **_figures(dense, read, dense)}]
    with setting.step("pruning with the mask alone"):
        mask_only = run(dense, read.calibration, pattern, solver=None, progress=False, **common)
    show = not (quiet or as_json)
    if setting.is_embedded and horizon is None:
        light = chosen.replace(sweeps=1)
        layerwise = run(dense, read.calibration, pattern, recipe=light, horizon=0, progress=show, **common)
    else:
        layerwise = None
    result = run(dense, read.calibration, pattern, recipe=chosen, horizon=horizon, progress=show, **common)
    networks = [("mask only", mask_only.model)]
    networks += [("layer-wise (K=0)", layerwise.model)] if layerwise else []
    networks += [(f"SNOWS (K={chosen.horizon if horizon is None else horizon})", result.model)]
    if read.test is not None:
        with setting.step("evaluating"):
            rows += [{"network": name, **_figures(network, read, dense)} for name, network in networks]
    result.report.evaluation = rows
    result = _with_source(result, setting.model_name)
    if out is not None:
        result.save(out)
    _print_prune(result.report, out, as_json, quiet)


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
) -> None:
    """Top-1, top-5 and loss against labels; agreement with the dense network and KL divergence from it.

    Samples that `snows prune` would calibrate on (the first --samples) are left out.
    """
    from copy import deepcopy

    from .report import finite
    from .storage import load

    setting = Setting.read(model, data, weights, samples, seed, config, device, quiet or as_json)
    with setting.step("reading the model and the data"):
        dense, read = setting.model(), setting.data()
        networks = [("dense", dense)]
        if pruned is not None:
            networks.append(("pruned", load(pruned, deepcopy(dense))))
    if read.test is None:
        raise InputError(
            f"no samples are left to evaluate on: all are used to calibrate; lower --samples ({setting.samples})"
        )
    if read.test_labels is None and pruned is None:
        raise InputError("the data has no labels: pass --pruned DIR to compare with the dense network, or give labels")
    with setting.step("evaluating"):
        rows = [{"network": name, **_figures(net, read, dense if pruned else None)} for name, net in networks]
    if as_json:
        print(json.dumps(finite(rows), indent=2))
    elif not quiet:
        _console().print(_evaluation_table(rows, len(read.test)))


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
    as_json: JsonOption = False,
    quiet: QuietOption = False,
    config: ConfigOption = None,
) -> None:
    """Each layer: its shape, whether it takes the pattern (if not, why), its horizon, estimates of memory and time.

    Needs no data for models that take images: random ones of the size in --config ([data] size) do.
    """
    import dataclasses

    from .inspection import inspect as look

    setting = Setting.read(model, data, weights, samples, 0, config, device, quiet or as_json)
    with setting.step("reading and capturing the model"):
        network = setting.model(pretrained=setting.is_embedded)
        calibration = setting.data().calibration if setting.data_name else setting.random_images()
        wanted = setting.default_pattern if pattern is None else pattern
        found = look(
            network, calibration, wanted, layers=layers, exclude=exclude, horizon=horizon,
            recipe=setting.recipe(recipe), samples=setting.samples, device=setting.device,
        )  # fmt: skip
    if as_json:
        data_out = {**dataclasses.asdict(found), "seconds": found.seconds, "memory_bytes": found.memory_bytes}
        print(json.dumps(data_out, indent=2))
    elif not quiet:
        _print_inspection(found)


@dataclass(frozen=True)
class Setting:
    """What the command line's words mean: names resolved, defaults filled in, files read."""

    model_name: str
    data_name: str | None
    weights: Path | None
    samples: int
    seed: int
    device: str
    quiet: bool
    config: dict[str, Any] = field(default_factory=dict)

    @classmethod
    def read(
        cls,
        model: str | None,
        data: str | None,
        weights: Path | None,
        samples: int | None,
        seed: int,
        config: Path | None,
        device: str | None,
        quiet: bool,
    ) -> Setting:
        import torch

        name = model or EMBEDDED_MODEL
        if data is None and name == EMBEDDED_MODEL:
            data = EMBEDDED_DATA
        if device is None:
            accelerator = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
            device = accelerator.type if accelerator is not None else "cpu"
        count = samples or (1000 if data == EMBEDDED_DATA else 3000)
        return cls(name, data, weights, count, seed, device, quiet, _read_config(config))

    @property
    def is_embedded(self) -> bool:
        return self.model_name == EMBEDDED_MODEL

    @property
    def default_pattern(self) -> str:
        return "1:4" if self.is_embedded else "2:4"

    def model(self, pretrained: bool = True) -> nn.Module:
        from .models import build_model

        return build_model(self.model_name, self.weights, pretrained)

    def data(self) -> Data:
        from .data import load_data

        if self.data_name is None:
            from .data import HELP

            raise ArgumentError(f"--data is needed for the model {self.model_name}: {HELP}")
        return load_data(self.data_name, self.samples, self.seed, self._data_config())

    def random_images(self) -> Any:
        import torch

        size = self._data_config().size
        return torch.randn(16, 3, size, size, generator=torch.Generator().manual_seed(0))

    def recipe(self, name: str) -> Recipe:
        from .recipe import EMBEDDED, Recipe, as_recipe

        if name.endswith(".json"):
            if not Path(name).is_file():
                raise InputError(f"there is no file {name}")
            try:
                chosen = Recipe.from_json(Path(name).read_text(encoding="utf-8"))
            except (OSError, UnicodeDecodeError) as error:
                raise InputError(f"{name} cannot be read: {error}") from error
        else:
            chosen = EMBEDDED if name == "default" and self.is_embedded else as_recipe(name)
        return chosen.replace(**self.config.get("recipe", {}))

    @contextmanager
    def step(self, what: str) -> Iterator[None]:
        """A spinner on standard error while something takes its time."""
        if self.quiet:
            yield
            return
        with Console(stderr=True).status(what):
            yield

    def _data_config(self) -> DataConfig:
        from .data import DataConfig

        given = self.config.get("data", {})
        unknown = set(given) - {"mean", "std", "size"}
        if unknown:
            raise ArgumentError(f"--config: [data] has {', '.join(sorted(unknown))}; expected mean, std and size")

        def numbers(key: str) -> tuple[float, ...] | None:
            value = given.get(key)
            if value is None:
                return None
            values = value if isinstance(value, list) else [value]
            if not all(isinstance(v, int | float) for v in values):
                raise ArgumentError(f"--config: [data] {key} is {value!r}; expected a number or a list of numbers")
            return tuple(float(v) for v in values)

        if ("mean" in given) != ("std" in given):
            raise ArgumentError("--config: [data] has one of mean and std; expected both or neither")
        size = given.get("size", 224)
        if not isinstance(size, int) or not 1 <= size <= 4096:
            raise ArgumentError(f"--config: [data] size is {size!r}; expected a whole number of pixels")
        return DataConfig(numbers("mean"), numbers("std"), size)


def _read_config(path: Path | None) -> dict[str, Any]:
    if path is None:
        return {}
    try:
        config = tomllib.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise InputError(f"there is no file {path}") from error
    except OSError as error:
        raise InputError(f"{path} cannot be read: {error.strerror}") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ArgumentError(f"--config: {path} is not valid TOML: {error}") from error
    unknown = set(config) - {"data", "recipe"}
    if unknown or not all(isinstance(part, dict) for part in config.values()):
        raise ArgumentError(f"--config: {path} has {', '.join(config)}; expected the tables [data] and [recipe]")
    return config


def _read_masks(mask: str) -> Any:
    """A method's name as it is; a file of masks as {name: bool tensor}."""
    if not mask.endswith(".safetensors"):
        return mask
    from .storage import read_state

    return read_state(Path(mask))


def _figures(network: nn.Module, read: Data, dense: nn.Module | None) -> dict[str, float]:
    from .evaluation import evaluate as measure

    assert read.test is not None
    return measure(network, read.test, read.test_labels, dense)


def _with_source(result: Any, name: str) -> Any:
    from dataclasses import replace

    return replace(result, source=name)


def _print_prune(report: Report, out: Path | None, as_json: bool, quiet: bool) -> None:
    if as_json:
        print(report.to_json())
        return
    if quiet:
        return
    console = _console()
    if report.evaluation:
        console.print(_evaluation_table(report.evaluation, None))
    console.print(
        f"{report.model} to {report.pattern}: {report.sparsity:.1%} of {len(report.layers)} layers removed, "
        f"{report.network_sparsity:.1%} of the network; {report.samples} samples, {report.seconds:.1f} s",
    )
    for layer in report.dense_layers:
        console.print(f"  left dense: {layer.name}: {layer.reason}")
    if out is None:
        console.print("Nothing was saved: pass --out DIR to keep the result.")
    else:
        console.print(f"Saved to {out}")


def _evaluation_table(rows: list[dict[str, Any]], samples: int | None) -> Table:
    titles = {"top1": "top-1", "top5": "top-5", "loss": "loss", "agreement": "agreement", "kl": "KL to dense"}
    table = Table(title=None if samples is None else f"{samples} samples")
    table.add_column("network")
    columns = [key for key in titles if key in rows[0]]
    for key in columns:
        table.add_column(titles[key], justify="right")
    for row in rows:
        cells = [f"{row[key]:.2%}" if key in ("top1", "top5", "agreement") else f"{row[key]:.4f}" for key in columns]
        table.add_row(row["network"], *cells)
    return table


def _print_inspection(found: Inspection) -> None:
    console = _console()
    table = Table(title=f"{found.model}: {found.network_weights:,} weights; {found.samples} samples")
    for title in ("layer", "shape", "pattern", "K", "curvature", "memory", "time"):
        table.add_column(title, justify="left" if title in ("layer", "shape", "pattern", "curvature") else "right")
    for layer in found.layers:
        shape = "x".join(map(str, layer.shape))
        if layer.pattern is None:
            table.add_row(layer.name, shape, f"dense: {layer.reason}", "", "", "", "")
        else:
            memory, seconds = f"{layer.memory_bytes / 2**30:.2f} GiB", f"{layer.seconds:.1f} s"
            table.add_row(layer.name, shape, layer.pattern, str(layer.horizon), layer.curvature, memory, seconds)
    console.print(table)
    console.print(
        f"estimates for {found.sweeps} sweeps: {found.memory_bytes / 2**30:.1f} GiB at the peak, "
        f"{found.seconds:.0f} s here",
    )


def _console() -> Console:
    """Names of layers and files are printed as they are, not read as markup."""
    return Console(markup=False, highlight=False)


def main() -> None:
    """Run the command line; every failure on purpose is one sentence on standard error."""
    said: set[str] = set()  # several runs of one command warn of the same thing

    def show(message: Warning | str, category: type[Warning], *_: Any, **__: Any) -> None:
        if issubclass(category, SnowsWarning) and str(message) not in said:  # what libraries warn of is not for users
            said.add(str(message))
            print(f"warning: {message}", file=sys.stderr)

    warnings.showwarning = show
    try:
        status = app(standalone_mode=False)
    except SnowsError as error:
        _fail(str(error), 2 if isinstance(error, ArgumentError) else 1)
    except _UsageError as error:
        _fail(f"{error.format_message()} (see `snows --help`)", 2)
    if status == _INTERRUPTED:
        print("interrupted; nothing was saved", file=sys.stderr)
    sys.exit(status)


def _fail(sentence: str, status: int) -> NoReturn:
    print(f"error: {' '.join(sentence.split())}", file=sys.stderr)
    sys.exit(status)


if __name__ == "__main__":
    main()
