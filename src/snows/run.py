"""A run: what it holds, and what wraps every step of it. Opened once, and closed in every case.

The loop (`solve.cascade`) and the solves know nothing of journals, retries, clocks, warnings and events: they are here.
"""

from __future__ import annotations

import copy
import dataclasses
import time
import warnings
from collections import ChainMap
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from functools import cached_property, partial
from typing import Any

import torch
from torch import Tensor, nn

from .caller import own_surroundings, quiet_unless
from .data.permuting import permuted
from .data.preparation import Prepared, limits_for, prepare, with_weights
from .data.samples import Samples
from .data.streams import cut
from .devices.device import device_of
from .devices.distributed.ranks import ALONE, Ranks
from .devices.memory import Memory, least_of, one_out_of_memory
from .devices.phases import Phases
from .devices.weights import device_of_resting, kept_as, where_they_rest
from .errors import SnowsWarning
from .events import (
    ChannelsPermuted,
    DenseLayer,
    Event,
    LayerSolved,
    LayerStarted,
    Listener,
    MemoryEstimated,
    RunFinished,
    RunStarted,
)
from .graph import Graph
from .graph.flops import network_flops
from .masks import Choice, MaskMethod, NetworkMethod, default_spread
from .masks.given import settle_reference, warn_of_empty_rows
from .masks.source import GivenMasks, LayerMasks, MaskSource, NetworkMasks, read_mask
from .masks.statistics import CalibratedNetwork
from .patterns import Pattern
from .patterns.budgets import spread_out
from .plan import Plan, make_plan
from .recipe import LEAST_HELD_OUT
from .results.folder import digest_of_samples, versions
from .results.journal import Journal, open_journal
from .results.probe import SAMPLES, Call, first_samples
from .solve.activations import Activations
from .solve.augment import with_mirrored
from .solve.cascade import Group, Step
from .solve.distill import Distillation
from .solve.duration import announce_time
from .solve.effects import effects
from .solve.estimate import Estimate
from .solve.footprint import micro_batch_size
from .solve.layer import SolvedLayer, Turn, contiguous
from .solve.limits import Limits
from .solve.problem import LayerProblem
from .solve.settings import Settings, resolve
from .task import Task

_CHOOSING, _SOLVING = "choosing masks", "solving layers"  # phases


@contextmanager
def open_run(task: Task, *listeners: Listener, ranks: Ranks = ALONE) -> Iterator[Run]:
    """A run that is ready for the cascade. Calls from several threads take turns.

    The caller's random state, gradient mode and warning filters are as before when it is closed.
    """
    events: list[Event] = []

    def notify(event: Event) -> None:
        events.append(event)
        for listener in listeners:
            listener(event)

    device = device_of(task.model, task.device)
    with quiet_unless(ranks.is_first), own_surroundings(device, notify), one_out_of_memory():
        yield Run(task, events, notify, ranks)


