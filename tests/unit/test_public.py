"""The public surface: names, parameters, flags and versions. A change here is a decision."""

from __future__ import annotations

import inspect
import re
import subprocess
import sys
from pathlib import Path

import pytest
import typer

import snows
from snows.cli.commands import app

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text(encoding="utf-8")

NAMES = [
    "ALPS", "CAP", "CBS", "CHITA", "FALCON", "NM", "OBC", "ArgumentError", "Benchmark", "CaptureError", "Choice",
    "Comparison", "Event", "Exchange", "Exported", "InputError", "Inspection", "LayerMethod", "Magnitude",
    "NetworkMethod", "Pattern", "Random", "Recipe", "Report", "Result", "Sensitivity", "SnowsError", "SnowsWarning",
    "SparseGPT", "Unstructured", "Verification", "Wanda", "WoodFisher", "__version__", "attention_map", "bench",
    "check_mask_method", "compare", "evaluate", "export", "freeze", "inspect", "linear_probe", "load", "load_masks",
    "perplexity", "prune", "retrain", "sensitivity", "token_windows", "unfreeze", "verify",
]  # fmt: skip
FLAGS = {
    "prune": [
        "--data", "--weights", "--pattern", "--mask", "--horizon", "--layers", "--exclude", "--recipe", "--effort",
        "--samples", "--labels", "--permute", "--metric", "--out", "--compact", "--force", "--resume", "--memory",
        "--device", "--seed", "--events", "--tensorboard", "--live", "--json", "--quiet", "--config", "--debug",
    ],
    "evaluate": [
        "--data", "--weights", "--pruned", "--metric", "--samples", "--device", "--seed", "--json", "--quiet",
        "--config", "--debug",
    ],
    "inspect": [
        "--data", "--weights", "--pattern", "--horizon", "--layers", "--exclude", "--recipe", "--effort", "--samples",
        "--device", "--memory", "--world-size", "--json", "--quiet", "--config", "--debug",
    ],
    "compare": [
        "--data", "--weights", "--pattern", "--mask", "--horizon", "--layers", "--exclude", "--recipe", "--effort",
        "--samples", "--labels", "--permute", "--out", "--memory", "--device", "--seed", "--json", "--markdown",
        "--quiet", "--config", "--debug",
    ],
    "sensitivity": [
        "--data", "--weights", "--pattern", "--layers", "--exclude", "--samples", "--labels", "--out",
        "--memory", "--device", "--seed", "--json", "--quiet", "--config", "--debug",
    ],
    "attention": [
        "--data", "--weights", "--pruned", "--images", "--out", "--device", "--seed", "--quiet", "--config", "--debug",
    ],
    "retrain": [
        "--out", "--data", "--samples", "--model", "--teacher", "--teacher-weights", "--held-out", "--epochs",
        "--batch", "--lr", "--lr-decay", "--lr-decay-every", "--momentum", "--weight-decay", "--crop", "--flip",
        "--amp", "--compact", "--force", "--resume", "--device", "--seed", "--events", "--tensorboard", "--live",
        "--json", "--quiet", "--config", "--debug",
    ],
    "verify": ["--model", "--json", "--quiet", "--debug"],
    "bench": [
        "--model", "--batch", "--engine", "--mode", "--device", "--dtype", "--limit", "--out", "--force",
        "--json", "--quiet", "--debug",
    ],
    "export": ["--to", "--model", "--out", "--force", "--json", "--quiet", "--debug"],
}  # fmt: skip
PRUNE = [
    "model", "calibration", "pattern", "mask", "layers", "exclude", "horizon", "solver", "recipe", "effort", "device",
    "seed", "progress", "labels", "permute", "resume", "memory",
]  # fmt: skip


def test_public_names() -> None:
    assert snows.__all__ == NAMES
    assert dir(snows) == sorted(NAMES)
    for name in NAMES:
        assert getattr(snows, name) is not None
    with pytest.raises(AttributeError, match="module 'snows' has no attribute 'shrink'"):
        _ = snows.shrink


def test_parameters_of_prune() -> None:
    assert list(inspect.signature(snows.prune).parameters) == PRUNE


def test_flags_of_the_command_line() -> None:
    command = typer.main.get_command(app)
    commands = command.commands  # type: ignore[attr-defined]
    found = {
        name: [flag for parameter in entry.params if parameter.param_type_name == "option" for flag in parameter.opts]
        for name, entry in commands.items()
    }
    assert found == FLAGS
    for name, entry in commands.items():
        wanted = ["directory"] if name in ("verify", "export", "bench", "retrain") else ["model"]
        assert [p.name for p in entry.params if p.param_type_name == "argument"] == wanted
        assert all(p.help for p in entry.params if p.param_type_name == "option")


def test_the_version_is_the_same_everywhere() -> None:
    changelog = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    newest = re.search(r"^## (\S+)", changelog, re.MULTILINE)
    citation = re.search(r"^version: (\S+)$", (ROOT / "CITATION.cff").read_text(encoding="utf-8"), re.MULTILINE)
    assert newest is not None
    assert citation is not None
    assert newest[1] == citation[1] == snows.__version__


def test_importing_is_quick_and_touches_no_accelerator() -> None:
    code = (
        "import sys, snows, snows.cli.commands; assert 'torch' not in sys.modules; assert 'numpy' not in sys.modules\n"
        "snows.prune; import snows.api, torch; assert not torch.cuda.is_initialized()"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


@pytest.mark.parametrize("name", ["tables.py", "laptop_tables.py"])
def test_the_tables_of_readme_and_docs_are_those_of_the_benchmarks(name: str) -> None:
    script = ROOT / "benchmarks" / name
    done = subprocess.run([sys.executable, str(script), "--check"], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
