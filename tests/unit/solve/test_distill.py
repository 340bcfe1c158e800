"""The last stage: what it may change, that it is judged, and that its gradient is the loss's."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import snows
from snows.data.samples import read_samples
from snows.devices.memory import Memory
from snows.events import Distilled, DistillStep, Event, RunFinished
from snows.graph import capture
from snows.recipe import DEFAULT
from snows.solve.distill import Distillation, _error, _Gradient, _Match, _pieces
from snows.solve.settings import DistillSettings
from tests.networks import example, make
from tests.transformers import Vision, build, images

PLENTY = Memory(1 << 34)
CPU = torch.device("cpu")
RECIPE = DEFAULT.replace(
    horizon=0, sweeps=1, targets="dense-weights", finish_steps=40, finish_batch=16, finish_rate=1e-3
)
SETTINGS = DistillSettings(steps=40, batch=16, rate=1e-3, half_precision=False)


@pytest.fixture(scope="module")
def model() -> nn.Module:
    return build(Vision)


@pytest.fixture(scope="module")
def finished(model: nn.Module) -> snows.Result:
    return snows.prune(model, images(200), "2:4", recipe=RECIPE, progress=False)


def parts(model: nn.Module, samples: int = 60) -> tuple[Any, dict[str, Tensor], Any]:
    """A captured network, random masks of two of its layers, and samples."""
    table = read_samples(images(samples), model)
    graph = capture(model, *table.call_arguments(0, 2))
    generator = torch.Generator().manual_seed(3)
    names = ["blocks.0.mlp.0.weight", "blocks.1.attention.out.weight"]
    masks = {name: torch.rand(graph.parameters[name].shape, generator=generator) < 0.5 for name in names}
    return graph, masks, table


def test_it_lowers_the_loss_of_samples_it_never_saw(model: nn.Module, finished: snows.Result) -> None:
    before = snows.prune(model, images(200), "2:4", recipe=RECIPE.replace(finish_steps=0), progress=False)
    unseen = images(300, seed=9)
    kl = [snows.evaluate(result.model, unseen, dense=model)["kl"] for result in (before, finished)]
    assert kl[1] < 0.8 * kl[0]
    assert before.report.finish is None
    report = finished.report.finish
    assert report is not None
    assert report.steps == 40
    assert report.loss < report.loss_before
    assert report.seconds < finished.report.seconds


def test_only_kept_weights_and_vectors_change(model: nn.Module, finished: snows.Result) -> None:
    dense = dict(model.named_parameters())
    changed = set()
    for name, value in finished.model.named_parameters():
        if name in finished.masks:
            assert not value[~finished.masks[name]].any()
            assert torch.equal(value != 0, finished.masks[name])
        elif not torch.equal(value, dense[name]):
            assert value.ndim == 1
            changed.add(name)
    assert {"blocks.0.norm1.weight", "blocks.1.mlp.2.bias", "norm.bias", "head.bias", "patches.bias"} <= changed
    assert {"positions", "prefix", "head.weight", "patches.weight"}.isdisjoint(changed)


def test_a_second_run_is_bit_identical(model: nn.Module, finished: snows.Result) -> None:
    again = snows.prune(model, images(200), "2:4", recipe=RECIPE, progress=False)
    for (name, one), (_, other) in zip(finished.model.named_parameters(), again.model.named_parameters(), strict=True):
        assert torch.equal(one, other), name


def test_where_nothing_gets_better_the_start_is_kept(model: nn.Module) -> None:
    graph, masks, table = parts(model)
    fitted, held_out = table.split(40)
    start = {**graph.parameters, **{name: graph.parameters[name] * mask for name, mask in masks.items()}}
    wild = replace(SETTINGS, rate=1e3, steps=5)
    changed, ended = Distillation(graph, masks, fitted, held_out, wild, PLENTY, 0).run(start)
    assert ended.loss == ended.loss_before
    assert set(changed) == {*masks, *graph.vectors}
    for name, value in changed.items():
        assert torch.equal(value, start[name]), name


def test_the_loss_is_that_of_its_definition(model: nn.Module) -> None:
    """Each operation's mean squared error by its variance, and a tenth of all for the outputs, from hooks."""
    graph, masks, table = parts(model)
    match = _Match(graph, table)
    pruned = {name: graph.parameters[name] * mask for name, mask in masks.items()}
    x = table.leaves[0]
    wanted = graph.run_operations([x[:60]], graph.outputs)
    other = capture(snows.data.preparation.with_weights(model, pruned), (x[:2],), {})
    found = other.run_operations([x[:60]], other.outputs)
    output = graph.outputs[0].name
    inner = [name for name in wanted if name != output]
    errors = {n: float((wanted[n] - found[n]).square().mean() / wanted[n].var()) for n in wanted}
    expected = 0.1 * errors[output] + 0.9 * sum(errors[n] for n in inner) / len(inner)
    assert float(match.loss([x[:60]], pruned)) == pytest.approx(expected, rel=1e-5)
    assert match.mean_loss(table, pruned, 7) == pytest.approx(match.mean_loss(table, pruned, 60), rel=1e-5)


