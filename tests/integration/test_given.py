"""Masks from elsewhere: every form they come in is read exactly, and re-adjusted towards the dense network."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.nn.utils import prune as torch_prune

import snows
from snows import ArgumentError, InputError, SnowsWarning
from snows.data.models import build_model
from snows.data.preparation import Prepared, prepare
from snows.data.weights import fill, read_state
from snows.masks.given import given_masks
from tests.networks import example, make

from .conftest import Snows

SAMPLES = 32
QUICK = snows.Recipe(horizon=2, sweeps=1, cg_steps=4)
X = example("conv-bn", SAMPLES)
LAYERS = ("3.weight", "7.weight")  # those of conv-bn that are pruned here; the first and the last stay dense
NOTHING_TO_ADJUST = "every weight that the mask removes is already zero in the model"


def dense() -> nn.Module:
    return make("conv-bn")


def masks() -> dict[str, Tensor]:
    """Half of each layer, at random."""
    chance = torch.Generator().manual_seed(5)
    return {name: torch.rand(dense().get_parameter(name).shape, generator=chance) < 0.5 for name in LAYERS}


def pruned() -> nn.Module:
    """The dense network with the masks applied, as someone else would have left it."""
    model = dense()
    for name, kept in masks().items():
        model.get_parameter(name).mul_(kept)
    return model


def torch_pruned(names: tuple[str, ...] = LAYERS) -> nn.Module:
    model = dense()
    for name in names:
        torch_prune.custom_from_mask(model.get_submodule(name.partition(".")[0]), "weight", masks()[name])
    return model


def asp(recomputable: bool = True, dtype: torch.dtype = torch.bool) -> nn.Module:
    """As apex.contrib.sparsity leaves a model after compute_sparse_masks."""
    model = dense()
    for name, kept in masks().items():
        module = model.get_submodule(name.partition(".")[0])
        module.register_buffer("__weight_mma_mask", kept.to(dtype))
        if recomputable:
            module.register_buffer("__weight_mma_pruned_p", module.weight * ~kept)
        module.weight.mul_(kept)
    return model


def run(model: nn.Module, mask: Any = "magnitude", pattern: Any = None, **options: Any) -> snows.Result:
    return snows.prune(model, X, pattern, mask=mask, **{"recipe": QUICK, "progress": False, **options})


def error(model: nn.Module) -> float:
    """Of the outputs, against the dense network's."""
    with torch.no_grad():
        return float((model(X) - dense()(X)).square().mean())


def assert_exact(result: snows.Result, wanted: dict[str, Tensor]) -> None:
    assert result.masks.keys() == wanted.keys()
    for name, kept in wanted.items():
        assert result.masks[name].dtype == torch.bool
        assert torch.equal(result.masks[name], kept)
        assert not result.model.get_parameter(name)[~kept].any()


def assert_readjusted(result: snows.Result, reference: snows.Result) -> None:
    """Exactly these masks; everything else as it was; and nearer to the dense network than with the mask alone."""
    assert_exact(result, masks())
    assert not result.report.warnings
    assert error(result.model) < 0.5 * error(pruned())
    for name, tensor in dense().state_dict().items():
        assert torch.equal(result.model.state_dict()[name], tensor) == (name not in LAYERS)
        assert torch.equal(result.model.state_dict()[name], reference.model.state_dict()[name])


@pytest.fixture(scope="module")
def reference() -> snows.Result:
    """What every form of these masks must come to."""
    return run(dense(), masks())


@pytest.fixture(scope="module")
def world() -> Prepared:
    """Capturing takes its time: once for all the forms of masks that are only read."""
    return prepare(dense(), X, None, seed=0)


def assert_read(mask: Any, world: Prepared, wanted: dict[str, Tensor]) -> None:
    found = given_masks(mask, world)
    assert found is not None
    assert {kept.dtype for kept in found.values()} == {torch.bool}
    torch.testing.assert_close(found, wanted, rtol=0, atol=0)


# Tensors by name


def test_masks_by_name(reference: snows.Result) -> None:
    assert_readjusted(reference, reference)
    assert reference.report.pattern == "given"


