"""What benchmarks are made of: stored blocks, the plain Llama, text out of pages, tables, other programs."""

from __future__ import annotations

import importlib
import json
import pkgutil
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor

import snows
from snows.data.embedded.resnet20 import ResNet20
from tests.libraries import library

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


@pytest.fixture
def benchmark(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Modules of the benchmarks by name, which import each other as scripts do."""
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    loaded = set(sys.modules)

    def load(name: str) -> ModuleType:
        return importlib.import_module(name)

    yield load
    for name in set(sys.modules) - loaded:
        if (BENCHMARKS / f"{name}.py").is_file():
            del sys.modules[name]


def random_bytes(*shape: int) -> np.ndarray:
    return np.random.default_rng(0).integers(0, 256, shape, dtype=np.uint8)


def test_blocks_of_four_bits(benchmark: Any) -> None:
    rows = random_bytes(2, 40)
    rows[:, [1, 3, 21, 23]] = 0x3C  # no NaN among the halves: about 1
    expected = np.empty((2, 64), np.float32)
    for row in range(2):
        for block in range(2):
            part = rows[row, 20 * block : 20 * block + 20]
            scale, least = np.frombuffer(part[:4].tobytes(), np.float16).astype(np.float32)
            for place, byte in enumerate(part[4:]):
                expected[row, 32 * block + place] = scale * (byte % 16) + least
                expected[row, 32 * block + 16 + place] = scale * (byte // 16) + least
    found = benchmark("llama").unpack({"a.b.weight.q4_1": torch.from_numpy(rows)})
    np.testing.assert_array_equal(found["a.b.weight"].numpy(), expected)


def test_blocks_of_eight_bits(benchmark: Any) -> None:
    rows = random_bytes(3, 34)
    rows[:, 1] = 0x3C
    scale = np.stack([np.frombuffer(row[:2].tobytes(), np.float16) for row in rows]).astype(np.float32)
    found = benchmark("llama").unpack({"w.q8_0": torch.from_numpy(rows), "v.f32": torch.ones(2)})
    np.testing.assert_array_equal(found["w"].numpy(), scale * rows[:, 2:].view(np.int8).astype(np.float32))
    assert torch.equal(found["v"], torch.ones(2))


def tiny(llama: Any) -> tuple[Any, dict[str, Tensor]]:
    shape = llama.Shape(24, 32, 64, 2, 4, 2, 10000.0, 1e-5)
    with torch.random.fork_rng():
        torch.manual_seed(0)
        state = llama.Llama(shape).state_dict()
    return shape, {f"{name}.f32": value for name, value in state.items()}


def test_an_exported_model_is_loaded_again(benchmark: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    llama = benchmark("llama")
    monkeypatch.setattr(llama, "PART_BYTES", 20000)
    shape, blocks = tiny(llama)
    llama.save(tmp_path, shape, blocks, {"source": "here"})
    assert len(list(tmp_path.glob("part*"))) > 2
    model, facts = llama.load(tmp_path)
    assert facts == {"source": "here"}
    assert all(torch.equal(value, blocks[f"{name}.f32"]) for name, value in model.state_dict().items())


def test_the_plain_llama_is_causal_and_can_be_pruned(benchmark: Any) -> None:
    llama = benchmark("llama")
    model = llama.build(*tiny(llama))
    tokens = torch.randint(0, 24, (16, 10), generator=torch.Generator().manual_seed(0))
    changed = tokens.clone()
    changed[:, 6:] = 0
    with torch.no_grad():
        torch.testing.assert_close(model(tokens)[:, :6], model(changed)[:, :6])
    recipe = snows.Recipe(horizon=1, sweeps=1, cg_steps=2)
    report = snows.prune(model, tokens, "2:4", layers="layers.1.*", recipe=recipe, progress=False).report
    assert len(report.layers) == 7


@pytest.mark.slow
@pytest.mark.filterwarnings(r"ignore:::transformers(\..*)?$")
def test_the_plain_llama_is_that_of_transformers(benchmark: Any) -> None:
    transformers, llama = library("transformers"), benchmark("llama")
    config = transformers.LlamaConfig(
        vocab_size=24, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, rms_norm_eps=1e-5, tie_word_embeddings=True, max_position_embeddings=32,
        bos_token_id=1, eos_token_id=2, use_cache=False,
    )  # fmt: skip
    shape, blocks = tiny(llama)
    theirs = transformers.LlamaForCausalLM(config).eval()
    theirs.model.load_state_dict(llama.unpack(blocks))
    tokens = torch.randint(0, 24, (3, 10), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        torch.testing.assert_close(llama.build(shape, blocks)(tokens), theirs(tokens).logits, rtol=1e-4, atol=1e-4)


def test_a_larger_network_than_the_memory(benchmark: Any, tmp_path: Path) -> None:
    """The whole benchmark of weights that do not fit, with a network of 26,000 weights."""
    command = [
        sys.executable,
        str(BENCHMARKS / "larger.py"),
        "memory",
        "--tiny",
        "--device",
        "cpu",
        "--out",
        str(tmp_path),
    ]
    subprocess.run(command, check=True, capture_output=True)
    small, all_ = json.loads((tmp_path / "larger.json").read_text())["rows"]
    assert (small["memory"], all_["memory"]) == ("80kB", "all")
    assert small["weight_bytes"] == all_["weight_bytes"] > 80_000
    assert small["sparsity"] == all_["sparsity"] == 0.5
    assert small["loss_ratio"] == pytest.approx(all_["loss_ratio"], rel=1e-3)
    assert all_["loss_ratio"] < 1


INDEX = """<html><body><ul class="docnav"><li>Next</li></ul>
<a href="one.html">1</a> <a href="sect.a.html">1.1</a> <a href="sect.a.html#x">1.1</a> <a href="two.html">2</a>
<a href="https://else.where/three.html">3</a></body></html>"""
PAGE = """<html><head><title>not this</title></head><body><p id="title"><a href="index.html">nor this</a></p>
<div class="para">
  The <code>apt</code>
  command &amp; more.<br/>
</div><pre>  kept
   as it is</pre><ul class="docnav"><li>nor <b>that</b></li></ul></body></html>"""


def test_chapters_are_text_without_navigation(benchmark: Any, tmp_path: Path) -> None:
    for name, text in (("index", INDEX), ("one", PAGE), ("sect.a", "<p>section</p>"), ("two", "<p>other</p>")):
        (tmp_path / f"{name}.html").write_text(text)
    assert benchmark("language").chapters_of(tmp_path) == {
        "one": "The apt command & more.\n  kept\n   as it is\n\nsection\n\n",
        "two": "other\n\n",
    }


def test_growth_is_a_constant_and_a_slope(benchmark: Any) -> None:
    """Seconds that lie on a line are given back by it."""
    work = [1e12, 2e12, 4e12]
    rows = [{"network": "resnet20", "layer": "a", "seconds": 0.5 + 0.25 * w / 1e12, "flops": w} for w in work]
    rows += [{"network": "resnet20", "layer": "b", "seconds": s, "flops": w} for s, w in ((1.0, 1e12), (3.0, 2e12))]
    lines = benchmark("tables").growth_table(rows).splitlines()[2:]
    assert "| a | 0.500 s | 0.25 s | 0.750 (0.750), 1.000 (1.000), 1.500 (1.500) |" in lines[0]
    assert "| b | -1.000 s | 2.00 s | 1.000 (1.000), 3.000 (3.000) |" in lines[1]


def test_tables_of_timings(benchmark: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ratios are dense over sparse; what failed or was not timed is a dash."""
    tables = benchmark("bench_tables")
    monkeypatch.setattr(tables, "RESULTS", tmp_path)
    assert tables.engines() == "Not measured yet: `python benchmarks/engines.py`."
    machine = {"device": "cpu", "cpu": "Chip", "amx": False, "threads": 2, "versions": {"torch": "2"}}

    def timing(engine: str, weights: str, seconds: float | None, mode: str = "eager") -> dict[str, Any]:
        found = None if seconds is None else {"median": seconds, "low": 0.9 * seconds, "high": 1.1 * seconds}
        return {"engine": engine, "mode": mode, "weights": weights, "batch": 1, "timing": found}

    timings = [timing("torch", "dense", 0.2), timing("torch", "sparse", None), timing("onnxruntime", "dense", 0.05)]
    timings += [timing("openvino", "dense", 0.03), timing("openvino", "sparse", 0.02)]
    row = {"network": "resnet50", "sparsity": 0.9, "network_timings": timings, "machine": machine}
    (tmp_path / "engines.json").write_text(json.dumps({"rows": [row]}))
    text = tables.engines()
    assert "| ResNet50 | 0.9 | 1 | 200 (180–220) | – | 50 (45–55) | 30 (27–33) | 20 (18–22) | 1.50 |" in text
    assert "Measured on: Chip, without AMX, 2 threads; torch 2." in text
    times = {"fp16 dense": [1, 90, 1], "fp16 dense, channels first": [1, 80, 1], "fp16 2:4": [1, 40, 1]}
    product = {"outputs": 8, "inputs": 4, "positions": 1024, "microseconds": times, "errors": {}}
    networks = [
        timing("torch", "dense", 0.2),
        timing("torch", "sparse", 0.4),
        timing("torch", "sparse where it pays", 0.1),
    ]
    found = {"environment": {**machine, "device": "GPU"}, "products": {"rows": [product]}, "chains": {"error": "no"}}
    found |= {"vit": {"network": networks}, "resnet": {"error": "stopped"}, "wide": {}}
    assert "`python benchmarks/kernels.py --out benchmarks/results/kernels.json`" in tables.on_a_gpu()
    assert "|" not in tables.on_a_gpu()  # a sentence, no empty tables
    (tmp_path / "kernels.json").write_text(json.dumps(found))
    text = tables.on_a_gpu()
    assert "| 8 x 4 | 1,024 | 90 | – | 40 | 80 / 40 (2.00) | – | – |" in text
    assert "| ViT-B | 1 | eager | 200 (180–220) | 400 (360–440) | 100 (90–110) | 2.00 |" in text
    assert tables.chains(found).count("\n| ") == 1  # titles and the line below them only


def test_parts_that_are_timed_exist(benchmark: Any) -> None:
    for parts in (benchmark("laptop").PARTS, benchmark("speed").PROFILED):
        assert all(callable(pkgutil.resolve_name(place)) for places in parts.values() for place in places)


def test_time_within_a_part_is_its_own(benchmark: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    laptop = benchmark("laptop")
    now = iter([0.0, 1.0, 3.0, 7.0, 15.0, 31.0])
    monkeypatch.setattr(laptop.time, "process_time", lambda: next(now))
    parts = laptop.Parts()
    inner = parts._counted("losses", lambda: None)
    outer = parts._counted("steps", inner)
    parts._since = laptop.time.process_time()
    outer()
    parts._switch("all else")
    seconds = {part: taken for part, taken in parts.cpu_seconds.items() if taken}
    assert seconds == {"all else": 1.0 + 16.0, "steps": 2.0 + 8.0, "losses": 4.0}


def test_another_program_is_timed_in_its_folder(tmp_path: Path) -> None:
    (tmp_path / "theirs").mkdir()
    (tmp_path / "theirs" / "main.py").write_text("import sys, time; time.sleep(0.2); sys.exit(3)")
    command = [sys.executable, str(BENCHMARKS / "speed.py"), "authors", "--out", str(tmp_path)]
    theirs = f"{sys.executable} main.py"
    subprocess.run([*command, "--checkout", str(tmp_path / "theirs"), "--command", theirs], check=True)
    (row,) = json.loads((tmp_path / "speed-authors.json").read_text())["rows"]
    assert row["exit_status"] == 3
    assert 0.2 <= row["seconds"] < 60
    refused = subprocess.run(command, capture_output=True, text=True)
    assert refused.returncode == 1
    assert "expected --checkout DIR" in refused.stderr


def sheets(folder: Path, rows: int) -> np.ndarray:
    """Sheets as those of CIFAR-10: an image in each row of pixels."""
    pixels = np.random.default_rng(0).integers(0, 256, (6 * rows, 1, 1024, 3), dtype=np.uint8)
    names = [*(f"data_batch_{number}" for number in range(1, 6)), "test_batch"]
    for name, part in zip(names, pixels.reshape(6, rows, 1024, 3), strict=True):
        Image.fromarray(part).save(folder / f"{name}.png")
    for name, count in (("train", 5 * rows), ("test", rows)):
        (folder / f"{name}_lables.json").write_text(json.dumps([i % 10 for i in range(count)]))
    return pixels.reshape(-1, 32, 32, 3)


def test_retraining_from_packed_images(benchmark: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    retrain, rows = benchmark("retrain"), 12
    pixels = sheets(tmp_path, rows)
    monkeypatch.setattr(retrain, "PARTS", {"a.xz": (0, 3 * rows), "b.xz": (3 * rows, 6 * rows)})
    for name, value in {"TRAINING": 5 * rows, "HELD_OUT": 10, "CALIBRATION": 8}.items():
        monkeypatch.setattr(retrain, name, value)
    monkeypatch.setattr(retrain, "ROWS", (("mask only", "labels"), ("mask only", "teacher")))
    monkeypatch.setattr(retrain, "load_network", lambda name, shared: ResNet20().eval())
    packed, out = tmp_path / "packed", tmp_path / "retrain.json"
    retrain.main(["pack", "--sheets", str(tmp_path), "--packed", str(packed)])
    x, y = retrain.read(packed)
    np.testing.assert_allclose(x.numpy(), (pixels / 255 - 0.5).transpose(0, 3, 1, 2) / 0.5, atol=1e-6)
    assert y.tolist() == [i % 10 for i in range(5 * rows)] + [i % 10 for i in range(rows)]
    retrain.main(
        ["run", "--packed", str(packed), "--out", str(out), "--epochs", "2", "--limit", "500", "--device", "cpu"]
    )
    found = json.loads(out.read_text())
    assert [(row["start"], row["lesson"]) for row in found["rows"]] == [
        ("mask only", "labels"), ("mask only", "teacher"),
    ]  # fmt: skip
    for row in found["rows"]:
        assert row["masks_unchanged"] is True
        assert row["epochs"] == 2
        assert row["settings"]["crop"] == 4
        assert [epoch["epoch"] for epoch in row["history"]] == [0, 1, 2]
        assert 0.89 < row["sparsity"] < 0.91
