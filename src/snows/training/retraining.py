"""`snows.retrain`: a pruned network trained further, with its masks frozen."""

from __future__ import annotations

import copy
import hashlib
import math
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ..caller import Stoppable, current_device
from ..data.preparation import ONE_AT_A_TIME
from ..data.samples import check_seed
from ..data.usable import require_module
from ..devices.device import as_device, device_of, move
from ..errors import ArgumentError, InputError
from ..events import EpochEnded, Listener, Retrained, TrainingStep
from ..listeners.progress import listening
from ..reading import as_path
from ..results.folder import digest
from ..results.reading import read_result
from ..results.result import Result
from .checkpoints import Checkpoint, Checkpoints, kept_epochs
from .feeding import Feed, TableFeed, augmented, read_feeds
from .frozen import freeze, unfreeze
from .objectives import AgainstLabels, AgainstTeacher, Objective
from .settings import TrainingSettings
from .steps import Steps


def retrain(
    pruned: Result | str | Path,
    data: Any,
    *,
    teacher: nn.Module | None = None,
    held_out: Any = 0.1,
    epochs: int = 90,
    batch: int = 128,
    lr: float = 3e-3,
    lr_decay: float = 0.1,
    lr_decay_every: int = 30,
    momentum: float = 0.9,
    weight_decay: float = 5e-5,
    crop: int = 0,
    flip: bool = False,
    amp: bool = False,
    model: nn.Module | None = None,
    trust: bool = False,
    device: torch.device | str | None = None,
    seed: int = 0,
    progress: bool | Listener | Sequence[bool | Listener] = True,
    resume: str | Path | None = None,
) -> Result:
    """Train a pruned network further while its masks stay as they are.

    By default with labels, as in the paper: SGD, cross-entropy, a learning rate that falls in steps. With `teacher`
    without labels: the network learns the predictions of the dense one. After every epoch the network is judged on
    held-out samples, and the best weights are kept, those from before included: by top-1 accuracy with labels (then by
    the loss), by KL divergence with a teacher. Removed weights are exactly zero at the end; this is checked.

    Args:
        pruned: What `snows.prune` returned, or the folder of a saved result. It is left as it was.
        data: The training samples: (inputs, labels), a list of such batches, a `Dataset` or a loader. Labels are one
            whole number for each sample; with `teacher` none are needed. A loader keeps its own order and batch size.
        teacher: The dense network.
        held_out: The share of the data that is not trained on but judges the epochs; or samples of its own, which a
            loader needs.
        epochs: Passes over the data. The defaults are the paper's for CIFAR-10; for ImageNet it takes 5 epochs with
            `lr_decay_every=2`.
        batch: Samples in a step.
        lr: The learning rate of the first epochs.
        lr_decay: It is multiplied by this after every `lr_decay_every` epochs.
        lr_decay_every: See there.
        momentum: Of SGD.
        weight_decay: Of SGD, on all parameters.
        crop: Random crops of images that get a border of so many zeros first (4 is usual for CIFAR). 0: none.
        flip: Whether to mirror half of the images, at random.
        amp: Whether forward and backward passes are in bfloat16 where torch's autocast says so.
        model: For a folder: the module to fill, as of `snows.load`. It is copied.
        trust: For a folder: as of `snows.load`.
        device: Where to work. Default: where the model is.
        seed: Of the order of samples, of random views and dropout.
        progress: As of `prune`.
        resume: A folder that keeps the newest epoch. The same call goes on where it was stopped; on a CPU it ends with
            the same bits. A folder of another model, other data or other options is refused.

    Returns:
        A new `Result` with the same masks. Its report has `retraining`.

    Raises:
        ArgumentError: An argument has the wrong form.
        InputError: The result, the data or the labels cannot be used; or the loss is not finite any more.
        KeyboardInterrupt: Ctrl-C was pressed. It says how many epochs `resume` has kept.

    Example:
        >>> import torch, snows
        >>> model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.ReLU(), torch.nn.Linear(16, 2)).eval()
        >>> x = torch.randn(200, 8)
        >>> result = snows.prune(model, x, "1:4", layers="0", solver=None, progress=False)
        >>> better = snows.retrain(result, x, teacher=model, epochs=20, lr=0.5, progress=False)
        >>> better.masks["0.weight"].equal(result.masks["0.weight"])
        True
        >>> better.report.retraining.after["kl"] < better.report.retraining.before["kl"]
        True
    """
    settings = TrainingSettings(epochs, batch, lr, lr_decay, lr_decay_every, momentum, weight_decay, crop, flip, amp)
    check_seed(seed)
    folder = None if resume is None else as_path(resume, "resume")
    result = _as_result(pruned, model, trust)
    started = time.perf_counter()
    folder = None if resume is None else Path(resume)
    stoppable = Stoppable(partial(kept_epochs, folder, "resume=DIR", "call"))
    with stoppable, ONE_AT_A_TIME, current_device(device_of(result.model, device)), listening(progress) as notify:
        network, home = _trainable(result, as_device(device))
        objective = _objective(teacher, next(network.parameters()).device)
        training, judging = read_feeds(data, held_out, network, batch, seed, teacher is None)
        identity = _identity(settings, network, teacher, training, judging, seed) if folder is not None else {}
        checkpoints = Checkpoints(folder, identity)
        freeze(network, result.masks)
        run = _Training(network, settings, objective, training, judging, checkpoints, seed, notify)
        history, best, recalled = run.train()
        _check_zeros(best, result.masks)
        network.load_state_dict(best)
        unfreeze(network)
        _lay_out(network, torch.contiguous_format)
        event = run.ended(history, teacher, time.perf_counter() - started, recalled)
        notify(event)
    return replace(
        result,
        model=network.to(home).eval(),
        report=replace(result.report, retraining=event, evaluation=[]),
    )


