"""`snows.prune`: from a trained model and unlabeled samples to a sparse model that still works."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch
from torch import nn

from .caller import Stoppable
from .data.samples import check_flag, check_labels, check_seed
from .data.usable import require_module
from .devices.device import as_device
from .devices.distributed.group import current_ranks
from .devices.memory import as_bytes
from .errors import ArgumentError, shown
from .listeners.progress import Listeners, listening
from .patterns import PatternRules
from .plan import Names, as_names
from .reading import as_path
from .recipe import Effort, Recipe, as_recipe
from .results.journal import kept_solves
from .results.report import fold
from .results.result import Result
from .run import open_run
from .solve.cascade import cascade, mask_group, solve_group
from .task import Task

__all__ = ["Result", "prune"]


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
    recipe: Recipe | str | None = None,
    effort: Effort = "default",
    device: torch.device | str | None = None,
    seed: int = 0,
    progress: Listeners = True,
    labels: Literal["model", "given"] = "model",
    permute: bool = False,
    resume: str | Path | None = None,
    memory: int | str | None = None,
) -> Result:
    """Prune a trained model without retraining and without labels.

    Calls from several threads take turns. Inside a process group of torch.distributed all ranks prune together: each
    passes the same arguments, and works on its share of the samples.

    Args:
        model: Any module that torch.export can capture. It is left exactly as it was.
        calibration: A few thousand unlabeled samples: a tensor, a Dataset, a DataLoader or a re-iterable of batches.
        pattern: "N:M" (N kept of every M input channels), a sparsity in (0, 1), `NM`, `Unstructured`, or
            {glob: pattern}. Not needed where `mask` already gives the masks.
        mask: The name of a mask method ("magnitude", "wanda", "sparsegpt", "obc" …) or a method such as `snows.OBC()`.
            Or masks from elsewhere: {name: tensor of bools, or of 0 and 1}, a file of masks or of pruned weights, a
            pruned copy of the model, or "weights" (the zeros of the model's weights). Masks of torch.nn.utils.prune
            and of NVIDIA's ASP in the model are used if there is no pattern.
        layers: Names, globs or roles ("qkv", "out", "mlp") of the layers to prune, or a file of `snows.bench`, which
            names those that were faster sparse. Default: all but the first and the last.
        exclude: Names, globs or roles of layers that stay dense.
        horizon: The paper's K. 0 is layer-wise reconstruction. Default: the recipe's.
        solver: "newton", or None for the mask only.
        recipe: "paper" or a `Recipe`. Default: the recipe of the effort.
        effort: "fast": what a laptop can do in minutes with 128 to 256 samples. "default": the best that its cost is
            worth. "best": for a GPU and patience. A recipe overrides it.
        device: Where to work. Default: where the model is. Not "mps", which has no double precision.
        seed: Of the order of the samples, and of random probes.
        progress: True for a progress bar, or for log lines where there is no terminal. Or a callable that gets every
            `Event`, such as those of `snows.listeners`; or a list of these.
        labels: For mask methods that use gradients of a loss. "model": the model's own predictions; "given": the
            labels that come with the calibration batches.
        permute: Re-order channels first, so that fewer large weights compete within the groups of an N:M pattern. The
            network computes the same function.
        resume: A folder that keeps every finished layer. The same call goes on where it was stopped, and ends with the
            same weights. A folder of another model, other data or other options is refused.
        memory: How much of the device's memory to use at most: "24GiB" or a number of bytes. Samples are taken in
            pieces that fit; activations that do not fit are kept in host memory, then on disk. Weights that do not fit
            rest in host memory. Default: what is free on a GPU; on a CPU 16 GiB beside the weights, or the host's
            memory if that is less.

    Returns:
        A `Result` with the new model, its masks and the report.

    Raises:
        ArgumentError: An argument has the wrong form.
        InputError: The model, the data or the masks cannot be used.
        CaptureError: torch.export cannot capture the model.
        KeyboardInterrupt: Ctrl-C was pressed. It says what `resume` has kept.

    Example:
        >>> import torch, snows
        >>> model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.ReLU(), torch.nn.Linear(8, 2)).eval()
        >>> result = snows.prune(model, torch.randn(64, 8), "2:4", layers="0", progress=False)
        >>> result.report.sparsity
        0.5
    """
    require_module(model, "model")
    if solver is not None and not (isinstance(solver, str) and solver == "newton"):
        raise ArgumentError(f"solver is {shown(solver)}; expected 'newton', or None for the mask alone")
    check_labels(labels)
    check_flag("permute", permute)
    check_seed(seed)
    chosen = as_recipe(recipe, effort)
    task = Task(
        model=model,
        calibration=calibration,
        rules=None if pattern is None else PatternRules.parse(pattern),
        mask=mask,
        layers=as_names(layers, "layers"),
        exclude=as_names(exclude, "exclude"),
        recipe=chosen if horizon is None else chosen.replace(horizon=horizon),
        readjusts=solver is not None,
        device=as_device(device),
        seed=seed,
        given_labels=labels == "given",
        permute=permute,
        resume=None if resume is None else as_path(resume, "resume"),
        memory=as_bytes(memory),
    )
    with Stoppable(partial(kept_solves, task.resume, "resume=DIR", "call")):
        return _run(task, progress)


def _run(task: Task, progress: Listeners) -> Result:
    ranks = current_ranks()
    with listening(progress if ranks.is_first else False) as listener, open_run(task, listener, ranks=ranks) as run:
        cascade(run, solve_group if task.readjusts else mask_group)
        run.distill()
        run.compare()
        pruned = run.finish()
    masks = {name: kept.cpu() for name, kept in run.masks.items()}
    return Result(pruned, masks, fold(run.events), task.recipe, probe=run.probe())
