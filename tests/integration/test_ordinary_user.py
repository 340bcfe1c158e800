"""All the way as an ordinary user: prune, save, load, go on; and folders that are closed to this user."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.users import as_ordinary_user

BEGINNING = """
import io, os, sys, tempfile
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path
import torch
import snows
from snows.cli.main import main
from snows.events import LayerSolved, LayerStarted

torch.set_num_threads(1)
RECIPE = snows.Recipe(sweeps=1, horizon=1, cg_steps=2, finish_steps=0)
X = torch.randn(64, 8, generator=torch.Generator().manual_seed(1))

def network():
    torch.manual_seed(0)
    layers = [torch.nn.Linear(8, 8), torch.nn.ReLU(), torch.nn.Linear(8, 8), torch.nn.ReLU(), torch.nn.Linear(8, 4)]
    return torch.nn.Sequential(*layers).eval()

def prune(**options):
    return snows.prune(network(), X, "2:4", layers="*", recipe=RECIPE, **{"progress": False, **options})

def refused(call):
    try:
        call()
    except snows.InputError as error:
        print(error)
    else:
        print("done")

def no_work(event):
    assert not isinstance(event, LayerStarted), "the work began"

def equal(one, two):
    return all(torch.equal(a, b) for a, b in zip(one.state_dict().values(), two.state_dict().values(), strict=True))
"""

THE_WAY = """
class Stop(Exception):
    pass

def stop(event):
    if isinstance(event, LayerSolved):
        raise Stop

whole = prune()
try:
    prune(resume="work/state", progress=stop)
except Stop:
    pass
again = prune(resume="work/state")
print(again.report.recalled_solves, equal(whole.model, again.model))
folder = again.save("work/out")
print(snows.verify(folder, network()).ok, equal(snows.load(folder, network()), whole.model))
again.save("work/out", compact=True, force=True)
print(equal(snows.load("work/out", network()), whole.model), sorted(os.listdir("work")))
"""


@pytest.fixture
def places() -> Iterator[Path]:
    """Outside of pytest's own folder, which another session may close to the user meanwhile."""
    with tempfile.TemporaryDirectory() as folder:
        for name, mode in (("work", 0o777), ("closed", 0o555), ("secret", 0)):
            (Path(folder) / name).mkdir()
            (Path(folder) / name).chmod(mode)
        yield Path(folder)


def test_prune_save_load_and_resume(places: Path) -> None:
    shown = as_ordinary_user(BEGINNING + THE_WAY, places).splitlines()
    assert shown == ["1 True", "True True", "True ['out', 'state']"]


CLOSED = """
tempfile.tempdir = "work"
for place in ("closed/state", "secret", "secret/state"):
    refused(lambda: prune(resume=place, progress=no_work))
    refused(lambda: snows.compare(network(), X, "2:4", "magnitude", test=X, out=place, progress=False))
result = prune(resume="work/state")
for place in ("work/state/layers", "work/state"):
    os.chmod(place, 0o555)
    refused(lambda: prune(resume="work/state", progress=no_work))
    os.chmod(place, 0o755)
for place in ("closed/out", "secret/out", "secret"):
    refused(lambda: result.save(place))
rescued = next(Path("work").glob("snows-rescued-*"))
print(snows.verify(rescued, network()).ok)
result.save("work/out")
os.chmod("work/out/model.safetensors", 0)
refused(lambda: snows.load("work/out", network()))
print(snows.verify("work/out", network()).findings[0])
os.chmod("work/out", 0)
refused(lambda: snows.load("work/out", network()))
refused(lambda: snows.verify("work/out", network()))
refused(lambda: result.save("work/out", force=True))
"""


def test_folders_that_are_closed_are_refused_in_a_sentence(places: Path) -> None:
    shown = as_ordinary_user(BEGINNING + CLOSED, places).splitlines()
    assert shown[:6] == [
        *["cannot write to closed/state: Permission denied"] * 2,
        *["cannot read secret/settings.json: Permission denied"] * 2,
        *["cannot read secret/state/settings.json: Permission denied"] * 2,
    ]
    assert shown[6:8] == ["cannot write to work/state: Permission denied"] * 2
    saved, read = shown[8:11], shown[11:]
    assert saved[0].startswith("cannot write to closed: Permission denied; what was to be written is in ")
    assert all(line.startswith(("cannot read secret", "cannot write to secret")) for line in saved[1:])
    assert read[0] == "True"
    assert all("Permission denied" in line for line in read[1:])
    assert len(read) == 6


COMMANDS = """
FILE = "work/net.py"
Path(FILE).write_text('''
import torch
def model():
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.ReLU(), torch.nn.Linear(8, 8)).eval()
def x():
    return torch.randn(64, 8)
''')
for out, resume in (("closed/out", "work/state"), ("work/out", "closed/state"), ("work/out", "secret/state"),
                    ("secret/out", "work/state"), ("work/out", "work/state")):
    sys.argv = ["snows", "prune", f"{FILE}:model", "--data", f"{FILE}:x", "--layers", "*", "--effort", "fast",
                "--out", out, "--resume", resume, "--quiet"]
    errors = io.StringIO()
    try:
        with redirect_stderr(errors), redirect_stdout(io.StringIO()):
            main()
    except SystemExit as ended:
        print(ended.code or 0, errors.getvalue().strip())
"""


def test_commands_refuse_them_in_a_sentence(places: Path) -> None:
    shown = as_ordinary_user(BEGINNING + COMMANDS, places).splitlines()
    assert shown == [
        "1 error: cannot write to closed/out: Permission denied",
        "1 error: cannot write to closed/state: Permission denied",
        "1 error: cannot read secret/state/settings.json: Permission denied",
        "1 error: cannot read secret/out: Permission denied",
        "0 ",
    ]
