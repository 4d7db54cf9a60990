"""What is kept, listed, counted or refused, against the types of OpenAI's client. The tests of each
endpoint check its answers and their streams."""

from contextlib import suppress

import pytest
from openai.types import Model
from openai.types.chat import ChatCompletion, ChatCompletionDeleted, ChatCompletionStoreMessage
from openai.types.conversations import (
    Conversation,
    ConversationDeletedResource,
    ConversationItem,
    ConversationItemList,
)
from openai.types.responses import Response, ResponseItem, ResponsesServerEvent
from openai.types.responses.input_token_count_response import InputTokenCountResponse
from openai.types.responses.response_item_list import ResponseItemList
from starlette.testclient import TestClient

from mlx_server.errors import BadRequest, EngineDied, ServerError
from tests.api import wire
from tests.api.responses_schema import OURS as RESPONSES_OURS
from tests.api.strict import assert_strict
from tests.api.wire import Json, ScriptedEngine, ok
from tests.live.server import eventually
from tests.tables import cases

CONVERSATIONS, RESPONSES, CHAT = "/v1/conversations", "/v1/responses", "/v1/chat/completions"
SAID: Json = {"role": "user", "content": "hi"}
ANSWERED: Json = {"call_id": "c", "output": "x"}
CALLED: Json = {"call_id": "c", "name": "f"}
ASSISTANT: Json = {"role": "assistant", "content": "ho"}
MCP: Json = {"type": "mcp", "server_label": "s", "server_url": "http://127.0.0.1:9/mcp"}
OURS = {"status"}
"""Of a `custom_tool_call_output`: a response's items have it, and a conversation's do not."""


pytestmark = pytest.mark.usefixtures("_as_before")


@pytest.mark.slow
@cases
def test_items_that_are_given(client: TestClient, items: list[Json]) -> None:
    made = ok(client.post(CONVERSATIONS, json={}))
    place = f"{CONVERSATIONS}/{made['id']}/items"
    added = ok(client.post(place, json={"items": items}))
    for page in (added, ok(client.get(place))):
        assert_strict(ConversationItemList, page, OURS)
    for item in added["data"]:
        assert_strict(ConversationItem, ok(client.get(f"{place}/{item['id']}")), OURS)
    asked = {"model": wire.MODEL, "tools": [MCP], "input": [*items, SAID], "tool_choice": "none"}
    response = ok(client.post(RESPONSES, json=asked))
    kept = ok(client.get(f"{RESPONSES}/{response['id']}/input_items"))
    assert_strict(ResponseItemList, kept)
    for item in kept["data"]:
        assert_strict(ResponseItem, item)


@pytest.mark.parametrize("failure", [None, EngineDied("It is gone."), BadRequest("It is wrong.")])
def test_events_over_a_websocket(
    client: TestClient, engine: ScriptedEngine, failure: ServerError | None
) -> None:
    """The SDK has other types for them than for a stream over HTTP."""
    engine.failure = failure
    asked = {"type": "response.create", "model": wire.MODEL, "input": "hi"}
    found: list[Json] = [{"type": ""}]
    with suppress(*wire.CANCELLED), client.websocket_connect(f"ws://localhost{RESPONSES}") as line:
        line.send_json(asked)
        while found[-1]["type"] not in ("response.completed", "response.failed"):
            found.append(line.receive_json())
            assert_strict(ResponsesServerEvent, found[-1], RESPONSES_OURS)
        line.send_json({**asked, "model": "none"})
        refused = line.receive_json()
    assert_strict(ResponsesServerEvent, refused)
    assert (refused["type"], refused["status"]) == ("error", 404)
    errors = [event["error"] for event in found if event["type"] == "error"]
    assert errors == ([failure.body()["error"]] if failure else [])


def test_conversations(client: TestClient) -> None:
    made = ok(client.post(CONVERSATIONS, json={"items": [SAID], "metadata": {"a": "b"}}))
    place = f"{CONVERSATIONS}/{made['id']}"
    (item,) = ok(client.get(f"{place}/items"))["data"]
    changed = ok(client.post(place, json={"metadata": {"a": "c"}}))
    shorter = ok(client.delete(f"{place}/items/{item['id']}"))
    for each in (made, ok(client.get(place)), changed, shorter):
        assert_strict(Conversation, each)
    assert_strict(ConversationDeletedResource, ok(client.delete(place)))


def test_responses_that_are_kept(client: TestClient) -> None:
    asked: Json = {"model": wire.MODEL, "input": "hi"}
    place = f"{RESPONSES}/{ok(client.post(RESPONSES, json=asked))['id']}"
    assert_strict(Response, ok(client.get(place)), RESPONSES_OURS)
    assert_strict(InputTokenCountResponse, ok(client.post(f"{RESPONSES}/input_tokens", json=asked)))
    background = ok(client.post(RESPONSES, json={**asked, "background": True}))
    assert_strict(Response, background, RESPONSES_OURS)
    place = f"{RESPONSES}/{background['id']}"
    eventually(lambda: ok(client.get(place))["status"] == "completed", "it is done")


def test_completions_that_are_kept(client: TestClient) -> None:
    asked: Json = {"model": wire.MODEL, "messages": [SAID, ASSISTANT], "store": True}
    place = f"{CHAT}/{ok(client.post(CHAT, json=asked))['id']}"
    (listed,) = page(client, CHAT)
    for each in (listed, ok(client.get(place)), ok(client.post(place, json={"metadata": {}}))):
        assert_strict(ChatCompletion, each, {"metadata"})
    _, said = page(client, f"{place}/messages")
    assert_strict(ChatCompletionStoreMessage, said)
    assert_strict(ChatCompletionDeleted, ok(client.delete(place)))


def page(client: TestClient, place: str) -> list[Json]:
    """The SDK's pages have no type of their own that names their fields."""
    found = ok(client.get(place))
    assert found.keys() == {"object", "data", "first_id", "last_id", "has_more"}
    assert found["object"] == "list"
    data: list[Json] = found["data"]
    assert (found["first_id"], found["last_id"]) == (data[0]["id"], data[-1]["id"])
    return data


def test_models(client: TestClient) -> None:
    found = ok(client.get("/v1/models"))
    assert found.keys() == {"object", "data"}
    of_codex = ok(client.get("/v1/models", params={"client_version": "0.169.0"}))
    assert of_codex == {**found, "models": []}
    for each in (*found["data"], ok(client.get(f"/v1/models/{wire.MODEL}"))):
        assert_strict(Model, each, each.keys())
