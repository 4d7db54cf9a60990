"""Models as the list has them, the model of a request that names none, health and version."""

import re
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from starlette.testclient import TestClient

from mlx_server import __version__
from mlx_server.api.chat_completions.input import ChatBody
from mlx_server.api.models import ABILITY_PARAMS, GENERATION_PARAMS, described, model_or_default
from mlx_server.errors import ModelNotFound
from mlx_server.models.checkpoint import Checkpoint, read_checkpoint
from mlx_server.pool.pool import Pool
from mlx_server.pool.prepare import Capabilities
from tests.api import wire
from tests.api.wire import Json, ok
from tests.tables import cases

ABLE = Capabilities("qwen3", "qwen3", "4bit", 1000, 4096, True, True, True)


def test_a_model_of_the_list_says_what_it_is_and_whether_it_is_loaded(
    client: TestClient, tiny_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    looked, names = list[str](), Pool.adapter_names

    async def counted(pool: Pool, id: str) -> list[str]:
        looked.append(id)
        return await names(pool, id)

    monkeypatch.setattr(Pool, "adapter_names", counted)
    (before,) = ok(client.get("/v1/models"))["data"]
    assert looked == ["tiny"], "a folder may have hundreds of adapters"
    assert before == ok(client.get(f"/v1/models/{wire.MODEL}"))
    facts = {
        "id": "tiny",
        "object": "model",
        "owned_by": "mlx-server",
        "context_length": 2048,
        "max_model_len": 2048,
        "max_context_length": 2048,
        "arch": "llama",
        "quantization": "f32",
        "size_bytes": (tiny_path / "model.safetensors").stat().st_size,
        "state": "not-loaded",
        "unused_prediction_layers": 0,
        "type": "llm",
        "adapters": [],
    }
    assert facts.items() <= before.items()
    assert before["architecture"]["input_modalities"] == ["text"]
    ok(client.post("/v1/completions", json={"model": wire.MODEL, "prompt": "x", "max_tokens": 1}))
    (after,) = ok(client.get("/v1/models"))["data"]
    assert after == {**before, "state": "loaded", "batching": True}


def test_parameters_that_are_listed_are_of_chat_completions_and_of_the_models_abilities() -> None:
    everything = {*GENERATION_PARAMS}.union(*ABILITY_PARAMS.values())
    assert everything <= ChatBody.model_fields.keys()
    assert set(described(ABLE)["supported_parameters"]) == everything
    assert described(replace(ABLE, unused_heads=2))["unused_prediction_layers"] == 2
    for ability, names in ABILITY_PARAMS.items():
        lacking: Any = {ability: False}
        unable = described(replace(ABLE, **lacking))
        assert everything - set(unable["supported_parameters"]) == set(names)
        assert unable["capabilities"][ability] is False


def test_nothing_is_invented_of_a_model_that_is_not_here() -> None:
    facts = described(None)
    known = {"type", "compatibility_type", "architecture", "capabilities"}
    assert {name for name, value in facts.items() if value is not None} == known


@pytest.fixture(scope="module")
def checkpoint(tiny_path: Path) -> Checkpoint:
    return read_checkpoint(tiny_path)


@cases
def test_quantization(checkpoint: Checkpoint, config: Json, quantization: str | None) -> None:
    assert replace(checkpoint, config=config).quantization == quantization


def serving(*tasks: str) -> Any:
    """A pool whose models have these tasks as their ids; an upstream model is never prepared."""

    async def prepared(id: str) -> Any:
        assert id != "upstream"
        return SimpleNamespace(task=id)

    specs = [SimpleNamespace(id=task, upstream=task == "upstream" or None) for task in tasks]
    return SimpleNamespace(models=SimpleNamespace(specs=specs), prepared=prepared)


@pytest.mark.anyio
@cases
async def test_a_request_without_a_model_gets_the_first_that_generates(
    tasks: str, requested: str | None, expected: str | None
) -> None:
    pool = serving(*tasks.split())
    if expected:
        assert await model_or_default(pool, requested) == expected
    else:
        with pytest.raises(ModelNotFound) as refused:
            await model_or_default(pool, requested)
        assert refused.value.param == "model"


@pytest.mark.parametrize(("healthy", "status"), [(True, 200), (False, 503)])
def test_a_dead_engine_is_a_status_that_is_no_success(
    client: TestClient, monkeypatch: pytest.MonkeyPatch, healthy: bool, status: int
) -> None:
    monkeypatch.setattr(Pool, "healthy", healthy)
    found = client.get("/health")
    assert found.status_code == status
    assert wire.as_json(found) == {"status": "ok" if healthy else "engine_died"}


def test_health_is_no_success_before_the_first_models_are_loaded(
    client: TestClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    views = [SimpleNamespace(state="loading", is_preloading=True)]
    monkeypatch.setattr(Pool, "views", lambda _: views)
    found = client.get("/health")
    assert (found.status_code, found.headers["retry-after"]) == (503, "1")
    assert wire.as_json(found) == {"status": "loading"}


def test_health_says_what_does_not_work_while_the_engine_does(
    client: TestClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    app: Any = client.app
    monkeypatch.setattr(app.state.runs.store, "trouble", "The disk is full.")
    views = [SimpleNamespace(state=each, is_preloading=False) for each in ("unavailable", "ready")]
    monkeypatch.setattr(Pool, "views", lambda _: views)
    assert wire.ok(client.get("/health")) == {
        "status": "degraded",
        "problems": [
            "The store of responses can't be used: the log says why.",
            "Models whose server does not answer: 1. /v1/pool has them.",
        ],
    }


def test_the_version_is_in_vllms_form(client: TestClient) -> None:
    assert wire.as_json(client.get("/version")) == {"version": __version__}
    assert re.fullmatch(r"\d+\.\d+\.\d+\S*", __version__)
