"""The main loop: Algorithm 3 of the paper.

Two streams of the same samples run through one graph: the dense stream gives targets, the pruned stream gives inputs.
One group of layers is solved at a time. A group is a single layer, or the query, key and value of one attention. All
layers before it are already pruned; in the first sweep, all layers after it are still dense.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Protocol

from torch import Tensor

from ..devices.memory import Memory
from ..events import Listener
from ..plan import PlannedLayer
from .layer import SolvedLayer, Turn, mask_layer, solve_layer
from .problem import LayerProblem
from .settings import Settings

Group = tuple[PlannedLayer, ...]


class CascadeRun(Protocol):
    """What the loop needs of a run. `snows.run.Run` adds the journal, retries, the clock and events around it."""

    settings: Settings
    memory: Memory
    notify: Listener

    def sweep(self, number: int) -> Iterator[Group]:
        """The groups of one sweep, in order of execution. Streams start anew, and new patterns get new masks."""

    def problem(self, group: Group) -> LayerProblem:
        """The K-step problem of the group."""

    def choose(self, group: Group, problem: LayerProblem | None = None) -> Mapping[str, Tensor]:
        """The masks chosen so far. Layer methods choose those of the group now, by the statistics of the problem."""

    @property
    def weights(self) -> Mapping[str, Tensor]:
        """All weights, those that the next solve starts from included."""

    @property
    def turn(self) -> Turn:
        """The sweep and the group at hand."""

    def recall(self) -> SolvedLayer | None:
        """The result for the group at hand, if an earlier, interrupted run recorded it."""

    def attempt(self, step: Step, group: Group) -> SolvedLayer:
        """Take the step. If the device runs out of memory, try again with smaller pieces."""

    def accept(self, group: Group, solved: SolvedLayer) -> None:
        """Keep the new weights."""


Step = Callable[[CascadeRun, Group], SolvedLayer]


def solve_group(run: CascadeRun, group: Group) -> SolvedLayer:
    """Choose the masks of the group and re-adjust what they keep."""
    problem = run.problem(group)
    masks = run.choose(group, problem)
    return solve_layer(problem, run.weights, masks, run.settings, run.memory, run.turn, run.notify)


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
