"""What clients send, as what the model is asked: items become the messages of a conversation."""

import asyncio
from typing import Any

import pytest

from mlx_server.api.responses.create import answered_within_context, drop_oldest
from mlx_server.api.responses.input import input_items
from mlx_server.api.responses.items import read_items, wire
from mlx_server.errors import ContextTooLong
from mlx_server.events import Event, Finished, Started, TokenCounts
from mlx_server.http.security import Signer
from mlx_server.messages import Conversation, Message, ToolCall
from mlx_server.requests import Approval, ChoiceFormat, GenerateRequest, JsonFormat
from tests.api.responses.asking import (
    SERVER,
    SIGNER,
    USER,
    asked,
    body,
    conversation,
    parsed,
    refused,
)
from tests.api.wire import Json
from tests.tables import cases, messages_of

CALL: Json = {"type": "function_call", "call_id": "c1", "name": "f", "arguments": "{}"}
RESULT: Json = {"type": "function_call_output", "call_id": "c1", "output": "42"}
THOUGHT: Json = {"type": "reasoning", "content": [{"type": "reasoning_text", "text": "hm"}]}
ASSISTANT: Json = {"type": "message", "role": "assistant", "content": "so"}
FIND: Json = {"server_label": "docs", "name": "find", "arguments": "{}"}
ASKED: Json = {"type": "mcp_approval_request", "id": "mcpr_1", **FIND}
GRANTED: Json = {"type": "mcp_approval_response", "approval_request_id": "mcpr_1", "approve": True}
DENIED: Json = {**GRANTED, "approve": False, "reason": "Not now"}
F = ToolCall("c1", "f", "{}")
USER_SAID = Message("user", "hi")


@cases
def test_items_become_turns(items: list[Json], turns: list[Json]) -> None:
    said = messages_of(turns)
    assert conversation(input=items).messages == said
    assert parsed(input=items).mcp.approvals == (), "the model has heard of them"
    stored = [wire(item) for item in read_items(items)]
    assert conversation(stored, input=[]).messages == said
    assert all(item["id"] for item in stored)


@cases
@pytest.mark.parametrize("role", ["user", "system", "developer", "assistant"])
def test_messages(role: Any, content: Any, text: str) -> None:
    for more in ({}, {"type": "message"}, {"type": None, "id": None, "status": None}):
        item = {"role": role, "content": content, **more}
        assert conversation(input=[item]).messages == (Message(role, text),)


SEALED: Json = {"content": None, "summary": [], "encrypted_content": SIGNER.seal("é")}
UNREAD = ("input.encrypted_content",)


@pytest.mark.parametrize(
    ("more", "reasoning", "ignored"),
    [
        (SEALED, "é", ()),
        ({"content": None, "summary": [{"type": "summary_text", "text": "short"}]}, "short", ()),
        ({"encrypted_content": "another server's"}, "hm", ()),
        ({"encrypted_content": None, "summary": None, "status": None}, "hm", ()),
        ({"content": [], "encrypted_content": None}, None, ()),
        ({**SEALED, "encrypted_content": "gAAAAABo"}, None, UNREAD),
        ({**SEALED, "encrypted_content": Signer(b"theirs").seal("hm")}, None, UNREAD),
        ({**SEALED, "encrypted_content": "mlx3.%"}, None, UNREAD),
    ],
)
def test_reasoning_in_each_of_its_forms(
    more: Json, reasoning: str | None, ignored: tuple[str, ...]
) -> None:
    items = [{**THOUGHT, "summary": [], **more}, ASSISTANT]
    (turn,) = conversation(input=items).messages
    assert turn == Message("assistant", "so", reasoning=reasoning)
    assert parsed(input=items).ignored == ignored


def test_earlier_items_and_instructions_come_first() -> None:
    found = conversation([USER, CALL], input=[RESULT], instructions="Be kind.").messages
    assert [m.role for m in found] == ["system", "user", "assistant", "tool"]
    assert (found[2].tool_calls, found[3].tool_call_id) == ((F,), "c1")


@pytest.mark.parametrize("nothing", [None, []])
def test_there_has_to_be_something_to_answer(nothing: Any) -> None:
    assert refused(input=nothing).param == "input"
    assert conversation([USER], input=nothing).messages == (USER_SAID,)
    assert conversation(input=nothing, instructions="Go.").messages == (Message("system", "Go."),)


def test_references() -> None:
    given = body(
        input=[{"id": "msg_1"}, {"type": "item_reference", "id": "fc_1"}, {"id": "?"}, USER]
    )
    items = input_items(given, {"msg_1": ASSISTANT, "fc_1": CALL}.get)
    assert [item.type for item in items] == ["message", "function_call", "message"]


def test_answers_to_requests_are_handed_on() -> None:
    find = ("mcpr_1", "docs", "find", "{}")
    granted = Approval(*find, approve=True)
    assert asked([USER, ASKED], input=[GRANTED], tools=[SERVER])[1].approvals == (granted,)
    denied = Approval(*find, approve=False, reason="Not now")
    assert asked([USER, ASKED], input=[DENIED, USER], tools=[SERVER])[1].approvals == (denied,)


