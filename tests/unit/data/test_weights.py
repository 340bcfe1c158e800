"""Weights in files: the same content in the same bytes, and state dicts of other tools."""

from __future__ import annotations

import json
import os
import pickle
import zipfile
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import save, save_file
from torch import Tensor, nn

from snows import InputError
from snows.data.weights import fill, fitted, mask_names, read_state, read_tensors, unwrapped, write_tensors

WORDS = st.text(st.characters(exclude_categories=["Cs"]), max_size=8)  # files hold no lone surrogates


def header(data: bytes) -> bytes:
    return data[8 : 8 + int.from_bytes(data[:8], "little")]


@given(st.dictionaries(WORDS, WORDS, min_size=1, max_size=5), st.dictionaries(WORDS, st.integers(0, 3), max_size=4))
def test_what_is_written_is_read(
    tmp_path_factory: pytest.TempPathFactory, metadata: dict[str, str], sizes: dict[str, int]
) -> None:
    """Any words: the header is sorted in place, where it must keep its length."""
    tensors = {f"t{name}": torch.arange(float(size)) for name, size in sizes.items()}
    path = tmp_path_factory.getbasetemp() / "any.safetensors"
    write_tensors(path, tensors, metadata)
    found, about = read_tensors(path)
    assert about == metadata
    assert found.keys() == tensors.keys()
    assert all(torch.equal(found[name], value) for name, value in tensors.items())
    assert len(path.read_bytes()) == len(save(tensors, metadata))


def test_the_same_content_is_the_same_bytes(tmp_path: Path) -> None:
    tensors = {"a": torch.ones(3), "b": torch.zeros(2, dtype=torch.int64)}
    metadata = {name: name * 3 for name in "qwertyuiop"}
    backwards = dict(reversed(metadata.items()))
    written = set()
    for words in (metadata, backwards) * 4:
        write_tensors(tmp_path / "a.safetensors", tensors, words)
        written.add((tmp_path / "a.safetensors").read_bytes())
    assert len(written) == 1
    assert list(json.loads(header(written.pop()))["__metadata__"]) == sorted(metadata)


STATE = {"a": torch.ones(2)}


@pytest.mark.parametrize("content", [STATE, {"state_dict": STATE, "epoch": 3}, {"model": STATE}])
def test_pickles_of_tensors_are_read(content: object, tmp_path: Path) -> None:
    torch.save(content, tmp_path / "a.pt")
    torch.testing.assert_close(read_state(tmp_path / "a.pt"), STATE, rtol=0, atol=0)


@pytest.mark.parametrize("content", [3, [torch.ones(1)], {"a": 1}, {1: torch.ones(1)}, {"state_dict": {"a": "b"}}])
def test_files_without_a_state_dict_are_refused(content: object, tmp_path: Path) -> None:
    torch.save(content, tmp_path / "a.pt")
    with pytest.raises(InputError, match=r"a\.pt holds no state dict; save one with torch\.save\(model\.state_dict"):
        read_state(tmp_path / "a.pt")


class Runs:
    """A pickle that makes a file when it is read."""

    def __init__(self, file: Path) -> None:
        self.file = file

    def __reduce__(self) -> tuple[Any, ...]:
        return Path.touch, (self.file,)


@pytest.mark.parametrize("suffix", ["pt", "pth", "bin"])
def test_code_in_a_pickle_is_not_run(suffix: str, tmp_path: Path) -> None:
    file = tmp_path / f"a.{suffix}"
    torch.save({"a": torch.ones(2), "b": Runs(tmp_path / "owned")}, file)
    words = rf"a\.{suffix} is not a file of plain tensors \(it needs getattr, and code in a pickle is not run\)"
    with pytest.raises(InputError, match=words):
        read_state(file)
    file.write_bytes(pickle.dumps(Runs(tmp_path / "owned")))
    with pytest.raises(InputError, match=rf"a\.{suffix}"):
        read_state(file)
    assert not (tmp_path / "owned").exists()


@pytest.mark.parametrize("suffix", ["pt", "safetensors"])
@pytest.mark.parametrize("content", [b"", b"nothing of this kind"])
def test_other_files_are_refused(suffix: str, content: bytes, tmp_path: Path) -> None:
    (tmp_path / f"a.{suffix}").write_bytes(content)
    with pytest.raises(InputError, match=rf"a\.{suffix}"):
        read_state(tmp_path / f"a.{suffix}")
    with pytest.raises(InputError, match="there is no file"):
        read_state(tmp_path / f"b.{suffix}")