@dataclass
class _Training:
    """One retraining."""

    network: nn.Module
    settings: TrainingSettings
    objective: Objective
    training: Feed
    judging: Feed
    checkpoints: Checkpoints
    seed: int
    notify: Listener
    held_out_samples: int = 0

    def train(self) -> tuple[tuple[EpochEnded, ...], Mapping[str, Tensor], int]:
        """The history, the best weights, and how many epochs were finished before."""
        first = next(self.network.parameters())
        training, judging = (
            feed.placed(first.device, first.dtype) if isinstance(feed, TableFeed) else feed
            for feed in (self.training, self.judging)
        )
        steps = Steps(self.network, self.objective, self.settings)
        state = self._started(judging)
        recalled = self.checkpoints.read()
        if recalled is not None:
            state = recalled
            self.network.load_state_dict(dict(state.weights))
            for number, momentum in state.momentum.items():
                parameter = steps.parameters[number]
                steps.optimizer.state[parameter]["momentum_buffer"] = momentum.to(parameter)
        if training.labels is not None:
            self.objective.check(training.labels, len(training.labels))
        for epoch in range(state.epoch + 1, self.settings.epochs + 1):
            state = self._epoch(epoch, state, steps, training, judging)
            self.checkpoints.write(state)
        return state.history, state.best, 0 if recalled is None else recalled.epoch

    def ended(
        self, history: tuple[EpochEnded, ...], teacher: nn.Module | None, seconds: float, recalled: int
    ) -> Retrained:
        return Retrained(
            settings=self.settings.to_dict(),
            teacher=None if teacher is None else type(teacher).__name__,
            samples=self.training.samples,
            held_out_samples=self.held_out_samples,
            measure=self.objective.measure,
            best_epoch=_best_epoch(history, self.objective),
            history=history,
            seed=self.seed,
            device=str(next(self.network.parameters()).device),
            seconds=seconds,
            recalled_epochs=recalled,
        )

    def _started(self, judging: Feed) -> Checkpoint:
        """Before the first epoch."""
        ended = EpochEnded(0, self.settings.epochs, 0.0, float("nan"), self._judged(judging, 0))
        self.notify(ended)
        weights = _copied(self.network)
        return Checkpoint(weights, {}, weights, (ended,))

    def _judged(self, judging: Feed, epoch: int) -> dict[str, float]:
        count = 0

        def counted() -> Iterator[Any]:
            nonlocal count
            for call in judging.epoch(None):
                count += call.count
                yield call

        figures = self.objective.judge(self.network, counted())
        self.held_out_samples = count
        self._require_finite(figures, epoch)
        return figures

    def _require_finite(self, figures: Mapping[str, float], epoch: int) -> None:
        if all(math.isfinite(value) for value in figures.values()):
            return
        what = f"{type(self.network).__name__} gives NaN or infinity on the held-out samples"
        if epoch == 0:
            raise InputError(f"{what}; look at its weights, and at how the data is normalized")
        rate = self.settings.lr_of(epoch)
        raise InputError(f"{what} after epoch {epoch}; use a smaller learning rate than {rate:g}")

    def _epoch(self, epoch: int, state: Checkpoint, steps: Steps, training: Feed, judging: Feed) -> Checkpoint:
        lr = self.settings.lr_of(epoch)
        for group in steps.optimizer.param_groups:
            group["lr"] = lr
        with _seeded(self.seed, epoch, steps.device) as generator:
            loss = self._trained(epoch, steps, training, generator, state.history[-1].held_out)
        if not loss < float("inf"):
            raise InputError(f"the training loss of epoch {epoch} is {loss}; use a smaller learning rate than {lr:g}")
        ended = EpochEnded(epoch, self.settings.epochs, lr, loss, self._judged(judging, epoch))
        self.notify(ended)
        weights = _copied(self.network)
        history = (*state.history, ended)
        best = weights if _best_epoch(history, self.objective) == epoch else state.best
        momentum = {
            number: steps.optimizer.state[parameter]["momentum_buffer"]
            for number, parameter in enumerate(steps.parameters)
            if steps.optimizer.state[parameter].get("momentum_buffer") is not None
        }
        return Checkpoint(weights, momentum, best, history)

    def _trained(
        self, epoch: int, steps: Steps, training: Feed, generator: torch.Generator, held_out: Mapping[str, float]
    ) -> float:
        """One pass over the training samples; returns the mean loss of its steps."""
        self.network.train()
        losses: list[Tensor] = []
        largest, known, epochs = 0, training.steps, self.settings.epochs
        if known is None:
            self.notify(TrainingStep(epoch - 1, epochs, epoch, epochs, held_out))
        for call in training.epoch(generator):
            largest = max(largest, call.count)
            if call.count == 1 < largest:  # what is left at the end; batch norms need two samples
                continue
            if training.labels is None:
                self.objective.check(call.labels, call.count)
            losses.append(steps(augmented(call, self.settings.crop, self.settings.flip, generator)))
            if known is not None:
                done = (epoch - 1) * known + len(losses)
                self.notify(TrainingStep(done, epochs * known, epoch, epochs, held_out))
        if not losses:
            raise InputError("the training data has no batches; give samples, or a loader that can be read again")
        return float(torch.stack(losses).cpu().double().mean())


