"""Models, samples and arguments of odd kinds: each is refused in one sentence, or pruned as any other."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import snows
from snows import ArgumentError, CaptureError, InputError, SnowsWarning
from snows.caller import ONE_AT_A_TIME
from snows.events import LayerStarted
from snows.results.journal import kept_solves
from snows.solve import footprint

X = torch.randn(24, 8, generator=torch.Generator().manual_seed(0))
RECIPE = snows.Recipe(sweeps=1, horizon=1, cg_steps=2, finish_steps=0)


def network(hidden: int = 8, classes: int = 4) -> nn.Sequential:
    torch.manual_seed(0)
    layers = [nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, hidden), nn.ReLU(), nn.Linear(hidden, classes)]
    return nn.Sequential(*layers).eval()


def prune(model: Any = None, x: Any = X, pattern: Any = "2:4", **options: Any) -> snows.Result:
    options = {"recipe": RECIPE, "progress": False, **options}
    return snows.prune(network() if model is None else model, x, pattern, **options)


def with_weight(change: Callable[[Tensor], Tensor]) -> nn.Module:
    model = network()
    model[2].weight = nn.Parameter(change(model[2].weight.detach()), requires_grad=False)
    return model


def with_buffer(value: Tensor) -> nn.Module:
    model = network()
    model.register_buffer("table", value)
    return model


def replaced(wrap: Callable[[nn.Module], nn.Module]) -> nn.Module:
    model = network()
    model[2] = wrap(model[2])
    return model


def scripted(module: nn.Module) -> Any:
    return torch.jit.trace(module, X[:2], check_trace=False)  # type: ignore[no-untyped-call]


MODELS: dict[str, tuple[str, Callable[[], nn.Module]]] = {
    "meta": (r"^0\.weight of the model is without values", lambda: network().to("meta")),
    "one weight on meta": (r"^2\.weight .* is without values", lambda: with_weight(lambda w: w.to("meta"))),
    "a buffer on meta": ("^table of the model is without values", lambda: with_buffer(torch.ones(3, device="meta"))),
    "a sparse buffer": (r"^table of the model is sparse", lambda: with_buffer(torch.ones(3).to_sparse())),
    "float8": (
        r"^2\.weight of the model is torch\.float8_e4m3fn; .*model\.float\(\)",
        lambda: with_weight(lambda w: w.to(torch.float8_e4m3fn)),
    ),
    "complex": (r"^2\.weight of the model is torch\.complex64", lambda: with_weight(lambda w: w.to(torch.complex64))),
    "lazy": (r"^2\.weight of the model is lazy", lambda: replaced(lambda _: nn.LazyLinear(8))),
    "torch.jit": (r"^the model is compiled by torch\.jit", lambda: scripted(network())),
    "torch.jit inside": (r"^the submodule 2 of the model is compiled by torch\.jit", lambda: replaced(scripted)),
    "DataParallel": (
        r"^the model is wrapped in DataParallel; give the module inside, which is model\.module",
        lambda: nn.DataParallel(network()),
    ),
    "DataParallel inside": (r"^the submodule 2 is wrapped .* is 2\.module$", lambda: replaced(nn.DataParallel)),
    "torch.compile": (
        r"^the model is wrapped in OptimizedModule; .* is model\._orig_mod$", lambda: torch.compile(network()),
    ),
}  # fmt: skip


@pytest.mark.filterwarnings("ignore")  # torch's own, of each of these
@pytest.mark.parametrize("case", MODELS)
def test_a_model_that_cannot_be_pruned_as_it_is(case: str) -> None:
    words, model = MODELS[case]
    with pytest.raises(InputError, match=words) as caught:
        prune(model())
    assert "\n" not in str(caught.value)


SAMPLES: dict[str, tuple[str, Callable[[], Tensor]]] = {
    "meta": (r"without values \(on the device meta\)", lambda: X.to("meta")),
    "sparse": (r"sparse \(torch\.sparse_coo\)", X.to_sparse),
    "float8": (r"of torch\.float8_e5m2", lambda: X.to(torch.float8_e5m2)),
    "quantized": (
        r"torch\.qint8, which torch cannot compute with",
        lambda: torch.quantize_per_tensor(X, 0.1, 0, torch.qint8),
    ),
    "nested": ("a nested tensor", lambda: torch.nested.nested_tensor([X[0], X[1]])),
    "expanded": ("expanded to 8,000,000,000 elements", lambda: X[:1].expand(10**9, 8)),
}


@pytest.mark.filterwarnings("ignore")  # torch's own, of each of these
@pytest.mark.parametrize("case", SAMPLES)
def test_samples_that_hold_no_plain_numbers(case: str) -> None:
    words, samples = SAMPLES[case]
    with pytest.raises(InputError, match=f"^a tensor of the calibration data is {words}; expected dense tensors"):
        prune(x=samples())
    with pytest.raises(InputError):
        snows.evaluate(network(), samples(), torch.zeros(24, dtype=torch.long))


ARGUMENTS: dict[str, tuple[dict[str, Any], str]] = {
    "a seed that is a bool": ({"seed": True}, "^seed is True; expected a whole number"),
    "layers by number": ({"layers": 5}, "^layers has an int; expected names or globs of layers"),
    "a list of numbers": ({"exclude": [5]}, "^exclude has an int; expected names or globs of layers"),
    "layers as a tensor": ({"layers": torch.ones(2)}, "^layers has a Tensor; expected names or globs of layers"),
    "a folder that is a number": ({"resume": 5}, "^resume is 5; expected the path of a folder"),
    "a folder without a name": ({"resume": ""}, "^resume is ''; expected the path of a folder"),
    "permute in a word": ({"permute": "yes"}, "^permute is 'yes'; expected True or False"),
    "a solver that is a tensor": ({"solver": torch.ones(2)}, "^solver is tensor"),
    "labels that are a tensor": ({"labels": torch.ones(2)}, "^labels is tensor"),
    "the device meta": ({"device": "meta"}, "^the device meta holds no values"),
    "a device of a huge number": ({"device": 10**30}, "^device 10+ is not known"),
    "a device that is a list": ({"device": ["cpu"]}, r"^device \['cpu'\] is not known"),
}


@pytest.mark.parametrize("case", ARGUMENTS)
def test_arguments_of_a_wrong_type(case: str) -> None:
    options, words = ARGUMENTS[case]
    with pytest.raises(ArgumentError, match=words):
        prune(**options)


@pytest.mark.parametrize("name", ["x" * 300, "a/" * 3000, "file/state"])
def test_a_resume_folder_that_cannot_be(name: str, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(InputError, match=r"^cannot (read|write to) .*(File name too long|Not a directory)"):
        prune(resume=tmp_path / name)
    with pytest.raises(InputError, match=r"^cannot read .*File name too long"):
        kept_solves(tmp_path / ("x" * 300), "resume=DIR", "call")


@pytest.mark.parametrize("name", ["settings.json", "layer"])
def test_a_folder_in_place_of_a_resume_file(name: str, tmp_path: Path) -> None:
    prune(resume=tmp_path / "state")
    file = tmp_path / "state" / name if "." in name else min((tmp_path / "state" / "layers").iterdir())
    file.unlink()
    file.mkdir()
    with pytest.raises(InputError, match=r"no regular file|not empty"):
        prune(resume=tmp_path / "state")


class Branches(nn.Module):
    """One of ordinary layers, one of layers without elements."""

    def __init__(self, hidden: int, classes: int) -> None:
        super().__init__()
        self.first, self.middle, self.last = nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 4)
        self.narrow, self.out = nn.Linear(8, hidden), nn.Linear(hidden, classes)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        x = self.first(x).relu()
        return self.last(self.middle(x).relu()), self.out(self.narrow(x).relu())


@pytest.mark.filterwarnings("ignore:Initializing zero-element tensors")
@pytest.mark.parametrize(("hidden", "classes"), [(0, 4), (8, 0)])
def test_layers_without_elements_stay_dense(hidden: int, classes: int) -> None:
    torch.manual_seed(0)
    model = Branches(hidden, classes).eval()
    result = prune(model, layers="*", recipe=RECIPE.replace(horizon=4, finish_steps=4))
    empty = [layer.name for layer in result.report.dense_layers if "has no elements" in layer.reason]
    assert empty == (["narrow", "out"] if hidden == 0 else ["out"])
    assert {"first.weight", "middle.weight", "last.weight"} <= result.masks.keys()
    only = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 0)).eval()
    assert prune(only, layers="*").masks.keys() == {"0.weight", "2.weight"}


class Branching(nn.Module):
    """Another network from so many samples on."""

    def __init__(self, size: int = 10) -> None:
        super().__init__()
        self.inner, self.size = network(), size

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x) if x.shape[0] < self.size else self.inner(x) * 2


@pytest.mark.filterwarnings("ignore:Initializing zero-element tensors", "ignore:the mask of 0 removes every weight")
def test_outputs_without_elements_do_not_move() -> None:
    """As those of a head that has no classes yet."""
    found = snows.sensitivity(network(classes=0), X, 0.5, layers="2", progress=False)
    assert [level.mask_only.error for level in found.layers[0].levels] == [0.0]
    assert prune(network(classes=0), pattern="0.5 measured", layers=["0", "2"]).masks.keys() == {"0.weight", "2.weight"}


def test_a_branch_on_the_batch_size_is_noticed() -> None:
    with pytest.raises(CaptureError, match=r"does not give the model's own outputs on .* samples"):
        prune(Branching().eval())
    assert prune(Branching().eval(), X[:8]).report.sparsity == 0.5  # never more than 8 at a time


BEYOND: dict[str, tuple[int, dict[str, Any]]] = {  # the micro-batch of 4
    "effects": (6, {}),
    "the last stage": (14, {"recipe": RECIPE.replace(finish_steps=2, finish_batch=32)}),
    "its variances": (14, {"recipe": RECIPE.replace(finish_steps=2, finish_batch=4)}),
    "gradients": (14, {"pattern": "0.5", "mask": "falcon"}),
    "trials": (14, {"pattern": "0.5 measured", "layers": "*"}),
    "moments": (14, {"pattern": "0.5 owl", "layers": "*"}),
}


@pytest.mark.parametrize("case", BEYOND)
def test_branches_are_noticed_at_every_size_that_is_used_and_before_the_work(
    case: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    size, options = BEYOND[case]
    monkeypatch.setattr(footprint, "_MICRO_BATCH", {"cpu": 4})
    events: list[snows.Event] = []
    with pytest.raises(CaptureError, match="does not give the model's own outputs on"):
        prune(Branching(size).eval(), progress=events.append, **options)
    assert not any(isinstance(event, LayerStarted) for event in events)
    assert prune(Branching(100).eval(), **options).report.sparsity == pytest.approx(0.5, abs=0.01)


def test_a_branch_on_the_batch_size_is_noticed_where_nothing_is_pruned() -> None:
    words = "does not give the model's own outputs on"
    with pytest.raises(CaptureError, match=words):
        snows.sensitivity(Branching(14).eval(), X, ["2:4"], progress=False)
    labels = torch.arange(24) % 2
    with pytest.raises(CaptureError, match=words):
        snows.linear_probe(Branching(20).eval(), X[:4], labels[:4], X, labels)
    assert snows.linear_probe(Branching(20).eval(), X[:4], labels[:4], X, labels, batch=16) >= 0


# Results that are not finite


def near_the_limit_of_float16() -> nn.Module:
    model = network().half()
    with torch.no_grad():
        model[0].weight.uniform_(2e4, 6e4, generator=torch.Generator().manual_seed(0))
    return model


@pytest.mark.parametrize("mask", ["magnitude", "obc", "sparsegpt"])
@pytest.mark.parametrize("solver", ["newton", None])
def test_a_result_that_float16_cannot_hold_is_never_returned(mask: str, solver: Any, tmp_path: Path) -> None:
    """Inputs are alike, so the kept weights of a row take over the sum of all."""
    model, x = near_the_limit_of_float16(), torch.full((64, 8), 1e-4)
    if mask == "magnitude" and solver is None:
        result = prune(model, x, layers="0", mask=mask, solver=solver)
    else:
        with pytest.warns(SnowsWarning, match=r"^the new values of 0\.weight are not finite in the model's float16"):
            result = prune(model, x, layers="0", mask=mask, solver=solver, resume=tmp_path / "state")
        again = prune(model, x, layers="0", mask=mask, solver=solver, resume=tmp_path / "state")
        assert torch.equal(weights(again), weights(result))
    assert weights(result).isfinite().all()
    assert torch.equal(result.model[0].weight, model[0].weight * result.masks["0.weight"])
    result.save(tmp_path / "out")


def test_weights_that_are_not_finite_are_not_saved(tmp_path: Path) -> None:
    result = prune()
    with torch.no_grad():
        result.model[4].bias[1] = torch.inf
    with pytest.raises(InputError, match=r"^the model's weights contain NaN or infinity \(in 4\.bias\)"):
        result.save(tmp_path / "out")
    result = prune(with_buffer(torch.tensor([1.0, -torch.inf])))  # an attention mask may have infinity
    assert snows.verify(result.save(tmp_path / "masked"), result.model).ok
    result.model.get_buffer("table")[0] = torch.nan
    with pytest.raises(InputError, match=r"^the model's weights contain NaN or infinity \(in table\)"):
        result.save(tmp_path / "out")
    assert not (tmp_path / "out").exists()


# What is pruned as any other


def weights(result: snows.Result) -> Tensor:
    return torch.cat([parameter.flatten() for parameter in result.model.parameters()])


def test_a_model_made_in_inference_mode_is_pruned() -> None:
    with torch.inference_mode():
        model, x = network(), X.clone()
    result = prune(model, x)
    assert torch.equal(weights(result), weights(prune()))
    assert not any(parameter.is_inference() for parameter in result.model.parameters())


@pytest.mark.parametrize("context", [lambda: torch.device("meta"), lambda: default_device("meta")])
def test_the_callers_default_device_is_of_no_effect(context: Callable[[], AbstractContextManager[Any]]) -> None:
    model = network()
    with context():
        result = prune(model)
        listed = snows.inspect(model, X, "2:4")
    assert torch.equal(weights(result), weights(prune()))
    assert len(listed.layers) == 3


class default_device:  # noqa: N801
    """torch.set_default_device, until the end of the block."""

    def __init__(self, name: str) -> None:
        self.name = name

    def __enter__(self) -> None:
        torch.set_default_device(self.name)

    def __exit__(self, *_: object) -> None:
        torch.set_default_device(None)


def test_a_child_process_does_not_wait_for_a_thread_of_its_parent() -> None:
    taken, done = threading.Event(), threading.Event()

    def hold() -> None:
        with ONE_AT_A_TIME:
            taken.set()
            done.wait(60)

    thread = threading.Thread(target=hold)
    thread.start()
    taken.wait(60)
    child = os.fork()
    if child == 0:
        os._exit(0 if ONE_AT_A_TIME.acquire(timeout=20) else 1)
    _, status = os.waitpid(child, 0)
    done.set()
    thread.join()
    assert os.waitstatus_to_exitcode(status) == 0


FORK = """
import os, sys, threading, torch, snows
torch.set_num_threads(2)
model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.ReLU(), torch.nn.Linear(64, 2)).eval()
x, inside, done = torch.randn(512, 64), threading.Event(), threading.Event()

