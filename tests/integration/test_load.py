"""`snows.load`: the same outputs again; files that are not as they were written, and code of others, are refused."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

import snows
from snows import InputError
from snows.data import embedded
from tests.networks import call_arguments, example, make
from tests.saved import FACTORY, SAMPLES, check_folder, quick, sealed


@pytest.fixture(scope="module")
def result() -> snows.Result:
    return quick(make("mlp"), example("mlp", SAMPLES))


def outputs(model: nn.Module, inputs: Any) -> Any:
    args, kwargs = call_arguments(inputs)
    with torch.no_grad():
        return model(*args, **kwargs)


# What comes back


@pytest.mark.parametrize("name", ["mlp", "conv-bn", "residual", "attention", "tied", "two-inputs", "dict-output"])
def test_a_loaded_model_gives_the_same_outputs_exactly(name: str, tmp_path: Path) -> None:
    pruned = quick(make(name), example(name, SAMPLES))
    folder = pruned.save(tmp_path / "out")
    blank = make(name)
    for tensor in blank.state_dict().values():
        tensor.zero_()
    loaded = snows.load(folder, blank)
    assert loaded is blank
    torch.testing.assert_close(loaded.state_dict(), pruned.model.state_dict(), rtol=0, atol=0)
    x = example(name, 5, seed=9)
    torch.testing.assert_close(outputs(loaded, x), outputs(pruned.model, x), rtol=0, atol=0)
    check_folder(folder, pruned)


def test_half_precision(tmp_path: Path) -> None:
    model = make("conv-bn").to(torch.bfloat16)
    pruned = quick(model, example("conv-bn", SAMPLES).float())
    loaded = snows.load(pruned.save(tmp_path / "out"), make("conv-bn").to(torch.bfloat16))
    x = example("conv-bn", 5).to(torch.bfloat16)
    assert torch.equal(outputs(loaded, x), outputs(pruned.model, x))
    stored = load_file(tmp_path / "out" / "model.safetensors")
    assert {tensor.dtype for tensor in stored.values() if tensor.is_floating_point()} == {torch.bfloat16}


def test_tied_weights_stay_tied(tmp_path: Path) -> None:
    def tied() -> nn.Module:
        with torch.random.fork_rng():
            torch.manual_seed(3)
            model = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4)).eval()
        model[4].weight = model[0].weight
        return model

    pruned = quick(tied(), torch.randn(SAMPLES, 4), layers="2")
    loaded = snows.load(pruned.save(tmp_path / "out"), tied())
    assert loaded[4].weight is loaded[0].weight
    torch.testing.assert_close(loaded.state_dict(), pruned.model.state_dict(), rtol=0, atol=0)


def test_counters_of_batch_norms_are_kept_and_may_be_missing(tmp_path: Path) -> None:
    model = make("conv-bn")
    model[1].num_batches_tracked.fill_(17)
    pruned = quick(model, example("conv-bn", SAMPLES))
    folder = pruned.save(tmp_path / "out")
    assert int(snows.load(folder, make("conv-bn"))[1].num_batches_tracked) == 17
    state = load_file(folder / "model.safetensors")
    save_file({k: v for k, v in state.items() if "num_batches" not in k}, folder / "model.safetensors")
    assert int(snows.load(sealed(folder), make("conv-bn"))[1].num_batches_tracked) == 0


def test_compact_files_hold_tied_weights_once(tmp_path: Path) -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.used, self.last = nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 2)
            self.spare = nn.Linear(8, 8)
            self.spare.weight = self.used.weight  # the same weight under a second name

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.last(self.used(self.first(x).relu()).relu())

    pruned = quick(Tied().eval(), torch.randn(SAMPLES, 8), layers="used", solver=None)
    names = {name for name, *_ in pruned.model.named_parameters(remove_duplicate=False) if "weight" in name}
    assert {"used.weight", "spare.weight"} <= names
    for compact in (False, True):
        folder = pruned.save(tmp_path / str(compact), compact=compact)
        loaded = snows.load(folder, Tied())
        assert loaded.spare.weight is loaded.used.weight
        torch.testing.assert_close(loaded.state_dict(), pruned.model.state_dict(), rtol=0, atol=0)
        assert snows.verify(folder, Tied()).ok
    assert "tensor:spare.weight" not in load_file(folder / "model.compact.safetensors")


# The recorded name


def saved_from(source: str, folder: Path) -> Path:
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 2)).eval()
    return replace(quick(model, torch.randn(SAMPLES, 4), solver=None), source=source).save(folder)


def factory(folder: Path) -> str:
    """The name of a model that leaves a file behind when it is built."""
    (folder / "net.py").write_text(FACTORY + f"open({str(folder / 'ran')!r}, 'w').close()\n")
    return f"{folder / 'net.py'}:make"


@pytest.mark.parametrize("manifest", [True, False])
def test_code_that_a_folder_names_is_not_run(manifest: bool, tmp_path: Path) -> None:
    folder = saved_from(factory(tmp_path), tmp_path / "out")
    if not manifest:
        (folder / "manifest.json").unlink()
    with pytest.raises(
        InputError,
        match=r"out was made from .*net\.py:make, and code that a folder names is not run; give "
        r"the model, or trust=True, if you know the code",
    ):
        snows.load(folder)
    with pytest.raises(InputError):  # without a manifest it is refused for that
        snows.export(folder, "safetensors", out=tmp_path / "exported")
    with pytest.raises(InputError):
        snows.retrain(folder, torch.randn(SAMPLES, 4))
    snows.verify(folder)
    assert not (tmp_path / "ran").exists()


def test_trusted_code_is_run(tmp_path: Path) -> None:
    folder = saved_from(factory(tmp_path), tmp_path / "out")
    loaded = snows.load(folder, trust=True)
    assert (tmp_path / "ran").exists()
    assert not loaded.training
    torch.testing.assert_close(loaded.state_dict(), load_file(folder / "model.safetensors"), rtol=0, atol=0)


def test_a_given_model_needs_no_trust(tmp_path: Path) -> None:
    folder = saved_from(factory(tmp_path), tmp_path / "out")
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 2))
    assert snows.load(folder, model) is model
    assert not (tmp_path / "ran").exists()


def test_code_is_not_run_where_the_report_is_not_what_was_written(tmp_path: Path) -> None:
    """Somebody may have put another name there: trust is in the folder as it was saved."""
    folder = saved_from(embedded.MODEL, tmp_path / "out")
    report = json.loads((folder / "report.json").read_text())
    (folder / "report.json").write_text(json.dumps({**report, "source": factory(tmp_path)}))
    with pytest.raises(InputError, match=r"report\.json has \d+ bytes, and had \d+ when it was written"):
        snows.load(folder, trust=True)
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize("trust", [False, True])
def test_the_embedded_model_is_built_without_trust(trust: bool, tmp_path: Path) -> None:
    model = embedded.model()
    pruned = quick(model, torch.randn(4, 1, 28, 28), solver=None, layers="layer3*")
    loaded = snows.load(replace(pruned, source=embedded.MODEL).save(tmp_path / "out"), trust=trust)
    torch.testing.assert_close(loaded.state_dict(), pruned.model.state_dict(), rtol=0, atol=0)


# Loading what does not fit


def test_loading_without_a_name_and_without_a_model_is_refused(result: snows.Result, tmp_path: Path) -> None:
    result.save(tmp_path / "out")
    with pytest.raises(InputError, match=r"out does not record which model it was made from; give the model$"):
        snows.load(tmp_path / "out")


def test_loading_into_a_wrong_module_says_the_difference(result: snows.Result, tmp_path: Path) -> None:
    folder = result.save(tmp_path / "out")
    cases = {
        r"does not fit Residual: it lacks stem\.weight, .* and \d+ more; it has no place for 0\.bias": make("residual"),
        r"does not fit Sequential: it has no place for 2\.bias, 2\.weight, 4\.bias and 1 more$": nn.Sequential(
            nn.Linear(6, 8)
        ),
        r"does not fit Sequential: other shapes in 4\.bias, 4\.weight$": nn.Sequential(
            nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 5)
        ),
    }
    for words, model in cases.items():
        before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
        with pytest.raises(InputError, match=words):
            snows.load(folder, model)
        torch.testing.assert_close(model.state_dict(), before, rtol=0, atol=0)


# Files that are not as they were written


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)


CHANGES: dict[str, tuple[Callable[[Path], Any], str]] = {
    "one bit": (flip, r"is damaged: its checksum is not that of the manifest"),
    "cut off": (lambda path: path.write_bytes(b"x"), r"has 1 bytes, and had \d+ when it was written"),
    "missing": (Path.unlink, "is missing"),
}


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("name", ["model.safetensors", "report.json"])
def test_a_changed_file_is_refused_by_name(name: str, change: str, result: snows.Result, tmp_path: Path) -> None:
    folder = replace(result, source=embedded.MODEL).save(tmp_path / "out")
    make_change, words = CHANGES[change]
    make_change(folder / name)
    with pytest.raises(InputError, match=rf"out/{name} {words}; restore the folder from a copy, or save"):
        snows.load(folder)
    if name == "model.safetensors":
        with pytest.raises(InputError, match=rf"out/{name} {words}"):
            snows.load(folder, make("mlp"))
    else:  # the report is not read if the model is given
        assert snows.load(folder, make("mlp")) is not None


@pytest.mark.parametrize(
    ("content", "words"), [(b"{", "cannot read"), (b'{"files": {}}', r"manifest\.json is damaged")]
)
def test_a_damaged_manifest_is_refused(content: bytes, words: str, result: snows.Result, tmp_path: Path) -> None:
    folder = result.save(tmp_path / "out")
    (folder / "manifest.json").write_bytes(content)
    with pytest.raises(InputError, match=words):
        snows.load(folder, make("mlp"))


def test_weights_of_another_result_are_refused(result: snows.Result, tmp_path: Path) -> None:
    folder = result.save(tmp_path / "out")
    other = quick(make("mlp"), example("mlp", SAMPLES), "1:4").save(tmp_path / "other")
    (folder / "model.safetensors").write_bytes((other / "model.safetensors").read_bytes())
    with pytest.raises(InputError, match=r"out/model\.safetensors is damaged"):
        snows.load(folder, make("mlp"))


def test_weights_that_were_added_are_refused(result: snows.Result, tmp_path: Path) -> None:
    folder, other = result.save(tmp_path / "0"), result.save(tmp_path / "1", compact=True)
    (folder / "model.safetensors").unlink()
    (other / "model.compact.safetensors").rename(folder / "model.compact.safetensors")
    with pytest.raises(InputError, match=r"manifest\.json lists no model\.compact\.safetensors"):
        snows.load(folder, make("mlp"))


@pytest.mark.parametrize("compact", [False, True])
def test_folders_older_than_manifests_are_loaded(compact: bool, result: snows.Result, tmp_path: Path) -> None:
    folder = result.save(tmp_path / "out", compact=compact)
    (folder / "manifest.json").unlink()
    loaded = snows.load(folder, make("mlp"))
    torch.testing.assert_close(loaded.state_dict(), result.model.state_dict(), rtol=0, atol=0)


@pytest.mark.parametrize("content", [b"{", b"[]", b"\xff\xfe", None])
@pytest.mark.parametrize("name", ["model.safetensors", "report.json"])
def test_unreadable_files_of_old_folders_are_refused(
    name: str, content: bytes | None, result: snows.Result, tmp_path: Path
) -> None:
    folder = result.save(tmp_path / "out")
    (folder / "manifest.json").unlink()
    if content is None:
        (folder / name).unlink()
    else:
        (folder / name).write_bytes(content)
    with pytest.raises(InputError, match=rf"^(cannot read|there is no file) .*out/{name}"):
        snows.load(folder, make("mlp") if name == "model.safetensors" else None)
