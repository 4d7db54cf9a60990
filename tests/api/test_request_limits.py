"""The limits on the form of a request: what is within them passes, one more does not."""

import json
from collections.abc import Callable
from typing import Any

import pytest
from pydantic import ValidationError
from starlette.testclient import TestClient

from mlx_server import limits
from mlx_server.api import fields, security, strict_json
from mlx_server.api.adapters import Load
from mlx_server.api.chat_completions.protocol import ChatBody
from mlx_server.api.completions.protocol import CompletionBody
from mlx_server.api.conversations.protocol import ConversationBody
from mlx_server.api.formats import JsonSchemaParam
from mlx_server.api.native.protocol import NativeBody
from mlx_server.api.responses.protocol import ResponsesBody
from mlx_server.api.responses.tools import McpTool, ToolFilterParam
from mlx_server.errors import BadRequest, InvalidGrammar
from mlx_server.grammars import formats, schema, user_grammar
from mlx_server.limits.limit import Limit
from mlx_server.messages import Tool
from mlx_server.requests import ChoiceFormat
from mlx_server.schemas import patterns
from mlx_server.schemas.check import check, measure
from mlx_server.schemas.check import written as written_schema
from mlx_server.schemas.view import View
from tests.api import wire
from tests.api.wire import MODEL, Json, error, ok

HI = [{"role": "user", "content": "Hi"}]
TOOL = {"type": "function", "function": {"name": "f"}}
ITEM = {"type": "message", "role": "user", "content": "Hi"}


def chat(**more: Any) -> ChatBody:
    return ChatBody.model_validate({"model": MODEL, "messages": HI, **more})


def completion(**more: Any) -> CompletionBody:
    return CompletionBody.model_validate({"model": MODEL, "prompt": "Hi", **more})


def response(**more: Any) -> ResponsesBody:
    return ResponsesBody.model_validate({"model": MODEL, "input": "Hi", **more})


def native(**more: Any) -> NativeBody:
    return NativeBody.model_validate({"messages": HI, **more})


def mcp(**more: Any) -> McpTool:
    return McpTool.model_validate({"type": "mcp", "server_label": "a", **more})


def keys(count: int) -> dict[str, str]:
    return {str(at): "x" for at in range(count)}


def tools(count: int, size: int = 0) -> list[Tool]:
    return [Tool(f"f{at}", "", {"description": "x" * size}) for at in range(count)]


def nested(depth: int) -> Any:
    found: Any = {}
    for _ in range(depth):
        found = {"properties": {"a": found}}
    return found


def chained(length: int) -> Any:
    links = {str(at): {"items": {"$ref": f"#/$defs/{at + 1}"}} for at in range(length)}
    return {"$ref": "#/$defs/0", "$defs": {**links, str(length): {}}}


def padded(size: int) -> Any:
    return {"description": "x" * (size - len(json.dumps({"description": ""})))}


def rules(count: int) -> str:
    return "start: a1\n" + "\n".join(f'a{at}: "x"' for at in range(1, count))


def refused(pattern: str) -> None:
    if why := patterns.excessive_part(pattern):
        raise InvalidGrammar(why)


