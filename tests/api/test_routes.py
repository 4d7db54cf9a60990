import logging
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from fastapi.openapi.models import OpenAPI
from fastapi.routing import iter_route_contexts
from starlette.testclient import TestClient

from mlx_server.api.page.routes import page_routes
from mlx_server.app import create_app
from mlx_server.config.settings import Settings
from tests.api import wire
from tests.api.messages.talking import BODY
from tests.api.messages.talking import error as messages_error
from tests.api.ollama.talking import BODIES as OLLAMA
from tests.api.ollama.talking import refused as ollama_error
from tests.api.wire import Json, ScriptedEngine, error

OPEN = {("GET", "/health")}
KEYED = {
    ("GET", "/metrics"),
    ("GET", "/openapi.json"),
    ("GET", "/v1/models"),
    ("GET", "/v1/models/tiny"),
    ("GET", "/v1/pool"),
    ("GET", "/page/history"),
    ("GET", "/page/suggested"),
    ("GET", "/page/conversations"),
    ("GET", "/v1/chat/completions"),
    ("GET", "/v1/files"),
    ("GET", "/v1/batches"),
    ("GET", "/v1/messages/batches"),
    ("GET", "/v1/fine_tuning/jobs"),
    ("POST", "/v1/chat/completions"),
    ("POST", "/v1/completions"),
    ("POST", "/v1/fim/completions"),
    ("POST", "/v1/models/load"),
    ("POST", "/v1/models/unload"),
    ("POST", "/v1/messages"),
    ("POST", "/v1/messages/batches"),
    ("POST", "/v1/messages/count_tokens"),
    ("POST", "/generate"),
    ("POST", "/tokenize"),
    ("POST", "/detokenize"),
    ("GET", "/version"),
    ("POST", "/v1/responses"),
    ("POST", "/v1/responses/input_tokens"),
    ("POST", "/v1/responses/compact"),
    ("POST", "/v1/conversations"),
    ("GET", "/"),
    ("GET", "/api/tags"),
    ("GET", "/api/ps"),
    ("GET", "/api/version"),
    ("POST", "/api/chat"),
    ("POST", "/api/generate"),
    ("POST", "/api/show"),
}
EMPTY = {("DELETE", "/v1/models/tiny")}
"""Those whose answer has no body."""
ENDLESS = {("GET", "/page/events")}
PAGE = {(method, route.path) for route in page_routes() for method in route.methods or ()}
REFUSED = {
    ("GET", "/page/log"),
    *((method, "/page/conversations/none-such") for method in ("GET", "POST", "DELETE")),
    ("POST", "/v1/files"),
    ("POST", "/v1/embeddings"),
    ("POST", "/v1/rerank"),
    ("POST", "/infill"),
    ("POST", "/api/embed"),
    ("POST", "/api/embeddings"),
    ("POST", "/api/pull"),
    ("POST", "/api/push"),
    ("POST", "/api/create"),
    ("POST", "/api/copy"),
    ("DELETE", "/api/delete"),
}
"""What the owner does not allow, what this model does not do, and what of Ollama's API this server
does not do."""

NONE, CHAT = "none-such", "/v1/chat/completions"
STORED = {
    ("POST", "/page/fetches"),
    ("POST", "/page/fetches/cancel"),
    ("GET", f"/v1/chat/completions/{NONE}"),
    ("POST", f"/v1/chat/completions/{NONE}"),
    ("DELETE", f"/v1/chat/completions/{NONE}"),
    ("GET", f"/v1/chat/completions/{NONE}/messages"),
    ("POST", "/v1/batches"),
    ("GET", f"/v1/batches/{NONE}"),
    ("POST", f"/v1/batches/{NONE}/cancel"),
    *(("GET", f"/v1/messages/batches/{NONE}{more}") for more in ("", "/results")),
    ("POST", f"/v1/messages/batches/{NONE}/cancel"),
    ("DELETE", f"/v1/messages/batches/{NONE}"),
    ("POST", "/v1/fine_tuning/jobs"),
    *(("GET", f"/v1/fine_tuning/jobs/{NONE}{more}") for more in ("", "/events", "/checkpoints")),
    ("POST", f"/v1/fine_tuning/jobs/{NONE}/cancel"),
    ("GET", f"/v1/files/{NONE}"),
    ("GET", f"/v1/files/{NONE}/content"),
    ("DELETE", f"/v1/files/{NONE}"),
    *((("GET", f"/v1/{path}/{NONE}/stream")) for path in ("chat/completions", "completions")),
    ("GET", f"/v1/messages/{NONE}/stream"),
    ("GET", f"/v1/responses/{NONE}"),
    ("DELETE", f"/v1/responses/{NONE}"),
    ("POST", f"/v1/responses/{NONE}/cancel"),
    ("GET", f"/v1/responses/{NONE}/input_items"),
    ("GET", f"/v1/conversations/{NONE}"),
    ("POST", f"/v1/conversations/{NONE}"),
    ("DELETE", f"/v1/conversations/{NONE}"),
    ("GET", f"/v1/conversations/{NONE}/items"),
    ("POST", f"/v1/conversations/{NONE}/items"),
    ("GET", f"/v1/conversations/{NONE}/items/{NONE}"),
    ("DELETE", f"/v1/conversations/{NONE}/items/{NONE}"),
}
SOCKETS = {"/v1/responses"}
LIMIT = 2000


