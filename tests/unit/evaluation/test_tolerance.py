"""Sensitivity: which effects it measures, on which samples, and what it refuses."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from torch import nn

import snows
from snows.evaluation import tolerance
from snows.evaluation.tolerance import Sensitivity
from snows.events import Event, Working
from tests.networks import example, make, prunable


def measure(**options: object) -> Sensitivity:
    settings = {"patterns": [0.5, 0.9, "2:4"], "progress": False, **options}
    return snows.sensitivity(make("residual"), example("residual", 60), **settings)  # type: ignore[arg-type]


def test_every_layer_with_every_pattern_that_it_takes() -> None:
    found = measure(layers="*")
    taken = {layer.name: [level.pattern for level in layer.levels] for layer in found.layers}
    assert [f"{name}.weight" for name in taken] == prunable("residual")
    assert taken["stem"] == ["0.5", "0.9"]  # two input channels are no group of four
    assert taken["head"] == ["0.5", "0.9", "2:4"]
    assert (found.samples, found.judged_samples) == (45, 15)
    for layer in found.layers:
        for level in layer.levels:
            assert level.unstructured == (":" not in level.pattern)
            assert level.sparsity == pytest.approx(
                0.5 if level.unstructured is False else float(level.pattern), abs=0.1
            )
            assert level.readjusted.error <= level.mask_only.error * 1.5


def test_it_is_shown_in_a_line() -> None:
    found = measure(layers="conv*")
    patterns = ", ".join(found.patterns)
    assert repr(found) == f"<Sensitivity: Residual, 2 layers, each to {patterns}>"


def test_a_listener_hears_which_layer_is_measured() -> None:
    seen: list[Event] = []
    found = measure(progress=seen.append)
    assert seen == [Working(layer.name, done, len(found.layers)) for done, layer in enumerate(found.layers)]


def test_the_default_layers_are_those_of_prune() -> None:
    names = {layer.name for layer in measure().layers}
    pruned = snows.prune(make("residual"), example("residual", 60), 0.5, solver=None, progress=False)
    assert names == {layer.name for layer in pruned.report.layers}


def test_figures_are_those_of_a_network_with_this_layer_pruned() -> None:
    """The masked one of `snows.prune`, layer by layer, on the judged samples."""
    model, samples = make("residual"), example("residual", 60)
    found = snows.sensitivity(model, samples, ["2:4"], layers="conv2", progress=False, seed=3)
    order = torch.randperm(60, generator=torch.Generator().manual_seed(3))
    judged = samples[order][45:]
    pruned = snows.prune(model, samples, "2:4", layers="conv2", solver=None, progress=False).model
    a, b = pruned(judged), model(judged)
    assert found.layers[0].levels[0].mask_only.error == pytest.approx(
        float((a - b).square().mean() / b.var()), rel=1e-6
    )


def test_accuracy_is_measured_where_labels_are_given() -> None:
    model, x = make("residual"), example("residual", 40)
    y = model(x).argmax(1)
    found = snows.sensitivity(model, [(x, y)], 0.5, labels="given", progress=False)
    assert found.dense_accuracy == 1.0
    effect = found.layers[0].levels[0].readjusted
    assert effect.accuracy == effect.agreement
    assert snows.sensitivity(model, [(x, y)], 0.5, progress=False).dense_accuracy is None


def test_the_file_and_the_object_are_the_same_budget(tmp_path: Path) -> None:
    model, x = make("residual"), example("residual", 60)
    found = snows.sensitivity(model, x, [0.3, 0.6, 0.9], progress=False)
    found.save(tmp_path / "layers.json")
    assert json.loads((tmp_path / "layers.json").read_text()) == found.to_dict()
    results = [
        snows.prune(model, x, pattern, progress=False)
        for pattern in (found.pattern(0.7), f"0.7 measured={tmp_path}/layers.json")
    ]
    assert all(torch.equal(results[0].masks[name], mask) for name, mask in results[1].masks.items())
    weights = sum(mask.numel() for mask in results[0].masks.values())
    assert sum(int((~mask).sum()) for mask in results[0].masks.values()) == round(0.7 * weights)


def test_a_result_is_verified_after_its_file_is_gone(tmp_path: Path) -> None:
    model, x = make("residual"), example("residual", 60)
    snows.sensitivity(model, x, [0.5, 0.9], progress=False).save(tmp_path / "layers.json")
    result = snows.prune(model, x, f"0.7 measured={tmp_path}/layers.json", progress=False)
    result.save(tmp_path / "pruned")
    (tmp_path / "layers.json").unlink()
    assert snows.verify(tmp_path / "pruned", model).ok


def test_other_measurements_are_another_run(tmp_path: Path) -> None:
    """A run is not resumed with a file that has changed meanwhile."""
    model, x = make("residual"), example("residual", 60)
    file, journal = tmp_path / "layers.json", tmp_path / "journal"
    snows.sensitivity(model, x, [0.5, 0.9], progress=False).save(file)
    snows.prune(model, x, f"0.7 measured={file}", progress=False, resume=journal)
    snows.sensitivity(model, x, [0.4, 0.8], progress=False).save(file)
    with pytest.raises(snows.InputError, match="measurements"):
        snows.prune(model, x, f"0.7 measured={file}", progress=False, resume=journal)


def test_the_caller_keeps_model_and_random_state() -> None:
    model, x = make("residual").train(), example("residual", 60)
    before, state = {k: v.clone() for k, v in model.state_dict().items()}, torch.random.get_rng_state()
    with pytest.warns(snows.SnowsWarning, match="train mode"):
        snows.sensitivity(model, x, 0.5, progress=False)
    assert model.training
    assert torch.equal(torch.random.get_rng_state(), state)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"patterns": []}, "patterns is .*expected some"),
        ({"patterns": "much"}, "pattern 'much' is not understood"),
        ({"labels": "mine"}, "labels is 'mine'; expected 'model' or 'given'"),
        ({"patterns": "2:4", "layers": "stem"}, "none of the layers takes 2:4; try a sparsity"),
        ({"layers": "nothing"}, "fits no layer"),
    ],
)
def test_what_cannot_be_measured_is_refused(options: dict[str, object], words: str) -> None:
    with pytest.raises((snows.ArgumentError, snows.InputError), match=words):
        measure(**options)


def test_a_wrong_size_of_memory_costs_no_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tolerance, "prepare", lambda *_: pytest.fail("the network was captured"))
    with pytest.raises(snows.ArgumentError, match=r"memory is .much.; expected a size"):
        measure(memory="much")


def test_too_few_samples_and_no_model_are_refused() -> None:
    with pytest.raises(snows.InputError, match="3 calibration samples are too few; expected at least 4"):
        snows.sensitivity(make("residual"), example("residual", 3), 0.5, progress=False)
    with pytest.raises(snows.ArgumentError, match="model is a str"):
        snows.sensitivity("model", None, 0.5)  # type: ignore[arg-type]


def test_the_page_holds_every_figure_and_escapes_names(tmp_path: Path) -> None:
    model = nn.Sequential()
    model.add_module("<b>first</b>", nn.Linear(8, 8))
    model.add_module("last", nn.Linear(8, 2))
    found = snows.sensitivity(model.eval(), torch.randn(60, 8), [0.5, 0.9, "2:4"], layers="*", progress=False)
    found.to_html(tmp_path / "page.html")
    page = (tmp_path / "page.html").read_text()
    assert "<b>first</b>" not in page
    assert page.count("<figure>") == 2
    assert page.count("<circle") == 8
    assert page.count("<rect") == 4
    for layer in found.layers:
        for level in layer.levels:
            assert f"{level.pattern}, re-adjusted: error {level.readjusted.error:.2%}" in page
    assert "http" not in page
