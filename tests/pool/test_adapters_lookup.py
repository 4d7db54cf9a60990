"""An adapter is found by its name, or by a path that the owner allows."""

import asyncio
import shutil
from pathlib import Path
from typing import Any

import pytest

from mlx_server.errors import AdapterNotFound
from mlx_server.models import adapter_catalog as catalog_module
from mlx_server.models.adapter_catalog import (
    AdapterCatalog,
    AdapterLocation,
    AdapterSpec,
    BaseModelShapes,
)
from mlx_server.pool.adapters import allowed_folder, find_adapter
from mlx_server.pool.pool import Pool
from mlx_server.pool.prepare import ModelSpec
from tests.pool.adapter_sizes import FILE

SAMPLES = Path(__file__).parents[2] / "adapters"


class Known(AdapterCatalog):
    """Finds every adapter that it is given."""

    def __init__(self, **places: AdapterLocation) -> None:
        super().__init__(BaseModelShapes(), places)

    def read(self, name: str, place: AdapterLocation) -> AdapterSpec:
        return AdapterSpec(name, place.path, name, 8, FILE, "lora", None, "mlx")


@pytest.fixture
def folders(tmp_path: Path) -> Path:
    for name in ("allowed/one", "allowed/two", "allowed-not/three"):
        (tmp_path / name).mkdir(parents=True)
    (tmp_path / "allowed/out").symlink_to(tmp_path / "allowed-not/three")
    (tmp_path / "in").symlink_to(tmp_path / "allowed/one")
    return tmp_path


@pytest.mark.parametrize(
    "outside",
    ["allowed/../allowed-not/three", "allowed/out", "allowed-not/three", "", "allowed/.."],
)
def test_a_folder_elsewhere_is_none(folders: Path, outside: str) -> None:
    with pytest.raises(AdapterNotFound) as refused:
        allowed_folder(str(folders / outside), [folders / "allowed"])
    assert str(folders / "allowed-not") not in str(refused.value).replace(
        str(folders / outside), ""
    )


@pytest.mark.parametrize("path", ["allowed/one", "./allowed/one", "allowed/two/../one"])
def test_a_path_may_be_relative_to_the_folder_of_models_yaml(folders: Path, path: str) -> None:
    """It names `allowed` there, while the server was started elsewhere."""
    assert allowed_folder(path, [folders / "allowed"]) == (folders / "allowed/one").resolve()
    for outside in ("allowed-not/three", "allowed/out", "one"):
        with pytest.raises(AdapterNotFound):
            allowed_folder(outside, [folders / "allowed"])


@pytest.mark.parametrize("odd", ["/a\0b", "/" + "a" * 5000, "~root/x", "/proc/self/root/etc/x"])
def test_what_is_no_path_is_no_adapter(folders: Path, odd: str) -> None:
    with pytest.raises(AdapterNotFound):
        find_adapter(Known(), odd, [folders / "allowed"])


def test_a_name_is_a_name_and_a_path_is_the_adapter_that_lies_there(folders: Path) -> None:
    one = folders / "allowed/one"
    catalog = Known(mine=AdapterLocation(one, by_client=True))
    assert find_adapter(catalog, "mine", []).by_client
    found = find_adapter(catalog, str(folders / "in"), [folders / "allowed"])
    assert (found.spec.name, found.by_client) == ("mine", True), "by whatever way"
    new = find_adapter(catalog, str(folders / "allowed/two"), [folders / "allowed"])
    assert (new.spec.name, new.by_client) == ("two", False)


def test_a_folder_does_not_take_the_name_of_another(folders: Path) -> None:
    catalog = Known(two=AdapterLocation(folders / "allowed/one", by_client=True))
    found = find_adapter(catalog, str(folders / "allowed/two"), [folders / "allowed"])
    assert found.spec.path == folders.resolve() / "allowed/two"
    assert catalog.locations()["two"] == AdapterLocation(folders / "allowed/one", by_client=True)


def test_a_list_of_models_reads_each_adapter_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Weights are hashed to be known; a client that asks again and again must not repeat that."""
    shutil.copytree(SAMPLES / "pirate", tmp_path / "adapters" / "pirate")
    read: list[Path] = []
    own = catalog_module.read_adapter

    def counted(folder: Path, **more: Any) -> AdapterSpec:
        read.append(folder)
        return own(folder, **more)

    monkeypatch.setattr(catalog_module, "read_adapter", counted)
    pool = Pool([ModelSpec("m", "demo:smollm2", adapters_dir=tmp_path / "adapters")])

    async def names() -> list[list[str]]:
        return [await pool.adapter_names("m") for _ in range(3)]

    assert asyncio.run(names()) == [["pirate"]] * 3
    assert len(read) == 1
