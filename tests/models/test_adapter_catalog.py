"""What the catalog says of adapters: which there are, which fit, and which have changed."""

import json
from pathlib import Path

import pytest
from safetensors.numpy import save

from mlx_server import limits
from mlx_server.errors import AdapterInvalid, AdapterNotFound, BadRequest
from mlx_server.models.adapter_catalog import AdapterCatalog, AdapterLocation, BaseModelShapes, scan
from mlx_server.models.adapter_config import CONFIG, MLX_WEIGHTS
from mlx_server.models.adapter_reader import AdapterSpec
from tests.models.adapter_files import (
    MLX,
    RANK,
    SHAPES,
    mlx_adapter,
    mlx_tensors,
    peft_adapter,
    read,
    refusal,
)

TINY = BaseModelShapes(SHAPES, True, frozenset({"tiny-1b"}))


def message_of(catalog: AdapterCatalog, name: str) -> str:
    with pytest.raises(AdapterInvalid) as caught:
        catalog.find(name)
    return caught.value.message


def test_folders_are_adapters_and_listed_ones_win(tmp_path: Path) -> None:
    adapters = tmp_path / "adapters"
    mlx_adapter(adapters / "a")
    mlx_adapter(adapters / "b")
    (adapters / "empty").mkdir()
    mlx_adapter(adapters / ".hidden")
    (adapters / "README.md").write_text("?")
    listed = AdapterLocation(peft_adapter(tmp_path / "elsewhere"), allow_other_base=True)
    catalog = AdapterCatalog(TINY, {"b": listed, "c": listed}, adapters)
    assert list(catalog.locations()) == ["a", "b", "c"]
    found = {name: catalog.find(name) for name in catalog.locations()}
    assert [(spec.name, spec.format) for spec in found.values()] == [
        ("a", "mlx"),
        ("b", "peft"),
        ("c", "peft"),
    ]
    assert scan(tmp_path / "nowhere") == {}


def test_a_base_with_a_name_like_a_book_is_looked_at_in_part(tmp_path: Path) -> None:
    mlx_adapter(tmp_path / "a", model="x" + "-4bit" * 4000)
    assert len(message_of(AdapterCatalog(TINY, folder=tmp_path), "a")) < 600
    spec = read(tmp_path / "a")
    assert len(spec.base or "") == limits.ADAPTER_PATH_CHARACTERS


def test_an_unknown_name_is_not_found(tmp_path: Path) -> None:
    mlx_adapter(tmp_path / "elsewhere" / "a")
    (tmp_path / "adapters").mkdir()
    catalog = AdapterCatalog(TINY, folder=tmp_path / "adapters")
    for name in ("a", "", ".", "..", "../elsewhere/a", str(tmp_path / "elsewhere" / "a")):
        with pytest.raises(AdapterNotFound) as caught:
            catalog.find(name)
        assert (caught.value.status, caught.value.code) == (404, "adapter_not_found")
    (tmp_path / "adapters" / ".DS_Store").touch()
    with pytest.raises(AdapterNotFound, match=r"There is no adapter 'x'") as caught:
        catalog.find("x")
    assert ".DS_Store" not in caught.value.message
    (tmp_path / "adapters" / "npz").mkdir()
    with pytest.raises(AdapterNotFound, match=r"The folder 'npz' .* has no adapter_config\.json"):
        catalog.find("npz")


def test_a_folder_of_a_request_gets_a_name_and_no_client_takes_it(tmp_path: Path) -> None:
    mlx_adapter(tmp_path / "adapters" / "a")
    asked = AdapterLocation(mlx_adapter(tmp_path / "b").resolve(), by_client=True)
    catalog = AdapterCatalog(TINY, folder=tmp_path / "adapters")
    spec, _ = catalog.find_folder(asked.path)
    assert catalog.find("b") == spec
    for name in ("a", "b"):
        with pytest.raises(BadRequest, match="already has an adapter"):
            catalog.add(name, asked)
    assert catalog.add("c", asked).digest == spec.digest


