"""Every format: what is written is the network, with its zeros; and what is refused leaves nothing behind."""

from __future__ import annotations

import json
import resource
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

import snows
from snows.errors import InputError
from snows.exports import checks, weight_files
from snows.exports.formats import FORMATS
from tests.exported import calibration, file_names, images, save, seeded
from tests.saved import contents, strict

RUN_HERE = [name for name in FORMATS if name not in ("coreml", "hf")]


def removed(folder: Path) -> int:
    return sum(int((~mask).sum()) for mask in snows.data.weights.read_state(folder / "masks.safetensors").values())


@pytest.mark.parametrize("name", RUN_HERE)
def test_outputs_and_zeros_are_those_of_the_model(name: str, pruned: Path, tmp_path: Path) -> None:
    before = contents(pruned)
    exported = snows.export(pruned, name, images(), out=tmp_path / "out")
    assert set(exported.differences) == {1, 2, 3}
    assert max(exported.differences.values()) < (1e-2 if name == "torch-2:4" else 1e-5)
    assert exported.removed == removed(pruned) > 1000
    assert set(file_names(tmp_path / "out")) == {*exported.files, "export.json"}
    for file, size in exported.files.items():
        assert size.bytes == (tmp_path / "out" / file).stat().st_size
        assert 0 < size.zipped < size.bytes
    about = strict((tmp_path / "out" / "export.json").read_text())
    assert about["format"] == name
    assert about["result_sha256"] == json.loads((pruned / "manifest.json").read_text())["sha256"]
    assert contents(pruned) == before
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_the_default_place_is_beside_the_result(pruned: Path) -> None:
    exported = snows.export(pruned, "torch-2:4", images())
    assert exported.folder == f"{pruned}-torch-2of4"
    shutil.rmtree(exported.folder)


def test_the_default_place_of_the_working_directory(pruned: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(pruned)
    exported = snows.export(".", "safetensors", images())
    assert exported.folder == f"{pruned}-safetensors"
    shutil.rmtree(exported.folder)


def test_a_folder_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"^cannot read .*File name too long"):
        snows.export("x" * 300, "safetensors", out=tmp_path / "out")


def test_the_users_model_is_not_changed(pruned: Path, tmp_path: Path) -> None:
    model = images().train()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    snows.export(pruned, "torch-export", model, out=tmp_path / "out")
    assert model.training
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
    assert all(parameter.requires_grad for parameter in model.parameters())


@pytest.mark.filterwarnings("ignore")  # of coremltools about what it cannot do on this system
def test_core_ml_packages_hold_sparse_weights(tmp_path: Path) -> None:
    """Half precision takes two bytes a weight; sparse, a tenth of the weights and one bit for each place."""
    pytest.importorskip("coremltools", reason="coremltools is not installed (pip install coremltools)")
    model = seeded(nn.Sequential(nn.Linear(256, 512), nn.ReLU(), nn.Linear(512, 512), nn.ReLU(), nn.Linear(512, 256)))
    x = torch.randn(16, 256, generator=torch.Generator().manual_seed(0))
    result = save(tmp_path / "pruned", model, x, "0.9 uniform")
    exported = snows.export(result, "coreml", model, out=tmp_path / "out")
    weights = 512 * (256 + 512 + 256)
    assert exported.differences == {}
    assert exported.removed == removed(result) == pytest.approx(0.9 * weights, abs=3)
    assert exported.facts["precision"] == "float16"
    assert exported.facts["dense_bytes"] > 2 * weights
    size = sum(size.bytes for size in exported.files.values())
    assert (0.1 * 2 + 1 / 8) * weights < size < 0.2 * exported.facts["dense_bytes"]
    assert "Not run" in exported.notes[0]


def test_the_compact_file_is_smaller_and_the_same(pruned: Path, tmp_path: Path) -> None:
    files = snows.export(pruned, "safetensors", images(), out=tmp_path / "out").files
    assert files["model.compact.safetensors"].bytes < files["model.safetensors"].bytes


# What is refused


def test_a_folder_that_is_no_result(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="there is no folder"):
        snows.export(tmp_path / "nothing", "safetensors", images())
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "notes.txt").write_text("mine")
    with pytest.raises(InputError, match=r"other cannot be used: there is no .*manifest.json"):
        snows.export(tmp_path / "other", "safetensors", images())
    assert [path.name for path in tmp_path.iterdir()] == ["other"]


def test_a_changed_byte_is_refused_as_verify_does(pruned: Path, tmp_path: Path) -> None:
    copied = Path(shutil.copytree(pruned, tmp_path / "copied"))
    file = copied / "model.safetensors"
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)
    (finding,) = snows.verify(copied, images()).findings
    with pytest.raises(InputError) as refused:
        snows.export(copied, "safetensors", images())
    assert str(refused.value) == f"{copied} cannot be used: {finding}"
    assert [path.name for path in tmp_path.iterdir()] == ["copied"]


def test_another_model_is_refused(pruned: Path, tmp_path: Path) -> None:
    with pytest.raises(InputError, match="does not fit Linear"):
        snows.export(pruned, "safetensors", nn.Linear(4, 4), out=tmp_path / "out")


def test_a_result_without_a_recorded_model_needs_one(pruned: Path, tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"does not record which model it was made from; give the model$"):
        snows.export(pruned, "safetensors", out=tmp_path / "out")


