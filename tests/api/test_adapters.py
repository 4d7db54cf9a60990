"""vLLM's routes that load and unload adapters: which model they mean, and what they refuse."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from starlette.testclient import TestClient

from mlx_server.api.pool import LOAD, UNLOAD
from mlx_server.app import create_app
from mlx_server.config.settings import ModelSettings, ServerSettings, Settings
from tests.api import wire
from tests.api.wire import Json, ScriptedEngine
from tests.tables import cases
from tests.worker.lora_files import mlx_adapter

UPSTREAM = "openai+http://127.0.0.1:9/v1"


@pytest.fixture(scope="module")
def adapter(tiny_path: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return mlx_adapter(tmp_path_factory.mktemp("adapters") / "mine", tiny_path)


@contextmanager
def serving(folder: Path, **models: str) -> Iterator[TestClient]:
    server = ServerSettings(adapter_dirs=(folder,))
    listed = {
        id: ModelSettings(source=source, aliases=(f"{id}-x",)) for id, source in models.items()
    }
    app = create_app(Settings(server=server, models=listed))
    app.state.pool.make_engine = lambda **limits: ScriptedEngine()
    with TestClient(app, base_url="http://localhost", raise_server_exceptions=False) as client:
        yield client


@pytest.fixture(scope="module")
def client(tiny_path: Path, adapter: Path) -> Iterator[TestClient]:
    """Of the only model with weights."""
    with serving(adapter.parent, tiny=str(tiny_path)) as client:
        yield client


def load(client: TestClient, path: Path | str, name: str = "n", **more: Any) -> Any:
    return client.post(LOAD, json={"lora_name": name, "lora_path": str(path), **more})


def unload(client: TestClient, name: str = "n", **more: Any) -> Any:
    return client.post(UNLOAD, json={"lora_name": name, **more})


def names(client: TestClient) -> list[str]:
    return [model["id"] for model in wire.ok(client.get("/v1/models"))["data"]]


@pytest.mark.parametrize("model", [{}, {"model": "tiny"}, {"model": "tiny-x"}, {"model": None}])
def test_an_adapter_comes_and_goes(client: TestClient, adapter: Path, model: Json) -> None:
    found = wire.ok(load(client, adapter, **model))
    assert (found["id"], found["parent"]) == ("tiny:n", "tiny")
    assert found["digest"]
    assert "tiny:n" in names(client)
    assert UNLOAD in wire.error(client.delete("/v1/models/tiny:n"))["message"]
    gone = wire.ok(unload(client, **model))
    assert gone == {"id": "tiny:n", "parent": "tiny", "unloaded": True}
    assert "tiny:n" not in names(client)
    assert wire.error(unload(client, **model), 404)["code"] == "adapter_not_found"


def test_fields_that_only_vllm_has_are_ignored_by_name(client: TestClient, adapter: Path) -> None:
    response = load(client, adapter, load_inplace=True)
    wire.ok(response)
    assert response.headers["x-mlx-server-ignored"] == "load_inplace"
    response = unload(client, lora_int_id=1)
    wire.ok(response)
    assert response.headers["x-mlx-server-ignored"] == "lora_int_id"


@cases
def test_what_is_missing_or_empty_is_named(
    client: TestClient, path: str, body: Json, param: str
) -> None:
    assert wire.error(client.post(path, json=body))["param"] == param


def test_a_model_that_is_not_served(client: TestClient, adapter: Path) -> None:
    for response in (load(client, adapter, model="none"), unload(client, model="none")):
        assert wire.error(response, 404)["code"] == "model_not_found"


def test_of_several_models_one_has_to_be_named(tiny_path: Path, adapter: Path) -> None:
    with serving(adapter.parent, a=str(tiny_path), b=str(tiny_path)) as client:
        for response in (load(client, adapter), unload(client)):
            error = wire.error(response)
            assert (error["param"], "a, b." in error["message"]) == ("model", True)
        wire.ok(load(client, adapter, model="b"))
        assert [name for name in names(client) if ":" in name] == ["b:n"]


def test_a_model_of_another_server_has_no_adapters(tiny_path: Path, adapter: Path) -> None:
    with serving(adapter.parent, a=str(tiny_path), up=UPSTREAM) as client:
        wire.ok(load(client, adapter))
        for response in (load(client, adapter, model="up"), unload(client, model="up")):
            assert wire.error(response)["param"] == "model"
    with serving(adapter.parent, up=UPSTREAM) as client:
        for response in (load(client, adapter), unload(client)):
            assert "none" in wire.error(response)["message"]


def test_without_folders_for_them_there_are_no_such_routes(tiny_path: Path) -> None:
    with wire.client(tiny_path, ScriptedEngine()) as client:
        for response in (load(client, "x"), unload(client)):
            wire.error(response, 404)
