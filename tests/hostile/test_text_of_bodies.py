"""Text is never control, whichever field of whichever endpoint brings it, MCP servers included.

Each text of a valid body is replaced, as far as the body stays valid. `test_text.py` has the
fields of a conversation; here is the way from the wire to it.
"""

import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from functools import cache
from types import SimpleNamespace

import msgspec
import pytest
from mcp import types
from pydantic import ValidationError

from mlx_server.api.chat_completions.input import ChatBody
from mlx_server.api.chat_completions.input import to_request as of_chat
from mlx_server.api.native import NativeBody
from mlx_server.api.native import to_request as of_native
from mlx_server.api.responses.input import input_items
from mlx_server.api.responses.input import to_request as of_responses
from mlx_server.api.responses.items import read_items
from mlx_server.api.responses.protocol import ResponsesBody
from mlx_server.errors import ServerError
from mlx_server.generation.tool_loop import ServerTools
from mlx_server.http.security import SEALED, Signer
from mlx_server.mcp.server import Lister, text_of
from mlx_server.messages import Conversation, Message, ToolCall
from mlx_server.requests import GenerateRequest, McpServer
from tests.families.prompts import checkpoint_of
from tests.hostile.bodies import Place, at, places, put
from tests.hostile.routes import CHAT, NATIVE, RESPONSES, SCHEMA, Json
from tests.hostile.test_text import NAMES, control, every_mark, own_marks, twin

SIGNER = Signer(b"a key")

LONG, SHORT = 4000, 60

Reader = Callable[[Json], Conversation]

MADE_HERE: list[Json] = [
    {"role": "user", "content": "read this"},
    {"type": "reasoning", "summary": [], "encrypted_content": SIGNER.seal("sealed thought")},
    {"type": "reasoning", "summary": [{"type": "summary_text", "text": "a summary"}]},
    {"type": "mcp_call", "server_label": "s1", "name": "t1", "arguments": "a1", "output": "o1"},
    {
        "type": "mcp_call",
        "server_label": "s2",
        "name": "t2",
        "arguments": '{"a": "b1"}',
        "error": {"type": "e1", "content": [{"type": "text", "text": "e2"}]},
    },
    {"type": "mcp_call", "server_label": "s3", "name": "t3", "error": "e3"},
    {"type": "mcp_approval_request", "id": "r1", "server_label": "s4", "name": "t4"},
    {
        "type": "mcp_approval_response",
        "approval_request_id": "r1",
        "approve": False,
        "reason": "because",
    },
    {"role": "assistant", "content": [{"type": "refusal", "refusal": "no no"}]},
    {"role": "developer", "content": "be so"},
]
"""Items that a server stores or hands out, and gets back."""


def chat(body: Json) -> Conversation:
    return only(of_chat(ChatBody.model_validate(body)))


def native(body: Json) -> Conversation:
    return only(of_native(NativeBody.model_validate(body), "m"))


def responses(body: Json) -> Conversation:
    read = ResponsesBody.model_validate(body)
    return only(of_responses(read, input_items(read, lambda id: {}), opened=SIGNER.opened).request)


def stored(body: Json) -> Conversation:
    """The items are what `previous_response_id` or a conversation read back."""
    kept = [msgspec.json.decode(msgspec.json.encode(item)) for item in body["items"]]
    asked = ResponsesBody.model_validate({"model": "m", "input": "and now?"})
    items = input_items(asked, lambda id: {})
    return only(of_responses(asked, items, read_items(kept), opened=SIGNER.opened).request)


def from_mcp(body: Json) -> Conversation:
    """What a server lists and answers, as a later round has it."""
    server = McpServer(body["label"], url="https://example.com")
    lister = Lister(server)
    lister.add(types.ListToolsResult.model_validate({"tools": body["tools"]}))
    assert lister.listing.tools, lister.listing.error
    result = text_of(types.CallToolResult.model_validate(body["result"]), 1 << 20)
    call = ToolCall("c1", body["tools"][0]["name"], body["arguments"], body["label"])
    said = [Message("user", "go"), Message("assistant", tool_calls=(call,))]
    conversation = Conversation((*said, Message("tool", result, tool_call_id="c1")), ())
    toolset = SimpleNamespace(
        servers=[
            SimpleNamespace(
                requested=server, listing=lister.listing, needs_approval=lambda name: False
            )
        ]
    )
    tools = ServerTools(toolset, conversation.tools)  # type: ignore[arg-type]
    named = replace(conversation, messages=tuple(map(tools.renamed, conversation.messages)))
    offered = tuple(each.tool for each in tools.by_name.values())
    return conversation_of(replace(named, tools=offered))