@pytest.mark.parametrize(
    ("items", "tools"),
    [
        ([GRANTED], [SERVER]),
        ([ASKED, GRANTED, GRANTED], [SERVER]),
        ([GRANTED, ASKED], [SERVER]),
        ([ASKED, GRANTED], []),  # the server has gone
    ],
)
def test_an_answer_without_its_request_is_reported(items: list[Json], tools: list[Json]) -> None:
    found = parsed(input=[USER, *items], tools=tools)
    assert found.ignored == ("input.approval_request_id",)
    assert len(found.mcp.approvals) == (len(items) == 3)


def test_what_the_engine_is_asked() -> None:
    request, mcp = asked(
        max_output_tokens=5,
        max_response_tokens=4,
        max_tool_calls=3,
        temperature=0.5,
        top_p=0.9,
        top_k=3,
        min_p=0.1,
        presence_penalty=0.5,
        seed=1,
        stop=["a"],
        adapter="french",
        adapter_scale=0.5,
        top_logprobs=2,
        parallel_tool_calls=False,
        thinking_budget=7,
        reasoning={"effort": "high"},
        chat_template_kwargs={"x": 1},
    )
    (prompt,) = request.prompts
    assert isinstance(prompt, Conversation)
    assert prompt.template_kwargs == {"reasoning_effort": "high", "thinking_budget": 7, "x": 1}
    assert mcp.max_calls == 3
    assert (request.max_tokens, request.max_response_tokens, request.thinking_budget) == (5, 4, 7)
    assert (request.seed, request.stop, request.logprobs) == (1, ("a",), 2)
    assert (request.adapter, request.adapter_scale) == ("french", 0.5)
    assert (request.parallel_calls, request.buffered) == (False, True)
    assert set(request.choices) == {"temperature", "top_p", "top_k", "min_p", "presence_penalty"}


@cases
def test_log_probabilities(given: Json, logprobs: int | None) -> None:
    assert asked(**given)[0].logprobs == logprobs


SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}}
AS_JSON = {"type": "json_schema", "name": "sums", "schema": SCHEMA, "strict": True}


def test_formats() -> None:
    request, _ = asked(text={"format": AS_JSON, "verbosity": None})
    assert request.format == JsonFormat(SCHEMA, strict=True, name="sums")
    assert request.format_param == "text.format.schema"
    assert asked(text={"format": {"type": "json_object"}})[0].format == JsonFormat()
    assert asked(text={"format": {"type": "text"}})[0].format is None
    assert asked(structured_outputs={"choice": ["a", "b"]})[0].format == ChoiceFormat(("a", "b"))
    error = refused(text={"format": AS_JSON}, structured_outputs={"regex": "a"})
    assert error.param == "structured_outputs.regex"


def test_truncation() -> None:
    for given, truncates in [(None, False), ("disabled", False), ("auto", True)]:
        assert parsed(truncation=given).truncates is truncates


def test_two_budgets() -> None:
    assert asked(chat_template_kwargs={"thinking_budget": 3})[0].thinking_budget == 3
    error = refused(chat_template_kwargs={"thinking_budget": 3}, thinking_budget=3)
    assert error.param == "chat_template_kwargs.thinking_budget"


# The oldest turns are left out where not all of them fit.


def turns(count: int) -> list[Message]:
    said = [[Message("user", str(i)), Message("assistant", str(i))] for i in range(count)]
    return [Message("system", "s"), *(message for turn in said for message in turn)]


@pytest.mark.parametrize(
    ("dropped", "left"), [(0, "0123"), (1, "123"), (3, "3"), (4, "3"), (100, "3")]
)
def test_the_oldest_turns_go_and_the_last_one_stays(dropped: int, left: str) -> None:
    found = drop_oldest(Conversation(tuple(turns(4))), dropped).messages
    assert found[0] == Message("system", "s")
    assert "".join(m.content for m in found if m.role == "user") == left
    assert drop_oldest(Conversation(found[:1]), dropped).messages == found[:1]


class Room:
    """Holds so many messages, and no more."""

    def __init__(self, size: int) -> None:
        self.size, self.tries = size, list[int]()

    async def respond(self, request: GenerateRequest) -> Any:
        (prompt,) = request.prompts
        assert isinstance(prompt, Conversation)
        self.tries.append(len(prompt.messages))
        if len(prompt.messages) > self.size:
            raise ContextTooLong("Too long.")
        yield Started("tiny", 1)
        yield Finished(0, "stop", TokenCounts(1))


def answered(count: int, room: Room) -> list[Event]:
    async def everything() -> list[Event]:
        request = GenerateRequest("tiny", (Conversation(tuple(turns(count))),))
        return [
            event async for event in answered_within_context(request, room.respond, truncates=True)
        ]

    return asyncio.run(everything())


def test_as_much_as_fits_is_answered() -> None:
    room = Room(201)
    assert len(answered(100, room)) == 2
    assert room.tries == [201]
    room = Room(100)
    assert len(answered(100, room)) == 2
    assert room.tries == [201, 199, 197, 193, 185, 169, 137, 73]


def test_a_last_turn_that_is_too_long_is_an_error() -> None:
    room = Room(1)
    with pytest.raises(ContextTooLong):
        answered(3, room)
    assert room.tries == [7, 5, 3]
