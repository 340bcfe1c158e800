"""The caller's random state, gradient mode and warning filters: put back after a run, and used for its warnings."""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

import snows
from snows.caller import own_surroundings
from snows.data.models import build_model
from snows.errors import SnowsWarning
from snows.events import Event, Warned

WORDS = "this layer is odd"
CPU = torch.device("cpu")


@contextmanager
def surroundings(events: list[Event] | None = None) -> Iterator[None]:
    with own_surroundings(CPU, [].append if events is None else events.append):
        yield


def warn(words: str = WORDS) -> None:
    warnings.warn(words, SnowsWarning, stacklevel=2)


def warn_and_fail() -> None:
    warn()
    raise ZeroDivisionError


# Random state and modes


def test_random_numbers_of_a_run_are_not_the_callers() -> None:
    torch.manual_seed(4)
    expected = torch.rand(3)
    torch.manual_seed(4)
    with surroundings():
        torch.manual_seed(9)
        torch.rand(5)
    assert torch.equal(torch.rand(3), expected)


@pytest.mark.parametrize(
    ("device", "there", "cuda", "used", "seeded"),
    [
        ("cuda", 1, False, ["cuda"], [0]),
        ("cuda:1", 2, False, ["cuda:1"], [0, 1]),
        ("cuda:1", 1, False, [], []),
        ("cuda", 0, False, [], []),
        ("cpu", 2, False, [], []),
        ("cpu", 2, True, [], [0, 1]),
    ],
)
def test_a_run_has_its_gpu_as_the_current_one_and_random_states_are_put_back(
    device: str, there: int, cuda: bool, used: list[str], seeded: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Random states of all GPUs: torch.manual_seed seeds all. A run on a CPU does not start CUDA."""
    forked: list[int] = []
    current: list[str] = []

    @contextmanager
    def fork(devices: list[int]) -> Iterator[None]:
        forked.extend(devices)
        yield

    @contextmanager
    def make_current(chosen: torch.device) -> Iterator[None]:
        current.append(str(chosen))
        yield
        current.append("as before")

    monkeypatch.setattr(torch.random, "fork_rng", fork)
    monkeypatch.setattr(torch.cuda, "device", make_current)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: there)
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: cuda)
    with own_surroundings(torch.device(device)):
        assert (forked, current) == (seeded, used)
    assert current == ([*used, "as before"] if used else [])


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode, torch.enable_grad])
@pytest.mark.parametrize("raises", [False, True])
def test_gradients_are_on_within_and_as_before_afterwards(mode: type[torch.no_grad], raises: bool) -> None:
    with mode():
        before = torch.is_grad_enabled(), torch.is_inference_mode_enabled()
        with pytest.raises(ZeroDivisionError) if raises else surroundings(), surroundings():
            assert (torch.is_grad_enabled(), torch.is_inference_mode_enabled()) == (True, False)
            if raises:
                raise ZeroDivisionError
        assert (torch.is_grad_enabled(), torch.is_inference_mode_enabled()) == before


# Warnings


def test_a_warning_is_shown_at_once_and_is_an_event() -> None:
    events: list[Event] = []
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("default")
        with surroundings(events):
            warn()
            assert [str(each.message) for each in caught] == [WORDS]
            assert events == [Warned(WORDS)]
        assert len(caught) == 1


def test_a_warning_is_shown_even_if_the_run_fails() -> None:
    events: list[Event] = []
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("default")
        with pytest.raises(ZeroDivisionError), surroundings(events):
            warn_and_fail()
    assert [(each.category, str(each.message)) for each in caught] == [(SnowsWarning, WORDS)]
    assert events == [Warned(WORDS)]


def test_the_same_warning_is_shown_once_in_a_run() -> None:
    events: list[Event] = []
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(2):
            with surroundings(events):
                warn("first")
                for _ in range(3):
                    warn("again")
                warn("first")
    assert [str(each.message) for each in caught] == ["first", "again"] * 2
    assert events == [Warned("first"), Warned("again"), Warned("first", 2), Warned("again", 3)] * 2


def test_a_filter_that_makes_errors_of_warnings_stops_the_run() -> None:
    events: list[Event] = []
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        before = list(warnings.filters)
        with pytest.raises(SnowsWarning, match=WORDS), surroundings(events):
            warn_and_fail()
        assert list(warnings.filters) == before
    assert events == [Warned(WORDS)]


@pytest.mark.parametrize("category", [SnowsWarning, UserWarning])
def test_a_filter_that_hides_warnings_leaves_the_event(category: type[Warning]) -> None:
    events: list[Event] = []
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        warnings.simplefilter("ignore", category)
        with surroundings(events):
            warn()
    assert (len(caught), events) == (0, [Warned(WORDS)])


def test_a_warning_names_the_callers_line() -> None:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("default")
        line = inspect.stack()[0].lineno + 1
        with own_surroundings(CPU, lambda event: None):
            warn()
    assert (Path(caught[0].filename), caught[0].lineno) == (Path(__file__), line)


def test_warnings_of_others_are_shown_as_ever() -> None:
    events: list[Event] = []
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        with surroundings(events):
            for _ in range(2):
                warnings.warn("mind the gap", DeprecationWarning, stacklevel=1)
    assert [(each.category, str(each.message)) for each in caught] == [(DeprecationWarning, "mind the gap")] * 2
    assert events == []


def test_filters_and_the_way_warnings_are_shown_are_put_back() -> None:
    filters, show = list(warnings.filters), warnings.showwarning
    with surroundings():
        assert warnings.showwarning is not show
    assert list(warnings.filters) == filters
    assert warnings.showwarning is show


def test_warnings_of_prune_come_before_its_error() -> None:
    """The model is in train mode, and no layer fits the pattern."""
    model = nn.Sequential(nn.Linear(6, 6), nn.ReLU(), nn.Linear(6, 6), nn.ReLU(), nn.Linear(6, 2)).train()
    events: list[Event] = []
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("default")
        with pytest.raises(snows.InputError, match="no layer can be pruned"):
            snows.prune(model, torch.randn(8, 6), "2:4", progress=events.append)
    assert [(each.category, Path(each.filename)) for each in caught] == [(SnowsWarning, Path(__file__))]
    assert events == [Warned(str(caught[0].message))]


def test_an_error_filter_stops_prune() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 2)).train()
    with warnings.catch_warnings():
        warnings.simplefilter("error", SnowsWarning)
        with pytest.raises(SnowsWarning, match="train mode"):
            snows.prune(model, torch.randn(8, 4), "2:4", progress=False)


# Every verb


def odd_model() -> nn.Module:
    return nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 3)).eval()


class Noisy(Dataset[Tensor]):
    """Samples with random views, as datasets have them."""

    def __len__(self) -> int:
        return 24

    def __getitem__(self, index: int) -> Tensor:
        return X[index] + 0.01 * torch.randn(8)


X = torch.randn(24, 8, generator=torch.Generator().manual_seed(0))
Y = torch.arange(24) % 3
QUICK = snows.Recipe(horizon=0, sweeps=1)


def bench(model: nn.Module, place: Path) -> None:
    saved = snows.prune(model, X, "2:4", layers="2", solver=None, progress=False).save(place / "pruned")
    snows.bench(saved, model, batches=[2], engines=[], device="cpu", progress=False)


def retrain(model: nn.Module, place: Path) -> None:
    pruned = snows.prune(model, X, "2:4", layers="2", solver=None, progress=False)
    snows.retrain(pruned, Noisy(), teacher=model, held_out=DataLoader(Noisy(), 8), epochs=1, progress=False)


def use_saved(model: nn.Module, place: Path) -> None:
    result = snows.prune(model, X, "2:4", layers="2", solver=None, progress=False)
    saved = result.save(place / "pruned")
    assert snows.verify(saved, model).ok
    assert snows.export(saved, "safetensors", model, out=place / "exported").differences
    loaded = snows.load(saved, odd_model().to_empty(device="cpu"))
    assert torch.equal(loaded.get_parameter("2.weight"), result.model.get_parameter("2.weight"))
    assert snows.evaluate(loaded, X, Y, dense=model)["agreement"] > 0
    snows.unfreeze(snows.freeze(loaded, saved))


def use_recorded(_: nn.Module, place: Path) -> None:
    model, images = build_model("resnet20-fashion"), torch.linspace(0, 1, 4 * 784, device="cpu").view(4, 1, 28, 28)
    result = snows.prune(model, images, "2:4", layers="layer3.2.conv2", solver=None, progress=False)
    saved = replace(result, source="resnet20-fashion").save(place / "pruned")
    assert snows.verify(saved).ok
    assert {tensor.device.type for tensor in snows.load(saved).state_dict().values()} == {"cpu"}


VERBS: dict[str, Callable[[nn.Module, Path], object]] = {
    "save, verify, export, load, evaluate, freeze": use_saved,
    "save, verify and load by the recorded name": use_recorded,
    "prune": lambda model, _: snows.prune(model, Noisy(), "2:4", recipe=QUICK, progress=False),
    "inspect": lambda model, _: snows.inspect(model, Noisy(), "2:4"),
    "compare": lambda model, _: snows.compare(model, Noisy(), "2:4", "magnitude", test=X, recipe=QUICK, progress=False),
    "sensitivity": lambda model, _: snows.sensitivity(model, Noisy(), 0.5, progress=False),
    "linear_probe": lambda model, _: snows.linear_probe(model, X, Y, X, Y),
    "bench": bench,
    "retrain": retrain,
}


@pytest.mark.parametrize("verb", VERBS)
def test_every_verb_works_in_any_surroundings_and_leaves_them(verb: str, tmp_path: Path) -> None:
    model = odd_model()
    before = torch.get_rng_state()
    with torch.no_grad(), torch.device("meta"):
        VERBS[verb](model, tmp_path)
        assert not torch.is_grad_enabled()
        assert torch.get_default_device().type == "meta"
    assert torch.equal(torch.get_rng_state(), before)
    assert all(parameter.grad is None for parameter in model.parameters())
