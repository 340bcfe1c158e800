"""The picture of attention maps side by side."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

import snows
from snows.evaluation.attention_figure import _brightest, _pixels, attention_maps, draw
from tests.transformers import Vision, build, images


def test_maps_are_the_mean_over_heads() -> None:
    networks = {"dense": build(Vision), "other": build(Vision, "matmul")}
    found = attention_maps(networks, images(2))
    assert list(found) == ["dense", "other"]
    for name, network in networks.items():
        for image, shown in zip(images(2), found[name], strict=True):
            torch.testing.assert_close(shown, snows.attention_map(network, image).mean(0))


def test_every_image_is_a_row_and_every_network_a_column(tmp_path: Path) -> None:
    """Maps of one image share their colors: a map that is nowhere high is dark beside one that is."""
    low, high = torch.full((4, 4), 0.01), torch.full((4, 4), 0.1)
    path = tmp_path / "maps.png"
    draw({"dense": [high, high], "mask only": [low, high]}, torch.rand(2, 3, 8, 8), path)
    picture = np.asarray(Image.open(path).convert("RGB"), dtype=float)
    assert picture.shape == (2 * 220, 3 * 220, 3)
    middle = {(row, column): picture[110 + 220 * row, 110 + 220 * column] for row in (0, 1) for column in (1, 2)}
    assert np.abs(middle[0, 1] - middle[1, 2]).max() <= 2
    assert middle[0, 1].sum() > middle[0, 2].sum() + 100


def test_a_few_bright_patches_do_not_hide_the_others() -> None:
    plain = torch.linspace(0, 0.01, 196).view(14, 14)
    corners = plain.clone()
    corners[0, 0] = corners[13, 13] = 0.5
    assert _brightest([corners]) < 0.011
    assert _brightest([plain, 2 * plain]) == pytest.approx(0.02, rel=0.05)


def test_images_of_any_normalization_and_number_of_channels_are_shown() -> None:
    assert _pixels(torch.tensor([[[-2.0, 2.0]]] * 3)).tolist() == [[[0.0] * 3, [1.0] * 3]]
    assert _pixels(torch.tensor([[[5.0, 5.0]]])).tolist() == [[0.0, 0.0]]


def test_a_file_that_cannot_be_written_and_a_library_that_is_not_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    maps = {"dense": [torch.rand(2, 2)]}
    with pytest.raises(snows.InputError, match=r"cannot write .*nowhere.*; what was to be written is in .*"):
        draw(maps, torch.rand(1, 3, 4, 4), tmp_path / "nowhere" / "maps.png")
    monkeypatch.setitem(__import__("sys").modules, "matplotlib.figure", None)
    with pytest.raises(snows.InputError, match=r"pip install 'snows\[plot\]'"):
        draw(maps, torch.rand(1, 3, 4, 4), tmp_path / "maps.png")


def test_the_command_draws_dense_mask_only_and_re_adjusted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from snows.evaluation import attention_figure as module
    from tests.unit.cli.test_commands import call

    (tmp_path / "net.py").write_text(
        "from tests.transformers import Vision, build, images\n"
        "def make():\n    return build(Vision)\n"
        "def data():\n    return images(30)\n"
        "def words():\n    import torch\n    return torch.zeros(8, 5, dtype=torch.long)\n"
    )
    monkeypatch.chdir(tmp_path)
    with pytest.warns(snows.SnowsWarning):
        result = snows.prune(
            build(Vision), images(30), "1:4", layers="qkv", recipe=snows.Recipe(horizon=1), progress=False
        )
    result.save("pruned")
    drawn: dict[str, Any] = {}
    monkeypatch.setattr(module, "draw", lambda maps, shown, path: drawn.update(maps=maps, shown=shown, path=path))
    command = ["attention", "net.py:make", "--data", "net.py:data", "--images", "3"]
    assert call(*command, "--pruned", "pruned", "--out", "maps.png") == 0
    assert "Saved to maps.png" in capsys.readouterr().out
    assert list(drawn["maps"]) == ["dense", "mask only", "re-adjusted"]
    assert torch.equal(drawn["shown"], images(30)[:3])
    masked = build(Vision)
    with torch.no_grad():
        for name, mask in result.masks.items():
            masked.get_parameter(name).mul_(mask)
    for name, network in (("dense", build(Vision)), ("mask only", masked), ("re-adjusted", result.model)):
        for image, shown in zip(images(30), drawn["maps"][name], strict=False):
            torch.testing.assert_close(shown, snows.attention_map(network, image).mean(0))
    assert call(*command, "--quiet") == 0
    assert list(drawn["maps"]) == ["dense"]
    assert capsys.readouterr().out == ""
    assert call(*command, "--out", "maps.jpg") == 2
    monkeypatch.setattr(module, "attention_maps", lambda *_: pytest.fail("the work began"))
    Path("folder.png").mkdir()
    assert call(*command, "--out", "folder.png") == 2
    assert call(*command, "--out", "net.py/maps.png") == 1
    assert "net.py is no folder" in capsys.readouterr().err
    assert call("attention", "net.py:make", "--data", "net.py:words") == 1
    assert "no table of images" in capsys.readouterr().err
