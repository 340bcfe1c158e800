"""A short slice of `scripts/fuzz.py`, the same in every run; and a case for every bug that it found."""

from __future__ import annotations

import io
import json
import re
import struct
import subprocess
import sys
import zipfile
import zlib
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import save, save_file
from torch import nn

import snows
from snows.cli.main import main
from snows.cli.request import Request, read_config
from snows.data.samples import check_seed
from snows.data.sources import DataConfig, load_data
from snows.data.weights import read_state
from snows.patterns import PatternRules
from snows.recipe import Recipe
from snows.results import journal, probe, store
from snows.results.folder import Folder

sys.path.insert(0, str(Path(__file__).parents[2] / "scripts"))
from fuzzing import objects
from fuzzing.classes import TARGETS
from fuzzing.run import Fuzz, fuzzing

CASES = 40  # of each target
WITH_A_PRUNE = 5  # of those that may prune
DEEP = "[" * 100_000


@pytest.fixture(scope="module")
def fuzz(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fuzz]:
    with fuzzing(tmp_path_factory.mktemp("failures")) as ready:
        yield ready


@pytest.mark.parametrize("target", [target.__name__ for target in TARGETS])
def test_damaged_input_is_refused_in_a_sentence(fuzz: Fuzz, target: str) -> None:
    cases = WITH_A_PRUNE if target in {slow.__name__ for slow in objects.TARGETS} else CASES
    for number in range(cases):
        fuzz.run(7, number, target)
    assert fuzz.counts[target] == cases
    assert not fuzz.failed


def test_the_fuzz_sees_a_traceback_and_a_file_elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(case: object) -> None:
        raise KeyError("x")

    def leaking(case: object) -> None:
        (tmp_path / "elsewhere").write_text("x")

    monkeypatch.setattr("fuzzing.run.TARGETS", {broken: 1, leaking: 1})
    with fuzzing(tmp_path / "failures") as ready:
        ready.run(0, 0, "broken")
        ready.run(0, 1, "leaking")
    assert len(ready.failed) == 2
    assert len(list((tmp_path / "failures").glob("*/problem.txt"))) == 2


def test_the_fuzz_sees_a_hang_and_memory_that_grows(tmp_path: Path) -> None:
    """As a process of its own, which alarms and memory may end without an end to the tests."""
    command = [sys.executable, "-m", "tests.property.hanging", str(tmp_path)]
    ended = subprocess.run(command, cwd=Path(__file__).parents[2], capture_output=True, text=True, timeout=300)
    assert ended.returncode == 0, ended.stderr
    words = {path.parent.name.partition("-")[0]: path.read_text() for path in tmp_path.glob("*/problem.txt")}
    assert words.keys() == {"hanging", "careless", "slow_to_end", "endless", "growing"}
    assert re.match(r"memory rose by \d+ MiB", words.pop("growing"))
    assert all(text.startswith("took more than 1 s") for text in words.values())


def test_an_alarm_at_the_last_moment_of_a_case_is_not_left_behind() -> None:
    """It would ring in the next case. As a process of its own, which it may end."""
    command = [sys.executable, "-c", "from tests.property import hanging; hanging.ring_late()"]
    ended = subprocess.run(command, cwd=Path(__file__).parents[2], capture_output=True, text=True, timeout=300)
    assert ended.returncode == 0, ended.stderr


def npz(path: Path, **members: bytes) -> str:
    with zipfile.ZipFile(path, "w") as archive:
        for name, content in members.items():
            archive.writestr(f"{name}.npy", content)
    return f"npz:{path}"


def npy(array: np.ndarray) -> bytes:
    stream = io.BytesIO()
    np.save(stream, array)
    return stream.getvalue()


PLAIN = DataConfig((0.0,), (1.0,))


@pytest.mark.parametrize(
    "content",
    [
        pytest.param(b"no array", id="not-an-array"),
        pytest.param(npy(np.zeros(3)).replace(b"(3,), ", b"(3000000000000,), ")[:128], id="trillions"),
        pytest.param(npy(np.zeros(3, np.longdouble)), id="float128"),
    ],
)
def test_npz_members_that_are_no_samples_are_refused(tmp_path: Path, content: bytes) -> None:
    with pytest.raises(snows.InputError):
        load_data(npz(tmp_path / "x.npz", x=content), 3, config=PLAIN)


def test_an_npz_file_of_a_later_zip_version_is_refused(tmp_path: Path) -> None:
    name = npz(tmp_path / "x.npz", x=npy(np.zeros(3)))
    content = (tmp_path / "x.npz").read_bytes()
    at = content.index(b"PK\x01\x02") + 6
    (tmp_path / "x.npz").write_bytes(content[:at] + b"\xff" + content[at + 1 :])
    with pytest.raises(snows.InputError, match="cannot be read as npz"):
        load_data(name, 3, config=PLAIN)


def test_samples_of_the_other_byte_order_are_read(tmp_path: Path) -> None:
    name = npz(tmp_path / "x.npz", x=npy(np.array([[1.0, 2.0]], ">f4")))
    assert load_data(name, 1, config=PLAIN).calibration.tolist() == [[1.0, 2.0]]


def save_image(folder: Path, content: bytes | Image.Image, suffix: str = "png") -> str:
    path = folder / "class" / f"image.{suffix}"
    path.parent.mkdir()
    if isinstance(content, bytes):
        path.write_bytes(content)
    else:
        content.save(path)
    return f"folder:{folder}"


