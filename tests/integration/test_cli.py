"""The command line: real processes for what only they show, the same entry point in this process for the rest."""

from __future__ import annotations

import io
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import load_file, save_file

import snows
from snows.data.models import build_model
from snows.data.weights import read_state

from .conftest import Outcome, Snows, assert_error

NET = """
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

def model():
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return nn.Sequential(
            nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 4)
        )

def images():
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return nn.Sequential(
            nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Conv2d(8, 8, 3), nn.ReLU(), nn.Conv2d(8, 8, 1), nn.ReLU(),
            nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 3),
        )

def sparse():
    made = model()
    with torch.no_grad():
        made[2].weight[:, ::2] = 0
    return made

def x():
    return torch.randn(96, 8, generator=torch.Generator().manual_seed(1))

def labelled():
    with torch.no_grad():
        return x()[:48], x()[48:], model()(x()[48:]).argmax(1)

def unlabelled():
    return x()[:48], x()[48:]

def calibration():
    return x()[:48]

def loader():
    return DataLoader(TensorDataset(x(), torch.zeros(96)), batch_size=20)

def dataset():
    return TensorDataset(x(), torch.zeros(96))

def batches():
    return {"input": x()}

def nothing_between():
    return nn.Sequential(nn.Linear(8, 4), nn.ReLU(), nn.Linear(4, 4))

def bracketed():
    made = nn.Sequential()
    for name in ("first", "[/red]", "last"):
        made.add_module(name, nn.Linear(8, 8))
    return made

def raises():
    raise RuntimeError("no such luck\\nand a second line")

def text():
    return "resnet"

def generator():
    return (row for row in x())

def lists():
    return x()[:48], x()[48:].tolist()

def wrong_labels():
    return x()[:48], x()[48:], torch.full((48,), 9)

def wrong_test():
    return x()[:48], torch.randn(5, 7)

number = 3
"""
FAST = """{"schema": 1, "horizon": 2, "sweeps": 1, "cg_steps": 2}"""
FILES = {
    "model.safetensors", "masks.safetensors", "probe.safetensors", "report.json", "report.html", "recipe.json",
    "manifest.json",
}  # fmt: skip


@pytest.fixture(scope="module", autouse=True)
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("work")
    (folder / "net.py").write_text(NET)
    (folder / "fast.json").write_text(FAST)
    return folder


