from pathlib import Path

import pytest
from anthropic.types import MessageTokensCount, ModelInfo, ThreadUnsupportedRequestErrorDetails
from anthropic.types.beta import BetaMessageTokensCount, BetaModelInfo
from starlette.testclient import TestClient

from tests.api import wire
from tests.api.messages.talking import (
    BODY,
    HI,
    PATH,
    error,
    gathered,
    nameless,
    post,
    refused,
    streamed,
    whole,
)
from tests.api.strict import assert_strict
from tests.api.wire import TEXT, Json, ScriptedEngine, key
from tests.tables import cases

IGNORED = "x-mlx-server-ignored"
COUNT = f"{PATH}/count_tokens"
TOOL: Json = {"name": "f", "input_schema": {"type": "object"}}

# What is asked for next to BODY, in all of which streaming equals not streaming.
REQUESTS: dict[str, Json] = {
    "plain": {},
    "cut off": {"max_tokens": 4},
    "cut off inside a character": {"max_tokens": 5},
    "a stop sequence": {"stop_sequences": ["!"]},
    "a stop sequence across tokens": {"stop_sequences": ["nd so", "界"]},
    "a stop sequence at once": {"stop_sequences": [TEXT[0]]},
    "a stop sequence that only begins": {"stop_sequences": ["on.!"]},
    "tools": {"tools": [TOOL]},
    "only the prompt": {"max_tokens": 0},
}

pytestmark = pytest.mark.usefixtures("_as_before")


@pytest.mark.parametrize("asked", REQUESTS.values(), ids=REQUESTS)
def test_bodies_and_streams_are_what_the_sdk_expects(client: TestClient, asked: Json) -> None:
    message = whole(client, **asked)
    assert nameless(gathered(streamed(client, **asked))) == nameless(message)


def test_an_answer(client: TestClient) -> None:
    message = whole(client)
    assert message["content"] == [{"type": "text", "text": TEXT}]
    assert (message["stop_reason"], message["stop_sequence"]) == ("end_turn", None)
    assert (message["role"], message["type"], message["model"]) == (
        "assistant",
        "message",
        wire.MODEL,
    )
    assert message["usage"]["output_tokens"] == len(TEXT.encode()) + 1  # and the one that ends it


def test_two_answers_have_two_ids(client: TestClient) -> None:
    """Claude Code takes two messages with one id for one message."""
    assert whole(client)["id"] != whole(client)["id"]


@cases
def test_the_stop_sequence_is_named(
    client: TestClient, asked: Json, text: str, stopped: str
) -> None:
    message = whole(client, **asked)
    assert message["content"] == ([{"type": "text", "text": text}] if text else [])
    assert (message["stop_reason"], message["stop_sequence"]) == ("stop_sequence", stopped)


def test_no_tokens_fill_the_cache_and_answer_nothing(
    client: TestClient, engine: ScriptedEngine
) -> None:
    message = whole(client, max_tokens=0)
    assert (message["content"], message["usage"]["output_tokens"]) == ([], 0)
    assert message["stop_reason"] == "max_tokens"
    assert engine.taken[-1].max_tokens == 1


def test_the_query_and_the_headers_of_betas_change_nothing(client: TestClient) -> None:
    headers = {"anthropic-beta": "a,b", "anthropic-version": "2023-06-01"}
    response = client.post(f"{PATH}?beta=true", json=BODY, headers=headers)
    assert response.status_code == 200, response.text
    assert nameless(response.json()) == nameless(whole(client))
    assert IGNORED not in response.headers


def test_what_has_no_effect_is_accepted(client: TestClient) -> None:
    given: Json = {
        "metadata": {"user_id": "me"},
        "service_tier": "auto",
        "inference_geo": "us",
        "cache_control": {"type": "ephemeral", "ttl": "1h"},
        "mcp_servers": [],
        "temperature": None,
    }
    assert IGNORED not in post(client, **given).headers


def test_what_is_not_done_is_listed(client: TestClient) -> None:
    given: Json = {
        "context_management": {"edits": [{"type": "clear_tool_uses_20250919"}]},
        "speed": "fast",
        "output_config": {"task_budget": {"type": "tokens", "total": 1}},
    }
    found = post(client, **given).headers[IGNORED].split(", ")
    assert sorted(found) == ["context_management", "output_config.task_budget", "speed"]


def test_a_summary_in_place_of_an_answer_is_refused_by_name(client: TestClient) -> None:
    assert "`compaction`" in refused(client, compaction={"type": "summarize"})


def test_threads_are_refused_so_that_the_tool_runner_does_without(client: TestClient) -> None:
    response = post(client, thread={"type": "create"})
    found = wire.as_json(response)["error"]
    assert (response.status_code, found["type"]) == (400, "invalid_request_error")
    ThreadUnsupportedRequestErrorDetails.model_validate(found["details"], strict=True)


