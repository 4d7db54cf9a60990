"""Bodies of /v1/responses, and the requests that they are."""

from collections.abc import Mapping, Sequence
from typing import Any

import pytest

from mlx_server.api.responses.input import input_items, to_request
from mlx_server.api.responses.items import read_items
from mlx_server.api.responses.protocol import ResponsesBody
from mlx_server.errors import BadRequest, NotFound
from mlx_server.http.security import Signer
from mlx_server.messages import Conversation, Message, ToolCall
from mlx_server.requests import GenerateRequest, McpTools

Json = dict[str, Any]
CALL: Json = {"type": "function_call", "call_id": "c1", "name": "f", "arguments": "{}"}
RESULT: Json = {"type": "function_call_output", "call_id": "c1", "output": "42"}
THOUGHT: Json = {"type": "reasoning", "content": [{"type": "reasoning_text", "text": "hm"}]}
ASSISTANT: Json = {"type": "message", "role": "assistant", "content": "so"}
USER: Json = {"role": "user", "content": "hi"}
MADE: Json = {
    "type": "mcp_call",
    "id": "mcp_1",
    "server_label": "docs",
    "name": "find",
    "arguments": "{}",
    "output": "found",
}


ASKED: Json = {
    "type": "mcp_approval_request",
    "id": "mcpr_1",
    "server_label": "docs",
    "name": "find",
    "arguments": "{}",
}


GRANTED: Json = {
    "type": "mcp_approval_response",
    "approval_request_id": "mcpr_1",
    "approve": True,
}


DENIED: Json = {**GRANTED, "approve": False, "reason": "Not now"}
SIGNER = Signer(b"ours")
F = ToolCall("c1", "f", "{}")
FIND = ToolCall("mcp_1", "find", "{}", server="docs")
USER_SAID = Message("user", "hi")


def body(**asked: Any) -> ResponsesBody:
    return ResponsesBody.model_validate({"model": "tiny", "input": "hi", **asked})


def unknown(id: str) -> Mapping[str, Any]:
    raise NotFound(f"There is no item {id!r}.")


def asked(earlier: Sequence[Json] = (), **given: Any) -> tuple[GenerateRequest, McpTools]:
    found = body(**given)
    made = to_request(found, input_items(found, unknown), read_items(earlier), opened=SIGNER.opened)
    return made.request, made.mcp


def conversation(earlier: Sequence[Json] = (), **given: Any) -> Conversation:
    (found,) = asked(earlier, **given)[0].prompts
    assert isinstance(found, Conversation)
    return found


def messages(*items: Json) -> list[Message]:
    return list(conversation(input=list(items)).messages)


def refused(**given: Any) -> BadRequest:
    with pytest.raises(BadRequest) as caught:
        asked(**given)
    return caught.value