def routes() -> set[tuple[str, str]]:
    """(method, path) of each, included and mounted ones too, by way of the app itself."""
    contexts = list(iter_route_contexts(create_app(Settings()).routes))
    others = [context.path for context in contexts if not (context.path and context.methods)]
    assert set(others) == SOCKETS, "a route of a new kind"
    names = {"{name:path}": wire.MODEL, "{id}": NONE, "{item}": NONE}
    return {
        (method, re.sub(r"\{.*?\}", lambda name: names[name[0]], str(context.path)))
        for context in contexts
        for method in context.methods or ()
    }


@pytest.fixture(scope="module")
def client(tiny_path: Path) -> Iterator[TestClient]:
    with wire.client(tiny_path, ScriptedEngine(), max_body_bytes=LIMIT) as client:
        yield client


@pytest.fixture(scope="module")
def locked(tiny_path: Path) -> Iterator[TestClient]:
    keys = (wire.key("one-key"), wire.key("another-key"))
    with wire.client(tiny_path, ScriptedEngine(), api_keys=keys) as client:
        yield client


def body_of(path: str) -> Json:
    if path in ("/v1/completions", "/v1/fim/completions"):
        return {"model": wire.MODEL, "prompt": "a"}
    if path in ("/tokenize", "/detokenize"):
        return {"model": wire.MODEL, "prompt": "a", "tokens": [5]}
    if path == "/v1/messages/batches":
        return {"requests": [{"custom_id": "a", "params": BODY}]}
    if path == "/v1/fine_tuning/jobs":
        return {"model": wire.MODEL, "training_file": NONE}
    if path == "/v1/batches":
        return {"input_file_id": NONE, "endpoint": CHAT, "completion_window": "24h"}
    if path.startswith("/v1/messages"):
        return BODY
    if path.startswith("/api/"):
        return OLLAMA.get(path, {"model": wire.MODEL})
    if path.startswith("/v1/responses"):
        return {"model": wire.MODEL, "input": "a"}
    if path.startswith("/v1/conversations"):
        return {"items": [{"role": "user", "content": "a"}]}
    return {"model": wire.MODEL, "messages": [{"role": "user"}]}


def call(client: TestClient, method: str, path: str, headers: dict[str, str] | None = None) -> Any:
    body = body_of(path) if method == "POST" else None
    return client.request(method, path, json=body, headers=headers)


def test_these_are_all() -> None:
    assert routes() == OPEN | KEYED | EMPTY | STORED | REFUSED | ENDLESS | PAGE


@pytest.mark.parametrize(("method", "path"), sorted(KEYED | EMPTY | STORED | REFUSED | ENDLESS))
def test_a_key_is_needed(locked: TestClient, method: str, path: str) -> None:
    """test_security.py has all ways of writing one."""
    headers: dict[str, str]
    for headers in ({}, {"authorization": "Bearer wrong"}, {"x-api-key": "one-ke"}):
        response = call(locked, method, path, headers)
        if path.startswith("/v1/messages"):
            messages_error(response, 401, "authentication_error")
        elif path.startswith("/api/"):
            ollama_error(response, 401)
        else:
            assert error(response, status=401)["code"] == "invalid_api_key"
        assert response.headers["www-authenticate"] == "Bearer"


@pytest.mark.parametrize(("method", "path"), sorted(KEYED | EMPTY))
def test_a_key_lets_in(locked: TestClient, method: str, path: str) -> None:
    headers = {"authorization": "Bearer wrong", "x-api-key": "another-key"}
    expected = 204 if (method, path) in EMPTY else 200
    assert call(locked, method, path, headers).status_code == expected


