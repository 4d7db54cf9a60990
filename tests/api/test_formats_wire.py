"""What an answer has to be: by OpenAI's names and vLLM's, in both endpoints alike."""

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx2
import pytest
from openai import OpenAI
from pydantic import BaseModel
from starlette.testclient import TestClient

from mlx_server.api.chat_completions.input import ChatBody
from mlx_server.api.chat_completions.input import to_request as of_chat
from mlx_server.api.completions import CompletionBody
from mlx_server.api.completions import to_request as of_completions
from mlx_server.errors import BadRequest
from mlx_server.messages import Conversation
from mlx_server.requests import (
    ChoiceFormat,
    Format,
    GenerateRequest,
    GrammarFormat,
    JsonFormat,
    RegexFormat,
)
from tests.api import wire
from tests.api.wire import Json, ScriptedEngine, ok

CHAT: Json = {"model": wire.MODEL, "messages": [{"role": "user", "content": "hi"}]}
TEXT: Json = {"model": wire.MODEL, "prompt": "hi"}
SCHEMA: Json = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
OF_SCHEMA: Json = {"type": "json_schema", "json_schema": {"name": "it", "schema": SCHEMA}}
GRAMMAR = 'start: "a" | "b"'
PLACE = "response_format.json_schema.schema"


def chat(**asked: Any) -> GenerateRequest:
    return of_chat(ChatBody.model_validate({**CHAT, **asked}))


def completions(**asked: Any) -> GenerateRequest:
    return of_completions(CompletionBody.model_validate({**TEXT, **asked}))


BOTH = pytest.mark.parametrize("asking", [chat, completions])


@pytest.fixture(scope="module")
def client(tiny_path: Path) -> Iterator[TestClient]:
    with wire.client(tiny_path, ScriptedEngine()) as client:
        yield client


@BOTH
@pytest.mark.parametrize(
    ("asked", "format", "param"),
    [
        ({"response_format": {"type": "json_object"}}, JsonFormat(), "response_format"),
        ({"response_format": OF_SCHEMA}, JsonFormat(SCHEMA, strict=False, name="it"), PLACE),
        (
            {
                "response_format": {
                    "type": "json_schema",
                    "json_schema": {"schema": SCHEMA, "strict": True, "description": "all of it"},
                }
            },
            JsonFormat(SCHEMA, strict=True, description="all of it"),
            PLACE,
        ),
        ({"structured_outputs": {"json": SCHEMA}}, JsonFormat(SCHEMA), "structured_outputs.json"),
        (
            {"structured_outputs": {"json": json.dumps(SCHEMA)}},
            JsonFormat(SCHEMA),
            "structured_outputs.json",
        ),
        ({"structured_outputs": {"regex": "a+"}}, RegexFormat("a+"), "structured_outputs.regex"),
        (
            {"structured_outputs": {"choice": ["a", "b"]}},
            ChoiceFormat(("a", "b")),
            "structured_outputs.choice",
        ),
        (
            {"structured_outputs": {"grammar": GRAMMAR}},
            GrammarFormat(GRAMMAR),
            "structured_outputs.grammar",
        ),
        (
            {"structured_outputs": {"json_object": True}},
            JsonFormat(),
            "structured_outputs.json_object",
        ),
        ({"guided_json": SCHEMA}, JsonFormat(SCHEMA), "guided_json"),
        ({"guided_json": json.dumps(SCHEMA)}, JsonFormat(SCHEMA), "guided_json"),
        ({"guided_regex": "a+"}, RegexFormat("a+"), "guided_regex"),
        ({"guided_choice": ["a"]}, ChoiceFormat(("a",)), "guided_choice"),
        ({"guided_grammar": GRAMMAR}, GrammarFormat(GRAMMAR), "guided_grammar"),
        ({"json_schema": SCHEMA}, JsonFormat(SCHEMA, strict=False), "json_schema"),
        ({"json_schema": json.dumps(SCHEMA)}, JsonFormat(SCHEMA, strict=False), "json_schema"),
        ({"json_schema": {}}, JsonFormat({}, strict=False), "json_schema"),
        ({"grammar": GRAMMAR}, GrammarFormat(GRAMMAR), "grammar"),
        ({"grammar": "", "json_schema": None}, None, "response_format"),
        (
            {"response_format": {"type": "text"}, "guided_regex": "a", "guided_json": None},
            RegexFormat("a"),
            "guided_regex",
        ),
        ({"response_format": {"type": "text"}}, None, "response_format"),
        ({"response_format": None, "structured_outputs": None}, None, "response_format"),
    ],
)
def test_formats(
    asking: Callable[..., GenerateRequest], asked: Json, format: Format | None, param: str
) -> None:
    request = asking(**asked)
    assert (request.format, request.format_param) == (format, param)


def reported(**asked: Any) -> Any:
    (conversation,) = chat(**asked).prompts
    assert isinstance(conversation, Conversation)
    return conversation.response_format


