"""`snows.retrain`: a pruned network trained further, with its masks frozen."""

from __future__ import annotations

import hashlib
import math
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ..caller import Stoppable, own_surroundings
from ..data.samples import check_seed
from ..data.usable import copied, require_module, require_python
from ..devices.device import as_device, device_of, move
from ..errors import ArgumentError, InputError, a_type
from ..events import EpochEnded, Event, Listener, Retrained, RetrainingStarted, TrainingStep
from ..listeners.progress import Listeners, listening
from ..reading import as_path
from ..results.folder import digest, versions
from ..results.reading import read_result
from ..results.report import Report, add, fold
from ..results.result import Result
from .checkpoints import Checkpoint, Checkpoints, kept_epochs
from .feeding import Feed, TableFeed, augmented, read_feeds
from .frozen import freeze, unfreeze
from .objectives import AgainstLabels, AgainstTeacher, Objective
from .settings import TrainingSettings
from .steps import Steps

_BEGINNING = "reading samples, judging the network"


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
    progress: Listeners = True,
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
            the same bits. A folder of another model, other data or other options is refused. (A `Dataset` or loader is
            told from others by its length and a few of its samples.)

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
    place = as_device(device)
    result = _as_result(pruned, model, trust)
    report = fold((), result.report)
    started = time.perf_counter()
    with (
        Stoppable(partial(kept_epochs, folder, "resume=DIR", "call")),
        listening(progress, _BEGINNING) as listener,
        own_surroundings(device_of(result.model, place), notify := _folding(report, listener)),
    ):
        network, home = _trainable(result, place)
        objective = _objective(teacher, next(network.parameters()).device)
        training, judging = read_feeds(data, held_out, network, batch, seed, teacher is None)
        checkpoints = Checkpoints(
            folder,
            {} if folder is None else _identity(settings, network, result.masks, teacher, training, judging, seed),
        )
        freeze(network, result.masks)
        run = _Training(network, settings, objective, training, judging, checkpoints, seed, notify)
        best = run.train(None if teacher is None else type(teacher).__name__)
        _check_zeros(best, result.masks)
        network.load_state_dict(best)
        network.zero_grad()
        unfreeze(network)
        _lay_out(network, torch.contiguous_format)
        notify(Retrained(time.perf_counter() - started))
    return replace(result, model=network.to(home).eval(), report=report)


def _folding(report: Report, listener: Listener) -> Listener:
    """Events are added to the report, and go on to the listener."""

    def notify(event: Event) -> None:
        add(event, report)
        listener(event)

    return notify