def test_the_error_and_its_gradient_are_those_of_the_mean_square() -> None:
    found, wanted = torch.randn(3, 4, 5, dtype=torch.float64).requires_grad_(), torch.randn(3, 4, 5).double()
    assert float(_error(found.detach(), wanted)) == pytest.approx(float((found - wanted).detach().square().mean()))
    assert torch.autograd.gradcheck(lambda value: _error(value, wanted), found)


@pytest.mark.parametrize("precision", ["mixed", "half"])
def test_half_precision_is_the_same_loss_rounded(model: nn.Module, precision: Any) -> None:
    graph, masks, table = parts(model)
    match, x = _Match(graph, table), [table.leaves[0][:60]]
    pruned = {name: (graph.parameters[name] * mask).requires_grad_() for name, mask in masks.items()}
    losses = [match.loss(x, pruned, p) for p in ("full", precision)]
    full, rounded = (torch.cat([g.flatten() for g in torch.autograd.grad(loss, pruned.values())]) for loss in losses)
    assert losses[1].item() == pytest.approx(losses[0].item(), rel=0.02)
    assert rounded.dtype == full.dtype
    assert float((rounded - full).norm() / full.norm()) < 0.05
    assert match.loss(x, pruned).dtype == losses[1].dtype


def test_a_cpu_works_in_full_precision(model: nn.Module) -> None:
    graph, masks, table = parts(model)
    stage = Distillation(graph, masks, table, table, replace(SETTINGS, half_precision=True), PLENTY, 0)
    assert stage._precision(torch.zeros(1)) == "full"
    assert not graph.piecewise_linear
    convolutions = make("conv-bn").float()
    assert capture(convolutions, (example("conv-bn", 4).float(),), {}).piecewise_linear


def test_gradients_of_pieces_add_up(model: nn.Module) -> None:
    graph, masks, table = parts(model)
    match = _Match(graph, table)
    x = table.leaves[0][:32]

    def gradients(pieces: int) -> list[Tensor]:
        variables = [graph.parameters[name].clone().requires_grad_() for name in masks]

        def loss(leaves: list[Any]) -> Tensor:
            pruned = {name: v * mask for (name, mask), v in zip(masks.items(), variables, strict=True)}
            return match.loss(leaves, pruned) / pieces

        gradient = _Gradient(loss, variables)
        gradient.add([part] for part in x.chunk(pieces))
        return [v.grad for v in variables if v.grad is not None]

    for one, four in zip(gradients(1), gradients(4), strict=True):
        torch.testing.assert_close(one, four, rtol=1e-4, atol=1e-7)


def test_gradients_lie_in_memory_as_their_variables_do() -> None:
    """Else fused Adam on a CPU steps along a shuffled gradient; on a GPU it stops with an error."""
    variable, factors = torch.randn(4, 3, 2, 2).requires_grad_(), torch.randn(4, 2, 2, 3)
    loss = lambda _: (variable.permute(0, 2, 3, 1) * factors).sum()  # noqa: E731
    (found,) = torch.autograd.grad(loss(None), variable)
    assert found.stride() != variable.stride()
    _Gradient(loss, [variable]).add([[]])
    assert variable.grad is not None
    assert variable.grad.stride() == variable.stride()
    torch.testing.assert_close(variable.grad, factors.permute(0, 3, 1, 2))


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_a_convolutional_network_may_have_it(device: str) -> None:
    network, x = make("conv-bn").float(), example("conv-bn", 80).float()
    recipe = RECIPE.replace(targets="dense-stream", finish_steps=100, finish_rate=1e-2)
    result = snows.prune(network, x, "2:4", recipe=recipe, device=device, progress=False)
    assert result.report.finish is not None
    assert result.report.finish.loss < 0.9 * result.report.finish.loss_before


