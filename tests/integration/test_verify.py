"""Saved results are checked: every byte, every pattern, every zero, and what the model answers."""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn

import snows
from snows import InputError, SnowsError, verify
from snows.data.compact import pack_masks
from snows.data.embedded import MODEL
from snows.data.weights import read_state, read_tensors
from snows.reading import read_json
from snows.results.manifest import render_manifest
from snows.results.verification import Verification
from tests.networks import example, make
from tests.saved import FACTORY, QUICK, sealed

from .conftest import Snows

CORRUPTIONS = 1000
LENGTHS = 8  # at which each file is cut off


def pruned(name: str = "mlp", pattern: Any = "1:4", dtype: torch.dtype | None = None, **options: Any) -> snows.Result:
    model = make(name) if dtype is None else make(name).to(dtype)
    return snows.prune(model, example(name, 16), pattern, **{"recipe": QUICK, "progress": False, **options})


@pytest.fixture(scope="module")
def result() -> snows.Result:
    return pruned()


@pytest.fixture(scope="module", params=[False, True], ids=["dense", "compact"])
def saved(request: pytest.FixtureRequest, result: snows.Result, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A saved result that is not changed."""
    return result.save(tmp_path_factory.mktemp("saved") / "out", compact=request.param)


# What is as it should be


@pytest.mark.parametrize("compact", [False, True])
@pytest.mark.parametrize("name", ["conv-bn", "residual", "attention", "tied", "two-inputs", "dict-output"])
def test_a_saved_result_holds(name: str, compact: bool, tmp_path: Path) -> None:
    found = pruned(name, "2:4")
    folder = found.save(tmp_path / "out", compact=compact)
    checked = verify(folder, make(name))
    assert checked.ok
    assert checked == Verification((), (), 6, len(found.masks))


@pytest.mark.parametrize("compact", [False, True])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_every_type_of_weights_comes_back_bit_by_bit(dtype: torch.dtype, compact: bool, tmp_path: Path) -> None:
    found = pruned("conv-bn", 0.5, dtype, solver=None)
    folder = found.save(tmp_path / "out", compact=compact)
    loaded = snows.load(folder, make("conv-bn").to(dtype)).state_dict()
    stored = read_state(folder / f"model.{'compact.' if compact else ''}safetensors")
    for name, tensor in found.model.state_dict().items():
        assert stored[name].dtype == tensor.dtype
        assert torch.equal(loaded[name], tensor)
        assert torch.equal(loaded[name].flatten().view(torch.uint8), stored[name].flatten().view(torch.uint8))
    for name, mask in found.masks.items():  # though a negative weight times zero is -0.0
        assert not stored[name][~mask].signbit().any()
    assert verify(folder, make("conv-bn")).findings == ()  # in the types of the file, whatever the module's are


def test_the_model_given_is_left_as_it_is(saved: Path) -> None:
    model = make("mlp").train()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    assert verify(saved, model).ok
    torch.testing.assert_close(model.state_dict(), before, rtol=0, atol=0)
    assert model.training


def test_probes_that_are_not_run_are_said(result: snows.Result, tmp_path: Path) -> None:
    unnamed = verify(result.save(tmp_path / "unnamed"))
    assert unnamed.ok
    assert unnamed.notes == (
        f"the probe was not run: {tmp_path / 'unnamed'} does not record which model it was made from; give the model",
    )
    code = replace(result, source="net.py:make").save(tmp_path / "code")
    assert verify(code).notes == (
        f"the probe was not run: {code} was made from net.py:make, and code that a folder names is not run; give the "
        "model if you know the code",
    )
    unknown = replace(result, source="nowhere").save(tmp_path / "unknown")
    assert verify(unknown).notes[0].startswith("the probe was not run: model 'nowhere' is not known")
    without = replace(result, probe=None).save(tmp_path / "without")
    assert verify(without, make("mlp")).notes == ("no probe is stored, so no outputs were compared",)
    assert not (without / "probe.safetensors").exists()


def test_a_result_without_a_probe_is_saved_where_the_model_does_not_run(result: snows.Result, tmp_path: Path) -> None:
    for probe in (((torch.randn(2, 99),), {}), ((object(),), {})):
        folder = replace(result, probe=probe).save(tmp_path / str(len(list(tmp_path.iterdir()))))
        assert verify(folder, make("mlp")).notes == ("no probe is stored, so no outputs were compared",)


def test_the_probe_is_a_few_samples_and_the_answers_of_the_pruned_model(result: snows.Result, saved: Path) -> None:
    tensors, _ = read_tensors(saved / "probe.safetensors")
    assert set(tensors) == {"input.0", "output.0"}
    assert len(tensors["input.0"]) == 2
    assert torch.equal(result.model(tensors["input.0"]), tensors["output.0"])


def test_the_recorded_name_of_a_library_is_built(tmp_path: Path) -> None:
    from snows.data import embedded

    model = embedded.model()
    images = torch.randn(4, 1, 28, 28)
    found = snows.prune(model, images, "2:4", solver=None, progress=False, layers="layer3*")
    folder = replace(found, source=MODEL).save(tmp_path / "out")
    assert verify(folder) == Verification((), (), 6, len(found.masks))


def test_infinite_buffers_are_a_note(tmp_path: Path) -> None:
    class Masked(nn.Sequential):
        def __init__(self) -> None:
            super().__init__(*make("mlp"))
            self.register_buffer("causal", torch.full((2, 2), -torch.inf))

    folder = snows.prune(Masked().eval(), example("mlp", 16), "2:4", solver=None, progress=False).save(tmp_path / "out")
    assert verify(folder, Masked()) == Verification((), ("causal has infinite values",), 6, 1)


# Damaged files


def test_every_flipped_byte_is_found(saved: Path, tmp_path: Path) -> None:
    """All files; any byte, any change."""
    folder = Path(shutil.copytree(saved, tmp_path / "out"))
    contents = {path: path.read_bytes() for path in sorted(folder.iterdir())}
    assert len(contents) == 7
    chance = np.random.default_rng(0)
    began = time.perf_counter()
    model = make("mlp")
    for number in range(CORRUPTIONS):
        path = list(contents)[number % len(contents)]
        damaged = bytearray(contents[path])
        where = int(chance.integers(len(damaged)))
        damaged[where] ^= int(chance.integers(1, 256))
        path.write_bytes(damaged)
        found = verify(folder, model)
        assert not found.ok, f"{path.name}: byte {where} is {damaged[where]}, was {contents[path][where]}"
        assert len(found.findings) == 1
        assert path.name in found.findings[0]
        path.write_bytes(contents[path])
    assert verify(folder, model).ok
    assert time.perf_counter() - began < 20


def test_truncated_files_are_said_by_verify_and_load(saved: Path, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(saved, tmp_path / "out"))
    chance = np.random.default_rng(1)
    for path in sorted(folder.iterdir()):
        content = path.read_bytes()
        for length in [0, len(content) - 1, *map(int, chance.integers(len(content), size=LENGTHS))]:
            path.write_bytes(content[:length])
            found = verify(folder, make("mlp"))
            assert len(found.findings) == 1, (path.name, length)
            assert path.name in found.findings[0]
            if path.name.startswith("model") or path.name == "manifest.json":
                with pytest.raises(InputError, match=path.name):
                    snows.load(folder, make("mlp"))
            else:
                snows.load(folder, make("mlp"))  # reads no other file
            if path.name == "report.json":
                with pytest.raises(InputError, match=r"report\.json has \d+ bytes, and had"):
                    snows.load(folder)
            if path.name == "masks.safetensors":
                with pytest.raises(InputError, match=r"^cannot read .*masks\.safetensors: "):
                    read_state(path)
        path.write_bytes(content)


def test_damaged_files_are_read_or_refused_but_never_crash(saved: Path, tmp_path: Path) -> None:
    """Sealed with a fitting manifest: what reads them must not trust them."""
    folder = Path(shutil.copytree(saved, tmp_path / "out"))
    contents = {path: path.read_bytes() for path in sorted(folder.iterdir()) if path.suffix != ".html"}
    chance = np.random.default_rng(2)
    for number in range(300):
        path = list(contents)[number % len(contents)]
        damaged = bytearray(contents[path])
        damaged[int(chance.integers(min(len(damaged), 600)))] ^= int(chance.integers(1, 256))  # headers most of all
        path.write_bytes(damaged)
        if path.name != "manifest.json":
            sealed(folder)
        for read in (lambda: verify(folder, make("mlp")), lambda: snows.load(folder, make("mlp"))):
            with contextlib.suppress(SnowsError):
                read()
        for restored, content in contents.items():
            restored.write_bytes(content)
    assert verify(folder, make("mlp")).ok


CHANGES: dict[str, tuple[Callable[[Path], Any], str]] = {
    "missing": (lambda folder: (folder / "recipe.json").unlink(), r"recipe\.json is missing$"),
    "no manifest": (lambda folder: (folder / "manifest.json").unlink(), r"there is no .*manifest\.json, so nothing"),
    "empty": (lambda folder: [path.unlink() for path in folder.iterdir()], r"there is no .*manifest\.json"),
    "manifest is a folder": (
        lambda folder: ((folder / "manifest.json").unlink(), (folder / "manifest.json").mkdir()),
        r"manifest\.json is a folder",
    ),
    "another model": (
        lambda folder: save_file({"a": torch.ones(1)}, folder / "model.compact.safetensors"),
        r"model\.compact\.safetensors was not written with the other files$",
    ),
    "a manifest without masks": (
        lambda folder: ((folder / "masks.safetensors").unlink(), sealed(folder)),
        r"manifest\.json lists no masks\.safetensors$",
    ),
    "a manifest of other files": (
        lambda folder: (folder / "manifest.json").write_text(render_manifest({"../secret": {}}, {})),
        r"manifest\.json lists '\.\./secret', which is no file of snows$",
    ),
}


@pytest.mark.parametrize("case", CHANGES)
def test_files_that_are_missing_or_too_many(case: str, result: snows.Result, tmp_path: Path) -> None:
    folder = result.save(tmp_path / "out")
    change, words = CHANGES[case]
    change(folder)
    found = verify(folder, make("mlp"))
    assert any(re.search(words, finding) for finding in found.findings), found.findings
    assert found.notes == ("the contents were not looked at",)


def test_files_of_others_are_a_note(result: snows.Result, tmp_path: Path) -> None:
    folder = result.save(tmp_path / "out")
    (folder / "note.txt").write_text("mine")
    assert verify(folder, make("mlp")).ok
    assert verify(folder, make("mlp")).notes == (f"{folder / 'note.txt'} is no file of snows",)


def test_what_is_no_folder_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"^there is no folder .*nowhere$"):
        verify(tmp_path / "nowhere")


# Contents that are not what the report says, under a manifest that fits


def change_weights(folder: Path, change: Callable[[dict[str, Tensor]], Any]) -> None:
    state = {name: tensor.clone() for name, tensor in read_state(folder / "model.safetensors").items()}
    change(state)
    save_file(state, folder / "model.safetensors")


def change_masks(folder: Path, change: Callable[[dict[str, Tensor]], Any]) -> None:
    masks = {name: mask.clone() for name, mask in read_state(folder / "masks.safetensors").items()}
    change(masks)
    packed, metadata = pack_masks(masks)
    save_file(packed, folder / "masks.safetensors", metadata=metadata)


def change_report(folder: Path, change: Callable[[dict[str, Any]], Any]) -> None:
    report = read_json(folder / "report.json")
    change(report)
    (folder / "report.json").write_text(json.dumps(report))


def removed(masks: dict[str, Tensor]) -> tuple[int, ...]:
    return tuple(int(index) for index in (~masks["2.weight"]).nonzero()[0])


def put(value: float) -> Callable[[Path], None]:
    """Into the first weight that the mask removes."""

    def change(folder: Path) -> None:
        where = removed(read_state(folder / "masks.safetensors"))
        change_weights(folder, lambda state: state["2.weight"].__setitem__(where, value))

    return change


CONTENTS: dict[str, tuple[Callable[[Path], Any], str]] = {
    "a weight comes back": (put(0.5), "2.weight is not exactly zero at 1 of the weights that its mask removes"),
    "a zero is negative": (put(-0.0), "2.weight is not exactly zero at 1 of the weights"),
    "one group keeps two": (
        lambda f: change_masks(f, lambda masks: masks["2.weight"].__setitem__(removed(masks), True)),
        "2.weight keeps more than 1:4 allows in 1 groups",
    ),
    "one more is kept": (
        lambda f: change_masks(f, lambda masks: masks["2.weight"].__setitem__(removed(masks), True)),
        "2.weight keeps 17 of 64 weights; the report says 16 of 64",
    ),
    "no mask": (lambda f: change_masks(f, lambda m: m.update(other=m.pop("2.weight"))), "but has no mask"),
    "a mask too many": (lambda f: change_masks(f, lambda m: m.update(other=m["2.weight"])), "other has a mask, but is"),
    "no weight": (lambda f: change_weights(f, lambda s: s.pop("2.weight")), "but has no weight"),
    "another shape": (lambda f: change_weights(f, lambda s: s.update({"2.weight": torch.ones(4)})), "in the report"),
    "another type": (
        lambda f: change_weights(f, lambda s: s.update({"2.weight": s["2.weight"].long()})), "expected floats and",
    ),
    "NaN": (
        lambda f: change_weights(f, lambda s: s["2.weight"].masked_fill_(s["2.weight"] != 0, torch.nan)),
        "2.weight has NaN or infinite weights",
    ),
    "NaN elsewhere": (lambda f: change_weights(f, lambda s: s["0.bias"].fill_(torch.nan)), "0.bias has NaN values"),
    "another layer": (lambda f: change_weights(f, lambda s: s["0.bias"].add_(1)), "outputs that are "),
    "a bias is missing": (lambda f: change_weights(f, lambda s: s.pop("0.bias")), "it lacks 0.bias"),
    "another version": (lambda f: change_report(f, lambda r: r.update(schema=7)), "report.json has schema 7; this"),
    "no layers": (lambda f: change_report(f, lambda r: r.pop("layers")), "report.json does not list the layers with"),
    "odd layers": (lambda f: change_report(f, lambda r: r.update(layers=[3])), "does not list the layers with"),
    "another pattern": (
        lambda f: change_report(f, lambda r: r["layers"][0].update(pattern="1:3")), "2.weight cannot be 1:3: its 8",
    ),
    **{
        f"an impossible pattern, {pattern}": (
            lambda f, pattern=pattern: change_report(f, lambda r: r["layers"][0].update(pattern=pattern)),
            "2.weight has an impossible pattern in the report: ",
        )
        for pattern in ("5:4", "0:4", "2:4:6", 1.5, "-1:4", "dense", None)
    },
    "no recipe": (lambda f: (f / "recipe.json").write_text('{"schema": 1, "steps": 1}'), "unknown choice steps"),
    "no text": (lambda f: (f / "recipe.json").write_bytes(b"\xff\xfe"), "no text in UTF-8"),
    "no probe inside": (lambda f: save_file({"a": torch.ones(1)}, f / "probe.safetensors"), "it holds no call"),
}  # fmt: skip


@pytest.mark.parametrize("case", CONTENTS)
def test_contents_that_do_not_hold(case: str, result: snows.Result, tmp_path: Path) -> None:
    folder = result.save(tmp_path / "out")
    change, words = CONTENTS[case]
    change(folder)
    found = verify(sealed(folder), make("mlp"))
    assert any(words in finding for finding in found.findings), found


def test_a_model_that_does_not_fit_or_run_is_a_finding(saved: Path) -> None:
    assert "does not fit Residual: it lacks" in verify(saved, make("residual")).findings[0]

    class Broken(nn.Sequential):
        def forward(self, x: Tensor) -> Tensor:
            raise KeyError("what")

    assert "does not run on the stored inputs: 'what'" in verify(saved, Broken(*make("mlp"))).findings[0]


# The command


def process(*words: str) -> tuple[int, str, str]:
    """`python -m snows ...` in a process of its own."""
    done = subprocess.run(
        [sys.executable, "-m", "snows", *words],
        capture_output=True,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    return done.returncode, done.stdout, done.stderr


def test_the_command_from_end_to_end(run: Snows, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "net.py").write_text(FACTORY + "import torch\ndef data():\n    return torch.randn(32, 4)\n")
    (tmp_path / "fast.json").write_text('{"schema": 1, "horizon": 2, "sweeps": 1, "cg_steps": 2}')
    prune = ("prune", "net.py:make", "--data", "net.py:data", "--recipe", "fast.json", "--pattern", "1:4", "--quiet")
    assert run(*prune, "--out", "out", "--compact") == (0, "", "")
    assert (tmp_path / "out" / "model.compact.safetensors").is_file()
    assert not (tmp_path / "out" / "model.safetensors").exists()
    status, out, err = process("verify", "out", "--model", "net.py:make")
    assert (status, out, err) == (0, "out is as it was written: 6 files, 1 pruned layer\n", "")

    # replaced with --force only
    status, _, err = run(*prune, "--out", "out")
    assert status == 1
    assert "out exists and is not empty" in err
    assert run(*prune, "--out", "out", "--force") == (0, "", "")
    assert (tmp_path / "out" / "model.safetensors").is_file()
    assert not (tmp_path / "out" / "model.compact.safetensors").exists()
    assert sorted(path.name for path in tmp_path.iterdir() if path.name != "__pycache__") == [
        "fast.json",
        "net.py",
        "out",
    ]

    # a damaged file
    content = bytearray((tmp_path / "out" / "masks.safetensors").read_bytes())
    content[-1] ^= 1
    (tmp_path / "out" / "masks.safetensors").write_bytes(content)
    status, out, err = run("verify", "out")
    assert (status, err) == (1, "")
    assert out.splitlines() == [
        "out/masks.safetensors is damaged: its checksum is not that of the manifest",
        "note: the contents were not looked at",
    ]


def test_verify_as_json_and_quiet(run: Snows, result: snows.Result, tmp_path: Path) -> None:
    folder = str(result.save(tmp_path / "out"))
    status, out, _ = run("verify", folder, "--json")
    data = json.loads(out)
    assert (status, data.pop("notes")[0][:22]) == (0, "the probe was not run:")
    assert data == {"ok": True, "findings": [], "files": 6, "layers": 1}
    assert run("verify", folder, "--quiet") == (0, "", "")
    (tmp_path / "out" / "report.html").write_text("")
    assert run("verify", folder, "--quiet") == (1, "", "")
    status, out, _ = run("verify", folder, "--json")
    assert status == 1
    assert "report.html has 0 bytes, and had " in json.loads(out)["findings"][0]
    assert run("verify", "nowhere") == (1, "", "error: there is no folder nowhere\n")


@pytest.mark.parametrize(
    "words",
    [
        ["verify", "nowhere"], ["prune", "nowhere"], ["evaluate", "nowhere", "--data", "fashion"],
        ["inspect", "nowhere"], ["compare", "nowhere", "--data", "fashion"],
    ],
)  # fmt: skip
def test_debug_shows_where_a_failure_came_from(run: Snows, words: list[str]) -> None:
    plain, debugged = (run(*words, *more) for more in ([], ["--debug"]))
    assert plain[0] == debugged[0] != 0
    assert plain[2].count("\n") == 1
    assert debugged[2].startswith("Traceback (most recent call last):")
    assert debugged[2].endswith(plain[2])


@pytest.mark.parametrize("flag", ["--force", "--compact"])
def test_flags_of_saving_need_a_folder(run: Snows, flag: str) -> None:
    status, _, err = run("prune", flag)
    assert (status, err) == (2, f"error: {flag} says how to save; expected --out DIR with it\n")