TURNS: dict[str, tuple[list[Json], list[Message]]] = {
    "one turn": (
        [USER, THOUGHT, ASSISTANT, CALL, RESULT],
        [
            USER_SAID,
            Message("assistant", "so", reasoning="hm", tool_calls=(F,)),
            Message("tool", "42", tool_call_id="c1"),
        ],
    ),
    "reasoning and a call": (
        [THOUGHT, CALL, RESULT, THOUGHT, ASSISTANT],
        [
            Message("assistant", reasoning="hm", tool_calls=(F,)),
            Message("tool", "42", tool_call_id="c1"),
            Message("assistant", "so", reasoning="hm"),
        ],
    ),
    "calls side by side": (
        [CALL, {**CALL, "call_id": "c2"}, {**RESULT, "call_id": "c2"}, RESULT],
        [
            Message("assistant", tool_calls=(F, ToolCall("c2", "f", "{}"))),
            Message("tool", "42", tool_call_id="c2"),
            Message("tool", "42", tool_call_id="c1"),
        ],
    ),
    "text and reasoning among calls": (
        [CALL, THOUGHT, ASSISTANT, {**CALL, "call_id": "c2"}, THOUGHT, RESULT],
        [
            Message(
                "assistant",
                "so",
                reasoning="hm\n\nhm",
                tool_calls=(F, ToolCall("c2", "f", "{}")),
            ),
            Message("tool", "42", tool_call_id="c1"),
        ],
    ),
    "commentary and answer": (
        [{**ASSISTANT, "phase": "commentary"}, THOUGHT, {**ASSISTANT, "phase": "final_answer"}],
        [
            Message("assistant", "so", phase="commentary"),
            Message("assistant", "so", reasoning="hm", phase="final_answer"),
        ],
    ),
    "commentary and a call": (
        [{**ASSISTANT, "phase": "commentary"}, CALL],
        [Message("assistant", "so", tool_calls=(F,), phase="commentary")],
    ),
    "texts of two phases and a call": (
        [{**ASSISTANT, "phase": "commentary"}, ASSISTANT, CALL],
        [Message("assistant", "so\n\nso", tool_calls=(F,))],
    ),
    "reasoning of nothing": (
        [THOUGHT, USER],
        [Message("assistant", reasoning="hm"), USER_SAID],
    ),
    "a call without arguments": (
        [{**CALL, "arguments": None}],
        [Message("assistant", tool_calls=(ToolCall("c1", "f", ""),))],
    ),
    "arguments as an object": (
        [{**CALL, "arguments": {"a": "é"}}],
        [Message("assistant", tool_calls=(ToolCall("c1", "f", '{"a": "é"}'),))],
    ),
    "parts of a result": (
        [CALL, {**RESULT, "output": [{"type": "input_text", "text": "4"}] * 2}],
        [
            Message("assistant", tool_calls=(F,)),
            Message("tool", "4\n4", tool_call_id="c1"),
        ],
    ),
    "a call of another kind": (
        [
            {"type": "custom_tool_call", "call_id": "c1", "name": "patch", "input": "é"},
            {"type": "custom_tool_call_output", "call_id": "c1", "output": "done"},
        ],
        [
            Message("assistant", tool_calls=(ToolCall("c1", "patch", '{"input": "é"}'),)),
            Message("tool", "done", tool_call_id="c1"),
        ],
    ),
    "a call that was run here": (
        [THOUGHT, MADE, ASSISTANT],
        [
            Message("assistant", reasoning="hm", tool_calls=(FIND,)),
            Message("tool", "found", tool_call_id="mcp_1"),
            Message("assistant", "so"),
        ],
    ),
    "calls run here and there": (
        [MADE, {**MADE, "id": "mcp_2"}, CALL, RESULT],
        [
            Message(
                "assistant", tool_calls=(FIND, ToolCall("mcp_2", "find", "{}", server="docs"), F)
            ),
            Message("tool", "found", tool_call_id="mcp_1"),
            Message("tool", "found", tool_call_id="mcp_2"),
            Message("tool", "42", tool_call_id="c1"),
        ],
    ),
    "a call that failed": (
        [{**MADE, "output": None, "error": {"type": "x", "content": [{"text": "No."}]}}],
        [
            Message("assistant", tool_calls=(FIND,)),
            Message("tool", "No.", tool_call_id="mcp_1"),
        ],
    ),
    "a call that was denied": (
        [THOUGHT, ASKED, DENIED, ASSISTANT],
        [
            Message(
                "assistant", reasoning="hm", tool_calls=(ToolCall("mcpr_1", "find", "{}", "docs"),)
            ),
            Message("tool", "The user has denied this call: Not now", tool_call_id="mcpr_1"),
            Message("assistant", "so"),
        ],
    ),
    "a call that was denied, and another one": (
        [ASKED, DENIED, CALL, RESULT],
        [
            Message("assistant", tool_calls=(ToolCall("mcpr_1", "find", "{}", "docs"), F)),
            Message("tool", "The user has denied this call: Not now", tool_call_id="mcpr_1"),
            Message("tool", "42", tool_call_id="c1"),
        ],
    ),
    "a call that was granted, and made": (
        [THOUGHT, ASKED, GRANTED, {**MADE, "approval_request_id": "mcpr_1"}, ASSISTANT],
        [
            Message("assistant", reasoning="hm", tool_calls=(FIND,)),
            Message("tool", "found", tool_call_id="mcp_1"),
            Message("assistant", "so"),
        ],
    ),
    "a request that nobody answered": (
        [ASSISTANT, ASKED, USER],
        [Message("assistant", "so"), USER_SAID],
    ),
    "what nobody here can read": (
        [USER, {"type": "web_search_call", "id": "ws_1", "status": "completed", "action": {}}],
        [USER_SAID],
    ),
}


def turns(count: int) -> list[Message]:
    said = [[Message("user", str(i)), Message("assistant", str(i))] for i in range(count)]
    return [Message("system", "s"), *(message for turn in said for message in turn)]
