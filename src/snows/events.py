"""What happens in a run, as small frozen values.

A run notifies its listeners of every event, in order. The report is the fold of the events (`snows.results.report`).
The progress bar is a listener, and so is the callable that `snows.prune` takes as `progress=`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from .words import counted, duration, to_pattern


@dataclass(frozen=True)
class Event:
    """Something that happened in a run. `str(event)` says it in a few words.

    `snows.prune(..., progress=listener)` calls the listener with every event; the classes here are their kinds.

    Example:
        >>> import torch, snows
        >>> from snows.events import LayerSolved
        >>> def listener(event: snows.Event) -> None:
        ...     if isinstance(event, LayerSolved):
        ...         print(event, "ended with:", event.solve.outcome)
        >>> model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.ReLU(), torch.nn.Linear(8, 2)).eval()
        >>> recipe = snows.Recipe(horizon=0, sweeps=1)
        >>> result = snows.prune(model, torch.randn(64, 8), "2:4", layers="0", recipe=recipe, progress=listener)
        sweep 1/1  0 ended with: solved in closed form
    """


@dataclass(frozen=True)
class LayerFacts:
    """A layer that will be pruned."""

    name: str
    parameter: str
    shape: tuple[int, ...]
    pattern: str  # "given" where the mask was given
    horizon: int | None  # None: mask only
    group: tuple[str, ...]  # the layers it is solved together with, itself included
    flops: int = 0  # of the dense layer, for one sample


@dataclass(frozen=True)
class DenseLayer:
    """A layer that stays dense, and why."""

    name: str
    shape: tuple[int, ...]
    reason: str


@dataclass(frozen=True)
class RunStarted(Event):
    """Everything is read and planned; the work begins."""

    model: str
    pattern: str
    mask: str
    recipe: Mapping[str, Any]
    layers: tuple[LayerFacts, ...]
    dense_layers: tuple[DenseLayer, ...]
    network_weights: int
    samples: int
    held_out_samples: int
    seed: int
    device: str
    versions: Mapping[str, str]
    flops: int = 0  # of the dense network, for one sample
    attention_flops: int = 0  # of these, products of two activations

    def __str__(self) -> str:
        return f"{self.model} {to_pattern(self.pattern)}"


@dataclass(frozen=True)
class Warned(Event):
    """The user was warned; the work goes on.

    A warning that comes again is not shown again. The end of the run notifies once more, with the number of `times`.
    """

    message: str
    times: int = 1

    def __str__(self) -> str:
        return f"warning: {self.message}" + (f" ({self.times} times)" if self.times > 1 else "")


@dataclass(frozen=True)
class MemoryEstimated(Event):
    """How much of the device's memory the run is expected to use at its peak."""

    peak_bytes: int

    def __str__(self) -> str:
        return f"about {self.peak_bytes / 2**30:.1f} GiB of the device's memory will be used"


@dataclass(frozen=True)
class TimeEstimated(Event):
    """How long the run will take, by a short measurement of this machine's speed. Short runs are not estimated.

    Attributes:
        layers: Seconds of each group of layers that is solved together, in order, in all sweeps.
        last_stage: Seconds of the last stage; 0 if there is none.
        quicker: What would take less time, if the run is long.
    """

    layers: tuple[float, ...]
    last_stage: float = 0.0
    quicker: tuple[str, ...] = ()

    @property
    def seconds(self) -> float:
        return sum(self.layers) + self.last_stage

    def __str__(self) -> str:
        quicker = f"; quicker: {', '.join(self.quicker)}" if self.quicker else ""
        return f"this will take about {duration(self.seconds)}{quicker}"


@dataclass(frozen=True)
class ChannelsPermuted(Event):
    """Channels were re-ordered. The figures are shares of the magnitude that the best N:M masks keep."""

    kept_before: float
    kept_after: float

    def __str__(self) -> str:
        return "channels re-ordered"


@dataclass(frozen=True)
class SolveReport:
    """How one layer was solved in one sweep. Losses are K-step losses of the fitted samples; `held_out…` are those of
    the held-out samples."""

    sweep: int
    loss_masked: float  # of the weights before the solve, masked
    loss_start: float
    loss: float
    start: str
    outcome: str
    newton_steps: int
    cg_steps: int
    negative_curvature: int
    curvature: str
    relative_damping: float  # of the closed form; above the recipe's ridge where the statistics were singular
    seconds: float
    kept: str = "solved"  # or the start, or a part of the way, where the solve did worse on held-out samples
    held_out_masked: float = math.nan  # as loss_masked; NaN where nothing is held out
    held_out: float = math.nan  # of the weights that were kept
    held_out_tried: Mapping[str, float] = field(default_factory=dict)  # of all weights that were compared, by name
    losses: tuple[float, ...] = ()  # of the fitted samples: where Newton's method starts, and after each of its steps
    cg_residuals: tuple[tuple[float, ...], ...] = ()  # of each Newton step: the relative residual after each CG step

    @property
    def worse(self) -> bool:
        """Whether the solve did worse on held-out samples than what was kept."""
        return self.kept != "solved"


@dataclass(frozen=True)
class LayerStarted(Event):
    """One layer, or several that are solved together, is next: number `index` of `total` in this sweep."""

    layers: tuple[str, ...]
    index: int
    total: int
    sweep: int
    sweeps: int

    @property
    def layer(self) -> str:
        return " + ".join(self.layers)

    def __str__(self) -> str:
        return f"sweep {self.sweep + 1}/{self.sweeps}  {self.layer}"