@pytest.mark.parametrize("dtype", [torch.bool, torch.uint8, torch.int64, torch.float32, torch.bfloat16])
def test_masks_of_zeros_and_ones_in_any_dtype(dtype: torch.dtype, world: Prepared) -> None:
    assert_read({name: kept.to(dtype) for name, kept in masks().items()}, world, masks())


@pytest.mark.parametrize(
    "form", ["{}", "{}.weight", "{}_mask", "{}.weight_mask", "{}.__weight_mma_mask", "module.{}.weight"]
)
def test_every_way_of_naming_a_mask(form: str, world: Prepared) -> None:
    assert_read({form.format(name.partition(".")[0]): kept for name, kept in masks().items()}, world, masks())


def test_a_mask_that_removes_nothing_is_used_as_it_is(world: Prepared) -> None:
    everything = torch.ones(4, 4, 3, 3)
    assert_read(masks() | {"3.weight": everything}, world, masks() | {"3.weight": everything.bool()})


# Files and modules


def checkpoint_of_a_trainer() -> dict[str, Any]:
    return {"epoch": 3, "state_dict": {f"module.{name}": tensor for name, tensor in pruned().state_dict().items()}}


FILES: dict[str, Callable[[], dict[str, Any]]] = {
    "masks.safetensors": masks,
    "floats.safetensors": lambda: {name: kept.float() for name, kept in masks().items()},
    "masks.pt": lambda: {name.removesuffix(".weight"): kept.byte() for name, kept in masks().items()},
    "weights.safetensors": lambda: pruned().state_dict(),
    "weights.pth": lambda: pruned().half().state_dict(),
    "trainer.pt": checkpoint_of_a_trainer,
    "torch_prune.pt": lambda: torch_pruned().state_dict(),
    "asp.safetensors": lambda: asp().state_dict(),
}


@pytest.mark.parametrize("file", FILES)
def test_files_of_masks_and_of_pruned_weights(file: str, world: Prepared, tmp_path: Path) -> None:
    path = tmp_path / file
    (save_file if path.suffix == ".safetensors" else torch.save)(FILES[file](), path)
    assert_read(str(path), world, masks())
    assert_read(path, world, masks())


@pytest.mark.parametrize("file", ["masks.pt", "weights.safetensors"])
def test_masks_of_files_are_readjusted(file: str, reference: snows.Result, tmp_path: Path) -> None:
    path = tmp_path / file
    (save_file if path.suffix == ".safetensors" else torch.save)(FILES[file](), path)
    assert_readjusted(run(dense(), str(path)), reference)


def test_a_pruned_copy_of_the_model_is_a_mask(reference: snows.Result, world: Prepared) -> None:
    assert_readjusted(run(dense(), pruned()), reference)
    for model in (torch_pruned(), asp()):
        before = copy.deepcopy(model.state_dict())
        assert_read(model, world, masks())
        torch.testing.assert_close(model.state_dict(), before, rtol=0, atol=0)


def test_masks_in_a_state_dict_come_before_zeros(world: Prepared) -> None:
    """A kept weight may be zero by chance, and another layer may have zeros that nobody meant."""
    state = torch_pruned(LAYERS[:1]).state_dict()
    state["3.weight_orig"][masks()["3.weight"]] = 0
    state["7.weight"][0] = 0
    assert_read(state, world, {"3.weight": masks()["3.weight"]})


# The zeros of the weights


def test_the_zeros_of_the_weights_with_a_warning_that_nothing_can_be_adjusted() -> None:
    model = pruned()
    with pytest.warns(SnowsWarning, match=NOTHING_TO_ADJUST) as caught:
        result = run(model, "weights")
    assert len(caught) == 1
    said = str(caught[0].message)
    assert "mask=pruned_model" in said
    assert "--weights dense.safetensors --mask pruned.safetensors" in said
    assert result.report.warnings == [said]
    assert_exact(result, masks())
    torch.testing.assert_close(result.model(X), model(X))


def test_masks_of_weights_that_are_masked_already_get_the_same_warning() -> None:
    with pytest.warns(SnowsWarning, match=NOTHING_TO_ADJUST):
        assert_exact(run(pruned(), masks(), solver=None), masks())


