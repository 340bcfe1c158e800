"""Retraining: masks stay, the best epoch is kept, a killed run goes on with the same bits."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, IterableDataset, TensorDataset

import snows
from snows.data import embedded
from snows.events import EpochEnded, Event, Retrained, RetrainingStarted, TrainingStep, Warned
from snows.results.report import fold
from tests.saved import contents

QUICK: dict[str, Any] = {"epochs": 3, "batch": 16, "lr": 0.01, "progress": False}


def dense() -> nn.Sequential:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = nn.Sequential(
            nn.Linear(8, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Dropout(0.1), nn.Linear(16, 16), nn.ReLU(),
            nn.Linear(16, 3),
        ).eval()  # fmt: skip
        with torch.no_grad():
            model[6].weight *= 20  # predictions that are far from even
        return model


X = torch.randn(145, 8, generator=torch.Generator().manual_seed(1))
with torch.no_grad():
    Y = dense()(X).argmax(1)


def pruned(model: nn.Module | None = None) -> snows.Result:
    return snows.prune(model or dense(), X, "1:4", layers=["0", "4"], solver=None, progress=False)


def bits(result: snows.Result) -> dict[str, Tensor]:
    return dict(result.model.state_dict())


def equal(a: dict[str, Tensor], b: dict[str, Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


@pytest.mark.parametrize("teacher", [None, dense()])
def test_masks_stay_and_predictions_come_back(teacher: nn.Module | None) -> None:
    start = pruned()
    before = {name: tensor.clone() for name, tensor in bits(start).items()}
    after = snows.retrain(start, (X, Y) if teacher is None else X, teacher=teacher, **QUICK)
    assert equal(before, bits(start))
    for name, kept in start.masks.items():
        weight = dict(after.model.named_parameters())[name]
        assert torch.equal(after.masks[name], kept)
        assert not weight[~kept].any()
        assert not torch.equal(weight, before[name])
    done = after.report.retraining
    assert done is not None
    assert done.samples == 131
    assert done.held_out_samples == 14
    assert done.teacher == (None if teacher is None else "Sequential")
    if teacher is None:
        assert done.measure == "top1"
        assert done.after["top1"] > done.before["top1"]
    else:
        assert done.measure == "kl"
        assert done.after["kl"] < done.before["kl"]
    assert not after.model.training
    assert start.report.retraining is None


def test_the_trained_result_is_ordinary_again() -> None:
    """The guards are gone: a step of SGD regrows removed weights. So are the gradients."""
    after = snows.retrain(pruned(), (X, Y), **QUICK)
    assert all(parameter.grad is None for parameter in after.model.parameters())
    after.model(X).sum().backward()
    torch.optim.SGD(after.model.parameters(), lr=0.1).step()
    name, kept = next(iter(after.masks.items()))
    assert dict(after.model.named_parameters())[name][~kept].any()


@pytest.mark.filterwarnings("ignore:the masks of 3 layers remove")  # it removes whole outputs
def test_the_embedded_network_at_nine_tenths() -> None:
    x, _, test_x, test_y = (part[:160] for part in embedded.images())
    start = snows.prune(embedded.model(), x[:32], 0.9, solver=None, progress=False)
    after = snows.retrain(
        start, x, teacher=embedded.model(), epochs=2, lr=0.05, lr_decay_every=1, batch=16, crop=1, flip=True,
        progress=False,
    )  # fmt: skip
    was, now = (snows.evaluate(result.model, test_x, test_y)["top1"] for result in (start, after))
    assert now > was + 0.1


class Killed(Exception):  # noqa: N818  # stands for the end of the process
    pass


def killed_at(epoch: int, step: int) -> Callable[[Event], None]:
    def listener(event: Event) -> None:
        if isinstance(event, TrainingStep) and event.epoch == epoch and event.step % 9 == step:
            raise Killed

    return listener


def loader() -> DataLoader[Any]:
    return DataLoader(TensorDataset(X, Y), 16, shuffle=True)


SOURCES: dict[str, Callable[[], dict[str, Any]]] = {
    "table": lambda: {"data": (X, Y)},
    "loader": lambda: {"data": loader(), "held_out": (X[:20], Y[:20])},
    "teacher": lambda: {"data": X, "teacher": dense()},
}


@pytest.mark.parametrize("source", SOURCES)
def test_a_killed_run_goes_on_with_the_same_bits(source: str, tmp_path: Path) -> None:
    start, arguments = pruned(), SOURCES[source]()
    whole = snows.retrain(start, **arguments, **QUICK)
    options = {**QUICK, "resume": tmp_path / "kept"}
    for listener in (killed_at(2, 4), killed_at(3, 7)):
        with pytest.raises(Killed):
            snows.retrain(start, **arguments, **{**options, "progress": listener})
        torch.rand(3)  # the process's own random numbers play no part
    resumed = snows.retrain(start, **arguments, **options)
    assert equal(bits(whole), bits(resumed))
    a, b = whole.report.retraining, resumed.report.retraining
    assert a is not None
    assert b is not None
    assert [replace(ended, recalled=False) for ended in b.history[1:]] == a.history[1:]
    assert a.best_epoch == b.best_epoch
    assert (a.recalled_epochs, b.recalled_epochs) == (0, 2)
    assert len(list((tmp_path / "kept" / "epochs").iterdir())) == 1
    again = snows.retrain(start, **arguments, **options)
    assert equal(bits(whole), bits(again))


def test_a_folder_of_other_settings_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    start = pruned()
    given = {"data": Rows(), "held_out": (X[:20], Y[:20]), "resume": tmp_path / "kept", **QUICK}
    snows.retrain(start, **given)
    before = contents(tmp_path)
    other_masks = {name: kept.logical_not().roll(1) | kept for name, kept in start.masks.items()}
    fewer = pruned()
    fewer.model[6].weight.requires_grad_(False)  # type: ignore[index,union-attr]  # it is a Sequential
    for words, result, others in (
        ("lr was 0.01 and is 0.1", start, {"lr": 0.1}),
        ("the training samples differ", start, {"data": Rows(X + 1)}),
        ("the training samples differ", start, {"data": DataLoader(Rows(X + 1), 16)}),
        ("the held-out samples differ", start, {"held_out": Rows()}),
        ("teacher was none", start, {"teacher": dense()}),
        ("the masks differ", replace(start, masks=other_masks), {}),
        ("the parameters that are trained differ", fewer, {}),
    ):
        with pytest.raises(snows.InputError, match=words):
            snows.retrain(result, **{**given, **others})
    monkeypatch.setattr("snows.results.folder.__version__", "0.13.0")
    with pytest.raises(snows.InputError, match=rf"versions snows was {re.escape(snows.__version__)} and is 0\.13\.0"):
        snows.retrain(start, **given)
    assert contents(tmp_path) == before


def renamed(file: Path) -> None:
    """As a later epoch."""
    file.rename(file.with_name(file.name.replace("epoch00002", "epoch00003")))


def of_another_run(file: Path) -> None:
    other = file.parents[2] / "other"
    with pytest.raises(Killed):
        snows.retrain(pruned(), (X, Y), **{**QUICK, "seed": 5, "progress": killed_at(3, 4)}, resume=other)
    (theirs,) = (other / "epochs").iterdir()
    file.unlink()
    (file.parent / theirs.name).write_bytes(theirs.read_bytes())


@pytest.mark.parametrize("spoil", [renamed, of_another_run])
def test_an_epoch_that_belongs_elsewhere_is_not_used(spoil: Callable[[Path], None], tmp_path: Path) -> None:
    start = pruned()
    whole = snows.retrain(start, (X, Y), **QUICK)
    with pytest.raises(Killed):
        snows.retrain(start, (X, Y), **{**QUICK, "progress": killed_at(3, 4)}, resume=tmp_path / "kept")
    (file,) = (tmp_path / "kept" / "epochs").iterdir()
    spoil(file)
    with pytest.warns(snows.SnowsWarning, match=r"not what was written for epoch0000\d of this run"):
        again = snows.retrain(start, (X, Y), **QUICK, resume=tmp_path / "kept")
    assert equal(bits(whole), bits(again))


def test_a_damaged_epoch_is_not_used(tmp_path: Path) -> None:
    start = pruned()
    whole = snows.retrain(start, (X, Y), **QUICK, resume=tmp_path / "kept")
    (file,) = (tmp_path / "kept" / "epochs").iterdir()
    file.write_bytes(file.read_bytes()[:-1] + b"x")
    with pytest.warns(snows.SnowsWarning, match="is damaged"):
        again = snows.retrain(start, (X, Y), **QUICK, resume=tmp_path / "kept")
    assert equal(bits(whole), bits(again))
    assert [" is damaged" in warning for warning in again.report.warnings] == [True]
    assert start.report.warnings == []


def test_the_best_epoch_is_kept() -> None:
    """A learning rate that ruins the network: the weights from before are the best ones."""
    start = pruned()
    worst = (X[:20], (Y[:20] + 1) % 3)  # what it learns is judged as wrong
    with torch.no_grad():
        good = start.model(X[:20]).argmax(1)
    after = snows.retrain(start, (X, (Y + 1) % 3), held_out=(X[:20], good), **QUICK)
    assert after.report.retraining is not None
    assert after.report.retraining.best_epoch == 0
    assert equal(bits(start), bits(after))
    other = snows.retrain(start, (X, (Y + 1) % 3), held_out=worst, **QUICK)
    assert other.report.retraining is not None
    assert other.report.retraining.best_epoch > 0


def test_figures_of_the_optimizer_are_those_of_torch() -> None:
    """The same steps by hand."""
    start = pruned()
    after = snows.retrain(
        start, TensorDataset(X[:64], Y[:64]), held_out=(X[:64], Y[:64]), batch=64, epochs=4, lr=0.05, lr_decay=0.5,
        lr_decay_every=2, momentum=0.8, weight_decay=0.01, progress=False, seed=3,
    )  # fmt: skip
    done = after.report.retraining
    assert done is not None
    assert [epoch.lr for epoch in done.history] == [0.0, 0.05, 0.05, 0.025, 0.025]
    expected = pruned(without_dropout()).model.train()
    parameters = dict(expected.named_parameters())
    plain = snows.retrain(
        replace(start, model=pruned(without_dropout()).model), (X[:64], Y[:64]), held_out=(X[:64], Y[:64]), batch=64,
        epochs=4, lr=0.05, lr_decay=0.5, lr_decay_every=2, momentum=0.8, weight_decay=0.01, progress=False,
    )  # fmt: skip
    optimizer = torch.optim.SGD(parameters.values(), lr=0.05, momentum=0.8, weight_decay=0.01)
    losses = []
    for lr in (0.05, 0.05, 0.025, 0.025):
        optimizer.param_groups[0]["lr"] = lr
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(expected(X[:64]), Y[:64])
        losses.append(loss.item())
        loss.backward()
        optimizer.step()
        with torch.no_grad():
            for name, kept in start.masks.items():
                parameters[name].mul_(kept)
    assert plain.report.retraining is not None
    assert [epoch.loss for epoch in plain.report.retraining.history[1:]] == pytest.approx(losses, rel=1e-4)


def without_dropout() -> nn.Sequential:
    model = dense()
    model[3].p = 0.0
    return model


class Stream(IterableDataset[tuple[Tensor, Tensor]]):
    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        return iter(zip(X, Y, strict=True))


class Rows(Dataset[tuple[Tensor, Tensor]]):
    def __init__(self, x: Tensor = X) -> None:
        self.x = x

    def __len__(self) -> int:
        return len(X)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return self.x[index], Y[index]


@pytest.mark.parametrize(
    ("data", "samples", "held_out"),
    [
        ([(X[:100], Y[:100]), (X[100:], Y[100:])], 131, 0.1),
        ([{"input": X, "labels": Y}], 131, 0.1),
        (TensorDataset(X, Y), 131, 0.1),
        (Rows(), 131, 0.1),
        (Rows(), 145, Rows()),
        (loader(), None, loader()),
        (Stream(), None, Stream()),
        ([(X, Y)], 145, [(X, Y)]),
    ],
)
def test_data_comes_in_any_form(data: Any, samples: int | None, held_out: Any) -> None:
    seen: list[Event] = []
    done = snows.retrain(
        pruned(), data, held_out=held_out, **{**QUICK, "epochs": 1, "progress": seen.append}
    ).report.retraining
    assert done is not None
    assert done.samples == samples
    assert done.held_out_samples == (14 if held_out == 0.1 else 145)
    assert [event.epoch for event in seen if isinstance(event, EpochEnded)] == [0, 1]
    assert any(isinstance(event, TrainingStep) for event in seen)
    assert str(next(event for event in seen if isinstance(event, TrainingStep))).startswith("retraining, epoch 1/1")


def test_the_report_is_the_fold_of_the_events() -> None:
    start = pruned()
    seen: list[Event] = []
    with pytest.warns(snows.SnowsWarning, match="were not zero"):
        after = snows.retrain(
            replace(start, model=dense()), Stream(), held_out=(X, Y), **{**QUICK, "progress": seen.append}
        )
    assert fold(seen, start.report) == after.report
    assert [type(event) for event in seen if not isinstance(event, TrainingStep)] == [
        Warned, RetrainingStarted, EpochEnded, EpochEnded, EpochEnded, EpochEnded, Retrained,
    ]  # fmt: skip
    done = after.report.retraining
    assert done is not None
    assert done.best_epoch == max(range(4), key=lambda epoch: (
        done.history[epoch].held_out["top1"], -done.history[epoch].held_out["loss"],
    ))  # fmt: skip


def test_steps_are_counted_over_all_epochs_once_their_number_is_known(tmp_path: Path) -> None:
    """A loader without a length tells it in its first epoch. One sample that is left over is not trained on."""

    def steps(data: Any, listener: Callable[[Event], None] | None = None, **options: Any) -> list[Any]:
        seen: list[Event] = []
        listeners = [seen.append] if listener is None else [seen.append, listener]
        with suppress(Killed):
            snows.retrain(pruned(), data, held_out=(X, Y), **{**QUICK, "progress": listeners, **options})
        return [(event.step, event.steps) for event in seen if isinstance(event, TrainingStep)]

    known = [(step, 24) for step in range(1, 25)]
    whole = steps(DataLoader(Stream(), 18))  # the ninth batch has one sample
    assert whole == [(step, None) for step in range(1, 9)] + known[8:]
    assert steps((X[:144], Y[:144]), batch=18) == known
    assert steps((X, Y), batch=18) == [(step, 27) for step in range(1, 9)] + known[8:]
    kept = {"resume": tmp_path / "kept"}
    assert steps(DataLoader(Stream(), 18), killed_at(2, 4), **kept) == whole[:13]
    assert steps(DataLoader(Stream(), 18), **kept) == known[8:]


def test_training_on_a_cpu_leaves_gpus_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    seeded: list[int] = []
    start = pruned()
    monkeypatch.setattr(torch.cuda, "manual_seed_all", seeded.append)
    snows.retrain(start, (X, Y), **QUICK)
    assert not seeded


class WritesItsWeight(nn.Module):
    """A network whose own code changes a pruned weight while it runs."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = dense()

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.layers[0].weight.data += 1  # type: ignore[operator,union-attr]  # it is a tensor
        return self.layers(x)  # type: ignore[no-any-return]  # a tensor