@contextmanager
def _seeded(seed: int, epoch: int, device: torch.device) -> Iterator[torch.Generator]:
    """Random numbers of one epoch, whatever came before it. Afterwards torch's own go on as they were."""
    own = int.from_bytes(hashlib.sha256(f"{seed}/{epoch}".encode()).digest()[:8]) >> 1
    accelerators = [device] if device.type == "cuda" else []
    with torch.random.fork_rng(accelerators):
        torch.manual_seed(own)
        yield torch.Generator().manual_seed(own)


def _as_result(pruned: Any, model: nn.Module | None, trust: bool) -> Result:
    if isinstance(pruned, str | Path):
        return read_result(pruned, model, trust)
    if not isinstance(pruned, Result):
        raise ArgumentError(
            f"pruned is a {type(pruned).__name__}; expected what snows.prune returned, or the folder of a saved result"
        )
    if model is not None:
        raise ArgumentError("model is given with a result that has its own; expected it with a folder only")
    return pruned


def _trainable(result: Result, device: torch.device | None) -> tuple[nn.Module, torch.device]:
    """A copy of the model on the device, and where the model was."""
    half = [n for n, p in result.model.named_parameters() if p.dtype in (torch.float16, torch.bfloat16)]
    if half:
        raise InputError(
            f"{half[0]} is in half precision, in which small steps are lost; give the model in float32 (amp=True "
            "computes in bfloat16)"
        )
    first = next(result.model.parameters(), None)
    if first is None:
        raise InputError(f"{type(result.model).__name__} has no parameters; there is nothing to train")
    network = move(copy.deepcopy(result.model), device).eval()
    if next(network.parameters()).device.type == "cuda":
        _lay_out(network, torch.channels_last)  # the fastest one for convolutions there
    return network, first.device


def _lay_out(network: nn.Module, layout: torch.memory_format) -> None:
    for parameter in network.parameters():
        if parameter.ndim == 4:
            parameter.data = parameter.data.contiguous(memory_format=layout)


def _objective(teacher: nn.Module | None, device: torch.device) -> Objective:
    if teacher is None:
        return AgainstLabels()
    require_module(teacher, "teacher")
    return AgainstTeacher(move(copy.deepcopy(teacher), device).eval().requires_grad_(False))


def _identity(
    settings: TrainingSettings, network: nn.Module, teacher: nn.Module | None, training: Feed, judging: Feed, seed: int
) -> dict[str, Any]:
    """What a folder of `resume` belongs to."""
    return {
        **settings.to_dict(),
        "seed": seed,
        "device": next(network.parameters()).device.type,
        "weights": digest(network.state_dict()),
        "teacher": None if teacher is None else digest(teacher.state_dict()),
        "training": digest(training.identity()),
        "held_out": digest(judging.identity()),
    }


def _copied(network: nn.Module) -> dict[str, Tensor]:
    return {name: tensor.detach().clone() for name, tensor in network.state_dict().items()}


def _best_epoch(history: tuple[EpochEnded, ...], objective: Objective) -> int:
    best = 0
    for ended in history:
        if objective.is_better(ended.held_out, history[best].held_out):
            best = ended.epoch
    return best


def _check_zeros(weights: Mapping[str, Tensor], masks: Mapping[str, Tensor]) -> None:
    """Before they are loaded: the guards of a frozen network would hide what is wrong."""
    for name, kept in masks.items():
        grown = int(weights[name][~kept.to(weights[name].device)].count_nonzero())
        if grown:
            raise InputError(
                f"{grown} weights that the mask of {name} removes are not zero after retraining: the model's own code "
                "writes them; nothing was kept"
            )
