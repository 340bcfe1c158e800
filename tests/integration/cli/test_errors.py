"""Wrong input: one line on standard error, an exit status, and nothing written."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any, NoReturn

import pytest
import torch
from safetensors.torch import save_file

from snows.data.models import build_model

from ..conftest import Outcome, Snows, assert_error
from .helpers import DATA, MODEL, PRUNE

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
    "test inputs": (1, "an evaluation batch is a float; expected a tensor", (*MODEL, "--data", "net.py:lists")),
    "listed labels": (1, "gave test labels that are a list", (*MODEL, "--data", "net.py:list_labels")),
    "metric": (2, "--metric is 'error'; expected file.py:metric", (*MODEL, *DATA, "--metric", "error")),
    "missing metric": (1, "net.py has no function 'no'", (*MODEL, *DATA, "--metric", "net.py:no")),
    "metric of two": (2, "metric of_two cannot be called with one", (*MODEL, *DATA, "--metric", "net.py:of_two")),
    "metric unused": (2, "--metric is given, but no samples are left", (*PRUNE, "--metric", "net.py:error")),
    "metric fails": (
        1, "metric_that_fails of net.py failed: ZeroDivisionError: division by zero",
        (*MODEL, "--data", "net.py:pairs", "--metric", "net.py:metric_that_fails"),
    ),
    "no metric": (
        1, "or metric= (--metric of evaluate and prune) for other tasks",
        ("prune", "net.py:segmenter", "--data", "net.py:scenes"),
    ),
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
    "unknown mask, before the model is read": (
        2, "mask 'fisher' is not known", ("prune", "net.py:raises", "--mask", "fisher", *DATA),
    ),
    "malformed pattern, before the model is read": (
        2, "pattern 'half' is not understood", ("prune", "net.py:raises", "--pattern", "half", *DATA),
    ),
    "malformed pattern to inspect, before the model is read": (
        2, "pattern 'half' is not understood", ("inspect", "net.py:raises", "--pattern", "half", *DATA),
    ),
    "malformed pattern": (2, "pattern 'half' is not understood", (*MODEL, *DATA, "--pattern", "half")),
    "impossible pattern": (2, "pattern '5:4'", (*MODEL, *DATA, "--pattern", "5:4")),
    "empty pattern": (2, "pattern '' is not understood", (*MODEL, *DATA, "--pattern", "")),
    "pattern of no layer": (2, "the pattern for 'fc' fits no layer", (*MODEL, *DATA, "--pattern", "2:4, fc=1:4")),
    "unknown layer": (2, "layers='fc' fits no layer", (*MODEL, *DATA, "--layers", "fc")),
    "unknown device": (2, "device 'gpu' is not known", (*MODEL, *DATA, "--device", "gpu")),
    "no config": (1, "there is no file missing.toml", (*MODEL, *DATA, "--config", "missing.toml")),
    "config is a folder": (1, ". is a folder; expected a regular file", (*MODEL, *DATA, "--config", ".")),
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
    assert_error(run(*MODEL, *DATA, "--recipe", tmp_path / "bad.json"), 1, "bad.json: it is no text in UTF-8")
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

    monkeypatch.setattr("snows.results.result.render", full)
    assert_error(run(*PRUNE, "--quiet", "--out", tmp_path / "out"), 1, "No space left on device")
    assert not list(tmp_path.iterdir())


def test_a_long_error_of_the_users_code_is_cut(run: Snows, tmp_path: Path) -> None:
    """Weights of another size: torch names every layer, on lines that begin with a tab."""
    lines = [
        "from torch import nn",
        "def model():",
        "    small, large = (nn.Sequential(*[nn.Linear(n, n)] * 9) for n in (2, 3))",
    ]
    (tmp_path / "net.py").write_text("\n".join([*lines, "    return small.load_state_dict(large.state_dict())"]))
    outcome = run("prune", f"{tmp_path / 'net.py'}:model", *DATA)
    assert_error(
        outcome, 1, "net.py failed: RuntimeError: Error(s) in loading state_dict for Sequential: size mismatch"
    )
    assert outcome.err.endswith(" …\n")
    assert len(outcome.err) < 350 + len(str(tmp_path))
