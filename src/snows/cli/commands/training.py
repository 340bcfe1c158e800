"""The command that trains a pruned network further."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ...errors import ArgumentError
from ..app import app
from ..arguments import (
    CompactOption,
    ConfigOption,
    DataOption,
    DebugOption,
    DeviceOption,
    EventsOption,
    ForceOption,
    JsonOption,
    LiveOption,
    QuietOption,
    SavedArgument,
    SeedOption,
    TensorBoardOption,
)
from ..interruption import saying
from ..request import EMBEDDED_DATA, EMBEDDED_MODEL, Request
from ..rows import Judge
from ..tables import print_retraining
from ..watching import listeners_of

if TYPE_CHECKING:
    from torch import nn

    from ...data.sources import Data
    from ...results.result import Result

RetrainedOption = Annotated[
    Path, typer.Option("--out", help="A new folder for model, masks, report and recipe.", show_default=False)
]
TrainedSamplesOption = Annotated[
    int | None, typer.Option("--samples", min=1, help="Training samples. [default: all]", show_default=False)
]
FilledModelOption = Annotated[
    str | None,
    typer.Option(
        "--model",
        help="The model that was pruned, named as for `snows prune`. [default: the recorded one, unless that is code "
        "of your own]",
        show_default=False,
    ),
]
TeacherOption = Annotated[
    str | None,
    typer.Option(
        "--teacher",
        help="The dense network, named as for `snows prune`: its predictions are learned, and no labels are needed. "
        "[default: train with labels]",
        show_default=False,
    ),
]
TeacherWeightsOption = Annotated[
    Path | None,
    typer.Option("--teacher-weights", help="Weights for the teacher: .safetensors, or .pt.", show_default=False),
]
HeldOutOption = Annotated[
    str,
    typer.Option(
        "--held-out",
        help="The share of the samples that chooses the best epoch, or data of its own, named as for --data.",
    ),
]
EpochsOption = Annotated[int, typer.Option("--epochs", help="The paper takes 90 for CIFAR-10 and 5 for ImageNet.")]
BatchOption = Annotated[int, typer.Option("--batch", help="Samples in a step.")]
LrOption = Annotated[float, typer.Option("--lr", help="The learning rate of the first epochs.")]
LrDecayOption = Annotated[
    float, typer.Option("--lr-decay", help="The learning rate is multiplied by it, see --lr-decay-every.")
]
LrDecayEveryOption = Annotated[
    int, typer.Option("--lr-decay-every", help="Epochs after which it falls. The paper takes 2 for ImageNet.")
]
MomentumOption = Annotated[float, typer.Option("--momentum", help="Of SGD.")]
WeightDecayOption = Annotated[float, typer.Option("--weight-decay", help="Of SGD.")]
CropOption = Annotated[
    int, typer.Option("--crop", help="Random crops of images with a border of so many zeros; 4 is usual for CIFAR.")
]
FlipOption = Annotated[bool, typer.Option("--flip", help="Mirror half of the images at random.")]
AmpOption = Annotated[bool, typer.Option("--amp", help="Compute in bfloat16 where torch's autocast says so.")]
EpochsFolderOption = Annotated[
    Path | None,
    typer.Option(
        "--resume",
        help="A folder that keeps the newest epoch: the same command continues where it was stopped.",
        show_default=False,
    ),
]


@app.command(short_help="Train a saved result further, with its masks frozen.")
def retrain(
    directory: SavedArgument,
    out: RetrainedOption,
    data: DataOption = None,
    samples: TrainedSamplesOption = None,
    model: FilledModelOption = None,
    teacher: TeacherOption = None,
    teacher_weights: TeacherWeightsOption = None,
    held_out: HeldOutOption = "0.1",
    epochs: EpochsOption = 90,
    batch: BatchOption = 128,
    lr: LrOption = 3e-3,
    lr_decay: LrDecayOption = 0.1,
    lr_decay_every: LrDecayEveryOption = 30,
    momentum: MomentumOption = 0.9,
    weight_decay: WeightDecayOption = 5e-5,
    crop: CropOption = 0,
    flip: FlipOption = False,
    amp: AmpOption = False,
    compact: CompactOption = False,
    force: ForceOption = False,
    resume: EpochsFolderOption = None,
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
    """Train a saved result further while its masks stay: with labels, or from the dense network (--teacher).

    Defaults are the paper's for CIFAR-10. The best weights on held-out samples are kept.
    """
    from ...results.result import save_or_rescue
    from ...results.storage import check_output
    from ...training.checkpoints import kept_epochs
    from ...training.retraining import retrain as run
    from ...training.settings import TrainingSettings

    check_output(out, force, resume)
    if teacher is None and teacher_weights is not None:
        raise ArgumentError("--teacher-weights is given without --teacher; expected both or neither")
    figures: dict[str, Any] = {
        "epochs": epochs, "batch": batch, "lr": lr, "lr_decay": lr_decay, "lr_decay_every": lr_decay_every,
        "momentum": momentum, "weight_decay": weight_decay, "crop": crop, "flip": flip, "amp": amp,
    }  # fmt: skip
    TrainingSettings(**figures)  # refuses wrong figures before anything is read
    pruned, request = _read(directory, model, teacher, teacher_weights, data, seed, config, device, quiet or as_json)
    request.require_data()
    listeners = listeners_of(events, tensorboard, live, out, request.quiet, pruned.report)
    read, judging, dense = _data(request, samples, held_out, taught=teacher is not None)
    with saying(partial(kept_epochs, resume, "--resume DIR", "command")):
        result = run(
            pruned, read.samples(teacher is None), teacher=dense, held_out=judging, device=request.device, seed=seed,
            progress=[not request.quiet, *listeners], resume=resume, **figures,
        )  # fmt: skip
    with request.step("evaluating"):
        result = replace(result, report=replace(result.report, evaluation=_rows(read, dense, pruned, result)))
    save_or_rescue(result, out, compact, force)
    print_retraining(result.report, out, as_json, quiet)


def _read(
    directory: Path,
    model: str | None,
    teacher: str | None,
    weights: Path | None,
    data: str | None,
    seed: int,
    config: Path | None,
    device: str | None,
    quiet: bool,
) -> tuple[Result, Request]:
    """The saved result, and a request whose model is the teacher if there is one."""
    from ...data.models import build_model
    from ...results.reading import read_result

    pruned = read_result(directory, None if model is None else build_model(model, pretrained=False))
    source = pruned.source or model
    if data is None and source == EMBEDDED_MODEL:
        data = EMBEDDED_DATA
    request = Request.read(teacher or source or EMBEDDED_MODEL, data, weights, None, seed, config, device, quiet)
    return replace(pruned, source=source), request


def _data(request: Request, samples: int | None, held_out: str, taught: bool) -> tuple[Data, Any, nn.Module | None]:
    """What to train on, what to judge by, and the teacher if there is one."""
    with request.step("reading the data"):
        read = request.load(request.require_data(), samples)
        return read, _held_out(request, held_out, labelled=not taught), request.model() if taught else None


def _held_out(request: Request, words: str, labelled: bool) -> Any:
    """A share, or the samples of the named data."""
    try:
        return float(words)
    except ValueError:
        return request.load(words, None).samples(labelled)


def _rows(read: Data, dense: nn.Module | None, pruned: Result, result: Result) -> list[dict[str, Any]]:
    """Figures of the test samples, if there are any that can be judged."""
    if read.test is None or (dense is None and not read.has_labels):
        return []
    judge = Judge(read, dense)
    networks = {"dense": dense, "pruned": pruned.model, "retrained": result.model}
    return [judge.row(name, network) for name, network in networks.items() if network is not None]
