"""Transcripts begin again: all of them, or one, and nothing for a body that is none."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from starlette.testclient import TestClient

from mlx_server.app import create_app
from mlx_server.config.settings import ModelSettings, Settings
from tests.api.wire import error, ok
from tests.mcp.playing import Playing

RESET = "/v1/replay/reset"


@pytest.fixture(scope="module")
def replays(tmp_path_factory: pytest.TempPathFactory, tiny_path: Path) -> Iterator[TestClient]:
    said = tmp_path_factory.mktemp("said") / "said.jsonl"
    said.write_text("\n".join(json.dumps({"output": word}) for word in ("one", "two")))
    replayed = ModelSettings(source=f"replay:{said}", family="plain")
    models = {"a": replayed, "b": replayed, "tiny": ModelSettings(source=str(tiny_path))}
    app = create_app(Settings(models=models))
    app.state.pool.make_engine = lambda **_: Playing()
    with TestClient(app, base_url="http://localhost", raise_server_exceptions=False) as client:
        yield client


def text(client: TestClient, model: str) -> Any:
    body = {"model": model, "messages": [{"role": "user", "content": "?"}]}
    return ok(client.post("/v1/chat/completions", json=body))["choices"][0]["message"]["content"]


@pytest.mark.parametrize(
    ("body", "models"), [({}, ["a", "b"]), ({"model": None}, ["a", "b"]), ({"model": "a"}, ["a"])]
)
def test_only_what_is_named_begins_again(
    replays: TestClient, body: dict[str, Any], models: list[str]
) -> None:
    ok(replays.post(RESET, json={}))
    assert [text(replays, model) for model in "ab"] == ["one", "one"]
    found = ok(replays.post(RESET, json=body))
    assert found == {"object": "replay.reset", "models": models}
    for model in "ab":
        assert text(replays, model) == ("one" if model in models else "two")


@pytest.mark.parametrize(
    ("content", "status"),
    [
        (b"", 400),
        (b"[]", 400),
        (b'{"model": ""}', 400),
        (b'{"model": 5}', 400),
        (b'{"model": ["a", "b"]}', 400),
        (b'{"model": "tiny"}', 400),
        (b'{"model": "Sal\xc3\xbc"}', 404),
    ],
)
def test_a_body_that_names_no_replay_model_resets_nothing(
    replays: TestClient, content: bytes, status: int
) -> None:
    ok(replays.post(RESET, json={}))
    text(replays, "a")
    headers = {"content-type": "application/json"}
    error(replays.post(RESET, content=content, headers=headers), status=status)
    assert text(replays, "a") == "two"


def test_what_has_no_effect_is_reported(replays: TestClient) -> None:
    found = replays.post(RESET, json={"entry": 3})
    assert found.headers["x-mlx-server-ignored"] == "entry"
