"""Which engines can take a layer, by their own rules, and what none can do."""

from __future__ import annotations

import torch
from torch import nn

from snows.timing.possibilities import RULES, elsewhere, never


def masked(module: nn.Module, keep: list[int]) -> tuple[nn.Module, torch.Tensor]:
    """The module with this pattern along the input channels."""
    weight = module.get_parameter("weight")
    with torch.no_grad():
        weight.fill_(1.0)
        pattern = torch.tensor(keep).repeat(weight.shape[1] // len(keep))
        weight.mul_(pattern.reshape(1, -1, *[1] * (weight.ndim - 2)))
    return module, weight.detach()


def test_engines_by_their_rules() -> None:
    module, weight = masked(nn.Linear(128, 64), [1, 0, 0, 1])
    found = elsewhere(module, "weight", weight)
    assert list(found) == list(RULES)
    assert {engine for engine, refusal in found.items() if refusal is None} == {
        "torch 2:4 on an NVIDIA GPU",
        "TensorRT on an NVIDIA GPU",
        "torch CSR on a CPU",
        "OpenVINO in int8 on a CPU with AMX",
    }
    assert found["XNNPACK on a CPU"] == "it is no 1x1 convolution of stride 1"
    module, weight = masked(nn.Conv2d(128, 64, 1), [1, 0, 0, 0])
    found = elsewhere(module, "weight", weight)
    assert found["XNNPACK on a CPU"] is found["TensorRT on an NVIDIA GPU"] is None
    module, weight = masked(nn.Conv2d(128, 64, 1), [1, 1, 0, 0])
    assert "two thirds or more" in str(elsewhere(module, "weight", weight)["XNNPACK on a CPU"])


def test_torch_packs_modules_that_are_called() -> None:
    """nn.MultiheadAttention takes the weight of its output projection and does not call the layer."""
    module, weight = masked(nn.Linear(128, 64), [1, 0, 0, 1])
    found = elsewhere(module, "weight", weight, called=False)
    words = "its module is not called with one tensor"
    assert found["torch 2:4 on an NVIDIA GPU"] == found["torch CSR on a CPU"] == words
    assert found["TensorRT on an NVIDIA GPU"] is None


def test_what_never_gains() -> None:
    module, weight = masked(nn.Conv2d(8, 8, 3, groups=8), [1])
    assert "depthwise" in never(module, weight)[0]
    assert never(*masked(nn.Linear(64, 64), [1, 1, 0, 0])) == ()
    (more_zeros,) = never(*masked(nn.Linear(64, 64), [1, 0, 0, 0]))
    assert "no faster" in more_zeros
    few, unstructured = never(*masked(nn.Conv2d(16, 16, 3), [1, 1, 1, 0]))
    assert few.startswith("with 16 input channels")
    assert unstructured.startswith("on a GPU, tensor cores skip zeros of 2:4 only")


def test_the_rules_in_words_are_those_that_are_asked() -> None:
    """One step beyond each size that is named, and the engine refuses."""
    for engine, size in (("torch 2:4 on an NVIDIA GPU", 16), ("OpenVINO in int8 on a CPU with AMX", 64)):
        assert f"multiples of {size}" in RULES[engine]
        for rows, columns, taken in ((size, size, True), (size + size // 2, size, False), (size, size // 2, False)):
            module, weight = masked(nn.Linear(columns, rows), [1, 0, 0, 1])
            assert (elsewhere(module, "weight", weight)[engine] is None) is taken, (engine, rows, columns)
    module, weight = masked(nn.Linear(6, 8), [1, 0])
    assert "multiples of 4" in RULES["TensorRT on an NVIDIA GPU"]
    assert "it has 6 input channels" in str(elsewhere(module, "weight", weight)["TensorRT on an NVIDIA GPU"])
