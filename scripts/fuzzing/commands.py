"""The command line: every command with odd words. Where the work would begin, it stops."""

from __future__ import annotations

import io
import os
import sys
import warnings
from collections.abc import Callable
from contextlib import ExitStack, redirect_stderr, redirect_stdout, suppress
from pathlib import Path
from typing import Any
from unittest import mock

import typer

import snows
from snows import api
from snows.cli import main as cli
from snows.cli.commands import app
from snows.evaluation import attention_figure, classes, comparison, inspection, tolerance
from snows.exports import exporting
from snows.timing import benchmarking
from snows.training import retraining

from .mutations import odd_value, spoil_bytes, spoil_safetensors
from .targets import require_printable
from .world import Case

NET = """
import torch
from torch import nn

def model():
    return nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 4))

def x():
    return torch.randn(12, 8)

def images():
    return torch.randn(12, 3, 8, 8)

def pairs():
    return torch.randn(12, 8), torch.arange(12) % 4

def metric(pairs):
    return {"count": sum(len(output) for output, _ in pairs)}

def broken():
    raise KeyError("x")
"""
with suppress(snows.InputError):
    attention_figure.drawing_library()  # its first import writes its own settings
WORKS = (
    (api, "prune"), (comparison, "compare"), (classes, "evaluate"), (inspection, "inspect"), (tolerance, "sensitivity"),
    (retraining, "retrain"), (exporting, "export"), (benchmarking, "bench"), (attention_figure, "attention_maps"),
)  # fmt: skip
COMMANDS: dict[str, Any] = typer.main.get_command(app).commands  # type: ignore[attr-defined]  # it is a group
FOR_RESULTS = {"verify", "retrain", "export", "bench"}  # commands whose first word is a folder
FLAGS: dict[str, list[str]] = {
    "--weights": ["w.safetensors"], "--pattern": ["2:4", "0.7"], "--mask": ["wanda", "w.safetensors"],
    "--horizon": ["3"], "--layers": ["2"], "--exclude": ["2"], "--recipe": ["paper"], "--samples": ["4"],
    "--effort": ["fast", "best"], "--labels": ["given"], "--permute": [], "--metric": ["net.py:metric", "net.py:x"],
    "--out": ["out", "out.json", "out.png"], "--compact": [], "--force": [], "--resume": ["state"],
    "--device": ["cpu", "meta", "cuda:99", "mps"], "--seed": ["1", "-1", str(2**70)], "--json": [], "--quiet": [],
    "--config": ["c.toml"], "--memory": ["1GiB"], "--pruned": ["saved"], "--model": ["net.py:model"], "--markdown": [],
    "--events": ["events.jsonl", "saved"], "--live": [], "--tensorboard": ["board", "w.safetensors"],
    "--teacher": ["net.py:model"], "--teacher-weights": ["w.safetensors"], "--held-out": ["0.5", "2", "net.py:pairs"],
    "--epochs": ["1"], "--batch": ["4", "1,8"], "--lr": ["0.1", "nan"], "--lr-decay": ["0.5"], "--momentum": ["0.9"],
    "--weight-decay": ["0"], "--crop": ["4"], "--flip": [], "--amp": [], "--to": ["onnx", "hf", "safetensors"],
    "--engine": ["torch", "openvino,torch"], "--mode": ["eager"], "--limit": ["1", "nan"], "--images": ["2"],
    "--help": [], "--version": [], "--debug": [], "--unknown": ["x"],
}  # fmt: skip
DATA = ["net.py:x", "net.py:pairs", "net.py:images", "npz:x.npz", "folder:.", "net.py:broken"]


def command_line(case: Case) -> None:
    """The flags of every command."""
    rng = case.random
    _write_files(case)
    command = case.some_word() if rng.random() < 0.05 else rng.choice(sorted(COMMANDS))
    of_results = command in FOR_RESULTS
    first = ["saved", "saved", "w.safetensors"] if of_results else ["net.py:model", "net.py:model", "net.py:broken"]
    words = [command, rng.choice([*first, case.some_word()])]
    known = _flags_of(command)
    for flag, usual in (("--data", [*DATA, f"npz:{case.some_word()}"]), ("--to", FLAGS["--to"]), ("--out", ["out"])):
        if flag in known and rng.random() < 0.9:
            words += [flag, rng.choice(usual)]
    for flag in rng.sample(known if rng.random() < 0.9 else list(FLAGS), rng.choice([0, 1, 2, 4])):
        words += [flag, *_value(case, flag)]
    if rng.random() < 0.1:
        rng.shuffle(words)
    run_command([word.replace("\0", "?") for word in words], case.folder)  # no system hands a NUL on


TARGETS: dict[Callable[[Case], None], int] = {command_line: 8}


def _write_files(case: Case) -> None:
    rng = case.random
    case.write("net.py", NET.encode())
    case.write("w.safetensors", spoil_safetensors(rng, case.world.weights, case.world.masks))
    case.write("c.toml", b"[data]\nsize = 8\n")
    case.write("x.npz", case.world.npz)
    files = dict(rng.choice([case.world.result, case.world.small_result]))
    if rng.random() < 0.3:
        name = rng.choice(sorted(files))
        files[name] = spoil_bytes(rng, files[name], files["masks.safetensors"])
    for name, content in files.items():
        case.write(f"saved/{name}", content)


def _flags_of(command: str) -> list[str]:
    """Those of this command; all of them if there is no such command."""
    if command not in COMMANDS:
        return list(FLAGS)
    options = {name for parameter in COMMANDS[command].params for name in parameter.opts}
    return [flag for flag in ("--data", *FLAGS) if flag in options or flag in ("--help", "--unknown")]


def _value(case: Case, flag: str) -> list[str]:
    """What follows a flag: something fitting, or any word."""
    rng, fitting = case.random, DATA if flag == "--data" else FLAGS[flag]
    if not fitting:
        return []
    if rng.random() < 0.4:
        return [rng.choice(fitting)]
    word = rng.choice([case.some_word(), str(odd_value(rng))])
    refused = word == "/" and flag == "--out"  # a mount point; --tensorboard would write there, as it is told to
    return [f".{word}" if word.startswith("/") and not refused else word]  # within the case's own folder


def run_command(words: list[str], folder: Path) -> None:
    before, show = Path.cwd(), warnings.showwarning
    os.chdir(folder)
    shown, errors = io.BytesIO(), io.StringIO()
    try:
        with ExitStack() as stack:
            for module, name in WORKS:
                stack.enter_context(mock.patch.object(module, name, _stop))
            stack.enter_context(mock.patch.object(sys, "argv", ["s", *words]))
            out = stack.enter_context(redirect_stdout(io.TextIOWrapper(shown, "utf-8")))
            stack.enter_context(redirect_stderr(errors))
            try:
                cli.main()
            finally:
                out.flush()
                require_printable(shown.getvalue().decode("utf-8"))
                require_printable(errors.getvalue())
    except SystemExit as ended:
        if ended.code not in (None, 0, 1, 2):
            raise RuntimeError(f"exit status {ended.code}") from ended
        if ended.code:
            raise snows.InputError(f"exit status {ended.code}") from ended
    finally:
        warnings.showwarning = show
        os.chdir(before)


def _stop(*_: Any, **options: Any) -> Any:
    listeners = options.get("progress")
    for listener in listeners if isinstance(listeners, list) else []:
        getattr(listener, "close", lambda: None)()
    raise snows.InputError("the work would begin here")
