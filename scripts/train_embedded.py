"""Trains the embedded default: a ResNet20 on Fashion-MNIST, and packs the subset of images that ships with it.

    python scripts/train_embedded.py --data /usr/share/datasets/fashion-mnist --out src/snows/data/embedded

The four idx files of Fashion-MNIST (MIT licence, Zalando SE) are Debian's package `dataset-fashion-mnist`.
Test images never decide anything: the last epoch's weights are the ones that are kept.
"""

from __future__ import annotations

import argparse
import gzip
import sys
import time
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from torch import Tensor

sys.path.insert(0, str(Path(__file__).parents[1] / "src"))
from snows.data.embedded.resnet20 import ResNet20

MEAN, STD = 0.2860, 0.3530  # of the 60,000 training images


def read_idx(path: Path) -> np.ndarray:
    raw = gzip.decompress(path.read_bytes())
    dimensions = raw[3]
    shape = [int.from_bytes(raw[4 + 4 * i : 8 + 4 * i], "big") for i in range(dimensions)]
    return np.frombuffer(raw, np.uint8, offset=4 + 4 * dimensions).reshape(shape)


def normalize(images: np.ndarray, device: str) -> Tensor:
    return ((torch.from_numpy(images.copy()).to(device).float() / 255 - MEAN) / STD).unsqueeze(1)


def augment(x: Tensor) -> Tensor:
    """A random shift of up to two pixels and a random flip, one per image."""
    n, _, height, width = x.shape
    padded = F.pad(x, (2, 2, 2, 2), value=-MEAN / STD)
    top, left = torch.randint(0, 5, (2, n, 1), device=x.device)
    rows = top + torch.arange(height, device=x.device)
    columns = left + torch.arange(width, device=x.device)
    flipped = torch.rand(n, 1, device=x.device) < 0.5
    columns = torch.where(flipped, columns.flip(1), columns)
    batch = torch.arange(n, device=x.device)
    return padded[batch[:, None, None], 0, rows[:, :, None], columns[:, None, :]].unsqueeze(1)


def accuracy(model: ResNet20, x: Tensor, y: Tensor) -> float:
    model.eval()
    with torch.no_grad():
        right = sum(int((model(a).argmax(1) == b).sum()) for a, b in zip(x.split(1000), y.split(1000), strict=True))
    return right / len(y)


def train(x: Tensor, y: Tensor, epochs: int, batch: int, rate: float) -> ResNet20:
    model = ResNet20(in_channels=1).to(x.device)
    decay = [p for p in model.parameters() if p.ndim > 1]
    plain = [p for p in model.parameters() if p.ndim <= 1]
    groups = [{"params": decay, "weight_decay": 5e-4}, {"params": plain, "weight_decay": 0.0}]
    optimizer = torch.optim.SGD(groups, lr=rate, momentum=0.9, nesterov=True)
    steps = epochs * (len(x) // batch)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, rate, total_steps=steps, pct_start=0.15)
    for epoch in range(epochs):
        began, total = time.perf_counter(), torch.zeros((), device=x.device)
        model.train()
        for index in torch.randperm(len(x), device=x.device).split(batch):
            if len(index) < batch:
                continue
            loss = F.cross_entropy(model(augment(x[index])), y[index])
            optimizer.zero_grad(set_to_none=True)
            loss.backward()
            optimizer.step()
            schedule.step()
            total += loss.detach()
        print(
            f"epoch {epoch + 1}/{epochs}  loss {float(total) / (len(x) // batch):.4f}  "
            f"{time.perf_counter() - began:.1f} s",
            flush=True,
        )
    return model


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, default=Path("/usr/share/datasets/fashion-mnist"))
    parser.add_argument("--out", type=Path, default=Path("src/snows/data/embedded"))
    parser.add_argument("--epochs", type=int, default=60)
    parser.add_argument("--batch", type=int, default=256)
    parser.add_argument("--rate", type=float, default=0.2)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--images", type=int, default=60000, help="training images to use (fewer for a dry run)")
    options = parser.parse_args()

    torch.manual_seed(options.seed)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    train_x, train_y = (read_idx(options.data / f"train-{k}-ubyte.gz") for k in ("images-idx3", "labels-idx1"))
    test_x, test_y = (read_idx(options.data / f"t10k-{k}-ubyte.gz") for k in ("images-idx3", "labels-idx1"))
    x = normalize(train_x[: options.images], device)
    y = torch.from_numpy(train_y[: options.images].copy()).to(device).long()
    model = train(x, y, options.epochs, options.batch, options.rate)
    test_labels = torch.from_numpy(test_y.copy()).to(device).long()
    print(f"test accuracy {accuracy(model, normalize(test_x, device), test_labels):.4f} on {len(test_y)} images")

    options.out.mkdir(parents=True, exist_ok=True)
    state = {k: v.float().cpu().contiguous() for k, v in model.state_dict().items() if "num_batches" not in k}
    save_file(state, options.out / "resnet20_fashion.safetensors")
    # The first images of each official split; both files are already shuffled.
    np.savez_compressed(
        options.out / "fashion_subset.npz",
        calibration_x=train_x[:3000],
        calibration_y=train_y[:3000],
        test_x=test_x[:2000],
        test_y=test_y[:2000],
    )


if __name__ == "__main__":
    main()
