"""`GET /v1/pool`: what the owner sees of the models and of the memory."""

import asyncio
import logging
import time
from pathlib import Path
from typing import Any

import pytest
from starlette.testclient import TestClient

from mlx_server import app as app_module
from mlx_server.app import create_app
from mlx_server.config.settings import ModelSettings, ServerSettings, Settings, StoreSettings
from mlx_server.engine.client import OnLoading
from mlx_server.engine.messages import AdapterLoaded, LoadModel, ModelLoaded
from mlx_server.errors import ModelUnusable
from mlx_server.models.adapter_reader import AdapterSpec
from mlx_server.pool.adapters import LeasedAdapter
from mlx_server.pool.memory import size
from tests.api import wire
from tests.api.wire import Json, ScriptedEngine

BUDGET = 1_000_000_000


def client(engine: ScriptedEngine, models: dict[str, Json], **server: Any) -> TestClient:
    settings = Settings(
        server=ServerSettings(memory_budget=BUDGET, **server),
        models={id: ModelSettings(**model) for id, model in models.items()},
    )
    app = create_app(settings)
    app.state.pool.make_engine = lambda **limits: engine
    return TestClient(app, base_url="http://localhost", raise_server_exceptions=False)


def pool(client: TestClient) -> Json:
    return wire.ok(client.get("/v1/pool"))


def model(client: TestClient, place: int = 0) -> Json:
    found: Json = pool(client)["models"][place]
    return found


def complete(client: TestClient, model: str = "a") -> Any:
    return client.post("/v1/completions", json={"model": model, "prompt": "a", "max_tokens": 3})


def test_before_and_after_the_first_request(tiny_path: Path) -> None:
    owned = {"source": str(tiny_path), "aliases": ("x",), "pinned": True, "ttl": 60.0}
    with client(ScriptedEngine(), {"a": owned, "b": {"source": str(tiny_path)}}) as found:
        before = pool(found)
        unseen = {
            "id": "a",
            "aliases": ["x"],
            "family": None,
            "source": tiny_path.name,
            "state": "unloaded",
            "leases": 0,
            "bytes": 0,
            "last_used": None,
            "stale_at": None,
            "pinned": True,
            "ttl": 60.0,
            "batching": None,
            "compute_dtype": "auto",
            "kv_bits": None,
            "deterministic": False,
            "progress": None,
            "prefilling": [],
            "error": None,
            "adapters": [],
        }
        other = {**unseen, "id": "b", "aliases": [], "pinned": False, "ttl": None}
        assert before.pop("processes")["mlx_server"] > 20_000_000
        memory = dict.fromkeys(("used", "kv_reserved", "prompt_cache", "lowered"), 0)
        assert before == {
            "object": "pool",
            "memory": {"budget": BUDGET, **memory, "other_servers": 0},
            "disk_writes": None,
            "training": None,
            "engine": None,
            "models": [unseen, other],
        }

        wire.ok(complete(found))
        used = model(found)
        assert (used["state"], used["family"], used["leases"]) == ("ready", "llama3", 0)
        assert used["batching"] is True
        assert abs(used["last_used"] - time.time()) < 60, "Unix time"
        assert pool(found)["models"][1] == other


class Slow(ScriptedEngine):
    """Says how far the load is, and goes no further."""

    def __init__(self) -> None:
        super().__init__()
        self.failure_of_load: Exception | None = None

    async def load(self, command: LoadModel, progress: OnLoading) -> ModelLoaded:
        if self.failure_of_load:
            raise self.failure_of_load
        progress(3, 4)
        await asyncio.Event().wait()
        raise AssertionError


def test_a_load_that_is_under_way(tiny_path: Path) -> None:
    models = {"a": {"source": str(tiny_path), "preload": True}}
    with client(Slow(), models) as found:
        while (loading := model(found))["progress"] is None:
            pass
        assert loading["state"] == "loading"
        assert loading["progress"] == {"what": "loading", "done": 3, "total": 4}
        assert loading["bytes"] > 0, "known before it is loaded"
        assert pool(found)["memory"]["used"] == loading["bytes"]


@pytest.mark.parametrize(
    ("failure", "said"),
    [
        (ModelUnusable("Its layers are of no kind known here."), "Its layers are of no kind known"),
        (ZeroDivisionError("secret"), "log"),
    ],
)
def test_a_load_that_failed(tiny_path: Path, failure: Exception, said: str) -> None:
    """A mistake of ours is told without its details."""
    engine = Slow()
    engine.failure_of_load = failure
    with client(engine, {"a": {"source": str(tiny_path)}}) as found:
        wire.error(complete(found), status=500)
        failed = model(found)
        assert said in failed["error"]
        assert "secret" not in failed["error"]
        assert (failed["state"], failed["progress"]) == ("unloaded", None)
        assert pool(found)["memory"]["used"] == 0


def test_files_that_fail_are_named_without_the_folders_around_them(tmp_path: Path) -> None:
    with client(ScriptedEngine(), {"a": {"source": str(tmp_path / "gone")}}) as found:
        wire.error(complete(found), status=500)
        error = model(found)["error"]
        assert "The folder 'gone' does not exist" in error
        assert str(tmp_path) not in error