@pytest.mark.parametrize(("method", "path"), sorted(STORED))
def test_what_was_never_stored(locked: TestClient, method: str, path: str) -> None:
    response = call(locked, method, path, {"authorization": "Bearer one-key"})
    if path.startswith("/v1/messages"):
        messages_error(response, 404, "not_found_error")
    else:
        assert error(response, status=404)["code"] == "not_found"


def test_health_is_open_to_all(locked: TestClient) -> None:
    assert wire.ok(locked.get("/health")) == {"status": "ok"}


def test_without_a_key_nothing_is_said_of_the_body(locked: TestClient) -> None:
    for content in (b"{", b"{}"):
        headers = {"content-type": "application/json"}
        response = locked.post("/v1/chat/completions", content=content, headers=headers)
        error(response, status=401)


@pytest.mark.parametrize(
    "path", ["/v1", "/v1/moderations", "/docs", "/redoc", "/v1/modles", "/v1//nothing", "/%ff"]
)
def test_no_such_route(client: TestClient, path: str) -> None:
    found = error(client.get(path), status=404)
    assert found["code"] == "not_found"
    assert ("Did you mean" in found["message"]) == (path == "/v1/modles")


def test_a_misspelt_field_is_named(client: TestClient) -> None:
    body = {"model": "tiny", "x" * 1000: 1, "mesages": []}
    found = error(client.post("/v1/chat/completions", json=body), status=400)
    assert found["message"] == "`messages`: is missing: did you write `mesages` for it?"


@pytest.mark.parametrize("path", ["/v1/models/other", "/v1/models/a/b", "/v1/models/%0d%0a"])
def test_no_such_model(client: TestClient, path: str) -> None:
    found = error(client.get(path), status=404)
    assert (found["param"], found["code"]) == ("model", "model_not_found")


@pytest.mark.slow
@pytest.mark.parametrize(
    "path", sorted({path for _, path in OPEN | KEYED if not path.startswith("/v1/responses/")})
)
def test_methods_that_a_route_does_not_take(client: TestClient, path: str) -> None:
    for method in ("PUT", "PATCH", "DELETE", "OPTIONS", "TRACE", "BREW"):
        if method == "DELETE" and path.startswith("/v1/models/"):
            continue  # of a model
        response = client.request(method, path)
        if path.startswith("/v1/messages"):
            messages_error(response, 405, "invalid_request_error")
        elif path.startswith("/api/"):
            ollama_error(response, 405)
        else:
            assert error(response, status=405)["code"] == "method_not_allowed"
        assert response.headers["allow"] in {"GET", "POST"}


def test_the_log_has_a_line_a_request_and_no_word_of_it(
    client: TestClient, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO, "mlx_server.access"):
        client.post("/v1/completions", json={**body_of("/v1/completions"), "prompt": "secret"})
        client.get("/nothing?secret")
    lines = [record.getMessage() for record in caplog.records]
    assert [(*line.split()[:3], "tokens," in line) for line in lines] == [
        ("POST", "/v1/completions", "200", True),
        ("GET", "/*", "404", False),
    ]
    assert not any("secret" in line for line in lines)


def test_the_openapi_document_holds_together(client: TestClient) -> None:
    document = wire.ok(client.get("/openapi.json"))
    OpenAPI.model_validate(document)
    assert {path for _, path in OPEN | KEYED} - {"/openapi.json", "/v1/models/tiny"} <= set(
        document["paths"]
    )
    references = list(references_in(document))
    assert references
    for reference in references:
        found_at(document, reference)


def test_the_openapi_document_knows_the_parameters(client: TestClient) -> None:
    paths = wire.ok(client.get("/openapi.json"))["paths"]
    body = paths["/v1/chat/completions"]["post"]["requestBody"]["content"]["application/json"]
    properties = body["schema"]["properties"]
    assert {"model", "messages", "temperature", "stream"} <= properties.keys()
    assert {"minimum": 0, "maximum": 2, "type": "number"} in properties["temperature"]["anyOf"]


def references_in(node: Any) -> Iterator[str]:
    if isinstance(node, dict):
        for key, value in node.items():
            if key == "$ref":
                yield value
            elif key == "mapping":  # of a discriminator
                yield from value.values()
            else:
                yield from references_in(value)
    if isinstance(node, list):
        for value in node:
            yield from references_in(value)


def found_at(document: Any, reference: str) -> Any:
    start, *parts = reference.split("/")
    assert start == "#", reference
    node = document
    for part in parts:
        node = node[part.replace("~1", "/").replace("~0", "~")]
    return node
