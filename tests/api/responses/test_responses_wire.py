import json
from typing import Any

import httpx2
import pytest
from starlette.testclient import TestClient

from mlx_server.api.responses.protocol import ResponsesBody, new_response
from mlx_server.errors import EngineDied
from tests.api import wire
from tests.api.responses_schema import assert_response, assert_stream, timeless
from tests.api.wire import TEXT, Json, ScriptedEngine, error, ok
from tests.tables import cases

PATH = "/v1/responses"
BODY: Json = {"model": wire.MODEL, "input": "hi"}
IGNORED = "x-mlx-server-ignored"


FUNCTION: Json = {"type": "function", "name": "f", "parameters": {"type": "object"}}
INCLUDED = {"include": ["message.output_text.logprobs"]}

REQUESTS: dict[str, Json] = {
    "plain": {},
    "instructions": {"instructions": "Be kind."},
    "log probabilities": INCLUDED,
    "and alternatives": {**INCLUDED, "top_logprobs": 3},
    "cut off": {"max_output_tokens": 4, **INCLUDED},
    "cut off inside a character": {"max_output_tokens": 5, **INCLUDED},
    "a stop string": {"stop": "!", **INCLUDED},
    "a stop string at once": {"stop": TEXT[0], **INCLUDED},
    "every field that is repeated": {
        "metadata": {"a": "b"},
        "user": "u",
        "safety_identifier": "s",
        "prompt_cache_key": "k",
        "service_tier": "auto",
        "temperature": 0,
        "top_p": 0.5,
        "presence_penalty": 1,
        "frequency_penalty": -1,
        "top_logprobs": 1,
        "truncation": "disabled",
        "reasoning": {"effort": "low"},
        "text": {"format": {"type": "text"}, "verbosity": "medium"},
        "max_tool_calls": 3,
        "parallel_tool_calls": False,
        "tools": [FUNCTION, {**FUNCTION, "name": "g", "description": "G", "strict": True}],
        "tool_choice": "none",
    },
    "a choice among tools": {
        "tools": [FUNCTION],
        "tool_choice": {
            "type": "allowed_tools",
            "mode": "auto",
            "tools": [{"type": "function", "name": "f"}],
        },
    },
    "tools of others": {"tools": [{"type": "web_search"}, FUNCTION]},
}


pytestmark = pytest.mark.usefixtures("_as_before")


def post(client: TestClient, **asked: Any) -> httpx2.Response:
    return client.post(PATH, json={**BODY, **asked})


def refused(client: TestClient, **asked: Any) -> Json:
    return error(post(client, **asked))


def stream(client: TestClient, **asked: Any) -> list[Json]:
    """What it said, having made sure that each event is named, and that it ended as it should."""
    response = post(client, stream=True, **asked)
    assert response.status_code == 200, response.text
    assert response.headers["content-type"].startswith("text/event-stream")
    *blocks, done, end = response.text.split("\n\n")
    assert (done, end) == ("data: [DONE]", "")
    return [event(block) for block in blocks]


def event(block: str) -> Json:
    name, data = block.split("\n")
    found: Json = json.loads(data.removeprefix("data: "))
    assert name == f"event: {found['type']}"
    return found


def text_of(response: Json) -> str:
    (item,) = response["output"]
    (part,) = item["content"]
    text: str = part["text"]
    return text


@pytest.mark.slow
@pytest.mark.parametrize("asked", REQUESTS.values(), ids=REQUESTS)
def test_bodies_and_events_are_what_others_expect(client: TestClient, asked: Json) -> None:
    body = ok(post(client, **asked))
    assert_response(body)
    response = assert_stream(stream(client, **asked))
    assert timeless(response) == timeless(body)


def test_tools_of_all_kinds_are_told_again(client: TestClient) -> None:
    """Open Responses has no such tools."""
    tools = [
        {**FUNCTION, "defer_loading": True},
        {"type": "custom", "name": "c", "format": {"type": "text"}},
        {"type": "tool_search", "execution": "client", "description": "s", "parameters": {}},
        {"type": "namespace", "name": "n", "description": "d", "tools": [FUNCTION]},
    ]
    response = assert_stream(stream(client, tools=tools), is_open=False)
    assert [tool["type"] for tool in response["tools"]] == [tool["type"] for tool in tools]
    assert response["tools"][1:3] == tools[1:3]


def test_an_answer(client: TestClient) -> None:
    body = ok(post(client))
    assert text_of(body) == TEXT
    assert (body["status"], body["model"], body["object"]) == ("completed", wire.MODEL, "response")
    assert body["usage"]["output_tokens"] == len(TEXT.encode()) + 1