@dataclass(frozen=True)
class LayerSolved(LayerStarted):
    """The same layers have their new weights."""

    solve: SolveReport
    recalled: bool = False  # an earlier, interrupted call had solved them


@dataclass(frozen=True)
class CGStep(Event):
    """One step of conjugate gradients, in one Newton step of the layers that are being solved. At most `steps`."""

    newton_step: int
    newton_steps: int
    step: int
    steps: int

    def __str__(self) -> str:
        return f"Newton {self.newton_step}/{self.newton_steps}, CG {self.step}"


@dataclass(frozen=True)
class Counted(Event):
    """Number `step` of `steps` is done (None: nobody knows how many there are). Progress bars and log lines count any
    event of this kind."""

    step: int
    steps: int | None


@dataclass(frozen=True)
class DistillStep(Counted):
    """One step of the last stage, in which all kept weights are trained together."""

    def __str__(self) -> str:
        return "last stage, all layers together"


@dataclass(frozen=True)
class Distilled(Event):
    """The last stage has ended. Losses are of the held-out samples, or of the fitted ones if none are held out."""

    steps: int
    loss_before: float
    loss: float  # of the weights that were kept
    seconds: float
    curve: tuple[tuple[int, float], ...] = ()  # the step and the loss, wherever it was measured


@dataclass(frozen=True)
class OperationErrors(Event):
    """The error of every operation's output in pruned networks: "mask only", "SNOWS", "before the last stage".

    An error is the mean squared difference from the dense network, over the variance there. `agreement` is the share of
    the samples with the dense network's top class, where the output has classes.
    """

    names: tuple[str, ...]
    samples: int
    errors: Mapping[str, tuple[float, ...]]
    agreement: Mapping[str, float]

    def __str__(self) -> str:
        return "the networks are compared"


@dataclass(frozen=True)
class WeightFacts:
    """A layer's weights in the dense network and after pruning, and a picture of its mask.

    Histograms have bins of equal width between `low` and `high`, with shares of all weights of the layer. The picture
    is the corner of the mask: one row for each output, one bit for each input, packed and in base64.
    """

    low: float
    high: float
    before: tuple[float, ...]
    after: tuple[float, ...]  # of the kept weights
    rows: int
    columns: int
    bits: str


@dataclass(frozen=True)
class WeightsShown(Event):
    """Histograms and masks of all pruned layers, by parameter name."""

    weights: Mapping[str, WeightFacts]


@dataclass(frozen=True)
class Phase:
    """A part of a run: how long it took, and the peak of memory if this part raised it."""

    name: str
    seconds: float
    peak_bytes: int | None


@dataclass(frozen=True)
class RetrainingStarted(Event):
    """Everything is read, and the network is judged once; retraining begins.

    `measure` is the figure of the held-out samples by which the best epoch is chosen.
    """

    model: str
    settings: Mapping[str, Any]
    teacher: str | None  # the class of the dense network; None: labels
    samples: int | None  # None: nobody knows, as with a loader
    held_out_samples: int
    measure: str
    seed: int
    device: str

    def __str__(self) -> str:
        samples = "" if self.samples is None else f"{counted(self.samples, 'sample')}, "
        return f"{self.model}, {counted(self.settings['epochs'], 'epoch')} of retraining: {samples}on {self.device}"


@dataclass(frozen=True)
class TrainingStep(Counted):
    """One step of retraining. In the first epoch nobody knows how many there are if a loader has no length.

    `held_out` are figures of the held-out samples after the last epoch.
    """

    epoch: int
    epochs: int
    held_out: Mapping[str, float] = field(default_factory=dict)

    def __str__(self) -> str:
        figures = "".join(f", {name} {value:.4f}" for name, value in self.held_out.items())
        return f"retraining, epoch {self.epoch}/{self.epochs}{figures}"


@dataclass(frozen=True)
class EpochEnded(Event):
    """One pass over all training samples has ended. Epoch 0 is the network before retraining.

    `held_out` are figures of the held-out samples: `top1` and `loss` against labels, or `kl` and `agreement` with the
    teacher.
    """

    epoch: int
    epochs: int
    lr: float
    loss: float  # mean of the training steps; NaN before the first
    held_out: Mapping[str, float]
    steps: int = 0  # of training, in this epoch
    best: bool = False  # whether no epoch before was as good on held-out samples
    recalled: bool = False  # an earlier, interrupted call had finished it

    def __str__(self) -> str:
        figures = ", ".join(f"{name} {value:.4f}" for name, value in self.held_out.items())
        return f"epoch {self.epoch}/{self.epochs}: {figures} on held-out samples"


@dataclass(frozen=True)
class Retrained(Event):
    """Retraining has ended; the weights of the best epoch are kept."""

    seconds: float  # of this call


@dataclass(frozen=True)
class Working(Event):
    """What is being done by a verb that prunes several networks, or none: a network of `snows.compare`, a layer of
    `snows.sensitivity`, a measurement of `snows.bench`. `done` of `total` such pieces of work are finished.
    """

    what: str
    done: int
    total: int
    detail: str = ""  # where it is within this piece

    def __str__(self) -> str:
        return self.what


@dataclass(frozen=True)
class RunFinished(Event):
    """The weights are final. `kept` counts them, by parameter name."""

    kept: Mapping[str, int]
    seconds: float
    recalled_solves: int  # that an earlier, interrupted call had finished
    peak_memory_bytes: int | None  # None: not measured
    phases: tuple[Phase, ...] = ()


Listener = Callable[[Event], None]


def ignore(event: Event) -> None:
    """The listener that does nothing."""
