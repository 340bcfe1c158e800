"""A saved result is a `Result` again."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
import torch

import snows
from snows.events import Phase
from snows.results.reading import read_report, read_result
from snows.results.report import fold
from tests.networks import mlp
from tests.saved import quick
from tests.unit.results.test_report import RETRAINED, RUN


def saved(folder: Path) -> snows.Result:
    result = quick(mlp().eval(), torch.randn(32, 6, generator=torch.Generator().manual_seed(0)))
    result.save(folder)
    return result


def test_what_was_saved_is_read(tmp_path: Path) -> None:
    result = saved(tmp_path / "a")
    model = mlp().eval()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    found = read_result(tmp_path / "a", model)
    assert all(torch.equal(before[name], tensor) for name, tensor in model.state_dict().items())
    assert all(torch.equal(found.masks[name], kept) for name, kept in result.masks.items())
    assert found.report.to_dict() == result.report.to_dict()
    assert found.report.layers[0].solves == result.report.layers[0].solves
    assert found.report == result.report
    assert found.recipe == result.recipe
    found.save(tmp_path / "b")
    for name in ("model.safetensors", "masks.safetensors", "report.json", "recipe.json"):
        assert (tmp_path / "a" / name).read_bytes() == (tmp_path / "b" / name).read_bytes(), name


def test_a_retraining_is_read() -> None:
    report = fold([*RUN, *RETRAINED])
    found = read_report(json.loads(report.to_json()), "report.json")
    assert found.retraining is not None
    assert math.isnan(found.retraining.history[0].loss)
    assert found.to_dict() == report.to_dict()
    assert found.retraining.after == {"top1": 0.75}


def test_a_changed_byte_is_refused(tmp_path: Path) -> None:
    saved(tmp_path / "a")
    file = tmp_path / "a" / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-1] + b"?")
    with pytest.raises(snows.InputError, match=r"a cannot be used: .*model.safetensors is damaged"):
        read_result(tmp_path / "a", mlp())


def test_reports_of_older_versions_lack_entries(tmp_path: Path) -> None:
    data = saved(tmp_path / "a").report.to_dict()
    del data["retraining"], data["network_flops"]
    data["layers"][0]["solves"][0]["held_out"] = None
    report = read_report(json.loads(json.dumps(data)), "report.json")
    assert report.retraining is None
    assert report.layers[0].solves[0].held_out != report.layers[0].solves[0].held_out
    with pytest.raises(snows.InputError, match=r"report.json is no report of snows"):
        read_report({"layers": [{}]}, "report.json")


def test_every_part_of_a_report_is_of_its_own_kind(tmp_path: Path) -> None:
    report = read_report(json.loads(saved(tmp_path / "a").report.to_json()), "report.json")
    assert {type(phase) for phase in report.phases} == {Phase}
    assert report.phases[0].seconds > 0
    assert report.operations is not None
    assert {type(errors) for errors in report.operations.errors.values()} == {tuple}
    picture = report.layers[0].picture
    assert picture is not None
    assert sum(picture.before) == pytest.approx(1, abs=1e-3)


@pytest.mark.parametrize(
    ("key", "value"),
    [("phases", {"seconds": 1}), ("layers", "none"), ("operations", [1]), ("finish", {"curve": [[1]]})],
)
def test_parts_of_another_form_are_refused(key: str, value: object, tmp_path: Path) -> None:
    data = {**saved(tmp_path / "a").report.to_dict(), key: value}
    with pytest.raises(snows.InputError, match=r"^report\.json is no report of snows: "):
        read_report(data, "report.json")