def test_the_advice_of_torch_to_run_the_code_is_not_passed_on(tmp_path: Path) -> None:
    for content, words in (
        (nn.Linear(2, 2), "it needs torch.nn.modules.linear.Linear, and"),
        (None, "cannot unpickle"),
    ):
        torch.save(content, tmp_path / "a.pt")
        if content is None:
            (tmp_path / "a.pt").write_bytes(b"nothing of this kind")
        with pytest.raises(InputError, match=words) as refused:
            read_state(tmp_path / "a.pt")
        assert "weights_only" not in str(refused.value)
        assert "x1b" not in str(refused.value)


# Names


def test_names_of_masks() -> None:
    assert mask_names("a.b.weight") == ("a.b.weight_mask", "a.b.__weight_mma_mask")
    assert mask_names("weight") == ("weight_mask", "__weight_mma_mask")


@pytest.mark.parametrize(
    ("names", "own", "wanted"),
    [
        (["module.a", "module.b"], ["a", "b"], ["a", "b"]),
        (["module.a", "b"], ["a", "b"], ["module.a", "b"]),
        (["module.a"], ["module.a"], ["module.a"]),
        (["a"], ["a"], ["a"]),
    ],
)
def test_the_prefix_of_data_parallel(names: list[str], own: list[str], wanted: list[str]) -> None:
    assert list(unwrapped({name: torch.ones(1) for name in names}, own)) == wanted


W, M = torch.tensor([1.0, 2.0, 3.0]), torch.tensor([1.0, 0.0, 1.0])
MASKED = W * M
FITTED: dict[str, tuple[dict[str, Tensor], list[str], dict[str, Tensor]]] = {
    "plain": ({"w": W}, ["w"], {"w": W}),
    "torch, into a plain model": ({"w_orig": W, "w_mask": M}, ["w"], {"w": MASKED}),
    "ASP, into a plain model": (
        {"w": W, "__w_mma_mask": M, "__w_mma_pruned_p": W - MASKED}, ["w"], {"w": MASKED},
    ),
    "ASP, into a model of ASP": ({"w": W, "__w_mma_mask": M}, ["w", "__w_mma_mask"], {"w": W, "__w_mma_mask": M}),
    "a mask of another shape": ({"w_orig": W, "w_mask": M[:2]}, ["w"], {"w_orig": W, "w_mask": M[:2]}),
    "a mask alone": ({"w_mask": M}, ["w"], {"w_mask": M}),
}  # fmt: skip


@pytest.mark.parametrize("case", FITTED)
def test_masks_of_other_tools(case: str) -> None:
    state, own, wanted = FITTED[case]
    before = dict(state)
    found = fitted(state, {name: torch.zeros(3) for name in own})
    assert state == before
    torch.testing.assert_close(found, wanted, rtol=0, atol=0)


def test_a_plain_weight_fills_a_pruning_module_and_its_mask_grows_with_it() -> None:
    own = {"w_orig": torch.zeros(3), "w_mask": torch.tensor([1.0, 0.0, 0.0])}
    found = fitted({"w": MASKED}, own)
    assert torch.equal(found["w_orig"], MASKED)
    assert found["w_mask"].tolist() == [True, False, True]


def test_a_model_that_does_not_fit_is_not_changed() -> None:
    model = nn.Linear(2, 3)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    state = {f"extra{number}": torch.ones(1) for number in range(5)} | {"weight": torch.ones(2, 2)}
    words = (
        r"^file does not fit Linear: it lacks bias; it has no place for extra0, extra1, extra2 and 2 more; "
        r"other shapes in weight$"
    )
    with pytest.raises(InputError, match=words):
        fill(model, state, "file")
    torch.testing.assert_close(dict(model.state_dict()), before, rtol=0, atol=0)


@pytest.mark.parametrize(
    ("tensor", "words"),
    [
        (torch.ones(3, 2) * (1 + 2j), "weight holds complex numbers"),
        (torch.ones(3, 2, dtype=torch.int32), "weight holds whole numbers"),
        (torch.ones(3, 2, dtype=torch.bool), "weight holds bools"),
    ],
)
def test_weights_of_other_kinds_are_not_cast(tmp_path: Path, tensor: torch.Tensor, words: str) -> None:
    path = tmp_path / "w.safetensors"
    save_file({"weight": tensor, "bias": torch.zeros(3)}, path)
    model = nn.Linear(2, 3)
    before = model.weight.clone()
    with pytest.raises(InputError, match=f"w.safetensors does not fit Linear: {words}"):
        fill(model, read_state(path), str(path))
    assert torch.equal(model.weight, before)