def test_only_exports_are_replaced_and_only_when_told(pruned: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    out.write_text("mine")
    for force in (False, True):
        with pytest.raises(InputError, match=r"exists|is no export of snows"):
            snows.export(pruned, "safetensors", images(), out=out, force=force)
    assert out.read_text() == "mine"
    out.unlink()
    snows.export(pruned, "safetensors", images(), out=out)
    with pytest.raises(InputError, match="exists; choose another folder, or say that it may be replaced"):
        snows.export(pruned, "torch-export", images(), out=out)
    snows.export(pruned, "torch-export", images(), out=out, force=True)
    assert file_names(out) == ["export.json", "model.pt2"]
    (out / "notes.txt").write_text("mine")
    with pytest.raises(InputError, match=r"holds more than an export \(notes.txt\), which would be lost"):
        snows.export(pruned, "safetensors", images(), out=out, force=True)
    assert (out / "notes.txt").read_text() == "mine"


def test_a_failing_export_leaves_nothing(pruned: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A writer that loses a zero, one that gives other outputs, and one that fails half-way."""
    whole = weight_files.write

    def loses_a_zero(saved, folder):  # type: ignore[no-untyped-def]
        written = whole(saved, folder)
        written.constants["0.weight"].add_(1.0)
        return written

    def other_outputs(saved, folder):  # type: ignore[no-untyped-def]
        written = whole(saved, folder)
        return checks.Written(lambda call: [1.001 * y for y in written.run(call)], written.constants)

    def fails(saved, folder):  # type: ignore[no-untyped-def]
        whole(saved, folder)
        raise RuntimeError("no such luck\nand a second line")

    for writer, words in {
        loses_a_zero: "the safetensors export holds no weight with the zeros of 0.weight",
        other_outputs: "the safetensors export gives outputs that are .* apart, where the largest is",
        fails: "safetensors cannot take Sequential: no such luck$",
    }.items():
        monkeypatch.setattr(weight_files, "write", writer)
        with pytest.raises(InputError, match=words):
            snows.export(pruned, "safetensors", images(), out=tmp_path / "out")
        assert list(tmp_path.iterdir()) == []


def test_a_model_that_cannot_be_traced(tmp_path: Path) -> None:
    class Frozen(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.one, self.two = nn.Linear(8, 8), nn.Linear(8, 4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = torch.relu(self.one(x))
            return self.two(y) if "frozen" not in self.__dict__ or float(y.sum()) > 0 else y

    model, x = seeded_linear(Frozen()), torch.randn(16, 8, generator=torch.Generator().manual_seed(0))
    result = save(tmp_path / "pruned", model, x)
    model.__dict__["frozen"] = True  # from now on it branches on values
    with pytest.raises(InputError, match=r"Frozen cannot be traced by torch\.export"):
        snows.export(result, "onnx", model, out=tmp_path / "out")
    assert [path.name for path in tmp_path.iterdir()] == ["pruned"]


def seeded_linear(model: nn.Module) -> nn.Module:
    with torch.random.fork_rng(), torch.no_grad():
        torch.manual_seed(0)
        for parameter in model.parameters():
            parameter.normal_()
    return model.eval()


def test_no_layer_fits_the_kernels_of_torch(tmp_path: Path) -> None:
    model = seeded_linear(nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 4)))
    result = save(tmp_path / "pruned", model, torch.randn(16, 8, generator=torch.Generator().manual_seed(0)))
    words = "no layer of Sequential can take torch's 2:4 kernels: 0.weight: it is 8 x 8; torch needs multiples of 16"
    with pytest.raises(InputError, match=words):
        snows.export(result, "torch-2:4", model)
    assert [path.name for path in tmp_path.iterdir()] == ["pruned"]


def test_a_model_that_is_none_of_transformers(pruned: Path, tmp_path: Path) -> None:
    pytest.importorskip("transformers", reason="transformers is not installed (pip install 'snows[models]')")
    with pytest.raises(InputError, match="Sequential is no model of transformers"):
        snows.export(pruned, "hf", images(), out=tmp_path / "out")


def test_a_full_disk_is_one_sentence_and_leaves_nothing(pruned: Path, tmp_path: Path) -> None:
    """In a process that may write files of 4 KB only, which fails like a full disk: while bytes are being written."""
    code = (
        "import resource, signal, sys, snows\nfrom tests.exported import images\n"
        "signal.signal(signal.SIGXFSZ, signal.SIG_IGN)\nresource.setrlimit(resource.RLIMIT_FSIZE, (4096, 4096))\n"
        "for to in ('safetensors', 'torch-export', 'onnx', 'openvino'):\n"
        "    try:\n        snows.export(sys.argv[1], to, images(), out=f'{sys.argv[2]}/{to}')\n"
        "    except snows.InputError as error:\n        print(to, len(str(error).splitlines()), error)\n"
    )
    assert resource.getrlimit(resource.RLIMIT_FSIZE)
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", code, pruned, tmp_path], capture_output=True, text=True, check=True
    )
    lines = done.stdout.splitlines()
    expected = [f"{to} 1" for to in ("safetensors", "torch-export", "onnx", "openvino")]
    assert [" ".join(line.split()[:2]) for line in lines] == expected
    assert all("cannot" in line for line in lines), lines
    assert list(tmp_path.iterdir()) == []


def test_half_precision_stays_half(tmp_path: Path) -> None:
    model = images().to(torch.bfloat16)
    result = save(tmp_path / "pruned", model, calibration().to(torch.bfloat16))
    exported = snows.export(result, "torch-export", images(), out=tmp_path / "out")  # a module in single precision
    assert exported.files["model.pt2"].bytes < 60_000
    stored = torch.export.load(tmp_path / "out" / "model.pt2")
    assert {tensor.dtype for tensor in stored.state_dict.values() if tensor.is_floating_point()} == {torch.bfloat16}