# torch.nn.utils.prune


@pytest.mark.parametrize("mask", ["magnitude", "weights"])
def test_torch_pruning_modules_are_adjusted_to_their_original_weights(
    mask: str, reference: snows.Result, tmp_path: Path
) -> None:
    model = torch_pruned()
    before = copy.deepcopy(model.state_dict())
    result = run(model, mask)
    assert_readjusted(result, reference)
    assert result.model.state_dict().keys() == dense().state_dict().keys()
    assert not torch_prune.is_pruned(result.model)
    assert torch_prune.is_pruned(model)
    torch.testing.assert_close(model.state_dict(), before, rtol=0, atol=0)
    # and the result loads into plain modules and into pruning modules
    folder = result.save(tmp_path / "out")
    assert torch.equal(snows.load(folder, dense())(X), result.model(X))
    loaded = snows.load(folder, model)
    assert torch_prune.is_pruned(loaded)
    assert torch.equal(loaded(X), result.model(X))
    for name, kept in masks().items():
        assert torch.equal(loaded.get_buffer(f"{name}_mask").bool(), kept)


def test_torch_pruning_modules_under_a_new_mask_are_taken_as_they_compute() -> None:
    """With a pattern a mask is chosen anew; what the old one removed is gone."""
    result = run(torch_pruned(), pattern="2:4", solver=None)
    plain = run(pruned(), pattern="2:4", solver=None)
    torch.testing.assert_close(result.model.state_dict(), plain.model.state_dict(), rtol=0, atol=0)


def test_masks_that_are_not_adjusted_stay() -> None:
    """Those of other layers than the given masks name, and those of biases."""
    model = torch_pruned()
    torch_prune.custom_from_mask(model[3], "bias", torch.tensor([1, 0, 0, 1]))
    result = run(model, {"3": masks()["3.weight"]})
    assert_exact(result, {"3.weight": masks()["3.weight"]})
    assert torch.equal(result.model.get_parameter("7.weight"), pruned().get_parameter("7.weight"))
    assert torch.equal(result.model.get_parameter("3.bias"), model[3].bias_orig * model[3].bias_mask)


def test_an_excluded_layer_keeps_its_mask_and_is_taken_as_it_computes() -> None:
    """The reference and the result must agree on a layer that is not re-adjusted."""
    plain = dense()
    plain.get_parameter("7.weight").mul_(masks()["7.weight"])
    result, wanted = run(torch_pruned(), exclude="7"), run(plain, {"3": masks()["3.weight"]})
    torch.testing.assert_close(result.model.state_dict(), wanted.model.state_dict(), rtol=0, atol=0)


# NVIDIA's ASP


def test_asp_models_are_adjusted_to_their_stowed_weights(reference: snows.Result, tmp_path: Path) -> None:
    model = asp()
    result = run(model)
    assert_readjusted(result, reference)
    before, after = model.state_dict(), result.model.state_dict()
    assert before.keys() == after.keys()
    for name in before.keys() - set(LAYERS):  # the buffers among them
        assert before[name].dtype == after[name].dtype
        assert torch.equal(before[name], after[name])
    # and the result loads into plain modules and into models of ASP
    folder = result.save(tmp_path / "out")
    for other in (dense(), asp()):
        assert torch.equal(snows.load(folder, other)(X), result.model(X))


def test_asp_models_without_stowed_weights_have_nothing_to_adjust() -> None:
    with pytest.warns(SnowsWarning, match=NOTHING_TO_ADJUST):
        assert_exact(run(asp(recomputable=False), solver=None), masks())


def test_asp_masks_of_weights_that_are_dense_still(reference: snows.Result) -> None:
    model = asp(recomputable=False, dtype=torch.float64)
    model.load_state_dict(dense().state_dict(), strict=False)
    assert_readjusted(run(model), reference)


def test_asp_buffers_follow_another_mask() -> None:
    other = {name: ~kept for name, kept in masks().items()}
    result = run(asp(), other)
    assert_exact(result, other)
    for name, kept in other.items():
        buffers = dict(result.model.get_submodule(name.partition(".")[0]).named_buffers())
        assert torch.equal(buffers["__weight_mma_mask"], kept)