def only(request: GenerateRequest) -> Conversation:
    (prompt,) = request.prompts
    assert isinstance(prompt, Conversation)
    return conversation_of(prompt)


def conversation_of(prompt: Conversation) -> Conversation:
    kwargs = {**prompt.template_kwargs, "conversation_start_date": "today"}
    return replace(prompt, template_kwargs=kwargs)


TOOL: Json = {
    "name": "look",
    "title": "Look",
    "description": "looks",
    "inputSchema": {**SCHEMA, "description": "where", "examples": ["here"], "title": "Where"},
    "annotations": {"title": "Looking"},
}
OF_MCP: Json = {
    "label": "wiki",
    "tools": [TOOL, {**TOOL, "name": "look again"}],
    "arguments": '{"a": "arg"}',
    "result": {
        "content": [
            {"type": "text", "text": "a result"},
            {"type": "resource_link", "name": "n", "uri": "https://example.com/file"},
            {"type": "resource", "resource": {"uri": "file:///f", "text": "a file's content"}},
        ]
    },
}
STRUCTURED: Json = {**OF_MCP, "result": {"content": [], "structuredContent": {"k1": ["v1"]}}}

BODIES: Mapping[str, tuple[Reader, Json, int]] = {
    "chat": (chat, CHAT[1], 1),
    "native": (native, NATIVE[0], 6),
    **{f"responses {n}": (responses, body, 1) for n, body in enumerate(RESPONSES[:2])},
    "responses, items of ours": (responses, {"model": "m", "input": MADE_HERE}, 20),
    "stored items of ours": (stored, {"items": MADE_HERE}, 20),
    "MCP": (from_mcp, OF_MCP, 12),
    "MCP, structured": (from_mcp, STRUCTURED, 10),
}
"""How it is read, the body, and how many of its texts can be replaced at least."""


def written(value: str, text: str) -> str:
    """In its place: what is sealed or JSON stays so."""
    if value.startswith(SEALED):
        return SIGNER.seal(text)
    if value.startswith("{"):
        return json.dumps({text: [text]})
    return text


def filled(body: Json, found: tuple[Place, ...], text: str) -> Json:
    for place in found:
        body = put(body, place, written(at(body, place), text))
    return body


def is_valid(reader: Reader, body: Json) -> bool:
    try:
        reader(body)
    except (ServerError, ValidationError, AssertionError):
        return False
    return True


@cache
def free(name: str, length: int = LONG) -> tuple[Place, ...]:
    """Where any text may stand: those that are equal together, or else each by itself."""
    reader, body, _ = BODIES[name]
    text = ("<b> |c| [d]" * length)[:length]
    groups: dict[str, list[Place]] = {}
    for place in places(body):
        if isinstance(value := at(body, place), str):
            groups.setdefault(value, []).append(place)
    found: tuple[Place, ...] = ()
    for group in groups.values():
        for tried in _tries(group):
            if not set(tried) & set(found) and is_valid(
                reader, filled(body, (*found, *tried), text)
            ):
                found = (*found, *tried)
    return found


def _tries(group: list[Place]) -> Iterator[tuple[Place, ...]]:
    yield tuple(group)
    yield from ((place,) for place in group)


def attacks(name: str) -> Iterator[tuple[str, int]]:
    """Texts, and the length for which their places are looked up."""
    yield " ".join(dict.fromkeys([*own_marks(name), *every_mark()])), LONG
    short = [mark for mark in own_marks(name) if len(mark) <= SHORT]
    yield "".join(short)[:SHORT], SHORT  # the last is cut, and may be whole with what comes next


@pytest.mark.parametrize("body", BODIES)
def test_texts_of_bodies_are_found(body: str) -> None:
    assert len(free(body)) >= BODIES[body][2], free(body)
    assert len(free(body, SHORT)) >= len(free(body))


def test_names_of_tools_are_among_them() -> None:
    assert ("tools", 0, "name") in free("MCP", SHORT)


@pytest.mark.parametrize(("body", "name"), [*zip(BODIES, NAMES, strict=False)])
def test_no_text_of_a_body_is_control(body: str, name: str) -> None:
    """Each body has a family of its own, since nothing between the wire and a conversation depends
    on the family; test_text.py has them all."""
    prompted = checkpoint_of(name)
    for text, length in attacks(name):
        each = body if length == LONG else "MCP"
        reader, sent, _ = BODIES[each]
        found, harmless = (
            control(name, prompted, reader(filled(sent, free(each, length), said)))
            for said in (text, twin(text))
        )
        assert found == harmless, (each, text)