def test_the_prompt_describes_every_format_but_a_grammar() -> None:
    asked = {"type": "json_schema", "json_schema": {**OF_SCHEMA["json_schema"], "description": "d"}}
    assert reported(response_format=asked) == {"name": "it", "description": "d", "schema": SCHEMA}
    assert reported(guided_json=SCHEMA) == {"name": None, "description": None, "schema": SCHEMA}
    any_object = reported(response_format={"type": "json_object"})
    assert any_object == {"name": None, "description": None, "schema": {"type": "object"}}
    assert reported(guided_regex="a") == {"regex": "a"}
    assert reported(structured_outputs={"choice": ["a", "b"]}) == {"choice": ["a", "b"]}
    assert reported(guided_grammar='root ::= "a"') is None
    assert reported() is None


@BOTH
@pytest.mark.parametrize(
    ("asked", "names"),
    [
        (
            {"response_format": OF_SCHEMA, "guided_regex": "a"},
            ["response_format.json_schema.schema", "guided_regex"],
        ),
        (
            {"response_format": {"type": "json_object"}, "structured_outputs": {"json": {}}},
            ["response_format", "structured_outputs.json"],
        ),
        (
            {"structured_outputs": {"regex": "a", "choice": ["a"]}},
            ["structured_outputs.regex", "structured_outputs.choice"],
        ),
        (
            {"structured_outputs": {"regex": "a", "json_object": True}},
            ["structured_outputs.regex", "structured_outputs.json_object"],
        ),
        ({"guided_json": {}, "guided_grammar": "a"}, ["guided_json", "guided_grammar"]),
        ({"json_schema": {}, "grammar": "a"}, ["json_schema", "grammar"]),
        ({"guided_regex": "a", "grammar": "a"}, ["guided_regex", "grammar"]),
        (
            {"structured_outputs": {"regex": "a"}, "guided_regex": "a"},
            ["structured_outputs.regex", "guided_regex"],
        ),
    ],
)
def test_two_of_them_are_one_too_many(
    asking: Callable[..., GenerateRequest], asked: Json, names: list[str]
) -> None:
    with pytest.raises(BadRequest) as caught:
        asking(**asked)
    assert all(f"`{name}`" in caught.value.message for name in names)
    assert caught.value.param == names[1]


def test_what_tells_a_backend_how_to_go_about_it_is_listed() -> None:
    asked = {
        "structured_outputs": {"regex": "a", "whitespace_pattern": " ", "disable_fallback": None},
        "guided_decoding_backend": "outlines",
        "guided_whitespace_pattern": None,
    }
    assert ChatBody.model_validate({**CHAT, **asked}).ignored() == [
        "guided_decoding_backend",
        "structured_outputs.whitespace_pattern",
    ]


class Item(BaseModel):
    name: str
    tags: list[str] = []


class Order(BaseModel):
    items: list[Item]
    note: str | None


def sent_by_the_sdk(parse: Callable[[OpenAI], Any], content: str) -> tuple[ChatBody, Any]:
    """What OpenAI's client sends, as our wire type, and what it makes of the answer."""
    bodies: list[Json] = []

    def answer(request: httpx2.Request) -> httpx2.Response:
        bodies.append(json.loads(request.content))
        message = {"role": "assistant", "content": content, "refusal": None}
        choice = {"index": 0, "message": message, "logprobs": None, "finish_reason": "stop"}
        head = {"id": "x", "object": "chat.completion", "created": 0, "model": "x"}
        return httpx2.Response(200, json={**head, "choices": [choice]})

    with (
        httpx2.Client(transport=httpx2.MockTransport(answer)) as http,
        OpenAI(base_url="http://localhost/v1", api_key="none", http_client=http) as client,
    ):
        found = parse(client)
    (body,) = bodies
    return ChatBody.model_validate(body), found


def test_a_pydantic_model_by_the_sdks_own_parse() -> None:
    def parse(client: OpenAI) -> Any:
        messages: Any = CHAT["messages"]
        return client.chat.completions.parse(model="x", messages=messages, response_format=Order)

    body, found = sent_by_the_sdk(parse, '{"items": [{"name": "a", "tags": []}], "note": null}')
    assert body.ignored() == []
    format = of_chat(body).format
    assert isinstance(format, JsonFormat)
    assert (format.name, format.strict) == ("Order", True)
    assert isinstance(format.schema, dict)
    assert format.schema["properties"]["items"] == {
        "items": {"$ref": "#/$defs/Item"},
        "title": "Items",
        "type": "array",
    }
    assert found.choices[0].message.parsed == Order(items=[Item(name="a")], note=None)


def test_without_a_format_nothing_changes(client: TestClient) -> None:
    response = client.post("/v1/chat/completions", json={**CHAT, "response_format": None})
    assert ok(response)["choices"][0]["message"]["content"] == wire.TEXT
    assert "x-mlx-server-ignored" not in response.headers


SCHEMA_FORMAT: Json = {"type": "json_object", "schema": {"type": "array", "items": {}}}


def test_a_json_object_with_a_schema_follows_it() -> None:
    request = chat(response_format=SCHEMA_FORMAT)
    assert request.format_param == "response_format.schema"
    assert request.format == JsonFormat({"type": "array", "items": {}}, strict=False)