# Weights from files


@pytest.mark.parametrize("make_pruned", [torch_pruned, asp, lambda: asp(False, torch.float64)])
@pytest.mark.parametrize("prefix", ["", "module."])
def test_state_dicts_with_masks_fill_plain_modules(
    make_pruned: Callable[[], nn.Module], prefix: str, tmp_path: Path
) -> None:
    torch.save({prefix + name: tensor for name, tensor in make_pruned().state_dict().items()}, tmp_path / "w.pt")
    model = dense()
    fill(model, read_state(tmp_path / "w.pt"), "w.pt")
    torch.testing.assert_close(model.state_dict(), pruned().state_dict(), rtol=0, atol=0)


def test_asp_masks_that_were_not_applied_are_multiplied_in() -> None:
    model = asp(recomputable=False)
    model.load_state_dict(dense().state_dict(), strict=False)
    plain = dense()
    fill(plain, model.state_dict(), "w.pt")
    torch.testing.assert_close(plain.state_dict(), pruned().state_dict(), rtol=0, atol=0)


def test_a_model_whose_own_names_begin_with_module() -> None:
    wrapped = nn.Module()
    wrapped.module = dense()
    state = {name: tensor + 1 for name, tensor in wrapped.state_dict().items()}
    fill(wrapped, state, "w.pt")
    torch.testing.assert_close(wrapped.state_dict(), state, rtol=0, atol=0)


def test_state_dicts_that_do_not_fit_are_refused_all_the_same() -> None:
    torch_state, asp_state = torch_pruned().state_dict(), asp().state_dict()
    cases = {
        r"it lacks 3\.weight; it has no place for 3\.weight_orig$": torch_state,
        r"it has no place for 3\.__weight_mma_mask$": asp_state,
        r"it has no place for nine\.bias$": dense().state_dict() | {"nine.bias": torch.ones(3)},
    }
    del torch_state["3.weight_mask"]
    asp_state["3.__weight_mma_mask"] = torch.ones(3)
    del asp_state["3.__weight_mma_pruned_p"]
    for words, state in cases.items():
        model = dense()
        with pytest.raises(InputError, match=r"^w\.pt does not fit Sequential: " + words):
            fill(model, state, "w.pt")
        torch.testing.assert_close(model.state_dict(), dense().state_dict(), rtol=0, atol=0)


# Wrong input


KEPT = masks()["3.weight"]
WEIGHT = dense().get_parameter("3.weight")
BAD_MASKS: dict[str, tuple[type[Exception], str, Any]] = {
    "no tensor": (
        ArgumentError, "^the mask of '3' is a list; expected a bool tensor or one of 0 and 1, True or 1 where a weight",
        {"3": [True]},
    ),
    "other values": (
        ArgumentError, r"^the mask of '3' is torch\.float32 with values other than 0 and 1; expected .*'3\.weight'\)$",
        {"3": KEPT * 0.5, "7": masks()["7.weight"]},
    ),
    "other values beside bools": (
        ArgumentError, r"^the mask of '3\.weight' is torch\.float64 with values other than 0 and 1",
        {"3.weight": WEIGHT, "7.weight": masks()["7.weight"]},
    ),
    "other values in a stored mask": (
        ArgumentError, r"^the mask of '3\.weight_mask' is torch\.float32 with values other than 0 and 1",
        {"3.weight_orig": WEIGHT, "3.weight_mask": KEPT * 0.5},
    ),
    "an unknown layer": (
        ArgumentError, r"^the mask names 'fc9\.weight_mask', which is no layer of the model; its layers are 0, 3, 7",
        {"3.weight_mask": KEPT, "fc9.weight_mask": KEPT},
    ),
    "a bias": (
        ArgumentError, r"^the mask names '3\.bias', which is no layer of the model",
        {"3.weight": KEPT, "3.bias": torch.ones(4)},
    ),
    "two masks of one layer": (
        ArgumentError, "^there are two masks of the layer '3'; expected one, under one name$",
        {"3": KEPT, "3.weight": KEPT},
    ),
    "nothing": (ArgumentError, "^the given mask is empty; expected {name: tensor} with at least one layer$", {}),
    "a mask of another shape": (
        InputError, r"^the mask of '3' has shape \(4, 4\); the weight has shape \(4, 4, 3, 3\)$",
        {"3": torch.ones(4, 4)},
    ),
    "weights of another shape": (
        InputError, r"^the mask of '3\.weight' has shape \(4,\); the weight has shape \(4, 4, 3, 3\)$",
        {"3.weight": torch.arange(4.0)},
    ),
    "weights of another network": (
        InputError,
        r"^the Residual given as the mask holds neither masks nor weights of the model's layers: its entries are "
        r"stem\.weight, stem\.bias, conv1\.weight …, its layers are 0, 3, 7, 11$",
        make("residual"),
    ),
    "weights without zeros": (
        InputError, "^the Sequential given as the mask holds weights, and none of a layer is zero; expected masks",
        dense(),
    ),
    "masks that remove nothing in a state dict": (
        InputError, "^the given mask holds masks that remove nothing; expected masks",
        {**dense().state_dict(), "3.__weight_mma_mask": torch.ones(4, 4, 3, 3)},
    ),
    "no file": (InputError, r"^there is no file none\.pt$", "none.pt"),
}  # fmt: skip


