"""Of Anthropic's Messages."""

from collections.abc import Mapping
from typing import Any

from pydantic import BaseModel

from mlx_server.api.messages import protocol
from tests.hostile.parameters.case import (
    CALLS,
    HI,
    SAID,
    THINKS,
    Case,
    Json,
    Shown,
    refused,
)
from tests.hostile.parameters.chatting import ONLY_A, UNIQUE

HISTORIES = "tests/api/test_requests.py::test_a_body_asks_for"
INPUT = "tests/api/messages/test_input.py"

SCHEMA: Json = {"type": "object", "properties": {"a": {"enum": ["x"]}}, "required": ["a"]}
TOOL: Json = {"name": "f", "description": "does f", "input_schema": SCHEMA}
CALL_TOKENS = 120


def offered(*tools: Json, **more: Any) -> Json:
    return {"tools": list(tools), **more}


def tool(**more: Any) -> Json:
    return offered({**TOOL, **more})


OFFERED = tool()
ONE = tool() | {"max_tokens": CALL_TOKENS}
TWO = offered(TOOL, {**TOOL, "name": "g"}, max_tokens=CALL_TOKENS)


def asked(text: str, **more: Any) -> Json:
    messages = [{"role": "user", "content": text}]
    return {"model": SAID, "max_tokens": 80, "messages": messages, **more}


def user(*blocks: Json, **more: Any) -> Json:
    return {"messages": [{"role": "user", "content": list(blocks), **more}]}


def answered(used: Json | None = None, result: Json | None = None, *more: Json) -> Json:
    """A turn of the model in between, with what its message has besides."""
    made = {"type": "tool_use", "id": "c", "name": "f", "input": {}, **(used or {})}
    given = {"type": "tool_result", "tool_use_id": "c", "content": "x", **(result or {})}
    turn = {"role": "assistant", "content": [*more, made]}
    return {"messages": [HI, turn, {"role": "user", "content": [given]}]}


def said(block: Json) -> Json:
    return {"messages": [HI, {"role": "assistant", "content": [block]}, HI]}


def document(**more: Any) -> Json:
    source = {"type": "text", "data": "x"}
    return user({"type": "document", "source": source, **more})


def file(data: str, kind: str = "text/plain") -> Json:
    return document(source={"type": "base64", "media_type": kind, "data": data})


def found(**more: Any) -> Json:
    return user({"type": "search_result", "title": "a", "source": "b", "content": [], **more})


def referenced(name: str) -> Json:
    content = [{"type": "tool_reference", "tool_name": name}]
    return offered(
        {**TOOL, "name": "g", "defer_loading": True}, **answered(None, {"content": content})
    )


def thought(**more: Any) -> Json:
    return said({"type": "thinking", "thinking": "Hm", "signature": "x", **more})


def chosen(**more: Any) -> Json:
    return {"tool_choice": {"type": "tool", "name": "f", **more}}


def format(schema: Any) -> Json:
    return {"output_config": {"format": {"type": "json_schema", "schema": schema}}}


def thinks(**more: Any) -> Json:
    return {"thinking": {"type": "enabled", "budget_tokens": 50, **more}}


MESSAGING: Mapping[type[BaseModel], Mapping[str, Shown]] = {
    protocol.PromptBody: {
        "model": Case({"model": SAID}),
        "system": Case({"system": "Be brief."}),
        "stop_sequences": Case({"stop_sequences": ["aaa"]}, ONLY_A),
        "mcp_servers": refused({"mcp_servers": [{"type": "url", "url": "a", "name": "b"}]}),
        "cache_control": f"{INPUT}::test_a_request_to_keep_the_prompt",
    },
    protocol.MessagesBody: {
        "max_tokens": Case({"max_tokens": 3}),
        "stream": Case({"stream": True}),
    },
    protocol.CustomTool: {
        "type": f"{INPUT}::test_tools",
        "name": Case(tool(name="g"), OFFERED),
        "description": Case(tool(description="does g"), OFFERED),
        "input_schema": Case(tool(input_schema={"type": "object"}), OFFERED),
        "strict": refused(
            tool(input_schema={"properties": {"a": UNIQUE}}, strict=True),
            **tool(input_schema={"properties": {"a": UNIQUE}}),
        ),
        "defer_loading": Case(tool(defer_loading=True), OFFERED),
    },
    protocol.AnthropicTool: {"type": refused({"tools": [{"type": "web_search_20250305"}]})},
    protocol.ToolChoiceParam: {
        "name": Case(chosen(name="g"), {**TWO, **chosen()}),
        "disable_parallel_tool_use": Case(
            {"tool_choice": {"type": "auto", "disable_parallel_tool_use": True}},
            asked(CALLS, **OFFERED),
        ),
    },
    protocol.AnthropicThinking: {
        "budget_tokens": Case(thinks(budget_tokens=2), asked(THINKS, **thinks())),
        "display": Case(thinks(display="omitted"), asked(THINKS, **thinks())),
    },
    protocol.OutputConfig: {"effort": Case({"output_config": {"effort": "low"}})},
    protocol.OutputFormat: {"schema_": Case(format({"const": "x"}), format({"const": "y"}))},
    protocol.AnthropicMessageParam: {
        "role": Case({"messages": [HI, {**HI, "role": "system"}]}, {"messages": [HI, HI]}),
        "content": Case({"messages": [{**HI, "content": "Ho"}]}),
    },
    protocol.TextBlock: {
        "text": Case(user({"type": "text", "text": "Ho"}), user({"type": "text", "text": "Hi"})),
    },
    protocol.MediaBlock: {"type": HISTORIES},
    protocol.FileSource: dict.fromkeys(("type", "url", "file_id"), HISTORIES),
    protocol.SearchResultBlock: {
        "title": Case(found(title="c"), found()),
        "source": Case(found(source="c"), found()),
        "content": Case(found(content=[{"type": "text", "text": "d"}]), found()),
    },
    protocol.TextSource: {
        "data": Case(document(source={"type": "text", "data": "y"}), document()),
    },
    protocol.DataSource: {
        "media_type": Case(file("eA==", "image/png"), file("eA==")),
        "data": Case(file("eQ=="), file("eA==")),
    },
    protocol.ContentSource: {
        "content": Case(document(source={"type": "content", "content": "y"}), document()),
    },
    protocol.DocumentBlock: {
        "title": Case(document(title="t"), document()),
        "context": Case(document(context="t"), document()),
    },
    protocol.ToolReferenceBlock: {"tool_name": Case(referenced("g"), referenced("h"))},
    protocol.ToolResultBlock: {
        "tool_use_id": f"{INPUT}::test_blocks_become_turns",
        "content": Case(answered(result={"content": "y"}), answered()),
        "is_error": Case(answered(result={"is_error": True}), answered()),
    },
    protocol.ToolUseBlock: {
        "extra_content": "tests/upstream/test_reasoning_details.py::"
        "test_a_signature_comes_back_with_its_call",
        "id": f"{INPUT}::test_blocks_become_turns",
        "name": Case(answered({"name": "g"}), answered()),
        "input": Case(answered({"input": {"b": 1}}), answered()),
    },
    protocol.ThinkingBlock: {
        "thinking": Case(thought(thinking="Ho"), thought()),
        "signature": f"{INPUT}::test_thoughts_come_back",
    },
    protocol.RedactedThinkingBlock: {
        "data": f"{INPUT}::test_blocks_that_mean_nothing_here_are_left_out_and_listed",
    },
}
