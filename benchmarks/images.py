"""Reads the benchmark images: npz files of raw arrays, or of JPEG bytes."""

from __future__ import annotations

import io
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import torch
from torch import Tensor


def read_images(path: Path, mean: Tensor, std: Tensor) -> tuple[Tensor, Tensor]:
    """Normalized images (n, 3, height, width) and labels."""
    with np.load(path) as archive:  # an npz re-reads an array at every access: take each once
        arrays = {name: archive[name] for name in archive.files}
    if "jpeg" in arrays:
        pixels = decode(arrays["jpeg"], arrays["offsets"])
        labels = arrays["labels"]
    else:
        pixels, labels = arrays["x"], arrays["y"]
    x = torch.from_numpy(pixels).permute(0, 3, 1, 2).float().div_(255)
    return x.sub_(mean).div_(std).contiguous(), torch.from_numpy(labels.astype(np.int64))


def decode(jpeg: np.ndarray, offsets: np.ndarray) -> np.ndarray:
    from PIL import Image

    def one(i: int) -> np.ndarray:
        return np.asarray(Image.open(io.BytesIO(jpeg[offsets[i] : offsets[i + 1]].tobytes())).convert("RGB"))

    with ThreadPoolExecutor() as pool:
        return np.stack(list(pool.map(one, range(len(offsets) - 1))))