def test_weights_that_would_overflow_are_refused() -> None:
    with pytest.raises(InputError, match=r"do not fit into torch.float16"):
        fill(nn.Linear(2, 3).half(), {"weight": torch.full((3, 2), 1e6), "bias": torch.zeros(3)}, "file")


def test_a_mask_in_a_file_that_is_none_does_not_scale_weights() -> None:
    state = {"weight_orig": torch.ones(3, 2), "weight_mask": torch.full((3, 2), 2.0), "bias": torch.zeros(3)}
    with pytest.raises(InputError, match="weight_mask has values other than 0 and 1"):
        fill(nn.Linear(2, 3), state, "file")


ODD_TENSORS = {
    "sparse": lambda: torch.eye(3).to_sparse(),
    "sparse_csr": lambda: torch.eye(3).to_sparse_csr(),
    "without values": lambda: torch.empty(3, 2, device="meta"),
    "bits8": lambda: torch.zeros(3, dtype=torch.uint8).view(torch.bits8),
    "expanded": lambda: torch.ones(1).expand(10**6, 10**6),
    "dimensions": lambda: torch.ones([1] * 60),
}


@pytest.mark.parametrize("words", ODD_TENSORS)
@pytest.mark.filterwarnings("ignore::UserWarning")  # torch's, on kinds that are in the making
def test_odd_tensors_of_pickles_are_refused(tmp_path: Path, words: str) -> None:
    torch.save({"0.weight": ODD_TENSORS[words]()}, tmp_path / "m.pt")
    with pytest.raises(InputError, match=f"m.pt: 0.weight is .*{words}"):
        read_state(tmp_path / "m.pt")


def test_a_tensor_of_thousands_of_dimensions_is_refused(tmp_path: Path) -> None:
    save_file({"w": torch.ones([1] * 5000)}, tmp_path / "w.safetensors")
    with pytest.raises(InputError, match="w has 5000 dimensions; expected at most 16"):
        read_state(tmp_path / "w.safetensors")


def test_a_compressed_pickle_is_refused(tmp_path: Path) -> None:
    torch.save({"w": torch.zeros(10**6)}, tmp_path / "w.pt")
    with (
        zipfile.ZipFile(tmp_path / "w.pt") as plain,
        zipfile.ZipFile(tmp_path / "z.pt", "w", zipfile.ZIP_DEFLATED) as z,
    ):
        for name in plain.namelist():
            z.writestr(name, plain.read(name))
    assert read_state(tmp_path / "w.pt")["w"].numel() == 10**6
    with pytest.raises(InputError, match=r"z.pt is compressed"):
        read_state(tmp_path / "z.pt")


@pytest.mark.parametrize("size", [1 << 20, 1 << 40])
def test_tar_archives_are_not_unpacked(tmp_path: Path, size: int) -> None:
    """torch takes a file of zeros for one, and would make a folder for it."""
    with (tmp_path / "w.pt").open("wb") as stream:
        stream.truncate(size)
    with pytest.raises(InputError, match="is a tar archive"):
        read_state(tmp_path / "w.pt")


@pytest.mark.parametrize("dtype", [torch.float16, torch.float8_e5m2, torch.bool, torch.uint8])
def test_the_type_of_a_mask_does_not_matter(dtype: torch.dtype) -> None:
    mask = torch.tensor([[1.0, 0.0], [0.0, 1.0]])
    state = {"weight_orig": torch.full((2, 2), 3.0), "weight_mask": mask.to(dtype), "bias": torch.zeros(2)}
    model = nn.Linear(2, 2)
    fill(model, state, "file")
    assert torch.equal(model.weight, 3 * mask)


@pytest.mark.parametrize("name", ["w.safetensors", "w.pt"])
def test_weights_are_not_read_from_fifos(tmp_path: Path, name: str) -> None:
    os.mkfifo(tmp_path / name)
    with pytest.raises(InputError, match="is a FIFO"):
        read_state(tmp_path / name)


def test_a_file_of_the_system_that_cannot_be_read_is_refused(tmp_path: Path) -> None:
    (tmp_path / "w.pt").symlink_to("/proc/self/mem")
    with pytest.raises(InputError, match=r"Input/output error|there is no file"):
        read_state(tmp_path / "w.pt")