class Overflowing(nn.Module):
    """Its outputs are finite while it is trained; afterwards they are not, where no training loss shows it."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = dense()
        self.trained = False

    def forward(self, x: Tensor) -> Tensor:
        self.trained |= self.training
        scores = self.layers(x)
        return scores / 0 if self.trained and not self.training else scores  # type: ignore[no-any-return]


@pytest.mark.parametrize("teacher", [None, dense()])
def test_outputs_that_are_not_finite_after_an_epoch_are_refused(teacher: nn.Module | None) -> None:
    start, model = pruned(), Overflowing()
    model.layers.load_state_dict(start.model.state_dict())
    masks = {f"layers.{name}": kept for name, kept in start.masks.items()}
    words = "gives NaN or infinity on the held-out samples after epoch 1; use a smaller learning rate than 0.01"
    with pytest.raises(snows.InputError, match=words):
        snows.retrain(replace(start, model=model.eval(), masks=masks), (X, Y), teacher=teacher, **QUICK)


def test_weights_that_the_model_writes_itself_are_found() -> None:
    start = pruned()
    wrapped = WritesItsWeight()
    wrapped.layers.load_state_dict(start.model.state_dict())
    masks = {f"layers.{name}": kept for name, kept in start.masks.items()}

    class LateWriter(WritesItsWeight):
        """It writes in eval mode: after the last step of the optimizer, where no guard sees it."""

        def forward(self, x: Tensor) -> Tensor:
            self.layers[0].weight.data += 1  # type: ignore[operator,union-attr]
            return self.layers(x)  # type: ignore[no-any-return]

    wrapped.eval()
    ok = snows.retrain(replace(start, model=wrapped, masks=masks), (X, Y), **QUICK)
    assert not dict(ok.model.named_parameters())["layers.0.weight"][~masks["layers.0.weight"]].any()
    late = LateWriter()
    late.layers.load_state_dict(start.model.state_dict())
    with pytest.raises(snows.InputError, match=r"weights that the mask of layers\.0\.weight removes are not zero"):
        snows.retrain(replace(start, model=late.eval(), masks=masks), (X, Y), **QUICK)


def broken() -> snows.Result:
    """Pruned, and then written to."""
    start = pruned()
    with torch.no_grad():
        start.model.get_parameter("4.bias")[0] = torch.nan
    return start


BAD: dict[str, tuple[type[Exception], str, Callable[[], Any], dict[str, Any]]] = {
    "no result": (snows.ArgumentError, "pruned is a Sequential; expected", dense, {}),
    "model for a result": (snows.ArgumentError, "model is given with a result", pruned, {"model": dense()}),
    "no folder": (snows.InputError, "there is no folder", lambda: "nowhere", {}),
    "epochs": (snows.ArgumentError, "epochs is 0; expected a whole number of at least 1", pruned, {"epochs": 0}),
    "lr": (snows.ArgumentError, "lr is 0; expected a number above 0", pruned, {"lr": 0}),
    "lr nan": (snows.ArgumentError, "lr is nan; expected a number", pruned, {"lr": float("nan")}),
    "decay": (snows.ArgumentError, "lr_decay is 2; expected a number above 0 and at most 1", pruned, {"lr_decay": 2}),
    "momentum": (snows.ArgumentError, "momentum is 1; expected", pruned, {"momentum": 1}),
    "weight decay": (snows.ArgumentError, "weight_decay is -1; expected", pruned, {"weight_decay": -1}),
    "share": (snows.ArgumentError, "held_out is 1.5; expected a share between 0 and 1", pruned, {"held_out": 1.5}),
    "nothing held out": (snows.InputError, "holds out 0 of them", pruned, {"held_out": 0.001}),
    "loader": (snows.ArgumentError, "from which no share can be held out", pruned, {"data": loader()}),
    "generator": (snows.InputError, "one-shot generator", pruned, {"data": iter([X]), "held_out": (X, Y)}),
    "no labels": (snows.InputError, "labels are needed, but a training batch", pruned, {"data": X}),
    "no labels to judge": (snows.InputError, "labels are needed, but a held-out batch", pruned, {"held_out": X}),
    "label outside": (snows.InputError, "labels go from", pruned, {"data": (X, Y + 7)}),
    "label outside, trained": (snows.InputError, "labels go from 7", pruned, {"data": (X, Y + 7), "held_out": (X, Y)}),
    "crop": (snows.ArgumentError, "crop and flip are for images", pruned, {"crop": 4}),
    "teacher": (snows.ArgumentError, "teacher is a str; expected an nn.Module", pruned, {"teacher": "resnet50"}),
    "other teacher": (snows.InputError, r"returns \(14, 3\) and the teacher \(14, 8\)", pruned, {"teacher": nn.ReLU()}),
    "half": (snows.InputError, "0.weight is in half", lambda: pruned(dense().half()), {}),
    "not finite": (
        snows.InputError,
        "gives NaN or infinity on the held-out samples; look at its weights",
        broken,
        {},
    ),
    "diverges": (snows.InputError, "use a smaller learning rate than 1e[+]30", pruned, {"lr": 1e30}),
    "nothing trainable": (snows.ArgumentError, "takes gradients", lambda: pruned(dense().requires_grad_(False)), {}),
    "empty": (snows.InputError, "the training data has no batches", pruned, {"data": [], "held_out": (X, Y)}),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_input_is_said_in_a_sentence(case: str) -> None:
    kind, words, make, options = BAD[case]
    with pytest.raises(kind, match=words):
        snows.retrain(make(), **{"data": (X, Y), **QUICK, **options})


def test_a_folder_is_retrained_and_saved(tmp_path: Path) -> None:
    pruned().save(tmp_path / "pruned")
    model = dense()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    after = snows.retrain(tmp_path / "pruned", (X, Y), model=model, **QUICK)
    assert equal(before, dict(model.state_dict()))
    after.save(tmp_path / "retrained", compact=True)
    assert snows.verify(tmp_path / "retrained", model).ok
    loaded = snows.load(tmp_path / "retrained", dense())
    assert equal(dict(loaded.state_dict()), bits(after))
    page = (tmp_path / "retrained" / "report.html").read_text()
    assert "Retraining with frozen masks" in page
    again = snows.retrain(tmp_path / "retrained", X, teacher=model, model=model, **QUICK)
    assert again.report.retraining is not None
    assert again.report.retraining.teacher == "Sequential"