def test_little_memory_makes_small_pieces(model: nn.Module) -> None:
    graph, _, _ = parts(model)
    needed = 4 * sum(int(node.meta["bytes"]) for node in graph.nodes)
    assert _pieces(graph, 64, Memory(64 * needed), CPU) == 1
    assert _pieces(graph, 64, Memory(16 * needed), CPU) == 4
    assert _pieces(graph, 64, Memory(needed // 2), CPU) == 64


def test_out_of_memory_is_survived(model: nn.Module, monkeypatch: pytest.MonkeyPatch) -> None:
    graph, masks, table = parts(model)
    fitted, held_out = table.split(40)
    whole = _Match.loss
    sizes = []

    def small_only(self: _Match, leaves: list[Any], parameters: dict[str, Tensor], precision: str = "full") -> Tensor:
        sizes.append(len(leaves[0]))
        if len(leaves[0]) > 4:
            torch.empty(1 << 55)  # a RuntimeError on a CPU
        return whole(self, leaves, parameters)

    monkeypatch.setattr(_Match, "loss", small_only)
    stage = Distillation(graph, masks, fitted, held_out, replace(SETTINGS, steps=2), PLENTY, 0)
    with pytest.warns(snows.SnowsWarning, match=r"going on with [48] samples at a time"):
        ended = stage.run(graph.parameters)[1]
    assert ended.steps == 2
    assert set(sizes) == {16, 8, 4}
    monkeypatch.setattr(_Match, "loss", lambda *_: (_ for _ in ()).throw(torch.OutOfMemoryError))
    with pytest.warns(snows.SnowsWarning), pytest.raises(torch.OutOfMemoryError):
        stage.run(graph.parameters)


def test_every_step_is_an_event(model: nn.Module) -> None:
    seen: list[Event] = []
    recipe = RECIPE.replace(finish_steps=3)
    snows.prune(model, images(40), "2:4", recipe=recipe, progress=seen.append)
    steps = [event for event in seen if isinstance(event, DistillStep)]
    assert [str(event) for event in steps] == ["last stage, all layers together"] * 3
    assert steps == [DistillStep(step, 3) for step in (1, 2, 3)]
    first = seen.index(steps[0])
    assert seen[first : first + 3] == steps
    assert isinstance(seen[first + 3], Distilled)
    assert isinstance(seen[-1], RunFinished)
    assert not any(isinstance(event, DistillStep | Distilled) for event in [*seen[:first], *seen[first + 4 :]])


def test_a_run_that_was_stopped_in_it_ends_the_same(model: nn.Module, finished: snows.Result, tmp_path: Path) -> None:
    def stop(event: Event) -> None:
        if event == DistillStep(20, 40):
            raise KeyboardInterrupt

    options: dict[str, Any] = {"recipe": RECIPE, "resume": tmp_path / "state"}
    with pytest.raises(KeyboardInterrupt):
        snows.prune(model, images(200), "2:4", progress=stop, **options)
    again = snows.prune(model, images(200), "2:4", progress=False, **options)
    for name, value in again.model.named_parameters():
        assert torch.equal(value, finished.model.get_parameter(name)), name


class Folded(nn.Module):
    """A scale that is read as it is, one that something is computed from, and one that is no parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 4)
        self.scale, self.shared = nn.Parameter(torch.ones(8)), nn.Parameter(torch.ones(8))
        self.register_buffer("fixed", torch.ones(8))

    def forward(self, x: Tensor) -> Tensor:
        x = torch.relu(self.first(x) * self.scale) * self.fixed
        return self.second(x * self.shared + self.shared.exp())


def test_vectors_are_parameters_that_nothing_was_computed_from() -> None:
    graph = capture(Folded().eval(), (torch.randn(2, 8),), {})
    assert graph.vectors == ["first.bias", "scale", "second.bias"]


def test_other_inputs_are_taken_as_they_are() -> None:
    """A network of vectors, whose samples no view could be taken of."""
    network = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 4)).eval()
    x = torch.randn(100, 8, generator=torch.Generator().manual_seed(0))
    result = snows.prune(network, x, "2:4", layers="*", recipe=RECIPE, progress=False)
    assert result.report.finish is not None
    assert result.report.finish.loss < result.report.finish.loss_before


def test_samples_may_stay_on_the_host(model: nn.Module) -> None:
    """Drawn one by one or from a copy on the device, it is the same."""
    graph, masks, table = parts(model)
    fitted, held_out = table.to(torch.device("cpu"), torch.float32).split(40)
    start = {**graph.parameters, **{name: graph.parameters[name] * mask for name, mask in masks.items()}}
    settings = replace(SETTINGS, steps=3)
    there, here = (
        Distillation(graph, masks, replace(fitted), held_out, settings, memory, 0).run(start)[1]
        for memory in (PLENTY, Memory(fitted.bytes))
    )
    assert there.loss == pytest.approx(here.loss, rel=1e-5)
