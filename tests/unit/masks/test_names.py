"""One list of names: of modules, of classes, and of what each of them takes."""

from __future__ import annotations

import subprocess
import sys
from importlib import import_module
from pathlib import Path

import pytest

import snows
from snows.cli.arguments import COMPARED_MASKS, MASKS
from snows.masks import NAMES, LayerMethod, NetworkMethod, as_method
from snows.masks.base import method_class
from snows.masks.names import CLASSES, LAYER_METHODS, NETWORK_METHODS, WITHOUT_LOSS

ROOM = Path(snows.__file__).parent / "masks"


def test_every_method_has_a_name() -> None:
    """A mask method is a class of a module of its own, and listed."""
    found = {}
    for path in ROOM.glob("*.py"):
        module = import_module(f"snows.masks.{path.stem}")
        for name, kind in vars(module).items():
            own = isinstance(kind, type) and kind.__module__ == module.__name__
            if own and (hasattr(kind, "choose") or hasattr(kind, "choose_layer")):
                found[path.stem] = name
    protocols = {"base"}
    assert {stem: name for stem, name in found.items() if stem not in protocols} == CLASSES


@pytest.mark.parametrize("name", NAMES)
def test_names_lead_to_objects_of_the_kind_that_is_listed(name: str) -> None:
    method = as_method(name)
    assert type(method).__name__ == CLASSES[name]
    assert isinstance(method, LayerMethod) == (name in LAYER_METHODS)
    assert isinstance(method, NetworkMethod) == (name in NETWORK_METHODS)
    assert getattr(snows, CLASSES[name]) is type(method) is method_class(name)
    assert CLASSES[name] in snows.__all__


def test_the_command_line_names_them_all() -> None:
    assert MASKS.split(", ") == list(NAMES)
    assert COMPARED_MASKS.split(",") == list(WITHOUT_LOSS)
    assert set(WITHOUT_LOSS) == {"magnitude", *LAYER_METHODS}


def test_names_are_known_without_torch() -> None:
    code = "import sys, snows.masks, snows.masks.names; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_the_room_exports_what_methods_are_made_from() -> None:
    import snows.masks as room

    for name in room.__all__:
        assert getattr(room, name) is not None
    with pytest.raises(AttributeError, match=r"module 'snows\.masks' has no attribute 'magic'"):
        _ = room.magic  # type: ignore[attr-defined]
