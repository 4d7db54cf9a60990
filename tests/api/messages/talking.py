"""Requests to `/v1/messages`, and what comes back, read by Anthropic's own types in strict mode."""

import json
from collections.abc import Mapping
from typing import Any

import httpx2
from anthropic.types import (
    Message,
    RawContentBlockDeltaEvent,
    RawContentBlockStartEvent,
    RawContentBlockStopEvent,
    RawMessageDeltaEvent,
    RawMessageStartEvent,
    RawMessageStopEvent,
)
from anthropic.types.beta import (
    BetaMessage,
    BetaRawContentBlockDeltaEvent,
    BetaRawContentBlockStartEvent,
    BetaRawContentBlockStopEvent,
    BetaRawMessageDeltaEvent,
    BetaRawMessageStartEvent,
    BetaRawMessageStopEvent,
)
from anthropic.types.shared import ErrorResponse
from pydantic import BaseModel
from starlette.testclient import TestClient

from tests.api import wire
from tests.api.strict import assert_strict
from tests.api.wire import Json, as_json

PATH = "/v1/messages"
HI: Json = {"role": "user", "content": "hi"}
BODY: Json = {"model": wire.MODEL, "max_tokens": 100, "messages": [HI]}

EVENTS: Mapping[str, tuple[type[BaseModel], type[BaseModel]]] = {
    "message_start": (RawMessageStartEvent, BetaRawMessageStartEvent),
    "content_block_start": (RawContentBlockStartEvent, BetaRawContentBlockStartEvent),
    "content_block_delta": (RawContentBlockDeltaEvent, BetaRawContentBlockDeltaEvent),
    "content_block_stop": (RawContentBlockStopEvent, BetaRawContentBlockStopEvent),
    "message_delta": (RawMessageDeltaEvent, BetaRawMessageDeltaEvent),
    "message_stop": (RawMessageStopEvent, BetaRawMessageStopEvent),
}
"""Of the SDK's `client.messages`, and of its `client.beta.messages`."""
RANDOM = ("id",)
"""Of a message: it differs between two answers to the same request."""


def post(client: TestClient, **asked: Any) -> httpx2.Response:
    return client.post(PATH, json={**BODY, **asked})


def whole(client: TestClient, **asked: Any) -> Json:
    response = post(client, **asked)
    assert response.status_code == 200, response.text
    body = as_json(response)
    assert_message(body)
    return body


def assert_message(body: Json) -> None:
    assert_strict(Message, body)
    assert_strict(BetaMessage, body)


def assert_event(event: Json) -> None:
    """Checks an event of a stream, other than an error. The SDK has no type for `ping`."""
    if event["type"] == "ping":
        assert event == {"type": "ping"}
        return
    stable, beta = EVENTS[event["type"]]
    assert_strict(stable, event)
    assert_strict(beta, event)


def streamed(client: TestClient, **asked: Any) -> list[Json]:
    """The events of a stream, pings included, after a check of each."""
    return events(post(client, stream=True, **asked))


def events(response: httpx2.Response) -> list[Json]:
    assert response.status_code == 200, response.text
    assert response.headers["content-type"].startswith("text/event-stream")
    *frames, end = response.text.split("\n\n")
    assert end == ""
    found = []
    for frame in frames:
        name, data = frame.split("\n")
        event: Json = json.loads(data.removeprefix("data: "))
        assert name == f"event: {event['type']}"
        if event["type"] == "error":
            assert_strict(ErrorResponse, event)
        else:
            assert_event(event)
        found.append(event)
    return found


def gathered(found: list[Json]) -> Json:
    """The message that a client makes of the events, by Anthropic's own rules."""
    first, *rest = [event for event in found if event["type"] != "ping"]
    assert first["type"] == "message_start"
    message: Json = first["message"]
    assert message["content"] == []
    for event in rest:
        match event["type"]:
            case "content_block_start":
                assert event["index"] == len(message["content"])
                message["content"].append({**event["content_block"], "open": True})
            case "content_block_delta":
                block = message["content"][event["index"]]
                assert block["open"]
                _add(block, event["delta"])
            case "content_block_stop":
                block = message["content"][event["index"]]
                assert block.pop("open")
                if block["type"] == "tool_use":
                    block["input"] = json.loads(block.pop("json", "{}"))
            case "message_delta":
                message |= event["delta"]
                message["usage"] |= event["usage"]
                message |= {name: event[name] for name in ("mlx_server",) if name in event}
            case kind:
                assert (kind, event) == ("message_stop", rest[-1])
    assert not any("open" in block for block in message["content"])
    return message


def _add(block: Json, delta: Json) -> None:
    match delta["type"], block["type"]:
        case "text_delta", "text":
            block["text"] += delta["text"]
        case "thinking_delta", "thinking":
            block["thinking"] += delta["thinking"]
        case "signature_delta", "thinking":
            assert block["signature"] == ""
            block["signature"] = delta["signature"]
        case "input_json_delta", "tool_use":
            block["json"] = block.get("json", "") + delta["partial_json"]
        case both:
            raise AssertionError(f"A delta that does not fit its block: {both}.")


def nameless(message: Json) -> Json:
    return {name: value for name, value in message.items() if name not in RANDOM}


def error(response: httpx2.Response, status: int, kind: str) -> str:
    """The message of an error, which has Anthropic's form."""
    assert response.status_code == status, response.text
    body = as_json(response)
    if kind != "request_too_large":  # which Anthropic documents, and the SDK has not
        assert_strict(ErrorResponse, body)
    assert body.keys() == {"type", "error", "request_id"}
    assert body["type"] == "error"
    assert body["error"].keys() == {"type", "message"}
    assert body["error"]["type"] == kind
    assert body["request_id"] == response.headers["request-id"]
    message: str = body["error"]["message"]
    assert message
    return message


def refused(client: TestClient, **asked: Any) -> str:
    return error(post(client, **asked), 400, "invalid_request_error")
