"""Progress where runs really happen: a log file, a terminal, one that is closed, tmux, a notebook."""

from __future__ import annotations

import json
import os
import pty
import re
import select
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[3]
ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT / "src"), "TERM": "xterm", "COLUMNS": "120"}
FACTORIES = """
from snows.data import embedded

def model():
    return embedded.model()

def data():
    return embedded.images()[0][:24]
"""
RECIPE = """{"schema": 1, "horizon": 2, "sweeps": 2, "cg_steps": 2}"""


@pytest.fixture
def command(tmp_path: Path) -> list[str]:
    """A run that takes a few seconds."""
    (tmp_path / "net.py").write_text(FACTORIES)
    (tmp_path / "recipe.json").write_text(RECIPE)
    net = str(tmp_path / "net.py")
    words = [f"{net}:model", "--data", f"{net}:data", "--pattern", "2:4", "--recipe", str(tmp_path / "recipe.json")]
    return [sys.executable, "-m", "snows", "prune", *words, "--out", str(tmp_path / "out")]


def wait_for(found: Callable[[], bool], seconds: float = 60) -> bool:
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        if found():
            return True
        time.sleep(0.1)
    return False


def test_a_log_file(command: list[str], tmp_path: Path) -> None:
    log = tmp_path / "run.log"
    with log.open("w") as stream:
        subprocess.run(command, stdout=subprocess.DEVNULL, stderr=stream, env=ENVIRONMENT, check=True)
    lines = [line for line in log.read_text().splitlines() if not line.startswith("warning: ")]
    assert all(re.match(r"\d\d:\d\d:\d\d ", line) for line in lines), lines
    assert any("ResNet20 to 2:4: 20 layers, 24 samples, on cpu" in line for line in lines)
    solved = [line for line in lines if re.search(r"sweep \d/\d  \S+, loss .* -> .*, \d+/40", line)]
    assert any(re.search(r"ends about \d\d:\d\d, in (a second|\d+ (seconds|minutes)), \d\.\d GiB$", s) for s in solved)
    assert " finished in " in lines[-1]


class Terminal:
    """A terminal that a command runs in, and what it has shown."""

    def __init__(self, command: list[str], survives: bool = False) -> None:
        self.shown = ""
        self._screen, inside = pty.openpty()
        ignore = (lambda: signal.signal(signal.SIGHUP, signal.SIG_IGN)) if survives else None  # as nohup does
        self.process = subprocess.Popen(
            command, stdin=inside, stdout=inside, stderr=inside, env=ENVIRONMENT, start_new_session=True,
            preexec_fn=ignore,
        )  # fmt: skip
        os.close(inside)

    def shows(self, pattern: str) -> bool:
        while select.select([self._screen], [], [], 0)[0]:
            try:
                text = os.read(self._screen, 1 << 16).decode(errors="replace")
            except OSError:  # the command has ended
                break
            self.shown += re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", text)
        return re.search(pattern, self.shown) is not None

    def close(self) -> None:
        os.close(self._screen)


BAR = r"sweep 1/2  \S+.*\s+[━╺╸]+ +\d+/40 0:0\d:\d\d .*ends about \d\d:\d\d, in .* \d\.\d GiB"  # on two lines


def test_a_terminal_that_is_closed_shows_a_bar_and_the_run_goes_on(command: list[str], tmp_path: Path) -> None:
    terminal = Terminal([*command, "--events", str(tmp_path / "events")], survives=True)
    assert wait_for(lambda: terminal.shows(BAR)), terminal.shown
    terminal.close()
    terminal.process.wait(timeout=120)
    last = json.loads((tmp_path / "events").read_text().splitlines()[-1])
    assert last["event"] == "RunFinished"
    assert (tmp_path / "out" / "model.safetensors").is_file()


@pytest.fixture
def tmux(tmp_path: Path) -> Iterator[Callable[..., str]]:
    """A server of our own, which ends with the test."""
    if shutil.which("tmux") is None:
        pytest.skip("tmux is not installed")

    def call(*words: str) -> str:
        # tmux 3.3 and later give programs only what their server was started with
        done = subprocess.run(
            ["tmux", "-L", f"snows-{os.getpid()}", "-f", "/dev/null", *words],
            capture_output=True, text=True, env={**ENVIRONMENT, "LC_ALL": "C.UTF-8"},
        )  # fmt: skip
        return done.stdout

    yield call
    call("kill-server")


def test_tmux(tmux: Callable[..., str], command: list[str]) -> None:
    """Nobody is attached to the session, as after a lost connection."""
    tmux("new-session", "-d", "-x", "80", "-y", "20", f"{shlex.join(command)}; sleep 60")
    screens: list[str] = []

    def shows(pattern: str) -> bool:
        screens.append(tmux("capture-pane", "-p"))
        return re.search(pattern, screens[-1]) is not None

    assert wait_for(lambda: shows(BAR)), screens[-1]
    assert wait_for(lambda: shows("Saved to")), screens[-1]


NOTEBOOK = """
import snows, torch
model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.ReLU(), torch.nn.Linear(8, 8)).eval()
result = snows.prune(model, torch.randn(64, 8), "2:4", layers="*")
"""


def only(outputs: list[Any]) -> Any:
    (output,) = outputs
    return output


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_a_notebook(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    nbclient = pytest.importorskip("nbclient", reason="nbclient runs the notebook")
    nbformat = pytest.importorskip("nbformat")
    pytest.importorskip("ipykernel", reason="ipykernel is the kernel of the notebook")
    monkeypatch.setenv("PYTHONPATH", ENVIRONMENT["PYTHONPATH"])
    monkeypatch.setenv("IPYTHONDIR", str(tmp_path))
    cells = [NOTEBOOK, "result", "print(result.summary())", "result.report.plot()"]
    notebook = nbformat.v4.new_notebook(cells=[*map(nbformat.v4.new_code_cell, cells)])
    nbclient.NotebookClient(notebook, timeout=120).execute()
    bar, result, summary, plot = [only(cell.outputs) for cell in notebook.cells]
    assert "Sequential pruned to 2:4" in result.data["text/html"]
    assert re.search(r"pruned to 2:4\n.*layer +shape +pattern.*8 × 8", summary.text, re.DOTALL)
    assert "image/png" in plot.data
    html = bar.data["text/html"]  # updated in place
    assert re.search(r'<progress value="\d+" max="\d+"></progress> sweep \d/\d', html), html