def test_the_adapters_that_are_in_memory(tiny_path: Path) -> None:
    spec = AdapterSpec("legal", tiny_path, "0123", 8, 90, "lora", None, "mlx")
    with client(WithAdapters(), {"a": {"source": str(tiny_path)}}) as found:
        wire.ok(complete(found))
        pool = found.app.state.pool  # type: ignore[attr-defined]
        adapters = pool.engine_of("a").scheduler.adapters

        async def used() -> list[Json]:
            async with adapters.lease("a", LeasedAdapter(spec)):
                return await asyncio.to_thread(lambda: model(found)["adapters"])

        assert found.portal
        leased = {"name": "legal", "leases": 1, "bytes": 100}
        assert found.portal.call(used) == [leased]
        assert model(found)["adapters"] == [{**leased, "leases": 0}]


class WithAdapters(ScriptedEngine):
    async def load_adapter(self, model: str, adapter: str, path: str) -> AdapterLoaded:
        return AdapterLoaded(model, adapter, 100)


LOADS = {  # of llama.cpp, rapid-mlx and LM Studio
    "/models/load": {"model": "a"},
    "/v1/models/load": {"model": "a:latest", "pin": True},
    "/api/v1/models/load": {"model": "x", "context_length": 100, "echo_load_config": True},
}


@pytest.mark.parametrize(("path", "asked"), LOADS.items())
def test_clients_load_and_unload_models_in_the_words_of_three_servers(
    tiny_path: Path, path: str, asked: Json
) -> None:
    models: dict[str, Json] = {
        "a": {"source": str(tiny_path), "aliases": ("x",)},
        "kept": {"source": str(tiny_path), "pinned": True},
    }
    with client(ScriptedEngine(), models) as found:
        response = found.post(path, json=asked)
        loaded = wire.ok(response)
        facts = {"success": True, "id": "a", "instance_id": "a", "type": "llm", "status": "loaded"}
        assert loaded.items() >= facts.items()
        assert loaded["load_time_seconds"] >= 0
        assert loaded.get("load_config") == (
            {"context_length": 2048} if "echo_load_config" in asked else None
        )
        ignored = [name for name in asked if name in ("pin", "context_length")]
        assert response.headers.get("x-mlx-server-ignored", "") == ", ".join(ignored)
        assert model(found)["state"] == "ready"
        gone = {"instance_id": "a"} if path.startswith("/api") else {"model": asked["model"]}
        unloaded = found.post(path.replace("load", "unload"), json=gone)
        assert wire.ok(unloaded) == {"success": True, "id": "a", "instance_id": "a"}
        assert model(found)["state"] == "unloaded"
        complete(found)
        assert found.delete("/v1/models/x").status_code == 204
        assert model(found)["state"] == "unloaded"
        for wrong, status, param in (({}, 400, "model"), ({"model": "nope"}, 404, "model")):
            assert wire.error(found.post(path, json=wrong), status)["param"] == param
        complete(found, "kept")
        for refused in (
            found.post("/models/unload", json={"model": "kept"}),
            found.delete("/v1/models/kept"),
        ):
            assert "only its owner" in wire.error(refused)["message"]


def test_clients_load_no_model_if_its_owner_says_so(tiny_path: Path) -> None:
    models = {"a": {"source": str(tiny_path)}}
    with client(ScriptedEngine(), models, runtime_models=False) as found:
        complete(found)
        for response in (
            found.post("/v1/models/load", json={"model": "a"}),
            found.post("/v1/models/unload", json={"model": "a"}),
            found.delete("/v1/models/a"),
            found.post("/v1/fine_tuning/jobs", json={"model": "a", "training_file": "file-x"}),
        ):
            assert "`runtime_models: true`" in wire.error(response, 403)["message"]
        assert model(found)["state"] == "ready"


def shared(folder: Path, tiny: Path, **model: Any) -> TestClient:
    store = StoreSettings(data_dir=folder)
    settings = Settings(store=store, models={"a": ModelSettings(source=str(tiny), **model)})
    app = create_app(settings)
    app.state.pool.make_engine = lambda **limits: Slow()
    return TestClient(app, base_url="http://localhost")


def test_servers_of_one_data_directory_share_the_memory(
    tiny_path: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr(app_module, "WATCH_SECONDS", 0.01)
    caplog.set_level(logging.INFO, "mlx_server.pool")

    def memory(client: TestClient) -> Json:
        return dict(pool(client)["memory"])

    with shared(tmp_path, tiny_path) as second:
        whole = memory(second)["budget"]
        with shared(tmp_path, tiny_path, preload=True) as first:
            while not (taken := memory(first)["used"]):
                pass
            while (left := memory(second))["other_servers"] != taken:
                pass
            assert left["budget"] == whole - taken < whole
            assert f"other servers of the data directory take {size(taken)}" in caplog.text
            assert memory(first)["budget"] == whole
            with shared(tmp_path, tiny_path) as third:
                assert memory(third)["budget"] == whole - taken
                assert f"minus {size(taken)} of other servers" in caplog.text
        while memory(second)["other_servers"]:
            pass
        assert memory(second)["budget"] == whole
        assert "other servers of the data directory have ended" in caplog.text


def test_the_page_suggests_models_that_fit(tiny_path: Path) -> None:
    with client(ScriptedEngine(), {"a": {"source": str(tiny_path)}}) as found:
        body = wire.ok(found.get("/page/suggested"))
        (model,) = body["models"]
        assert body["budget"] == BUDGET > model["bytes"]
        assert model["id"] == "mlx-community/Qwen3-0.6B-4bit"
        assert 4096 <= model["context"] < 6000
        assert (model["is_here"], model["command"]) == (False, f"mlx-server pull {model['id']}")
