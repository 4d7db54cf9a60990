"""Adapters that come and go while they are looked up, with every interleaving of two threads.

One operation runs; at one line of it, the other one runs from its beginning to its end. Each line
has its turn.
"""

import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import pytest

from mlx_server.errors import AdapterNotFound, BadRequest, ServerError
from mlx_server.models import adapter_catalog as catalog_module
from mlx_server.models.adapter_catalog import AdapterCatalog, AdapterLocation, BaseModelShapes
from mlx_server.pool import adapters as adapters_module
from mlx_server.pool.adapters import find_adapter

pytestmark = pytest.mark.slow

SAMPLES = Path(__file__).parents[2] / "adapters"
FILES = (catalog_module.__file__, adapters_module.__file__)

Operation = Callable[[AdapterCatalog, Path], Any]

OPERATIONS: dict[str, Operation] = {
    "ask": lambda catalog, folder: find_adapter(catalog, "one", []).spec.digest,
    "ask for its folder": lambda c, folder: (
        find_adapter(c, str(folder / "one"), [folder]).spec.digest
    ),
    "load": lambda catalog, folder: catalog.add("one", AdapterLocation(folder / "one")).digest,
    "load another": lambda catalog, folder: (
        catalog.add("one", AdapterLocation(folder / "two")).digest
    ),
    "unload": lambda catalog, folder: catalog.remove("one"),
    "list": lambda catalog, folder: list(catalog.all()),
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("coming-and-going")
    for name, sample in {"one": "pirate", "two": "json-answer"}.items():
        shutil.copytree(SAMPLES / sample, folder / name)
    return folder


def outcome(operation: Operation, catalog: AdapterCatalog, folder: Path) -> Any:
    try:
        return operation(catalog, folder)
    except ServerError as error:
        return type(error)


def interleaved(operation: Operation, other: Operation, folder: Path, at: int) -> Any:
    """What the operation came to when the other one ran before its line `at`; None: it is over."""
    catalog = AdapterCatalog(BaseModelShapes())
    catalog.add("one", AdapterLocation(folder / "one"))
    lines = 0

    def trace(frame: FrameType, event: str, arg: object) -> Any:
        nonlocal lines
        if frame.f_code.co_filename not in FILES:
            return None
        if event == "line":
            lines += 1
            if lines == at:
                sys.settrace(None)
                if not catalog.added.lock.locked():  # else the other thread would wait
                    outcome(other, catalog, folder)
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        found = outcome(operation, catalog, folder)
    finally:
        sys.settrace(before)
    return (found, catalog) if lines >= at else None


@pytest.mark.parametrize("other", ["load", "load another", "unload", "ask for its folder"])
@pytest.mark.parametrize("name", OPERATIONS)
def test_each_operation_is_one_step_to_the_others(folder: Path, name: str, other: str) -> None:
    digests = {
        each: AdapterCatalog(BaseModelShapes()).add(each, AdapterLocation(folder / each)).digest
        for each in ("one", "two")
    }
    at = 0
    while ended := interleaved(OPERATIONS[name], OPERATIONS[other], folder, at := at + 1):
        found, catalog = ended
        match name:
            case "ask":
                allowed = {digests["one"], AdapterNotFound}
                assert found in allowed | ({digests["two"]} if other == "load another" else set())
            case "ask for its folder" | "load":
                assert found in (digests["one"], BadRequest)
            case "load another":
                assert found in (digests["two"], BadRequest)
            case "unload":
                assert found in (None, AdapterNotFound)
        for shown, place in catalog.locations().items():  # a name means what is there
            assert catalog.read(shown, place).path == place.path
        if "one" in catalog.added.locations:  # and what is there can be unloaded
            catalog.remove("one")
        assert "one" not in catalog.added.locations
    assert at > 3
