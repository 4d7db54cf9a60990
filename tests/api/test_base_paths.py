"""A base URL with one `/v1` too few or too many leads to the same routes."""

from contextlib import suppress
from pathlib import Path

import pytest
from starlette.testclient import TestClient

from mlx_server.http.middleware import VERSIONED, served_path
from tests.api import wire
from tests.api.messages.talking import BODY
from tests.api.test_routes import routes
from tests.tables import cases


@cases
def test_the_path_that_was_meant(asked: str, served: str) -> None:
    assert served_path(asked) == served


def test_no_route_is_hidden_and_all_of_v1_is_found_without_it() -> None:
    paths = {path for _, path in routes()}
    assert {served_path(path) for path in paths} == paths
    below = {path.split("/")[2] for path in paths if path.startswith("/v1/")}
    assert below - {"pool", "adapters"} == VERSIONED


@pytest.mark.slow
def test_head_asks_whether_the_server_answers(client: TestClient) -> None:
    paths = {path for methods, path in routes() if "GET" in methods and "{" not in path}
    for path in paths | {"//models/", f"/v1/models/{wire.MODEL}", "/v1/responses"}:
        asked = client.head(path)
        assert not asked.content
        if path != "/page/events":  # it has no end
            assert asked.status_code == client.get(path).status_code


def test_every_client_s_way_to_answer(client: TestClient) -> None:
    chat = {"model": wire.MODEL, "messages": [{"role": "user", "content": "a"}]}
    assert wire.ok(client.post("/chat/completions", json=chat))["object"] == "chat.completion"
    assert wire.ok(client.post("/v1/v1/messages", json=BODY))["type"] == "message"
    assert wire.ok(client.get("/models"))["data"]
    assert wire.ok(client.get("/v1/api/tags"))["models"]
    assert client.post("/v1/v1/messages", json={}).json()["type"] == "error", "in Anthropic's form"
    with suppress(*wire.CANCELLED), client.websocket_connect("ws://localhost/responses") as socket:
        socket.send_text("{")
        assert socket.receive_json()["type"] == "error"


def test_keys_are_asked_for_all_the_same(tiny_path: Path) -> None:
    with wire.client(tiny_path, wire.ScriptedEngine(), api_keys=(wire.key("key"),)) as client:
        for path in ("/models", "/v1/v1/models", "/v1/api/tags"):
            assert client.get(path).status_code == 401