CASES: list[tuple[Limit, Callable[[int], object]]] = [
    (limits.JSON_DEPTH, lambda n: strict_json.parse(b"[" * n + b"]" * n)),
    (limits.JSON_DIGITS, lambda n: strict_json.parse(b"9" * n)),
    (limits.ANSWERS, lambda n: chat(n=n)),
    (limits.PROMPTS, lambda n: completion(prompt=["Hi"] * n)),
    (limits.PROMPTS, lambda n: completion(prompt=[[1]] * n)),
    (limits.STOP_STRINGS, lambda n: chat(stop=["x"] * n)),
    (limits.STOP_CHARACTERS, lambda n: chat(stop="x" * n)),
    (limits.STOP_CHARACTERS, lambda n: completion(stop=["x" * n])),
    (limits.LOGIT_BIASES, lambda n: chat(logit_bias=dict.fromkeys(keys(n), 1.0))),
    (limits.TOP_LOGPROBS, lambda n: chat(top_logprobs=n, logprobs=True)),
    (limits.TOP_LOGPROBS, lambda n: completion(logprobs=n)),
    (limits.TOP_LOGPROBS, lambda n: response(top_logprobs=n)),
    (limits.METADATA, lambda n: response(metadata=keys(n))),
    (limits.METADATA_KEY_CHARACTERS, lambda n: response(metadata={"k" * n: "x"})),
    (limits.METADATA_VALUE_CHARACTERS, lambda n: response(metadata={"k": "x" * n})),
    (limits.LABEL_CHARACTERS, lambda n: response(user="x" * n)),
    (limits.LABEL_CHARACTERS, lambda n: response(prompt_cache_key="x" * n)),
    (limits.LABEL_CHARACTERS, lambda n: response(safety_identifier="x" * n)),
    (limits.ADAPTER_PATH_CHARACTERS, lambda n: Load(lora_name="a", lora_path="x" * n)),
    (limits.ADDED_ITEMS, lambda n: ConversationBody.model_validate({"items": [ITEM] * n})),
    (limits.TOOLS, lambda n: chat(tools=[TOOL] * n)),
    (limits.TOOLS, lambda n: native(tools=[{"name": "f"}] * n)),
    (limits.TOOLS, lambda n: schema.usable_tools(tools(n))),
    (limits.RESPONSE_TOOLS, lambda n: response(tools=[{"type": "function", "name": "f"}] * n)),
    (
        limits.TOOL_SCHEMA_BYTES,
        lambda n: schema.usable_tools(
            [Tool(f"f{at}", "", padded(n // 8)) for at in range(7)]
            + [Tool("g", "", padded(n - 7 * (n // 8)))]
        ),
    ),
    (limits.MCP_LABEL_CHARACTERS, lambda n: mcp(server_label="x" * n)),
    (limits.MCP_LABEL_CHARACTERS, lambda n: mcp(connector_id="x" * n)),
    (limits.MCP_URL_CHARACTERS, lambda n: mcp(server_url="http://a/".ljust(n, "x"))),
    (limits.MCP_HEADERS, lambda n: mcp(headers=keys(n))),
    (limits.MCP_FILTER_NAMES, lambda n: mcp(allowed_tools=["x"] * n)),
    (limits.MCP_FILTER_NAMES, lambda n: ToolFilterParam(tool_names=["x"] * n)),
    (
        limits.NAME_CHARACTERS,
        lambda n: JsonSchemaParam.model_validate({"schema": {}, "name": "x" * n}),
    ),
    (limits.SCHEMA_BYTES, lambda n: written_schema(padded(n))),
    (limits.SCHEMA_DEPTH, lambda n: measure(nested(n))),
    (
        limits.SCHEMA_PROPERTIES,
        lambda n: check(View({"properties": {str(at): {} for at in range(n)}})),
    ),
    (limits.SCHEMA_PROPERTIES, lambda n: check(View({"required": list(keys(n))}))),
    (limits.SCHEMA_VALUES, lambda n: check(View({"enum": list(range(n))}))),
    (limits.SCHEMA_COUNT, lambda n: check(View({"minItems": n}))),
    (limits.SCHEMA_COUNT, lambda n: check(View({"maxItems": n}))),
    (limits.SCHEMA_COUNT, lambda n: check(View({"minLength": n}))),
    (limits.SCHEMA_TEXT_LENGTH, lambda n: check(View({"maxLength": n}))),
    (limits.PATTERN_CHARACTERS, lambda n: refused("x" * n)),
    (limits.PATTERN_REPEATS, lambda n: refused(f"x{{{n}}}")),
    (limits.PATTERN_DEPTH, lambda n: refused("(" * n + "x" + ")" * n)),
    (limits.CHOICES, lambda n: formats.check(ChoiceFormat(tuple(map(str, range(n)))), "choice")),
    (
        limits.CHOICE_CHARACTERS,
        lambda n: formats.check(ChoiceFormat(("x" * (n - 1), "y")), "choice"),
    ),
    (limits.GRAMMAR_CHARACTERS, lambda n: user_grammar.user_grammar_body('start: "x"'.ljust(n))),
    (limits.GRAMMAR_RULES, lambda n: user_grammar.user_grammar_body(rules(n))),
    (
        limits.GRAMMAR_DEPTH,
        lambda n: user_grammar.user_grammar_body("start: " + "(" * n + '"x"' + ")" * n),
    ),
    (
        limits.GRAMMAR_INTERSECTIONS,
        lambda n: user_grammar.user_grammar_body("start: /a/" + " & /a/" * n),
    ),
]


@pytest.mark.parametrize(
    ("limit", "ask"), CASES, ids=[f"{at}-{case[0].bounds[:40]}" for at, case in enumerate(CASES)]
)
def test_what_is_within_passes_and_one_more_does_not(
    limit: Limit, ask: Callable[[int], object]
) -> None:
    assert limit.beyond.startswith("400")
    ask(limit.value)
    with pytest.raises((ValidationError, BadRequest)):
        ask(limit.value + 1)


def test_a_page(client: TestClient) -> None:
    id = ok(client.post("/v1/conversations", json={}))["id"]
    path, most = f"/v1/conversations/{id}/items", limits.PAGE_ITEMS.value
    ok(client.get(path, params={"limit": most}))
    error(client.get(path, params={"limit": most + 1}))


def test_a_body_of_the_largest_size(client: TestClient) -> None:
    def sent(size: int) -> Any:
        body = json.dumps({"model": MODEL, "messages": 5}).encode().ljust(size)
        return client.post(
            "/v1/chat/completions", content=body, headers={"content-type": "application/json"}
        )

    error(sent(limits.BODY_BYTES.value), 400)
    error(sent(limits.BODY_BYTES.value + 1), 413)


@pytest.mark.parametrize("more", [0, 1])
def test_a_request_id(client: TestClient, more: int) -> None:
    sent = "x" * (limits.REQUEST_ID_CHARACTERS.value + more)
    got = client.get("/health", headers={"x-request-id": sent}).headers["x-request-id"]
    assert (got == sent) == (not more)
    assert security.REQUEST_ID.fullmatch(got)


def test_fields_without_a_meaning(client: TestClient) -> None:
    many: Json = {f"f{at:04}": 1 for at in range(limits.IGNORED_NAMES.value + 5)}
    assert len(list(chat(**many).ignored())) == limits.IGNORED_NAMES.value
    reported = fields.ignored_header(["x" * 1000])[fields.IGNORED_HEADER]
    assert len(reported) == limits.IGNORED_NAME_CHARACTERS.value
    reported = fields.ignored_header(many)[fields.IGNORED_HEADER]
    assert len(reported) == limits.IGNORED_HEADER_CHARACTERS.value
    assert wire.MODEL in ok(client.get("/v1/models"))["data"][0]["id"]
