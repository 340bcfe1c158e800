"""The main loop: the paper's Algorithm 3.

Two streams of the same samples run through one graph. The dense one gives targets, the pruned one gives inputs. Each
layer (or group: query, key and value of an attention) is solved with all layers before it already pruned and, in the
first sweep, all layers behind it still dense.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Protocol

from torch import Tensor

from ..devices.memory import Memory
from ..plan import PlannedLayer
from .layer import SolvedLayer, Turn, mask_layer, solve_layer
from .problem import LayerProblem
from .settings import Settings

Group = tuple[PlannedLayer, ...]


class CascadeRun(Protocol):
    """What the loop asks of a run (`snows.run.Run`). Journal, retries, clock and events are the run's business."""

    settings: Settings
    memory: Memory

    def sweep(self, number: int) -> Iterator[Group]:
        """The groups of one sweep, in order of execution. The streams start anew, and masks where patterns change."""

    def problem(self, group: Group) -> LayerProblem:
        """The K-step problem of the group, from the two streams."""

    def choose(self, group: Group, problem: LayerProblem | None = None) -> Mapping[str, Tensor]:
        """The masks of the group. A method that goes layer by layer chooses them now, by the problem's statistics."""

    @property
    def weights(self) -> Mapping[str, Tensor]:
        """All weights: solved ones, and those that the next solve starts from."""

    @property
    def turn(self) -> Turn: ...

    def recall(self) -> SolvedLayer | None:
        """What an earlier, interrupted run has found for the group at hand."""

    def attempt(self, step: Step, group: Group) -> SolvedLayer:
        """Take the step, with smaller pieces if the device runs out of memory."""

    def accept(self, group: Group, solved: SolvedLayer) -> None:
        """Keep the new weights."""


Step = Callable[[CascadeRun, Group], SolvedLayer]


def solve_group(run: CascadeRun, group: Group) -> SolvedLayer:
    """Choose the masks of the group and re-adjust what they keep."""
    problem = run.problem(group)
    masks = run.choose(group, problem)
    return solve_layer(problem, run.weights, masks, run.settings, run.memory, run.turn)


def mask_group(run: CascadeRun, group: Group) -> SolvedLayer:
    """Choose the masks of the group and apply them."""
    masks = run.choose(group)
    names = [planned.layer.parameter for planned in group]
    return mask_layer(names, run.weights, masks, run.turn.sweep)


def cascade(run: CascadeRun, step: Step = solve_group) -> None:
    """Take the step for every group of layers, in every sweep."""
    for number in range(run.settings.sweeps):
        for group in run.sweep(number):
            solved = run.recall() or run.attempt(step, group)
            run.accept(group, solved)