# Tokens


@pytest.mark.parametrize(
    "asked",
    [
        {},
        {"system": "Be brief."},
        {"messages": [HI, {"role": "assistant", "content": "ho"}, HI]},
        {"tools": [TOOL]},
        {"thinking": {"type": "disabled"}},
    ],
)
def test_tokens_are_counted_as_they_are_computed(client: TestClient, asked: Json) -> None:
    body = {name: value for name, value in BODY.items() if name != "max_tokens"}
    count = wire.ok(client.post(f"{COUNT}?beta=true", json={**body, **asked}))
    assert count["input_tokens"] == whole(client, **asked)["usage"]["input_tokens"]
    for kind in (MessageTokensCount, BetaMessageTokensCount):
        assert_strict(kind, count)
    assert client.post(COUNT, json={**BODY, **asked}).json() == count  # max_tokens changes nothing


def test_tokens_are_also_counted_where_the_context_has_no_room(client: TestClient) -> None:
    long = [{"role": "user", "content": "hi " * 5000}]
    tokens = wire.ok(client.post(COUNT, json={**BODY, "messages": long}))["input_tokens"]
    assert tokens > 15_000
    said = refused(client, messages=long)
    assert said == f"prompt is too long: {tokens} tokens > 2047 maximum"


@pytest.mark.slow
def test_an_overflow_that_is_too_long_to_count_has_the_same_words(client: TestClient) -> None:
    said = refused(client, messages=[{"role": "user", "content": "hi " * 400_000}])
    tokens = int(said.removeprefix("prompt is too long: ").partition(" ")[0])
    assert said == f"prompt is too long: {tokens} tokens > 2047 maximum"
    assert tokens > 2047


# Errors


@pytest.mark.parametrize("path", ["", "/", "/count_tokens/x", "/x/y"])
@pytest.mark.parametrize("method", ["GET", "DELETE"])
def test_no_such_route(client: TestClient, path: str, method: str) -> None:
    response = client.request(method, PATH + path)
    kind = "not_found_error" if response.status_code == 404 else "invalid_request_error"
    assert response.status_code in (404, 405)
    error(response, response.status_code, kind)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("content", "headers", "status", "kind"),
    [
        (b"{", {}, 400, "invalid_request_error"),
        (b"[]", {}, 400, "invalid_request_error"),
        (b'{"model": NaN}', {}, 400, "invalid_request_error"),
        (b"{}", {"content-type": "text/plain"}, 415, "invalid_request_error"),
        (b"{}", {"content-encoding": "gzip"}, 415, "invalid_request_error"),
        (b"{}", {"origin": "http://evil.example"}, 403, "permission_error"),
        (b"{}", {"host": "evil.example"}, 403, "permission_error"),
        (b'{"a": "%s"}' % (b"x" * 3000), {}, 413, "request_too_large"),
    ],
)
@pytest.mark.parametrize("path", [PATH, COUNT])
def test_errors_have_anthropics_form(
    tiny_path: Path, path: str, content: bytes, headers: dict[str, str], status: int, kind: str
) -> None:
    with wire.client(tiny_path, ScriptedEngine(), max_body_bytes=2000) as client:
        sent = {"content-type": "application/json", **headers}
        response = client.post(path, content=content, headers=sent)
        error(response, status, kind)


def test_other_routes_answer_anthropics_clients_in_their_form(tiny_path: Path) -> None:
    version = {"anthropic-version": "2023-06-01"}
    with wire.client(tiny_path, ScriptedEngine(), api_keys=(key("mine"),)) as client:
        error(client.get("/v1/models", headers=version), 401, "authentication_error")
        keyed = {**version, "x-api-key": "mine"}
        error(client.get("/v1/models/none", headers=keyed), 404, "not_found_error")
        wire.error(client.get("/v1/models/none", headers={"x-api-key": "mine"}), 404)


# Models


def test_models_in_anthropics_form(client: TestClient) -> None:
    version = {"anthropic-version": "2023-06-01"}
    response = client.get("/v1/models?limit=1000&after_id=x", headers=version)
    assert response.headers[IGNORED] == "limit, after_id", "the list is always whole"
    listed = wire.ok(response)
    (model,) = listed.pop("data")
    assert listed == {"first_id": wire.MODEL, "last_id": wire.MODEL, "has_more": False}
    assert wire.ok(client.get(f"/v1/models/{wire.MODEL}", headers=version)) == model
    for kind in (ModelInfo, BetaModelInfo):
        assert_strict(kind, model)
    whole(client)
    (model,) = wire.ok(client.get("/v1/models", headers=version))["data"]
    assert model["max_input_tokens"] == 2047
    assert wire.ok(client.get("/v1/models"))["object"] == "list"