class Run:
    """One run. `weights` are all parameters of the network as they are now, `masks` those of the pruned layers.

    Of several ranks each has a run of its own, and all of them take the same steps.
    """

    def __init__(self, task: Task, events: list[Event], notify: Listener, ranks: Ranks) -> None:
        self._began = time.perf_counter()
        self.task, self.events, self.notify, self.ranks = task, events, notify, ranks
        self.model = task.model
        self.phases = Phases()
        self.memory: Memory = least_of(
            ranks.gathered(limits_for(task.model, task.device, task.memory, ranks.on_this_host))
        )
        with self.phases("reading samples, capturing the network"):
            self._prepared = self._prepare()
        self.phases.watch(self.device)
        given, method = read_mask(task.mask, task.rules, self._prepared)
        self.settings = self._resolve(given is not None)
        self._plan = self._make_plan(given)
        if task.permute:
            self._permute(given)
        self.fitted, self.held_out = self._split()
        self.journal = self._open_journal()
        self.notify(self._started(given is not None))
        with self.phases(_CHOOSING):
            self._compare_at_sizes(self._estimate.largest_pass(self.fitted.count))
            self.source, self._plan = self._mask_source(given, method)
        if task.readjusts:
            rows = partial(self.fitted.rows, 0)
            held_out = self.ranks.share(self.held_out.count)
            announce_time(self._estimate, rows, held_out, task.recipe.effort, self.notify)
        self._changed = {planned.layer.parameter for planned in self._plan.pruned}
        self._current, self._limits = copy.copy(self.graph.parameters), Limits(self._prepared.dtypes)
        self._keep_choice(Choice({}))
        self._before_last_stage: dict[str, Tensor] = {}
        self._steps_plan, self._new_masks = self._plan, True
        self._sweep = self._index = 0
        self._recalled = False  # whether the layers at hand were solved by an earlier call

    @property
    def graph(self) -> Graph:
        return self._prepared.graph

    @property
    def device(self) -> torch.device:
        return self._prepared.device

    # What the cascade asks for

    def sweep(self, number: int) -> Iterator[Group]:
        before = self._steps_plan
        self._steps_plan = self._plan.on_the_way(min(1, (number + 1) / self.settings.mask_steps))
        self._sweep, self._index = number, 0
        self._new_masks = number == 0 or self._steps_plan.patterns != before.patterns
        if self._new_masks:
            with self.phases(_CHOOSING):
                self._keep_choice(self._choose_together())
        self._activations.restart(self._current)
        for group in self._steps_plan.groups:
            self.notify(LayerStarted(*self._where(group)))
            yield group
            self._index += 1

    def problem(self, group: Group) -> LayerProblem:
        with self.phases("computing activations"):
            return self._activations.problem(group)

    def choose(self, group: Group, problem: LayerProblem | None = None) -> Mapping[str, Tensor]:
        if self._new_masks and self.source.by_layer:
            with self.phases(_CHOOSING):
                chosen = self.source.at_layers(group, problem or self.problem(group), self._current)
            self.ranks.take_first([*chosen.masks.values(), *chosen.weights.values()])
            self._masks.update(chosen.masks)
            self._chosen_weights.update(chosen.weights)
        return self._masks

    @property
    def weights(self) -> Mapping[str, Tensor]:
        """Where masks are new, a solve starts from the weights that the mask method gave, if it gave some."""
        return ChainMap(self._chosen_weights, self._current) if self._new_masks else self._current

    @property
    def turn(self) -> Turn:
        return Turn(self.task.seed, self._sweep, self._index, self._new_masks)

    def recall(self) -> SolvedLayer | None:
        found = self.journal.recall(self._sweep, self._index)
        self._recalled = found is not None
        return found

    def attempt(self, step: Step, group: Group) -> SolvedLayer:
        solved: SolvedLayer | None = None
        while solved is None:
            began = time.perf_counter()
            # What filled the memory is freed when this block is left.
            with self.phases(_SOLVING), suppress(self.ranks.out_of_memory), one_out_of_memory():
                solved = step(self, group)
            if solved is None:
                self._activations.use_smaller_pieces(group[0].layer.name)
        self.ranks.take_first([*solved.weights.values(), *solved.masks.values()])
        report = dataclasses.replace(solved.solve, seconds=time.perf_counter() - began)
        solved = self._limits.solved(dataclasses.replace(solved, solve=report), self._current)
        self.journal.record(self._sweep, self._index, solved)
        return solved

    def accept(self, group: Group, solved: SolvedLayer) -> None:
        self._current.update(solved.weights)
        self._masks.update(solved.masks)
        self.notify(LayerSolved(*self._where(group), solve=solved.solve, recalled=self._recalled))

    def _where(self, group: Group) -> tuple[tuple[str, ...], int, int, int, int]:
        names = tuple(planned.layer.name for planned in group)
        return names, self._index, len(self._steps_plan.groups), self._sweep, self.settings.sweeps

    # What follows the cascade

    @property
    def masks(self) -> dict[str, Tensor]:
        masks = where_they_rest(self._masks)
        return {planned.layer.parameter: masks[planned.layer.parameter] for planned in self._plan.pruned}

    def distill(self) -> None:
        """The last stage, where the settings have one."""
        if self.settings.distill.steps == 0:
            return
        stage = Distillation(
            self.graph,
            self.masks,
            self.fitted,
            self.held_out,
            self.settings.distill,
            self.memory,
            self.task.seed,
            self.ranks,
        )
        self._before_last_stage = {name: self._current[name] for name in self._changed}
        with self.phases("last stage"):
            changed, ended = stage.run(self._current, self.notify)
            self.ranks.take_first(changed.values())
            changed, ended = self._limits.distilled(changed, ended)
        self._current.update(changed)
        self._changed |= changed.keys()
        self.notify(ended)

    def compare(self) -> None:
        """What the report shows of the pruned network beside the dense one."""
        changed = self._changed_weights()
        stages = {"before the last stage": self._before_last_stage, "SNOWS": changed if self.task.readjusts else {}}
        samples, count = self.held_out if self.held_out.count else self.fitted, self._prepared.samples.count
        with self.phases("comparing with the dense network"):
            for event in effects(self.graph, self.masks, self._current, stages, samples, count, self.memory):
                self.notify(event)

    def finish(self) -> nn.Module:
        """The pruned model: a new module of the same class, in the caller's dtype."""
        warn_of_empty_rows(self.masks)
        kept = {name: int(mask.sum()) for name, mask in self.masks.items()}
        # Weights that rest in host memory are as many as the network has: they become the result's own.
        handed_over = self.memory.room is not None and self.device.type != "cpu"
        pruned = with_weights(self.model, self._changed_weights(), handed_over)
        seconds, peak = time.perf_counter() - self._began, self.phases.device_peak
        self.notify(RunFinished(kept, seconds, self.journal.recalled, peak, self.phases.found))
        return pruned

    def probe(self) -> Call:
        """A few inputs, by which a saved model is verified later."""
        dtype = next(p.dtype for p in self.model.parameters() if p.is_floating_point())
        return first_samples(*self._prepared.samples.call_arguments(0, SAMPLES), dtype)

    # How it is opened

    def _prepare(self) -> Prepared:
        task = self.task
        in_shares = self.ranks.size > 1 and not task.recipe.may_mirror
        options = (task.device, task.seed, task.given_labels, in_shares, self.memory.room)
        return prepare(self.model, task.calibration, *options)

    def _resolve(self, given: bool) -> Settings:
        settings = resolve(self.task.recipe, self.graph, self.device.type, self.task.rules)
        if given or not self.task.readjusts:
            settings = dataclasses.replace(settings, mask_steps=1)
        if self.task.readjusts:
            return settings
        return dataclasses.replace(settings, sweeps=1, distill=dataclasses.replace(settings.distill, steps=0))

    def _make_plan(self, given: Mapping[str, Tensor] | None) -> Plan:
        task = self.task
        plan = make_plan(self.graph, task.rules, self.settings.horizon, task.layers, task.exclude, given)
        plan.require_layers()
        return plan

    def _permute(self, given: Mapping[str, Tensor] | None) -> None:
        """Go on with the same network, its channels re-ordered for the N:M patterns of the plan."""
        found = permuted(self.model, self._prepared, self._plan.patterns, given is not None, self.task.seed)
        self.model = found.model
        self._prepared = self._prepare()
        self._plan = self._make_plan(given)
        self.notify(ChannelsPermuted(found.kept_before, found.kept_after))

    def _split(self) -> tuple[Samples, Samples]:
        """Samples that weights are fitted to, and samples to judge them by."""
        samples, recipe = self._prepared.samples, self.task.recipe
        held_out = recipe.held_out_samples(samples.count) if self.task.readjusts else 0
        if self.task.readjusts and recipe.held_out and held_out < LEAST_HELD_OUT:
            warnings.warn(
                f"there are only {samples.count} calibration samples: weights fit their noise, and losses of the "
                f"{held_out} that are held out mean little; give some hundreds, or better a few thousand",
                SnowsWarning,
                stacklevel=2,
            )
        fitted, judged = samples.split(samples.count - held_out)
        return with_mirrored(fitted).shuffled(self.task.seed) if self.settings.mirror else fitted, judged

    def _open_journal(self) -> Journal:
        def facts() -> dict[str, Any]:
            calibration = digest_of_samples([self.fitted, self.held_out], self.ranks)
            samples = self._prepared.samples.count
            return self.task.facts(self.graph, calibration, samples, self.phases.device_name)

        return open_journal(self.task.resume, facts, device_of_resting(self.graph.parameters), self.ranks)

    @cached_property
    def _batch_size(self) -> int:
        fitted = self.fitted.count
        return micro_batch_size(self.graph, self._plan, fitted, self.settings, self.device, self.memory, self.ranks)

    def _mask_source(self, given: Mapping[str, Tensor] | None, method: MaskMethod | None) -> tuple[MaskSource, Plan]:
        """Where masks come from, and the plan with each layer's own sparsity."""
        if method is None:
            masks = {p.layer.parameter: (given or {})[p.layer.parameter] for p in self._plan.pruned}
            settle_reference(self._prepared, masks)
            return GivenMasks(masks), self._plan
        by_layer = not isinstance(method, NetworkMethod)
        dense = self._network(self._plan.patterns, self.graph.parameters)
        patterns = spread_out(self._plan.patterns, dense, default_spread(method), not by_layer)
        plan = self._plan.with_patterns(patterns)
        if isinstance(method, NetworkMethod):
            return NetworkMasks(method, self._network), plan
        return LayerMasks(method, self.task.readjusts, self.memory.choosing, self.ranks), plan

    def _network(self, patterns: Mapping[str, Pattern], weights: Mapping[str, Tensor]) -> CalibratedNetwork:
        labels, limit, compare = self.fitted.labels, self.memory.choosing, self._compare_at_sizes
        options = (self.task.seed, labels, limit, weights, compare, self.ranks)
        return CalibratedNetwork(self.graph, self.fitted, patterns, *options)

    def _compare_at_sizes(self, largest: int) -> None:
        """Before so many samples go through the network at once."""
        self._prepared.compare_at_sizes(largest, self.fitted)

    def _keep_choice(self, choice: Choice) -> None:
        self._masks = kept_as(self._current, choice.masks)
        self._chosen_weights = kept_as(self._current, choice.weights)

    def _changed_weights(self) -> dict[str, Tensor]:
        weights = where_they_rest(self._current)
        return {name: weights[name] for name in self._changed}

    def _choose_together(self) -> Choice:
        choice = self.journal.recall_choice(self._sweep)
        if choice is None:
            choice = self.source.before_sweep(self._steps_plan.patterns, self._current)
            choice = Choice(contiguous(choice.masks), contiguous(choice.weights))
            self.ranks.take_first([*choice.masks.values(), *choice.weights.values()])
            if not self.source.by_layer:
                self.journal.record_choice(self._sweep, choice)
        return choice

    @cached_property
    def _estimate(self) -> Estimate:
        """Of this rank."""
        graph, plan, count = self.graph, self._plan, self.fitted.count + self.held_out.count
        own, batch = self.ranks.share(count), self.ranks.share(self._batch_size)
        return Estimate(graph, plan, self.settings, self.memory, self.device, own, batch, self.ranks.size)

    @cached_property
    def _activations(self) -> Activations:
        graph, plan, fitted, held_out = self.graph, self._plan, self.fitted, self.held_out
        if self.task.readjusts and self.device.type != "cpu":
            self.notify(MemoryEstimated(self._estimate.peak()))
        batches = cut(fitted, held_out, [node.name for node in graph.inputs], self._batch_size, self.ranks)
        return Activations(graph, plan, batches, self.settings, self.memory, self.task.readjusts)

    def _started(self, given: bool) -> RunStarted:
        task, plan, flops = self.task, self._plan, network_flops(self.graph)
        return RunStarted(
            model=type(task.model).__name__,
            pattern="given" if task.rules is None else str(task.rules),
            mask="given" if given and task.mask_name != "weights" else task.mask_name,
            recipe=dataclasses.asdict(task.recipe),
            layers=plan.facts(flops.layers, task.readjusts),
            dense_layers=tuple(DenseLayer(layer.name, tuple(layer.shape), reason) for layer, reason in plan.dense),
            network_weights=sum(parameter.numel() for parameter in task.model.parameters()),
            samples=self._prepared.samples.count,
            held_out_samples=self.held_out.count,
            seed=task.seed,
            device=self.phases.device_name,
            versions=versions(),
            flops=flops.total,
            attention_flops=flops.attention,
        )