def test_an_image_that_would_fill_the_memory_is_refused(tmp_path: Path) -> None:
    head = b"IHDR" + struct.pack(">IIBBBBB", 2**20, 2**20, 8, 0, 0, 0, 0)
    bomb = b"\x89PNG\r\n\x1a\n" + struct.pack(">I", 13) + head + struct.pack(">I", zlib.crc32(head))
    with pytest.raises(snows.InputError, match="cannot be read as an image"):
        load_data(save_image(tmp_path, bomb), 1)


def test_a_damaged_ppm_is_refused(tmp_path: Path) -> None:
    with pytest.raises(snows.InputError, match="cannot be read as an image"):
        load_data(save_image(tmp_path, b"P6 ^^ 9 255 \0\0", "ppm"), 1)


def test_16_bits_for_each_color_are_scaled(tmp_path: Path) -> None:
    deep = Image.fromarray(np.full((8, 8), 128 * 256 + 7, np.uint16))
    read = load_data(save_image(tmp_path, deep), 1, config=DataConfig((0.0,), (1.0,), 8)).calibration
    assert torch.allclose(read, torch.tensor(128 / 255))


def test_pixels_of_unknown_range_are_refused(tmp_path: Path) -> None:
    with pytest.raises(snows.InputError, match="unknown range"):
        load_data(save_image(tmp_path, Image.fromarray(np.full((8, 8), 0.5, np.float32)), "tif"), 1)


@pytest.mark.parametrize("text", ["x = " + "[" * 5000, "[data]\nmean = 1" + "0" * 400 + "\nstd = 1"])
def test_config_files_are_refused_in_a_sentence(tmp_path: Path, text: str) -> None:
    path = tmp_path / "c.toml"
    path.write_bytes(text.encode("utf-8", "surrogatepass"))
    with pytest.raises(snows.ArgumentError, match="--config"):
        Request("m", None, None, 1, 0, "cpu", True, read_config(path)).data_config()


@pytest.mark.parametrize("text", [DEEP, '{"schema": 1, "sweeps": ' + "9" * 5000 + "}"])
def test_recipes_are_refused_in_a_sentence(text: str) -> None:
    with pytest.raises(snows.ArgumentError, match="recipe"):
        Recipe.from_json(text)


def test_a_comparison_folder_that_is_nested_too_deep_is_refused(tmp_path: Path) -> None:
    (tmp_path / "settings.json").write_text(DEEP)
    with pytest.raises(snows.InputError, match="cannot read"):
        Folder(tmp_path, {}).check()


@pytest.mark.parametrize("pattern", ["9" * 5000 + ":4", 10**400, "2:" + "9" * 5000])
def test_patterns_of_absurd_numbers_are_refused(pattern: object) -> None:
    with pytest.raises(snows.ArgumentError, match="pattern"):
        PatternRules.parse(pattern)


@pytest.mark.parametrize("seed", [2**64, -(2**63) - 1, 0.5])
def test_seeds_of_more_than_64_bits_are_refused(seed: object) -> None:
    with pytest.raises(snows.ArgumentError, match="seed"):
        check_seed(seed)


@pytest.mark.parametrize(
    ("tensors", "note"),
    [({"x": torch.zeros(1)}, "{}"), ({"weight": torch.zeros(1), "mask": torch.ones(1)}, "no JSON"), ({}, "{}")],
)
def test_a_finished_layer_that_is_not_ours_is_done_again(
    tmp_path: Path, tensors: dict[str, torch.Tensor], note: str
) -> None:
    kept = journal.DiskJournal(tmp_path / "resume", {}, torch.device("cpu"))
    data = save(tensors, metadata={"note": note})
    name = f"sweep00-layer0000-{store.digest_for({}, 'sweep00-layer0000', data)}.safetensors"
    (tmp_path / "resume" / "layers" / name).write_bytes(data)
    with pytest.warns(snows.SnowsWarning, match="is damaged"):
        assert kept.recall(0, 0) is None


def test_4_bit_floats_are_refused(tmp_path: Path) -> None:
    header = {"w": {"dtype": "F4", "shape": [4], "data_offsets": [0, 2]}}
    words = json.dumps(header).encode()
    path = tmp_path / "w.safetensors"
    path.write_bytes(struct.pack("<Q", len(words)) + words + b"\0\0")
    with pytest.raises(snows.InputError):
        read_state(path)


def test_8_bit_floats_are_looked_at(tmp_path: Path) -> None:
    path = tmp_path / "w.safetensors"
    save_file({"w": torch.tensor([1.0, 2.0]).to(torch.float8_e4m3fn)}, path)
    kept = read_state(path)["w"]
    assert probe.difference(nn.Identity(), [torch.tensor([1.0, 2.0])], [kept]) is None
    assert probe.difference(nn.Identity(), [torch.tensor([1.0, 3.0])], [kept]) is not None


def test_a_probe_that_is_nested_too_deep_is_refused() -> None:
    with pytest.raises(ValueError, match="no call of a model"):
        probe.read({}, {"snows.probe": DEEP})


def test_a_name_that_is_too_long_is_a_sentence(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["snows", "prune", "--out", "a/" * 3000])
    monkeypatch.setattr("warnings.showwarning", None)  # put back afterwards
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == 1
    assert "File name too long" in capsys.readouterr().err
