"""The other functions of the Python interface, with one argument of another type or of an odd value."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn

import snows

from .objects import LIGHT, make_odd_model, odd_arguments, samples
from .odd_tensors import odd_tensor
from .places import odd_path
from .world import Case

LABELS = torch.arange(12) % 4
Arguments = dict[str, Any]


def _evaluate(case: Case) -> Arguments:
    return {"model": case.fresh_model(), "data": samples(case), "labels": LABELS, "dense": case.fresh_model(),
            "batch": 5, "metric": None}  # fmt: skip


def _compare(case: Case) -> Arguments:
    return {
        "model": case.fresh_model(), "calibration": samples(case), "patterns": "2:4", "masks": ["magnitude"],
        "test": samples(case), "test_labels": LABELS, "labels": "model", "layers": "2", "exclude": None, "horizon": 0,
        "recipe": LIGHT, "effort": "fast", "device": None, "seed": 0, "permute": False, "memory": None,
        "out": case.folder / "cells", "progress": False,
    }  # fmt: skip


def _inspect(case: Case) -> Arguments:
    return {
        "model": case.fresh_model(), "calibration": samples(case), "pattern": "2:4", "layers": None, "exclude": None,
        "horizon": 1, "recipe": LIGHT, "effort": "default", "samples": 20, "device": None, "memory": None,
    }  # fmt: skip


def _sensitivity(case: Case) -> Arguments:
    return {
        "model": case.fresh_model(), "calibration": samples(case), "patterns": ["2:4", 0.5], "layers": "2",
        "exclude": None, "labels": "model", "device": None, "seed": 0, "memory": None, "progress": False,
    }  # fmt: skip


def _linear_probe(case: Case) -> Arguments:
    return {"model": case.fresh_model(), "train": samples(case), "train_labels": LABELS, "test": samples(case),
            "test_labels": LABELS, "batch": 5}  # fmt: skip


def _freeze(case: Case) -> Arguments:
    masks = {"2.weight": torch.rand(8, 8) > 0.5}
    return {"model": case.fresh_model(), "masks": case.random.choice([masks, _saved(case)])}


def _unfreeze(case: Case) -> Arguments:
    return {"model": snows.freeze(case.fresh_model(), _saved(case))}


def _retrain(case: Case) -> Arguments:
    return {
        "pruned": case.random.choice([case.world.saved_result, _saved(case)]), "data": (samples(case), LABELS),
        "teacher": None, "held_out": 0.5, "epochs": 1, "batch": 4, "lr": 0.01, "lr_decay": 0.1, "lr_decay_every": 1,
        "momentum": 0.9, "weight_decay": 1e-4, "crop": 0, "flip": False, "amp": False, "model": None, "trust": False,
        "device": None, "seed": 0, "progress": False, "resume": case.folder / "epochs",
    }  # fmt: skip


def _export(case: Case) -> Arguments:
    out = case.folder / "exported"
    return {"directory": _saved(case), "to": "safetensors", "model": case.fresh_model(), "out": out, "force": False}


def _load(case: Case) -> Arguments:
    return {"directory": _saved(case), "model": case.fresh_model(), "trust": False}


def _load_masks(case: Case) -> Arguments:
    return {"directory": _saved(case)}


def _verify(case: Case) -> Arguments:
    return {"directory": _saved(case), "model": case.fresh_model()}


def _save(case: Case) -> Arguments:
    return {"self": case.world.saved_result, "directory": case.folder / "saved", "compact": False, "force": False}


def _saved(case: Case) -> Path:
    return case.world.folder / "small"


VERBS: dict[Callable[..., Any], Callable[[Case], Arguments]] = {
    snows.evaluate: _evaluate, snows.compare: _compare, snows.inspect: _inspect, snows.sensitivity: _sensitivity,
    snows.linear_probe: _linear_probe, snows.freeze: _freeze, snows.unfreeze: _unfreeze, snows.retrain: _retrain,
    snows.export: _export, snows.load: _load, snows.load_masks: _load_masks, snows.verify: _verify,
    snows.Result.save: _save,
}  # fmt: skip
MODELS = {"model", "dense", "teacher"}
PATHS = {"directory", "out", "resume"}
CALLED = {"progress", "metric"}  # by us, if they can be: the caller's own code
SELF = "self"


def odd_verb(case: Case) -> None:
    rng = case.random
    verb = rng.choice(list(VERBS))
    options = VERBS[verb](case)
    name = rng.choice([name for name in options if name != SELF])
    value = odd_path(case) if name in PATHS and rng.random() < 0.6 else _odd_argument(rng, case)
    if name in CALLED and callable(value):
        return
    if name == "epochs" and isinstance(value, int) and value > 5:  # as much work as was asked for
        return
    if name in PATHS and isinstance(value, str | Path):  # a word must not name a place elsewhere
        value = odd_path(case)
    options[name] = value
    before = {key: tensor.clone() for key, tensor in case.world.saved_result.model.state_dict().items()}
    verb(*([options.pop(SELF)] if SELF in options else []), **options)
    after = case.world.saved_result.model.state_dict()
    if any(not torch.equal(before[key], after[key]) for key in before):
        raise ValueError("the caller's result was changed")


def odd_model_of_a_verb(case: Case) -> None:
    """Verbs that run a model or fill it."""
    rng = case.random
    verb = rng.choice([verb for verb, arguments in VERBS.items() if MODELS & arguments(case).keys()])
    options = VERBS[verb](case)
    name = rng.choice(sorted(MODELS & options.keys()))
    options[name] = make_odd_model(case)
    verb(*([options.pop(SELF)] if SELF in options else []), **options)
    filled = options[name] if verb is snows.load else nn.Module()
    if any(tensor.is_meta for tensor in filled.state_dict().values()):
        raise ValueError("nothing was loaded")


def _odd_argument(rng: random.Random, case: Case) -> Any:
    shapes = [(12, 8), (8, 8), (12,), (3, 8), (0, 8), (12, 8, 1)]
    return rng.choice([*odd_arguments(case), odd_tensor(rng, rng.choice(shapes)), odd_tensor(rng, rng.choice(shapes))])


TARGETS: dict[Callable[[Case], None], int] = {odd_verb: 4, odd_model_of_a_verb: 2}
