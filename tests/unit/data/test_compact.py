"""Packed masks and compact weights: bit-equal when expanded, really smaller, and refused when they do not fit."""

from __future__ import annotations

import gzip
import json
import shutil
import subprocess
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import save_file
from torch import Tensor

import snows
from snows import InputError
from snows.data.compact import PACKED_MASKS, PACKED_MODEL, expand_state, pack_masks, pack_state, unpack_masks
from snows.data.weights import read_state
from snows.patterns import parse_pattern

FLOATS = [torch.float16, torch.bfloat16, torch.float32, torch.float64]
INTEGERS = {2: torch.int16, 4: torch.int32, 8: torch.int64}


def bits(tensor: Tensor) -> Tensor:
    return tensor.contiguous().view(INTEGERS[tensor.element_size()])


def random_weight(shape: tuple[int, ...], dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def odd_weight(shape: tuple[int, ...], dtype: torch.dtype, mask: Tensor) -> Tensor:
    """Any bits at all: NaN with payloads, both zeros, infinities; +0.0 where the mask removes."""
    integer = INTEGERS[torch.empty((), dtype=dtype).element_size()]
    limits = torch.iinfo(integer)
    found = torch.randint(limits.min, limits.max, shape, dtype=integer, generator=torch.Generator().manual_seed(1))
    found.view(-1)[::3] = limits.min  # the bits of -0.0
    return found.masked_fill(~mask, 0).view(dtype)


def expanded(state: dict[str, Tensor], masks: dict[str, Tensor], tied: dict[str, str] | None = None) -> Any:
    tensors, metadata = pack_state(state, masks, tied or {})
    return expand_state(tensors, metadata[PACKED_MODEL]), tensors


# Round trips


@given(shape=st.lists(st.integers(0, 7), min_size=1, max_size=4), seed=st.integers(0, 100))
def test_masks_of_any_shape_come_back(shape: list[int], seed: int) -> None:
    masks = {"a": random_weight(tuple(shape), seed=seed) > 0, "b.weight": torch.ones(3, dtype=torch.bool)}
    packed, metadata = pack_masks(masks)
    assert packed["a"].dtype == torch.uint8
    assert packed["a"].numel() == (masks["a"].numel() + 7) // 8
    found = unpack_masks(packed, metadata[PACKED_MASKS])
    assert {name: mask.dtype for name, mask in found.items()} == dict.fromkeys(masks, torch.bool)
    assert all(torch.equal(found[name], masks[name]) for name in masks)


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("pattern", ["1:4", "2:4", "1:2", "3:8", "1:16", "1:3", 0.7, 0.02])
@pytest.mark.parametrize("shape", [(6, 48), (4, 48, 3, 3), (4, 48, 5)])
def test_every_bit_comes_back(shape: tuple[int, ...], pattern: Any, dtype: torch.dtype) -> None:
    chosen = parse_pattern(pattern)
    assert chosen is not None
    mask = chosen.best_mask(random_weight(shape).abs())
    state = {"w": odd_weight(shape, dtype, mask), "bias": odd_weight((5,), dtype, torch.ones(5, dtype=torch.bool))}
    found, tensors = expanded(state, {"w": mask})
    for name, tensor in state.items():
        assert found[name].dtype == dtype
        assert torch.equal(bits(found[name]), bits(tensor))
    size = sum(tensor.numel() * tensor.element_size() for name, tensor in tensors.items() if "bias" not in name)
    kept, width = int(mask.sum()), state["w"].element_size()
    indices = {"1:4": 2, "1:2": 1, "1:16": 4, "1:3": 2}.get(str(pattern))
    places = (mask.numel() + 7) // 8 if indices is None else (kept * indices + 7) // 8
    assert size == min(mask.numel() * width, kept * width + places)


@pytest.mark.parametrize("kept", [0, 1, 64])
def test_masks_that_keep_nothing_one_or_all(kept: int) -> None:
    mask = torch.arange(64).view(8, 8) < kept
    found, tensors = expanded({"w": random_weight((8, 8)) * mask}, {"w": mask})
    assert torch.equal(found["w"], random_weight((8, 8)) * mask)
    assert set(tensors) == ({"tensor:w"} if kept == 64 else {"values:w", "places:w"})


def test_layouts_in_memory_make_no_difference() -> None:
    mask = snows.NM(1, 4).best_mask(random_weight((4, 8, 3, 3)).abs())
    weight = (random_weight((4, 8, 3, 3)) * mask).to(memory_format=torch.channels_last)
    found, _ = expanded({"w": weight}, {"w": mask.to(memory_format=torch.channels_last)})
    assert torch.equal(found["w"], weight)
    assert found["w"].is_contiguous()


def test_names_cannot_meet_and_tied_weights_are_stored_once() -> None:
    mask = torch.eye(8, dtype=torch.bool)
    state = {"w": random_weight((8, 8)) * mask, "values:w": torch.ones(3), "tensor:w": torch.ones(2)}
    state["again"] = state["w"]
    found, tensors = expanded(state, {"w": mask}, {"again": "w"})
    assert found.keys() == state.keys()
    assert all(torch.equal(found[name], state[name]) for name in state)
    assert not any("again" in name for name in tensors)


# What does not fit


DAMAGE: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {  # changed entries of the file and of its description
    "no values": ({"values:w": None}, {}),
    "no places": ({"places:w": None}, {}),
    "fewer values": ({"values:w": torch.ones(15)}, {}),
    "one value": ({"values:w": torch.ones(())}, {}),
    "more places": ({"places:w": torch.zeros(5, dtype=torch.uint8)}, {}),
    "places of another type": ({"places:w": torch.zeros(4)}, {}),
    "another shape": ({}, {"packed": {"w": {"shape": [8, 16], "group": 4}}}),
    "a shape of none": ({}, {"packed": {"w": {"shape": [8, 0], "group": 4}}}),
    "a negative shape": ({}, {"packed": {"w": {"shape": [-8, -8], "group": 4}}}),
    "a huge shape": ({}, {"packed": {"w": {"shape": [2**40, 2**40], "group": 4}}}),
    "a shape of words": ({}, {"packed": {"w": {"shape": "8x8", "group": 4}}}),
    "another group": ({}, {"packed": {"w": {"shape": [8, 8], "group": 8}}}),
    "no group": ({}, {"packed": {"w": {"shape": [8, 8], "group": None}}}),
    "a group of words": ({}, {"packed": {"w": {"shape": [8, 8], "group": "4"}}}),
    "no description": ({}, {"packed": None}),
    "a list": ({}, {"packed": ["w"]}),
    "tied to nothing": ({}, {"tied": {"v": "u"}}),
    "another version": ({}, {"schema": 2}),
}


@pytest.mark.parametrize("case", DAMAGE)
def test_parts_that_do_not_fit_are_refused(case: str, tmp_path: Path) -> None:
    mask = snows.NM(1, 4).best_mask(random_weight((8, 8)))
    tensors, metadata = pack_state({"w": random_weight((8, 8)) * mask}, {"w": mask}, {})
    changes, description = DAMAGE[case]
    tensors = {name: tensor for name, tensor in {**tensors, **changes}.items() if tensor is not None}
    about = json.dumps({**json.loads(metadata[PACKED_MODEL]), **description})
    save_file(tensors, tmp_path / "w.safetensors", metadata={PACKED_MODEL: about})
    with pytest.raises(InputError, match=r"^cannot read .*w\.safetensors: "):
        read_state(tmp_path / "w.safetensors")


@pytest.mark.parametrize("about", ["{", "[]", '{"schema": 1}', '{"schema": 1, "shapes": {"w": [9]}}', "[" * 100_000])
def test_masks_that_do_not_fit_are_refused(about: str, tmp_path: Path) -> None:
    save_file({"w": torch.ones(1, dtype=torch.uint8)}, tmp_path / "m.safetensors", metadata={PACKED_MASKS: about})
    with pytest.raises(InputError, match=r"^cannot read .*m\.safetensors: "):
        read_state(tmp_path / "m.safetensors")


# Sizes


def resnet50() -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Random weights of a ResNet50 at 1:4; stem, shortcuts, classifier and batch norms dense."""
    state, masks = {"conv1.weight": random_weight((64, 3, 7, 7)), "fc.weight": random_weight((1000, 2048), seed=99)}, {}
    state |= {"fc.bias": random_weight((1000,)), **norm("bn1", 64)}
    inputs = 64
    for stage, (channels, blocks) in enumerate([(64, 3), (128, 4), (256, 6), (512, 3)], 1):
        for block in range(blocks):
            name = f"layer{stage}.{block}"
            shapes = [(channels, inputs, 1, 1), (channels, channels, 3, 3), (4 * channels, channels, 1, 1)]
            for index, shape in enumerate(shapes, 1):
                weight = random_weight(shape, seed=len(masks))
                masks[f"{name}.conv{index}.weight"] = mask = snows.NM(1, 4).best_mask(weight.abs())
                state |= {f"{name}.conv{index}.weight": weight * mask + 0.0, **norm(f"{name}.bn{index}", shape[0])}
            if block == 0:
                state |= {f"{name}.downsample.0.weight": random_weight((4 * channels, inputs, 1, 1), seed=100 + stage)}
                state |= norm(f"{name}.downsample.1", 4 * channels)
            inputs = 4 * channels
    return state, masks


def norm(name: str, channels: int) -> dict[str, Tensor]:
    parts = ("weight", "bias", "running_mean", "running_var")
    return {f"{name}.{part}": torch.ones(channels) for part in parts} | {f"{name}.num_batches_tracked": torch.tensor(1)}


def save_both(folder: Path) -> tuple[int, int]:
    """Sizes of the dense and of the compact file of that ResNet50; quick, and equal when read."""
    state, masks = resnet50()
    assert sum(tensor.numel() for name, tensor in state.items() if name.endswith(("weight", "bias"))) == 25_557_032
    save_file(state, folder / "dense.safetensors")
    began = time.perf_counter()
    tensors, metadata = pack_state(state, masks, {})
    save_file(tensors, folder / "compact.safetensors", metadata=metadata)
    found = read_state(folder / "compact.safetensors")
    print(f"packed, written, read and expanded in {time.perf_counter() - began:.1f} s")
    assert found.keys() == state.keys()
    assert all(torch.equal(found[name], tensor) for name, tensor in state.items())
    dense, compact = ((folder / f"{name}.safetensors").stat().st_size for name in ("dense", "compact"))
    return dense, compact


def test_a_resnet50_at_1_of_4_takes_less_than_0_42_of_its_dense_file(tmp_path: Path) -> None:
    dense, compact = save_both(tmp_path)
    assert compact <= 0.42 * dense


@pytest.mark.slow
def test_sizes_beside_general_compressors(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    dense, compact = save_both(tmp_path)
    content = (tmp_path / "dense.safetensors").read_bytes()
    sizes: dict[str, int | str] = {"compact": compact, "gzip -6": len(gzip.compress(content, 6))}
    sizes["zstd -3"], sizes["zstd -19"] = (
        zstd(tmp_path / "dense.safetensors", 3),
        zstd(tmp_path / "dense.safetensors", 19),
    )
    with capsys.disabled():
        print(f"\nResNet50 at 1:4, float32: dense {dense:,} bytes")
        for name, size in sizes.items():
            print(f"  {name}: {size if isinstance(size, str) else f'{size:,} bytes, {size / dense:.3f}'}")
    assert all(compact < size for name, size in sizes.items() if name != "compact" and isinstance(size, int))


def zstd(path: Path, level: int) -> int | str:
    """Of Python 3.14, of the package, or of the system; else why there is no number."""
    try:
        from compression import zstd as library  # type: ignore[import-not-found, unused-ignore]

        return len(library.compress(path.read_bytes(), level=level))
    except ImportError:
        pass
    try:
        import zstandard  # type: ignore[import-not-found, unused-ignore]

        return len(zstandard.ZstdCompressor(level=level).compress(path.read_bytes()))
    except ImportError:
        pass
    if shutil.which("zstd") is None:
        return "not measured: neither Python 3.14 nor zstandard nor the command zstd is here"
    return len(subprocess.run(["zstd", f"-{level}", "-c", str(path)], capture_output=True, check=True).stdout)


@pytest.mark.parametrize("shape", [[0, 2**62, 2**62], [1] * 5000, [2**40, 2**40], [True, 4], [-1], [0.5]])
def test_shapes_that_cannot_be_are_refused(shape: list[Any]) -> None:
    about = json.dumps({"schema": 1, "packed": {"w": {"shape": shape, "group": None}}, "tied": {}})
    parts = {"values:w": torch.zeros(0), "places:w": torch.zeros(0, dtype=torch.uint8)}
    with pytest.raises(ValueError, match=r"no shape|too large"):
        expand_state(parts, about)