def test_another_base_needs_the_owners_word(tmp_path: Path) -> None:
    adapters = tmp_path / "adapters"
    folder = mlx_adapter(adapters / "a", model="org/Other-7B")
    said = message_of(AdapterCatalog(TINY, folder=adapters), "a")
    assert "org/Other-7B" in said
    assert "allow_other_base: true" in said
    assert message_of(AdapterCatalog(TINY, {"a": AdapterLocation(folder)}), "a") == said
    allowed = AdapterCatalog(TINY, {"a": AdapterLocation(folder, allow_other_base=True)})
    assert allowed.find("a").base == "org/Other-7B"

    misfit = mlx_adapter(tmp_path / "b", mlx_tensors("model.layers.9.x"), model="org/Other-7B")
    assert "no layer" in message_of(
        AdapterCatalog(TINY, {"b": AdapterLocation(misfit, allow_other_base=True)}), "b"
    )


def test_a_link_out_of_the_folder_must_be_listed(tmp_path: Path) -> None:
    adapters = tmp_path / "adapters"
    adapters.mkdir()
    (adapters / "a").symlink_to(mlx_adapter(tmp_path / "elsewhere"))
    assert "is a link to outside" in message_of(AdapterCatalog(TINY, folder=adapters), "a")
    listed = AdapterCatalog(TINY, {"a": AdapterLocation(tmp_path / "elsewhere")}, adapters)
    assert listed.find("a").rank == RANK


@pytest.mark.parametrize("name", ["a:b", "-a", "a b", "ä", "a" * 129])
def test_names_that_a_request_could_not_spell(tmp_path: Path, name: str) -> None:
    mlx_adapter(tmp_path / name)
    assert "can't be the name" in message_of(AdapterCatalog(TINY, folder=tmp_path), name)


def test_the_hubs_cache_may_link_to_its_blobs_only(tmp_path: Path) -> None:
    repository = tmp_path / "models--org--name"
    folder = mlx_adapter(repository / "snapshots" / "0123")
    (repository / "blobs").mkdir()
    blob = repository / "blobs" / "4567"
    (folder / MLX_WEIGHTS).rename(blob)
    (folder / MLX_WEIGHTS).symlink_to("../../blobs/4567")
    assert read(folder).rank == RANK
    blob.rename(repository / "4567")
    (folder / MLX_WEIGHTS).unlink()
    (folder / MLX_WEIGHTS).symlink_to("../../4567")
    assert "is a link to outside" in refusal(folder)


def replaced(file: Path, content: bytes) -> None:
    """As careful writers do it."""
    new = file.with_suffix(".new")
    new.write_bytes(content)
    new.rename(file)


def test_a_changed_file_is_noticed_and_an_unchanged_one_is_not_read_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = mlx_adapter(tmp_path / "a")
    catalog = AdapterCatalog(TINY, folder=tmp_path)
    first = catalog.find("a")

    def fail(*_: object, **__: object) -> AdapterSpec:
        raise AssertionError("was read again")

    with monkeypatch.context() as patch:
        patch.setattr("mlx_server.models.adapter_catalog.read_adapter", fail)
        assert catalog.find("a") is first

    replaced(folder / MLX_WEIGHTS, save({name: 2 * t for name, t in mlx_tensors().items()}))
    second = catalog.find("a")
    replaced(folder / CONFIG, json.dumps({**MLX, "note": "another"}).encode())
    third = catalog.find("a")
    assert len({first.digest, second.digest, third.digest}) == 3
    replaced(folder / CONFIG, b"[]")
    assert "JSON object" in message_of(catalog, "a")
    mlx_adapter(folder)
    assert catalog.find("a").digest == first.digest
    (folder / CONFIG).unlink()
    (folder / MLX_WEIGHTS).unlink()
    with pytest.raises(AdapterNotFound):
        catalog.find("a")


def test_adapters_come_and_go_while_the_server_runs(tmp_path: Path) -> None:
    catalog = AdapterCatalog(TINY)
    spec = catalog.add("new", AdapterLocation(mlx_adapter(tmp_path / "a")))
    assert catalog.find("new") == spec
    with pytest.raises(AdapterInvalid):
        catalog.add("bad", AdapterLocation(tmp_path))
    with pytest.raises(AdapterInvalid, match="can't be the name"):
        catalog.add("a:b", AdapterLocation(tmp_path / "a"))
    assert list(catalog.locations()) == ["new"]
    catalog.remove("new")
    assert catalog.all() == {}