@dataclass(frozen=True)
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

    def train(self, teacher: str | None) -> Mapping[str, Tensor]:
        """The best weights. `teacher` is its name, for listeners."""
        first = next(self.network.parameters())
        training, judging = (
            feed.placed(first.device, first.dtype) if isinstance(feed, TableFeed) else feed
            for feed in (self.training, self.judging)
        )
        steps = Steps(self.network, self.objective, self.settings)
        state = self._begun(steps, training, judging, teacher)
        for epoch in range(state.epoch + 1, self.settings.epochs + 1):
            state = self._epoch(epoch, state, steps, training, judging)
            self.checkpoints.write(state)
        return state.best

    def _begun(self, steps: Steps, training: Feed, judging: Feed, teacher: str | None) -> Checkpoint:
        """Before the first epoch, or after those that an earlier call had finished."""
        _seeded(self.seed, 0, steps.device)
        held_out, count = self._judged(judging, 0)
        if training.labels is not None:
            self.objective.check(training.labels, len(training.labels))
        self.notify(
            RetrainingStarted(
                model=type(self.network).__name__,
                settings=self.settings.to_dict(),
                teacher=teacher,
                samples=training.samples,
                held_out_samples=count,
                measure=self.objective.measure,
                seed=self.seed,
                device=str(steps.device),
            )
        )
        state = self._recalled(steps)
        if state is None:
            weights = _copied(self.network)
            ended = EpochEnded(0, self.settings.epochs, 0.0, float("nan"), held_out, best=True)
            state = Checkpoint(weights, {}, weights, (ended,))
        for ended in state.history:
            self.notify(ended)
        return state

    def _recalled(self, steps: Steps) -> Checkpoint | None:
        """What an earlier call has kept, put into the network and the optimizer."""
        state = self.checkpoints.read()
        if state is None:
            return None
        self.network.load_state_dict(dict(state.weights))
        for number, momentum in state.momentum.items():
            parameter = steps.parameters[number]
            steps.optimizer.state[parameter]["momentum_buffer"] = momentum.to(parameter)
        return replace(state, history=tuple(replace(ended, recalled=True) for ended in state.history))

    def _judged(self, judging: Feed, epoch: int) -> tuple[dict[str, float], int]:
        """Figures of the held-out samples after an epoch, and the number of samples."""
        counts: list[int] = []

        def counted() -> Iterator[Any]:
            for call in judging.epoch(None):
                counts.append(call.count)
                yield call

        figures = self.objective.judge(self.network, counted())
        self._require_finite(figures, epoch)
        return figures, sum(counts)

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
        losses = self._trained(epoch, steps, training, state.history)
        loss = float(torch.stack(losses).cpu().double().mean())
        if not loss < float("inf"):
            raise InputError(f"the training loss of epoch {epoch} is {loss}; use a smaller learning rate than {lr:g}")
        held_out, _ = self._judged(judging, epoch)
        best = self.objective.is_better(held_out, next(e.held_out for e in reversed(state.history) if e.best))
        ended = EpochEnded(epoch, self.settings.epochs, lr, loss, held_out, len(losses), best)
        self.notify(ended)
        weights = _copied(self.network)
        momentum = {
            number: steps.optimizer.state[parameter]["momentum_buffer"]
            for number, parameter in enumerate(steps.parameters)
            if steps.optimizer.state[parameter].get("momentum_buffer") is not None
        }
        return Checkpoint(weights, momentum, weights if best else state.best, (*state.history, ended))

    def _trained(self, epoch: int, steps: Steps, training: Feed, history: tuple[EpochEnded, ...]) -> list[Tensor]:
        """One pass over the training samples; returns the loss of each step."""
        self.network.train()
        generator = _seeded(self.seed, epoch, steps.device)
        epochs, done, last = self.settings.epochs, sum(ended.steps for ended in history), history[-1]
        in_an_epoch = last.steps or training.steps
        total = None if in_an_epoch is None else done + in_an_epoch * (epochs + 1 - epoch)
        losses: list[Tensor] = []
        largest = 0
        for call in training.epoch(generator):
            largest = max(largest, call.count)
            if call.count == 1 and largest > 1:  # one sample is left over at the end: batch norms need two
                continue
            if training.labels is None:
                self.objective.check(call.labels, call.count)
            losses.append(steps(augmented(call, self.settings.crop, self.settings.flip, generator)))
            self.notify(TrainingStep(done + len(losses), total, epoch, epochs, last.held_out))
        if not losses:
            raise InputError("the training data has no batches; give samples, or a loader that can be read again")
        return losses


def _seeded(seed: int, epoch: int, device: torch.device) -> torch.Generator:
    """A generator for one epoch. torch's own random numbers begin anew with it, whatever came before."""
    own = int.from_bytes(hashlib.sha256(f"{seed}/{epoch}".encode()).digest()[:8]) >> 1
    if device.type == "cpu":
        torch.default_generator.manual_seed(own)  # torch.manual_seed would seed the GPUs that the caller uses, too
    else:
        torch.manual_seed(own)
    return torch.Generator().manual_seed(own)


def _as_result(pruned: Any, model: nn.Module | None, trust: bool) -> Result:
    if isinstance(pruned, str | Path):
        return read_result(pruned, model, trust)
    if not isinstance(pruned, Result):
        raise ArgumentError(
            f"pruned is {a_type(pruned)}; expected what snows.prune returned, or the folder of a saved result"
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
    network = move(copied(result.model), device).eval()
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
    require_python(teacher, "teacher")
    return AgainstTeacher(move(copied(teacher), device).eval().requires_grad_(False))


def _identity(
    settings: TrainingSettings,
    network: nn.Module,
    masks: Mapping[str, Tensor],
    teacher: nn.Module | None,
    training: Feed,
    judging: Feed,
    seed: int,
) -> dict[str, Any]:
    """What a folder of `resume` belongs to."""
    return {
        **settings.to_dict(),
        "seed": seed,
        "device": next(network.parameters()).device.type,
        "versions": versions(),
        "weights": digest(network.state_dict()),
        "masks": digest(dict(sorted(masks.items()))),
        "trained": digest([name for name, parameter in network.named_parameters() if parameter.requires_grad]),
        "teacher": None if teacher is None else digest(teacher.state_dict()),
        "training": digest(training.identity()),
        "held_out": digest(judging.identity()),
    }


def _copied(network: nn.Module) -> dict[str, Tensor]:
    return {name: tensor.detach().clone() for name, tensor in network.state_dict().items()}


def _check_zeros(weights: Mapping[str, Tensor], masks: Mapping[str, Tensor]) -> None:
    """Before they are loaded: the guards of a frozen network would hide what is wrong."""
    for name, kept in masks.items():
        grown = int(weights[name][~kept.to(weights[name].device)].count_nonzero())
        if grown:
            raise InputError(
                f"{grown} weights that the mask of {name} removes are not zero after retraining: the model's own code "
                "writes them; nothing was kept"
            )