@pytest.mark.parametrize("case", BAD_MASKS)
def test_wrong_input_gets_one_clear_sentence(case: str, world: Prepared) -> None:
    kind, words, mask = BAD_MASKS[case]
    with pytest.raises(kind, match=words) as caught:
        given_masks(mask, world)
    assert "\n" not in str(caught.value)
    assert type(caught.value) is kind


def test_files_that_run_code_are_refused(world: Prepared, tmp_path: Path) -> None:
    torch.save(pruned(), tmp_path / "module.pt")
    with pytest.raises(InputError, match="is not a file of plain tensors"):
        given_masks(tmp_path / "module.pt", world)


def test_an_asp_mask_of_another_shape() -> None:
    model = asp()
    setattr(model[3], "__weight_mma_mask", torch.ones(4, 4, dtype=torch.bool))
    words = r"^the mask that the model holds for a Conv2d \(in __weight_mma_mask\) has shape \(4, 4\); the weight has "
    with pytest.raises(InputError, match=words):
        run(model)


# The command line


NET = """
import torch
from torch import nn

def model():
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 4))

def data():
    return torch.randn(192, 8, generator=torch.Generator().manual_seed(1))
"""


def test_masks_on_the_command_line(run: Snows, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    Path("net.py").write_text(NET)
    Path("fast.json").write_text(QUICK.to_json())

    model = build_model("net.py:model")
    save_file(model.state_dict(), "dense.safetensors")
    kept = torch.rand(16, 16, generator=torch.Generator().manual_seed(2)) < 0.5
    torch_prune.custom_from_mask(model[2], "weight", kept)
    torch.save(model.state_dict(), "torch_prune.pt")
    torch_prune.remove(model[2], "weight")
    save_file(model.state_dict(), "pruned.safetensors")

    prune = ("prune", "net.py:model", "--data", "net.py:data", "--recipe", "fast.json", "--json", "--samples", "128")
    outcome = run(*prune, "--weights", "dense.safetensors", "--mask", "pruned.safetensors", "--out", "adjusted")
    found = outcome.data
    assert outcome.err == ""
    assert [layer["name"] for layer in found["layers"]] == ["2"]
    assert torch.equal(read_state(Path("adjusted/masks.safetensors"))["2.weight"], kept)
    rows = {row["network"]: row for row in found["evaluation"]}
    assert rows["SNOWS (K=2)"]["kl"] < 0.5 * rows["mask only"]["kl"]

    outcome = run(*prune, "--weights", "torch_prune.pt", "--mask", "weights", "--out", "as-it-was")
    said = outcome.err
    assert outcome.status == 0
    assert said.startswith(f"warning: {NOTHING_TO_ADJUST}")
    assert said.count("\n") == 1
    assert torch.equal(read_state(Path("as-it-was/masks.safetensors"))["2.weight"], kept)
    assert torch.equal(load_file("as-it-was/model.safetensors")["2.weight"] != 0, kept)