def test_tokens_are_counted_as_they_are_computed(client: TestClient) -> None:
    asked = {"input": "one two", "instructions": "Be kind."}
    counted = ok(client.post(f"{PATH}/input_tokens", json={**BODY, **asked}))["input_tokens"]
    assert counted == ok(post(client, **asked))["usage"]["input_tokens"]


def test_what_is_told_again(client: TestClient) -> None:
    asked = REQUESTS["every field that is repeated"]
    body = ok(post(client, **asked))
    same = set(asked) - {"service_tier", "tools", "reasoning"}
    assert {name: body[name] for name in same} == {name: asked[name] for name in same}
    assert body["service_tier"] == "default"
    assert body["reasoning"] == {"effort": "low", "summary": None}
    assert body["tools"][0] == {**FUNCTION, "description": None, "strict": False}


def test_a_format_is_told_again(client: TestClient) -> None:
    schema = {"type": "object", "properties": {}, "additionalProperties": False}
    asked = {"type": "json_schema", "name": "n", "schema": schema, "strict": True}
    body = ok(post(client, text={"format": asked}, max_output_tokens=1))
    assert body["text"]["format"] == {**asked, "description": None}
    # The schemas of Open Responses know of no schema in a format but null.
    assert_response(body, is_open=False)


def test_a_failure_in_the_middle_is_told_in_the_stream(
    client: TestClient, engine: ScriptedEngine
) -> None:
    engine.failure = EngineDied("It died.")
    events = stream(client)
    response = assert_stream(events)
    assert (response["status"], text_of(response)) == ("failed", TEXT[:3])
    assert response["error"] == {"code": "server_error", "message": "It died."}


NAMESPACE: Json = {"type": "namespace", "name": "n", "tools": [{"type": "web_search"}, FUNCTION]}


def test_what_has_no_use_here_is_told_in_the_header(client: TestClient) -> None:
    response = post(
        client,
        input=[{"role": "user", "content": "hi"}, {"type": "web_search_call", "id": "ws_1"}],
        tools=[{"type": "web_search"}, {"type": "web_search"}, NAMESPACE],
        reasoning={"summary": "auto"},
        text={"verbosity": "low"},
        frobnicate=1,
        client_metadata={"a": "b"},
    )
    assert text_of(ok(response)) == TEXT
    assert response.headers[IGNORED].split(", ") == [
        "frobnicate",
        "input.web_search_call",
        "tools.web_search",
        "tools.tools.web_search",
        "text.verbosity",
    ]


@cases
def test_the_header_names_what_was_sent(
    client: TestClient, asked: Json, ignored: str | None
) -> None:
    offered = {"tools": [{"type": "function", "name": "f"}]} if "tool_choice" in asked else {}
    response = post(client, **offered, **asked)
    assert response.status_code == 200, response.text
    assert response.headers.get(IGNORED) == ignored


@pytest.mark.parametrize("name", ["include", "include[]", "include[0]", "include%5B%5D"])
def test_what_a_query_asks_of_stored_items_in_vain_is_listed(client: TestClient, name: str) -> None:
    place = f"{PATH}/{ok(post(client, **INCLUDED))['id']}"
    query = f"{name}=reasoning.encrypted_content&include_obfuscation=true"
    ignored = "include.reasoning.encrypted_content, include_obfuscation"
    for path in (place, f"{place}/input_items"):
        assert client.get(f"{path}?{query}").headers[IGNORED] == ignored
        assert IGNORED not in client.get(f"{path}?include_obfuscation=false").headers
    (message,) = ok(client.get(place))["output"]
    assert message["content"][0]["logprobs"], "they are there as they were computed"


def test_nesting_in_content(client: TestClient) -> None:
    deep: Any = "x"
    for _ in range(60):
        deep = [deep]
    for item in (deep, {"role": "user", "content": deep}):
        assert post(client, input=[item]).status_code == 200


def test_secrets_of_servers_are_not_told_again() -> None:
    server = {
        "type": "mcp",
        "server_label": "docs",
        "server_url": "https://example.com",
        "headers": {"x-key": "secret"},
        "authorization": "secret",
        "require_approval": "never",
    }
    body = ResponsesBody.model_validate({**BODY, "tools": [server]})
    response = new_response(body, "resp_1", stored=False)
    assert "secret" not in str(response)
    assert response["tools"][0]["require_approval"] == "never"
    assert_response(response, is_open=False)
