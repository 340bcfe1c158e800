"""The last stage: what it may change, that it is judged, and that its gradient is the loss's."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import snows
from snows.data.samples import read_samples
from snows.devices.memory import Memory
from snows.events import DistillStep, Event, LayerStarted
from snows.graph import capture
from snows.graph.kind import is_image
from snows.plan import own_choices, resolve
from snows.recipe import DEFAULT, PAPER
from snows.solve.augment import random_views
from snows.solve.distill import Finish, _error, _Gradient, _Match, _pieces
from tests.networks import example, make
from tests.transformers import Vision, build, images

PLENTY = Memory(1 << 34)
RECIPE = DEFAULT.replace(
    horizon=0, sweeps=1, targets="dense-weights", finish_steps=40, finish_batch=16, finish_rate=1e-3
)


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
    wild = RECIPE.replace(finish_rate=1e3, finish_steps=5)
    found = Finish(graph, masks, fitted, held_out, wild, PLENTY, 0).run(start)
    assert found.report.loss == found.report.loss_before
    assert set(found.parameters) == {*masks, *graph.vectors}
    for name, value in found.parameters.items():
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
    finish = Finish(graph, masks, table, table, RECIPE, PLENTY, 0)
    assert finish._precision(torch.zeros(1)) == "full"
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
        for part in x.chunk(pieces):
            gradient.add([part])
        return [v.grad for v in variables if v.grad is not None]

    for one, four in zip(gradients(1), gradients(4), strict=True):
        torch.testing.assert_close(one, four, rtol=1e-4, atol=1e-7)


def test_gradients_lie_in_memory_as_their_variables_do() -> None:
    """Else fused Adam on a CPU steps along a shuffled gradient; on a GPU it stops with an error."""
    variable, factors = torch.randn(4, 3, 2, 2).requires_grad_(), torch.randn(4, 2, 2, 3)
    loss = lambda _: (variable.permute(0, 2, 3, 1) * factors).sum()  # noqa: E731
    (found,) = torch.autograd.grad(loss(None), variable)
    assert found.stride() != variable.stride()
    _Gradient(loss, [variable]).add([])
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
    assert _pieces(graph, 64, Memory(64 * needed)) == 1
    assert _pieces(graph, 64, Memory(16 * needed)) == 4
    assert _pieces(graph, 64, Memory(needed // 2)) == 64


def test_out_of_memory_is_survived(model: nn.Module, monkeypatch: pytest.MonkeyPatch) -> None:
    graph, masks, table = parts(model)
    fitted, held_out = table.split(40)
    whole = _Match.loss
    sizes = []

    def small_only(self: _Match, leaves: list[Any], parameters: dict[str, Tensor], precision: str = "full") -> Tensor:
        sizes.append(len(leaves[0]))
        if len(leaves[0]) > 4:
            raise torch.OutOfMemoryError
        return whole(self, leaves, parameters)

    monkeypatch.setattr(_Match, "loss", small_only)
    recipe = RECIPE.replace(finish_steps=2)
    with pytest.warns(snows.SnowsWarning, match=r"going on with [48] samples at a time"):
        found = Finish(graph, masks, fitted, held_out, recipe, PLENTY, 0).run(graph.parameters)
    assert found.report.steps == 2
    assert set(sizes) == {16, 8, 4}
    monkeypatch.setattr(_Match, "loss", lambda *_: (_ for _ in ()).throw(torch.OutOfMemoryError))
    with pytest.warns(snows.SnowsWarning), pytest.raises(torch.OutOfMemoryError):
        Finish(graph, masks, fitted, held_out, recipe, PLENTY, 0).run(graph.parameters)


def test_progress_is_told(model: nn.Module) -> None:
    seen: list[Event] = []
    recipe = RECIPE.replace(finish_steps=3)
    snows.prune(model, images(40), "2:4", recipe=recipe, progress=seen.append)
    steps = [event for event in seen if isinstance(event, DistillStep)]
    assert [(event.step, event.steps) for event in steps] == [(1, 3), (2, 3), (3, 3)]
    assert str(steps[0]) == "last stage, all layers together"
    assert not any(isinstance(event, LayerStarted) for event in seen[seen.index(steps[0]) :])


def test_a_run_that_was_stopped_in_it_ends_the_same(model: nn.Module, finished: snows.Result, tmp_path: Path) -> None:
    def stop(event: Event) -> None:
        if isinstance(event, DistillStep) and event.step == 20:
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


@pytest.mark.parametrize(
    ("network", "size", "device", "steps", "rate"),
    [
        ("transformer", 32, "cuda", 1500, 1e-3),
        ("transformer", 32, "cpu", 150, 1e-3),
        ("transformer", 8, "cuda", 0, 1e-3),
        ("convolutions", 128, "cuda", 1000, 3e-4),
        ("convolutions", 128, "cpu", 100, 3e-4),
        ("convolutions", 32, "cuda", 0, 3e-4),
    ],
)
def test_it_is_for_vision_transformers_and_for_convolutions_of_large_images(
    network: str, size: int, device: str, steps: int, rate: float
) -> None:
    convolutions = nn.Sequential(nn.Conv2d(3, 4, 3, 8), nn.ReLU(), nn.Conv2d(4, 4, 3), nn.Flatten()).eval()
    model = build(Vision, height=size, width=size) if network == "transformer" else convolutions
    graph = capture(model, (images(2, size, size),), {})
    assert {"finish_steps": steps, "finish_rate": rate}.items() <= own_choices(graph, device).items()
    chosen = resolve(DEFAULT.replace(finish_steps=7, finish_rate=0.5), graph, device)
    assert (chosen.finish_steps, chosen.finish_rate) == (7, 0.5)
    assert resolve(PAPER, graph, device).finish_steps == 0


def test_views_are_crops_of_the_image_itself() -> None:
    """A ramp from left to right stays one, mirrored or not, with values from within the image."""
    ramp = torch.linspace(-1, 1, 32).expand(64, 3, 32, 32).contiguous()
    views = random_views(ramp, _until_unmixed(ramp))
    steps = views.diff(dim=3)[:, :, :, 1:-1]
    rising, falling = (steps >= -1e-5).flatten(1).all(1), (steps <= 1e-5).flatten(1).all(1)
    assert (rising | falling).all()
    assert 10 < int(rising.sum()) < 54
    assert float(views.abs().max()) <= 1 + 1e-5
    widths = views[:, 0, 0].amax(1) - views[:, 0, 0].amin(1)
    assert float(widths.min()) > 2 * 0.35**0.5 * 0.9
    assert views.shape == ramp.shape


def test_mixed_views_lie_between_two() -> None:
    halves = torch.cat([torch.zeros(8, 1, 16, 16), torch.ones(8, 1, 16, 16)])
    seeds = (random_views(halves, torch.Generator().manual_seed(seed)) for seed in range(40))
    shares = [float(((views > 0.01) & (views < 0.99)).float().mean()) for views in seeds]
    assert 10 < sum(share > 0.5 for share in shares) < 30
    assert all(share in (0.0,) or share > 0.5 for share in shares)


def _until_unmixed(images: Tensor) -> torch.Generator:
    """A generator whose next views are not mixed: constant images stay what they are."""
    marks = torch.arange(len(images), dtype=torch.float32).view(-1, 1, 1, 1).expand_as(images)
    for seed in range(100):
        if torch.allclose(random_views(marks, torch.Generator().manual_seed(seed)), marks, atol=1e-3):
            return torch.Generator().manual_seed(seed)
    raise AssertionError("every batch was mixed")


@pytest.mark.parametrize(
    ("make", "expected"),
    [
        (lambda: torch.rand(2, 3, 16, 16), True),
        (lambda: torch.rand(2, 1, 28, 28), True),
        (lambda: torch.rand(2, 3, 8, 8), False),
        (lambda: torch.rand(2, 64, 32, 32), False),
        (lambda: torch.randint(0, 9, (2, 3, 16, 16)), False),
        (lambda: torch.rand(2, 16), False),
        (lambda: "words", False),
    ],
)
def test_what_is_an_image(make: Callable[[], object], expected: bool) -> None:
    assert is_image(make()) is expected


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
    recipe = RECIPE.replace(finish_steps=3)
    there, here = (
        Finish(graph, masks, replace(fitted), held_out, recipe, memory, 0).run(start)
        for memory in (PLENTY, Memory(fitted.bytes))
    )
    assert there.report.loss == pytest.approx(here.report.loss, rel=1e-5)