def hold(event):
    inside.set()
    done.wait()

snows.prune(model, x, "2:4", layers="0", progress=False)  # OpenMP makes its threads
thread = threading.Thread(target=lambda: snows.prune(model, x, "2:4", layers="0", progress=hold), daemon=True)
thread.start()
inside.wait(60)
child = os.fork()
if child == 0:
    result = snows.prune(model, x, "2:4", layers="0", progress=False)
    os._exit(5 if "os.fork()" in result.report.warnings[0] and torch.get_num_threads() == 2 else 6)
print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
done.set()
thread.join()
"""


def test_a_child_process_prunes_while_a_thread_of_its_parent_does() -> None:
    ended = subprocess.run([sys.executable, "-c", FORK], capture_output=True, text=True, timeout=120, check=True)
    assert ended.stdout == "5\n"


def test_what_the_forking_thread_holds_stays_held() -> None:
    with ONE_AT_A_TIME:
        child = os.fork()
        if child == 0:
            os._exit(0 if ONE_AT_A_TIME._is_owned() else 1)  # type: ignore[attr-defined]
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


@pytest.mark.parametrize("progress", ["True", "False"])
def test_the_first_prune_of_a_process_leaves_pythons_random_numbers_alone(progress: str) -> None:
    code = f"""
import random
random.seed(0)
before = random.getstate()
import torch, snows
model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.ReLU(), torch.nn.Linear(8, 2)).eval()
snows.prune(model, torch.randn(16, 8), "2:4", layers="0", progress={progress})
assert random.getstate() == before
"""
    subprocess.run([sys.executable, "-c", code], check=True)


def test_a_value_that_cannot_be_printed_is_named_by_its_kind() -> None:
    class Unprintable:
        def __repr__(self) -> str:
            raise RuntimeError("no text for this")

    model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Linear(8, 2))
    with pytest.raises(snows.ArgumentError, match="solver is a Unprintable; expected 'newton'"):
        snows.prune(model, torch.randn(40, 8), "2:4", solver=Unprintable())  # type: ignore[arg-type]