@pytest.fixture(autouse=True)
def here(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(place)


def process(*words: str | Path) -> Outcome:
    """`python -m snows ...` in a process of its own."""
    done = subprocess.run(
        [sys.executable, "-m", "snows", *map(str, words)],
        capture_output=True,
        text=True,
        env={**os.environ, "COLUMNS": "200", "OMP_NUM_THREADS": "1"},
    )
    return Outcome(done.returncode, done.stdout, done.stderr)


def weights(folder: Path) -> dict[str, torch.Tensor]:
    return load_file(folder / "model.safetensors")


def same(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


PRUNE = ("prune", "net.py:model", "--data", "net.py:calibration", "--recipe", "fast.json")


# Processes


def test_help_is_instant() -> None:
    code = "import sys, snows.cli.commands; assert not {'torch', 'numpy'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)
    for words in (("--help",), ("prune", "--help")):
        outcome = process(*words)
        assert outcome.status == 0
        assert "Usage:" in outcome.out
    script = Path(sys.executable).parent / "snows"
    if script.exists():
        assert subprocess.run([script, "--help"], capture_output=True, text=True).stdout.count("prune") >= 1
    # --help of every command imports no torch either: it runs where torch cannot be imported
    blocked = "import sys; sys.modules['torch'] = None; sys.argv = ['snows', 'evaluate', '--help']; import runpy\n"
    subprocess.run(
        [sys.executable, "-c", blocked + "runpy.run_module('snows', run_name='__main__')"],
        check=True,
        capture_output=True,
    )


def test_a_run_from_end_to_end(tmp_path: Path) -> None:
    words = ("prune", "net.py:model", "--data", "net.py:labelled", "--pattern", "2:4", "--recipe", "fast.json")
    first = process(*words, "--out", tmp_path / "out")
    assert (first.status, first.err.strip()) == (0, "")
    for part in ("dense", "mask only", "SNOWS (K=2)", "top-1", "agreement", "100.00%", "Saved to", "2 layers removed"):
        assert part in first.out
    assert "left dense: 0: first layer" in first.out
    assert {path.name for path in (tmp_path / "out").iterdir()} == FILES
    assert [path.name for path in tmp_path.iterdir()] == ["out"]
    masks = read_state(tmp_path / "out" / "masks.safetensors")
    assert {name: float(mask.float().mean()) for name, mask in masks.items()} == {"2.weight": 0.5, "4.weight": 0.5}
    report = json.loads((tmp_path / "out" / "report.json").read_text())
    assert report["source"] == "net.py:model"
    assert [row["network"] for row in report["evaluation"]] == ["dense", "mask only", "SNOWS (K=2)"]
    assert report["evaluation"][0]["top1"] == 1
    # the recorded name rebuilds it, and evaluation finds what prune found
    loaded = snows.load(tmp_path / "out")
    assert same(dict(loaded.state_dict()), weights(tmp_path / "out"))

    # refused before any work, and left as it was
    before = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    again = process("prune", "missing.py:model", "--out", tmp_path / "out")
    assert_error(again, 1, "out exists and is not empty; choose another folder or remove it first")
    assert {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()} == before


# prune


def test_quiet_and_json(run: Snows, tmp_path: Path) -> None:
    quiet = run(*PRUNE, "--quiet", "--out", tmp_path / "out")
    assert quiet == Outcome(0, "", "")
    assert (tmp_path / "out" / "model.safetensors").is_file()
    outcome = run(*PRUNE, "--json", "--seed", 0)
    assert outcome.err == ""
    stored = json.loads((tmp_path / "out" / "report.json").read_text())
    times = {"seconds", "source", "layers"}
    assert {k: v for k, v in outcome.data.items() if k not in times} == {
        k: v for k, v in stored.items() if k not in times
    }
    assert outcome.data["samples"] == 48
    assert outcome.data["pattern"] == "2:4"
    assert outcome.data["evaluation"] == []
    table = run(*PRUNE)
    assert "Nothing was saved: pass --out DIR to keep the result." in table.out


def test_patterns_layers_exclusions_and_horizon(run: Snows) -> None:
    data = run(
        *PRUNE, "--json", "--pattern", "1:4, 2=0.5, 6=dense", "--layers", "*", "--exclude", "0", "--horizon", "1",
        "--mask", "wanda", "--seed", "5",
    ).data  # fmt: skip
    assert {layer["name"]: (layer["pattern"], layer["sparsity"]) for layer in data["layers"]} == {
        "2": ("0.5", 0.5),
        "4": ("1:4", 0.75),
    }
    assert {layer["name"]: layer["reason"] for layer in data["dense_layers"]} == {
        "0": "excluded",
        "6": "its pattern is 'dense'",
    }
    assert {layer["horizon"] for layer in data["layers"]} == {1}
    assert data["recipe"]["horizon"] == 1
    assert (data["mask"], data["seed"]) == ("wanda", 5)


def test_masks_of_every_kind(run: Snows, tmp_path: Path) -> None:
    masks = {}
    for mask in ("magnitude", "random", "wanda"):
        out = tmp_path / mask
        assert run(*PRUNE, "--quiet", "--mask", mask, "--out", out).status == 0
        masks[mask] = read_state(out / "masks.safetensors")
    assert not same(masks["magnitude"], masks["random"])
    # a file of masks says everything
    given = tmp_path / "given"
    file = tmp_path / "random" / "masks.safetensors"
    assert run(*PRUNE, "--quiet", "--mask", file, "--out", given).status == 0
    assert same(read_state(given / "masks.safetensors"), masks["random"])
    assert same(weights(given), weights(tmp_path / "random"))
    report = json.loads((given / "report.json").read_text())
    assert (report["pattern"], report["mask"]) == ("given", "given")
    # so do the zeros of the weights
    zeros = run("prune", "net.py:sparse", *PRUNE[2:], "--mask", "weights", "--json").data
    assert [(layer["name"], layer["sparsity"]) for layer in zeros["layers"]] == [("2", 0.5)]
    # and weights may come from a file
    sparse = ("--weights", tmp_path / "random" / "model.safetensors", "--mask", "weights", "--json")
    assert {layer["name"] for layer in run(*PRUNE, *sparse).data["layers"]} == {"2", "4"}
    torch.save({name.removesuffix(".weight"): mask.byte() for name, mask in masks["random"].items()}, tmp_path / "m.pt")
    found = run(*PRUNE, "--mask", tmp_path / "m.pt", "--json").data
    assert (found["pattern"], found["mask"]) == ("given", "given")
    save_file({"2": torch.full((16, 16), 0.5)}, tmp_path / "halves.safetensors")
    assert_error(run(*PRUNE, "--mask", tmp_path / "halves.safetensors"), 2, "expected a bool tensor or one of 0 and 1")


def test_recipes_by_name_by_file_and_from_the_config(run: Snows, tmp_path: Path) -> None:
    start = ("prune", "net.py:model", "--data", "net.py:calibration", "--json", "--layers", "2")
    paper = run(*start, "--recipe", "paper").data
    assert paper["recipe"]["start"] == "masked"
    assert paper["recipe"]["damping"] == 1e-4
    default = run(*start).data
    assert default["recipe"] == json.loads(json.dumps(snows.Recipe().__dict__))
    config = tmp_path / "run.toml"
    config.write_text("[recipe]\nsweeps = 2\ncg_steps = 1\n")
    mixed = run(*start, "--recipe", "fast.json", "--config", config).data
    assert (mixed["recipe"]["horizon"], mixed["recipe"]["sweeps"], mixed["recipe"]["cg_steps"]) == (2, 2, 1)
    assert [solve["sweep"] for solve in mixed["layers"][0]["solves"]] == [0, 1]


def test_the_seed_decides(run: Snows, tmp_path: Path) -> None:
    for name, seed in (("a", 1), ("b", 1), ("c", 2)):
        assert run(*PRUNE, "--quiet", "--mask", "random", "--seed", seed, "--out", tmp_path / name).status == 0
    assert same(weights(tmp_path / "a"), weights(tmp_path / "b"))
    assert not same(weights(tmp_path / "a"), weights(tmp_path / "c"))


@pytest.mark.parametrize("data", ["x", "loader", "dataset", "batches", "labelled"])
def test_the_number_of_samples(data: str, run: Snows) -> None:
    """Whatever the factory gives, the first ones are used."""
    found = run("prune", "net.py:model", "--data", f"net.py:{data}", *PRUNE[4:], "--samples", 30, "--json").data
    assert found["samples"] == 30
    assert bool(found["evaluation"]) == (data in ("x", "labelled"))  # the rest of a tensor evaluates


def test_warnings_are_lines_on_standard_error(run: Snows) -> None:
    outcome = run(*PRUNE, "--json", "--exclude", "fc9")
    assert outcome.err.count("\n") == 1  # though the command prunes twice
    assert outcome.err.startswith("warning: exclude='fc9' fits no layer")
    assert outcome.data["warnings"]


def test_names_are_not_read_as_markup(run: Snows) -> None:
    words = ("net.py:bracketed", "--data", "net.py:calibration", "--pattern", "[[]/red]=2:4")
    for command in (("prune", *words, "--recipe", "fast.json"), ("inspect", *words)):
        outcome = run(*command)
        assert outcome.status == 0, outcome.err
        assert "/red]" in outcome.out


# evaluate


def test_evaluation_with_and_without_labels_and_a_pruned_network(run: Snows, tmp_path: Path) -> None:
    assert run(*PRUNE, "--quiet", "--out", tmp_path / "out").status == 0
    start = ("evaluate", "net.py:model", "--data")
    pruned = ("--pruned", tmp_path / "out")
    plain = run(*start, "net.py:labelled", "--json").data
    assert [set(row) for row in plain] == [{"network", "top1", "top5", "loss"}]
    assert plain[0]["top1"] == 1
    both = run(*start, "net.py:labelled", *pruned, "--json").data
    assert [row["network"] for row in both] == ["dense", "pruned"]
    assert set(both[1]) == {"network", "top1", "top5", "loss", "agreement", "kl"}
    assert both[0]["agreement"] == 1
    assert both[1]["agreement"] == both[1]["top1"] < 1  # the labels are the dense network's own choices
    without = run(*start, "net.py:unlabelled", *pruned, "--json").data
    assert without == [{k: row[k] for k in ("network", "agreement", "kl")} for row in both]
    table = run(*start, "net.py:labelled", *pruned)
    assert "48 samples" in table.out
    assert "pruned" in table.out
    assert run(*start, "net.py:labelled", "--quiet") == Outcome(0, "", "")
    assert_error(run(*start, "net.py:unlabelled"), 1, "the data has no labels: pass --pruned DIR")
    assert_error(run(*start, "net.py:calibration"), 1, "no samples are left to evaluate on")
    assert_error(run(*start, "net.py:labelled", "--pruned", tmp_path / "no"), 1, "there is no file")
    wrong = run("evaluate", "net.py:images", "--data", "net.py:labelled", *pruned)
    assert_error(wrong, 1, "model.safetensors does not fit Sequential: ")


# inspect


def test_inspection(run: Snows) -> None:
    start = ("inspect", "net.py:model", "--data", "net.py:calibration")
    table = run(*start, "--recipe", "fast.json")
    assert (table.status, table.err.strip()) == (0, "")
    for part in ("Sequential", "16x16", "2:4", "): first layer", "GiB", "1 sweep:"):
        assert part in table.out
    data = run(*start, "--pattern", "1:4", "--horizon", 1, "--exclude", "4", "--samples", 500, "--json").data
    layers = {layer["name"]: layer for layer in data["layers"]}
    assert layers["2"]["pattern"] == "1:4"
    assert layers["2"]["horizon"] == 1
    assert layers["2"]["shape"] == [16, 16]
    assert layers["4"]["reason"] == "excluded"
    assert data["samples"] == 500
    assert data["seconds"] > 0
    assert data["memory_bytes"] > 0
    assert run(*start, "--quiet") == Outcome(0, "", "")


def test_inspection_where_nothing_can_be_pruned(run: Snows) -> None:
    start = ("inspect", "net.py:nothing_between", "--data", "net.py:calibration")
    data = run(*start, "--json").data
    assert [layer["reason"].split(" (")[0] for layer in data["layers"]] == ["first layer", "last layer"]
    assert {layer["pattern"] for layer in data["layers"]} == {None}
    table = run(*start)
    assert table.status == 0
    assert "): first layer" in table.out
    # pruning it is a failure that says the same
    assert_error(run("prune", *start[1:]), 1, "no layer can be pruned: 0: first layer")


def test_inspection_without_data_takes_random_images(run: Snows, tmp_path: Path) -> None:
    (tmp_path / "c.toml").write_text("[data]\nsize = 12\n")
    data = run("inspect", "net.py:images", "--config", tmp_path / "c.toml", "--json").data
    assert [layer["name"] for layer in data["layers"] if layer["pattern"]] == ["2", "4"]


# Data


def pictures(count: int = 12, size: int = 16) -> np.ndarray:
    return np.random.default_rng(0).integers(0, 256, (count, size, size, 3), dtype=np.uint8)


def jpegs(count: int = 12) -> tuple[np.ndarray, np.ndarray]:
    files = []
    for picture in pictures(count):
        buffer = io.BytesIO()
        Image.fromarray(picture).save(buffer, "JPEG")
        files.append(buffer.getvalue())
    offsets = np.cumsum([0, *map(len, files)])
    return np.frombuffer(b"".join(files), np.uint8), offsets


NORMALIZED = "[data]\nmean = [0.5, 0.5, 0.5]\nstd = 0.25\nsize = 16\n"
IMAGES = ("prune", "net.py:images", "--recipe", "fast.json", "--samples", "8", "--json", "--data")


def test_npz_files(run: Snows, tmp_path: Path) -> None:
    (tmp_path / "c.toml").write_text(NORMALIZED)
    config = ("--config", tmp_path / "c.toml")
    y = np.arange(12) % 3
    np.savez(tmp_path / "xy.npz", x=pictures(), y=y)
    jpeg, offsets = jpegs()
    np.savez(tmp_path / "jpeg.npz", jpeg=jpeg, offsets=offsets, labels=y)
    np.savez_compressed(tmp_path / "floats.npz", x=np.random.default_rng(1).standard_normal((12, 3, 16, 16)))
    for name in ("xy", "jpeg"):
        data = run(*IMAGES, f"npz:{tmp_path / name}.npz", *config).data
        assert data["samples"] == 8
        assert set(data["evaluation"][0]) == {"network", "top1", "top5", "loss", "agreement", "kl"}
        assert data["warnings"] == []
    data = run(*IMAGES, f"npz:{tmp_path / 'floats.npz'}", *config).data
    assert set(data["evaluation"][0]) == {"network", "agreement", "kl"}
    bare = run(*IMAGES, f"npz:{tmp_path / 'xy.npz'}")
    assert bare.status == 0
    assert bare.err.startswith("warning: no mean and std are given for the npz file")


def test_npz_pixels_are_normalized(tmp_path: Path) -> None:
    from snows.data.sources import DataConfig, load_data

    np.savez(tmp_path / "xy.npz", x=pictures(), y=np.arange(12))
    data = load_data(f"npz:{tmp_path / 'xy.npz'}", 8, 3, DataConfig((0.5, 0.4, 0.3), (0.1, 0.2, 0.3)))
    assert data.test is not None
    assert data.test_labels is not None
    assert len(data.calibration) == 8
    assert len(data.test) == 4
    expected = (pictures() / 255 - np.array([0.5, 0.4, 0.3])) / np.array([0.1, 0.2, 0.3])
    found = expected[data.test_labels.numpy()].transpose(0, 3, 1, 2)
    np.testing.assert_allclose(data.test.numpy(), found, rtol=1e-4, atol=1e-5)


def test_class_folders(run: Snows, tmp_path: Path) -> None:
    (tmp_path / "c.toml").write_text("[data]\nsize = 16\n")
    for i, picture in enumerate(pictures()):
        folder = tmp_path / "photos" / f"class{i % 3}"
        folder.mkdir(parents=True, exist_ok=True)
        Image.fromarray(picture).resize((20 + i, 18)).save(folder / f"{i}.png")
        (folder / "notes.txt").write_text("no image")
    words = ("--config", tmp_path / "c.toml")
    data = run(*IMAGES, f"folder:{tmp_path / 'photos'}", *words).data
    assert data["samples"] == 8
    assert "top1" in data["evaluation"][0]
    rows = run("evaluate", "net.py:images", *IMAGES[4:], f"folder:{tmp_path / 'photos'}", *words).data
    assert {k: v for k, v in data["evaluation"][0].items() if k in rows[0]} == rows[0]
    (tmp_path / "photos" / "class0" / "0.png").write_bytes(b"no png")
    assert_error(run(*IMAGES, f"folder:{tmp_path / 'photos'}", *words), 1, "0.png cannot be read as an image")
    (tmp_path / "empty").mkdir()
    assert_error(run(*IMAGES, f"folder:{tmp_path / 'empty'}"), 1, "has no images in class folders")
    assert_error(run(*IMAGES, f"folder:{tmp_path / 'missing'}"), 1, "there is no folder")


def bad_npz(tmp_path: Path) -> dict[str, tuple[Path, str]]:
    def saved(name: str, **arrays: np.ndarray) -> Path:
        np.savez(tmp_path / f"{name}.npz", **arrays)
        return tmp_path / f"{name}.npz"

    np.savez_compressed(tmp_path / "corrupt.npz", x=pictures())
    content = bytearray((tmp_path / "corrupt.npz").read_bytes())
    content[60:600] = bytes(540)
    (tmp_path / "corrupt.npz").write_bytes(content)
    (tmp_path / "truncated.npz").write_bytes(bytes(content[:500]))
    (tmp_path / "garbage.npz").write_bytes(b"not a zip file at all")
    np.save(tmp_path / "single.npy", pictures())
    jpeg, offsets = jpegs()
    broken = jpeg.copy()
    broken[offsets[3] : offsets[4]] = 0
    labels = np.array(["cat"] * 12)
    return {
        "missing": (tmp_path / "missing.npz", "there is no file"),
        "corrupt": (tmp_path / "corrupt.npz", "cannot be read as npz"),
        "truncated": (tmp_path / "truncated.npz", "cannot be read as npz"),
        "garbage": (tmp_path / "garbage.npz", "cannot be read as npz"),
        "single array": (tmp_path / "single.npy", "is a single array"),
        "other arrays": (saved("other", images=pictures()), "has the arrays images; expected x (and y), or jpeg"),
        "objects": (saved("objects", x=np.array([{}, {}])), "cannot be read as npz"),
        "text": (saved("text", x=np.array(["a", "b"])), "the samples are <U1 of shape (2,); expected numbers"),
        "names": (saved("names", x=pictures(), y=labels), "the labels are <U3 of shape (12,); expected numbers"),
        "too few labels": (saved("few", x=pictures(), y=np.arange(3)), "has 12 samples and 3 labels"),
        "flat": (saved("flat", x=np.zeros((4, 9), np.uint8)), "x has shape (4, 9); images are expected as"),
        "broken JPEG": (saved("broken", jpeg=broken, offsets=offsets), "image 3 cannot be decoded"),
        "offsets": (saved("offsets", jpeg=jpeg, offsets=offsets / 2), "jpeg is uint8 and offsets float64; expected"),
        "no JPEG": (saved("none", jpeg=jpeg[:0], offsets=offsets[:1] * 0), "the images have 0 different sizes"),
    }


def test_bad_npz_files(run: Snows, tmp_path: Path) -> None:
    (tmp_path / "c.toml").write_text(NORMALIZED)
    for case, (path, words) in bad_npz(tmp_path).items():
        outcome = run(*IMAGES, f"npz:{path}", "--config", tmp_path / "c.toml")
        assert words in outcome.err, f"{case}: {outcome}"
        assert_error(outcome, 1, words)


# Wrong input

MODEL, DATA = ("prune", "net.py:model"), ("--data", "net.py:calibration")
ERRORS: dict[str, tuple[int, str, tuple[str, ...]]] = {
    "no file": (1, "there is no file missing.py", ("prune", "missing.py:model", *DATA)),
    "no function": (1, "net.py has no function 'nothing'", ("prune", "net.py:nothing", *DATA)),
    "not callable": (1, "net.py has no function 'number'", ("prune", "net.py:number", *DATA)),
    "factory raises": (
        1, "raises of net.py failed: RuntimeError: no such luck and a second line", ("prune", "net.py:raises", *DATA),
    ),
    "data factory raises": (1, "raises of net.py failed", (*MODEL, "--data", "net.py:raises")),
    "no module": (1, "net.py:text gave a str; expected an nn.Module", ("prune", "net.py:text", *DATA)),
    "no data of that kind": (1, "the calibration data is a str", (*MODEL, "--data", "net.py:text")),
    "one-shot data": (1, "one-shot generator", (*MODEL, "--data", "net.py:generator")),
    "test inputs": (1, "gave test inputs that are a list; expected a tensor", (*MODEL, "--data", "net.py:lists")),
    "test labels": (
        1, "labels go from 9 to 9; the network has 4 outputs", (*MODEL, "--data", "net.py:wrong_labels"),
    ),
    "test shape": (1, "Sequential does not run on the test samples", (*MODEL, "--data", "net.py:wrong_test")),
    "data of another shape": (1, "does not run on the data", ("prune", "net.py:images", *DATA)),
    "unknown model": (2, "model 'resnet' is not known; expected resnet20-fashion", ("prune", "resnet", *DATA)),
    "model without a name": (2, "model 'timm:' is not known", ("prune", "timm:", *DATA)),
    "no data": (2, "--data is needed for the model net.py:model", MODEL),
    "unknown data": (2, "data 'cifar' is not known; expected fashion", (*MODEL, "--data", "cifar")),
    "unknown mask": (2, "mask 'fisher' is not known", (*MODEL, *DATA, "--mask", "fisher")),
    "no mask file": (1, "there is no file masks.safetensors", (*MODEL, *DATA, "--mask", "masks.safetensors")),
    "no zeros": (1, "no weight of the model is zero", (*MODEL, *DATA, "--mask", "weights")),
    "unknown recipe": (2, "recipe 'best' is not known", (*MODEL, *DATA, "--recipe", "best")),
    "no recipe file": (1, "there is no file best.json", (*MODEL, *DATA, "--recipe", "best.json")),
    "malformed pattern": (2, "pattern 'half' is not understood", (*MODEL, *DATA, "--pattern", "half")),
    "impossible pattern": (2, "pattern '5:4'", (*MODEL, *DATA, "--pattern", "5:4")),
    "empty pattern": (2, "pattern '' is not understood", (*MODEL, *DATA, "--pattern", "")),
    "pattern of no layer": (2, "the pattern for 'fc' fits no layer", (*MODEL, *DATA, "--pattern", "2:4, fc=1:4")),
    "unknown layer": (2, "layers='fc' fits no layer", (*MODEL, *DATA, "--layers", "fc")),
    "unknown device": (2, "device 'gpu' is not known", (*MODEL, *DATA, "--device", "gpu")),
    "no config": (1, "there is no file missing.toml", (*MODEL, *DATA, "--config", "missing.toml")),
    "config is a folder": (1, "cannot be read", (*MODEL, *DATA, "--config", ".")),
    "no weights": (1, "there is no file missing.pt", (*MODEL, *DATA, "--weights", "missing.pt")),
    "unknown flag": (2, "No such option: --fast", (*MODEL, "--fast")),
    "unknown command": (2, "No such command 'shrink'", ("shrink",)),
    "no number": (2, "Invalid value for '--samples'", (*MODEL, *DATA, "--samples", "many")),
    "no samples": (2, "Invalid value for '--samples'", (*MODEL, *DATA, "--samples", "0")),
    "negative horizon": (2, "Invalid value for '--horizon'", (*MODEL, *DATA, "--horizon", "-1")),
    "missing value": (2, "--pattern", (*MODEL, *DATA, "--pattern")),
    "too many arguments": (2, "unexpected extra argument", (*MODEL, "another.py:model")),
    "inspect without fitting data": (1, "does not run on the data", ("inspect", "net.py:model")),
    "evaluate an unknown model": (2, "model 'resnet' is not known", ("evaluate", "resnet", *DATA)),
}  # fmt: skip


@pytest.mark.parametrize("case", ERRORS)
def test_every_error_is_one_line(case: str, run: Snows, tmp_path: Path) -> None:
    status, words, command = ERRORS[case]
    out = ("--out", tmp_path / "out") if command[0] == "prune" else ()
    assert_error(run(command[0], *out, *command[1:]), status, words)
    assert not list(tmp_path.iterdir())  # nothing half-written


def test_bad_config_and_recipe_files(run: Snows, tmp_path: Path) -> None:
    (tmp_path / "bad.json").write_bytes(b"\xff\xfe")
    assert_error(run(*MODEL, *DATA, "--recipe", tmp_path / "bad.json"), 1, "bad.json cannot be read")
    (tmp_path / "bad.json").write_text('{"schema": 1, "steps": 3}')
    assert_error(run(*MODEL, *DATA, "--recipe", tmp_path / "bad.json"), 2, "recipe: unknown choice steps")
    for text, words in {
        "[data": "is not valid TOML",
        "[other]\n": "has other; expected the tables [data] and [recipe]",
        "data = 3": "has data; expected the tables",
        "[data]\ncrop = 3": "[data] has crop; expected mean, std and size",
        "[data]\nmean = 'a'\nstd = 1": "[data] mean is 'a'; expected a number",
        "[data]\nmean = 0.5": "[data] has one of mean and std; expected both or neither",
        "[data]\nsize = 0": "[data] size is 0; expected a whole number of pixels",
        "[recipe]\nsteps = 3": "recipe: unknown choice steps",
        "[recipe]\nsweeps = 0": "recipe: sweeps is 0; expected a whole number of at least 1",
    }.items():
        (tmp_path / "c.toml").write_text(text)
        assert_error(run(*MODEL, *DATA, "--config", tmp_path / "c.toml"), 2, words)


def test_bad_weights(run: Snows, tmp_path: Path) -> None:
    state = build_model("net.py:model").state_dict()
    save_file(state, tmp_path / "good.safetensors")
    content = (tmp_path / "good.safetensors").read_bytes()
    (tmp_path / "truncated.safetensors").write_bytes(content[: len(content) // 2])
    torch.save({"model": Path("x"), "run": sys.exc_info}, tmp_path / "object.pt")
    torch.save([1, 2], tmp_path / "list.pt")
    torch.save({0: torch.ones(1)}, tmp_path / "numbered.pt")
    (tmp_path / "garbage.pt").write_bytes(b"garbage")
    (tmp_path / "empty.pt").write_bytes(b"")
    save_file({k: v for k, v in state.items() if k != "2.bias"}, tmp_path / "missing.safetensors")
    save_file({**state, "fc.weight": torch.ones(1)}, tmp_path / "extra.safetensors")
    save_file({**state, "2.bias": torch.ones(3)}, tmp_path / "shape.safetensors")
    for name, words in {
        "truncated.safetensors": "cannot read",
        "object.pt": "is not a file of plain tensors",
        "list.pt": "holds no state dict",
        "numbered.pt": "holds no state dict",
        "garbage.pt": "is not a file of plain tensors",
        "empty.pt": "cannot read",
        "missing.safetensors": "does not fit Sequential: it lacks 2.bias",
        "extra.safetensors": "does not fit Sequential: it has no place for fc.weight",
        "shape.safetensors": "does not fit Sequential: other shapes in 2.bias",
    }.items():
        outcome = run(*MODEL, *DATA, "--weights", tmp_path / name)
        assert words in outcome.err, f"{name}: {outcome.err}"
        assert_error(outcome, 1, words)
    torch.save({"state_dict": state}, tmp_path / "good.pt")
    for name in ("good.safetensors", "good.pt"):
        assert run(*PRUNE, "--weights", tmp_path / name, "--quiet") == Outcome(0, "", "")


def test_a_broken_file_of_code(run: Snows, tmp_path: Path) -> None:
    (tmp_path / "slip.py").write_text("def model(:\n")
    assert_error(run("prune", f"{tmp_path / 'slip.py'}:model", *DATA), 1, "slip.py cannot be run: SyntaxError")
    (tmp_path / "slip.py").write_text("import no_such_module\n")
    assert_error(run("prune", f"{tmp_path / 'slip.py'}:model", *DATA), 1, "ModuleNotFoundError: No module named")


def test_a_failure_while_saving_leaves_nothing(run: Snows, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: Any, **__: Any) -> NoReturn:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("snows.results.report.Report.to_html", full)
    assert_error(run(*PRUNE, "--quiet", "--out", tmp_path / "out"), 1, "No space left on device")
    assert not list(tmp_path.iterdir())


def test_an_interruption_is_said(run: Snows, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*_: Any, **__: Any) -> NoReturn:
        raise KeyboardInterrupt

    monkeypatch.setattr("snows.api.prune", interrupted)
    outcome = run(*PRUNE, "--out", tmp_path / "out")
    assert outcome.status == 130
    assert outcome.err.splitlines()[-1] == "interrupted; nothing was saved"
    assert not list(tmp_path.iterdir())


def test_no_command_and_version(run: Snows) -> None:
    bare = run()
    assert (bare.status, bare.out) == (2, "")
    assert "Usage: " in bare.err
    assert run("--version") == Outcome(0, f"snows {snows.__version__}\n", "")
