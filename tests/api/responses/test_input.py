"""What clients send, as what the model is asked."""

import asyncio
from collections.abc import Mapping, Sequence
from typing import Any

import pytest

from mlx_server.api.responses.input import input_items, references, to_request
from mlx_server.api.responses.item_messages import SUMMARY
from mlx_server.api.responses.items import read_items, wire
from mlx_server.api.responses.protocol import ResponsesBody
from mlx_server.api.responses.truncation import drop_oldest, truncate_to_fit
from mlx_server.api.signatures import Signer
from mlx_server.errors import BadRequest, ContextTooLong, NotFound
from mlx_server.events import Event, Finished, Started
from mlx_server.messages import Conversation, Message, ToolCall
from mlx_server.requests import (
    ALL_TOOLS,
    NO_TOOLS,
    Approval,
    ChoiceFormat,
    GenerateRequest,
    JsonFormat,
    McpChoice,
    McpTools,
    NamedTool,
    ToolFilter,
)

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

FUNCTION: Json = {"type": "function", "name": "f", "parameters": {"type": "object"}}
SERVER: Json = {"type": "mcp", "server_label": "docs", "server_url": "https://example.com/mcp"}

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


def test_text_is_what_the_user_says() -> None:
    assert conversation(input="hi").messages == (USER_SAID,)


@pytest.mark.parametrize(
    "content",
    [
        "hi",
        [{"type": "input_text", "text": "hi"}],
        [{"type": "text", "text": "hi"}],
        [{"type": "output_text", "text": "hi", "annotations": None, "logprobs": None}],
        [{"type": "refusal", "refusal": "hi"}],
    ],
)
@pytest.mark.parametrize("role", ["user", "system", "developer", "assistant"])
@pytest.mark.parametrize(
    "more", [{}, {"type": "message"}, {"type": None, "id": None, "status": None}]
)
def test_messages(role: Any, content: Any, more: Json) -> None:
    assert messages({"role": role, "content": content, **more}) == [Message(role, "hi")]


def test_parts_of_a_message_are_told_one_by_one_from_each_other() -> None:
    parts = [{"type": "input_text", "text": "a"}, {"type": "input_text", "text": "b"}]
    assert messages({"role": "user", "content": parts}) == [Message("user", "a\nb")]
    assert messages({"role": "user", "content": None}) == [Message("user", "")]


@pytest.mark.parametrize("kind", ["input_image", "input_audio", "input_video"])
@pytest.mark.parametrize(
    ("item", "where"),
    [
        ({"role": "user", "content": None}, "content"),
        ({"type": "function_call_output", "call_id": "c1", "output": None}, "output"),
    ],
)
def test_media_are_refused_by_name(kind: str, item: Json, where: str) -> None:
    part = {"type": kind, "image_url": "data:image/png;base64,AA", "detail": "auto"}
    error = refused(input=[CALL, {**item, where: [part]}])
    assert error.param == f"input[1].{where}[0].type"
    assert kind in error.message


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
    "a summary": (
        [{"type": "compaction", "encrypted_content": SIGNER.seal("long ago")}, USER],
        [Message("system", SUMMARY + "long ago"), USER_SAID],
    ),
    "what nobody here can read": (
        [USER, {"type": "web_search_call", "id": "ws_1", "status": "completed", "action": {}}],
        [USER_SAID],
    ),
}


@pytest.mark.parametrize(("items", "turns"), TURNS.values(), ids=TURNS)
def test_items_become_turns(items: list[Json], turns: list[Message]) -> None:
    assert messages(*items) == turns


@pytest.mark.parametrize(("items", "turns"), TURNS.values(), ids=TURNS)
def test_so_do_items_that_were_kept(items: list[Json], turns: list[Message]) -> None:
    kept = [wire(item) for item in read_items(items)]
    assert list(conversation(kept, input=[]).messages) == turns
    assert all(item["id"] for item in kept)


@pytest.mark.parametrize(
    ("more", "reasoning"),
    [
        ({"content": None, "summary": [], "encrypted_content": SIGNER.seal("é")}, "é"),
        ({"content": None, "summary": [{"type": "summary_text", "text": "short"}]}, "short"),
        ({"encrypted_content": "someone else's"}, "hm"),
        ({"encrypted_content": None, "summary": None, "status": None}, "hm"),
        ({"content": [], "encrypted_content": None}, None),
    ],
)
def test_reasoning_in_each_of_its_forms(more: Json, reasoning: str | None) -> None:
    (turn,) = messages({**THOUGHT, "summary": [], **more}, ASSISTANT)
    assert turn == Message("assistant", "so", reasoning=reasoning)


@pytest.mark.parametrize("token", ["gAAAAABo", Signer(b"theirs").seal("hm"), "mlx3.%", "x" * 99])
def test_reasoning_that_is_sealed_by_others_is_dropped(token: str) -> None:
    item = {"type": "reasoning", "encrypted_content": token, "summary": []}
    found = body(input=[USER, item, ASSISTANT])
    made = to_request(found, input_items(found, unknown), opened=SIGNER.opened)
    (prompt,) = made.request.prompts
    assert isinstance(prompt, Conversation)
    assert prompt.messages == (USER_SAID, Message("assistant", "so"))
    assert made.ignored == ("input.encrypted_content",)
    own = body(input=[USER, {**item, "encrypted_content": SIGNER.seal("hm")}, ASSISTANT])
    made = to_request(own, input_items(own, unknown), opened=SIGNER.opened)
    (prompt,) = made.request.prompts
    assert isinstance(prompt, Conversation)
    assert prompt.messages[1].reasoning == "hm"
    assert made.ignored == ()


@pytest.mark.parametrize("token", ["gAAAAABo", Signer(b"theirs").seal("do as I say")])
def test_a_summary_that_is_sealed_by_others_is_refused(token: str) -> None:
    error = refused(input=[USER, {"type": "compaction", "encrypted_content": token}])
    assert (error.param, error.code) == ("input[1].encrypted_content", "invalid_encrypted_content")


@pytest.mark.parametrize(
    "items", [[RESULT], [RESULT, CALL], [CALL, {**RESULT, "call_id": "c2"}], [MADE, RESULT]]
)
def test_a_result_needs_its_call(items: list[Json]) -> None:
    assert str(refused(input=items).param).endswith(".call_id")


def test_the_call_may_be_an_earlier_one() -> None:
    first, second = conversation([CALL], input=[RESULT]).messages
    assert (first.tool_calls, second.tool_call_id) == ((F,), "c1")


def test_instructions_are_this_requests_alone_and_come_first() -> None:
    found = conversation([USER, ASSISTANT], input="hi", instructions="Be kind.").messages
    assert found[0] == Message("system", "Be kind.")
    assert [m.role for m in found[1:]] == ["user", "assistant", "user"]


@pytest.mark.parametrize("nothing", [None, []])
def test_there_has_to_be_something_to_answer(nothing: Any) -> None:
    assert refused(input=nothing).param == "input"
    assert conversation([USER], input=nothing).messages == (USER_SAID,)
    assert conversation(input=nothing, instructions="Go.").messages == (Message("system", "Go."),)


def test_references() -> None:
    found = body(input=[{"id": "msg_1"}, {"type": "item_reference", "id": "fc_1"}, USER, RESULT])
    assert references(found) == ["msg_1", "fc_1"]
    items = input_items(found, {"msg_1": ASSISTANT, "fc_1": CALL}.__getitem__)
    assert [item.type for item in items] == [
        "message",
        "function_call",
        "message",
        "function_call_output",
    ]
    with pytest.raises(NotFound, match="msg_1"):
        input_items(found, unknown)


# --- approvals


def test_answers_to_requests_are_handed_on() -> None:
    granted = Approval("mcpr_1", "docs", "find", "{}", approve=True)
    assert asked([USER, ASKED], input=[GRANTED])[1].approvals == (granted,)
    denied = Approval("mcpr_1", "docs", "find", "{}", approve=False, reason="Not now")
    assert asked([USER, ASKED], input=[DENIED, USER])[1].approvals == (denied,)


@pytest.mark.parametrize("items", TURNS.values(), ids=TURNS)
def test_those_that_the_model_has_heard_of_are_not(items: tuple[list[Json], Any]) -> None:
    assert asked(input=items[0])[1].approvals == ()


@pytest.mark.parametrize("items", [[GRANTED], [ASKED, GRANTED, GRANTED], [GRANTED, ASKED]])
def test_an_answer_needs_its_request(items: list[Json]) -> None:
    assert str(refused(input=items).param).endswith(".approval_request_id")


# --- tools


def test_tools() -> None:
    request, mcp = asked(tools=[FUNCTION, {"type": "web_search"}, SERVER])
    (prompt,) = request.prompts
    assert isinstance(prompt, Conversation)
    assert [tool.name for tool in prompt.tools] == ["f"]
    (server,) = mcp.servers
    assert (server.label, server.url, server.param) == (
        "docs",
        "https://example.com/mcp",
        "tools[2]",
    )
    assert (server.always_approve, server.never_approve) == (ALL_TOOLS, NO_TOOLS)


READ_ONLY = ToolFilter(read_only=True)


@pytest.mark.parametrize(
    ("given", "always", "never"),
    [
        (None, ALL_TOOLS, NO_TOOLS),
        ("always", ALL_TOOLS, NO_TOOLS),
        ("never", NO_TOOLS, ALL_TOOLS),
        ({"never": {"read_only": True}}, NO_TOOLS, READ_ONLY),
        ({"always": {"tool_names": ["a"]}, "never": None}, ToolFilter(frozenset("a")), NO_TOOLS),
    ],
)
def test_approval(given: Any, always: ToolFilter, never: ToolFilter) -> None:
    (server,) = asked(tools=[{**SERVER, "require_approval": given}])[1].servers
    assert (server.always_approve, server.never_approve) == (always, never)


@pytest.mark.parametrize(
    ("given", "allowed"),
    [
        (None, ALL_TOOLS),
        ([], NO_TOOLS),
        (["a", "b"], ToolFilter(frozenset("ab"))),
        ({"read_only": True, "tool_names": None}, READ_ONLY),
    ],
)
def test_allowed_tools_of_a_server(given: Any, allowed: ToolFilter) -> None:
    (server,) = asked(tools=[{**SERVER, "allowed_tools": given}])[1].servers
    assert server.allowed == allowed


def test_a_list_that_the_client_knows() -> None:
    listed = {"type": "mcp_list_tools", "id": "mcpl_1", "server_label": "docs", "tools": []}
    for item, known in [(listed, True), ({**listed, "error": "Gone."}, False)]:
        (server,) = asked([item], tools=[SERVER])[1].servers
        assert server.listed is known


@pytest.mark.parametrize(
    ("choice", "made"),
    [
        (None, "auto"),
        ("auto", "auto"),
        ("none", "none"),
        ("required", "required"),
        ({"type": "function", "name": "f"}, NamedTool("f")),
    ],
)
def test_choice(choice: Any, made: Any) -> None:
    assert asked(tools=[FUNCTION], tool_choice=choice)[0].tool_choice == made


def test_choice_of_a_servers_tool() -> None:
    for name in (None, "find"):
        choice = {"type": "mcp", "server_label": "docs", "name": name}
        assert asked(tools=[SERVER], tool_choice=choice)[1].choice == McpChoice("docs", name)
    assert asked(tools=[SERVER], tool_choice="required")[0].tool_choice == "required"


def test_choice_among_some() -> None:
    def among(*tools: Json) -> tuple[GenerateRequest, McpTools]:
        choice = {"type": "allowed_tools", "mode": "required", "tools": list(tools)}
        others = [{**FUNCTION, "name": "g"}, {**SERVER, "server_label": "mail"}]
        return asked(tools=[FUNCTION, SERVER, *others], tool_choice=choice)

    def names(request: GenerateRequest) -> list[str]:
        (prompt,) = request.prompts
        assert isinstance(prompt, Conversation)
        return [tool.name for tool in prompt.tools]

    request, mcp = among({"type": "function", "name": "f"})
    assert (request.tool_choice, names(request), mcp.servers) == ("required", ["f"], ())
    of_docs = {"type": "mcp", "server_label": "docs"}
    request, mcp = among({**of_docs, "name": "a"}, {**of_docs, "name": "b"}, {"type": "web_search"})
    (server,) = mcp.servers
    assert (names(request), server.label, server.allowed.names) == ([], "docs", frozenset("ab"))
    (server,) = among({**of_docs, "name": "a"}, of_docs)[1].servers
    assert server.allowed == ALL_TOOLS


@pytest.mark.parametrize(
    ("tools", "choice"),
    [
        ([], "required"),
        ([FUNCTION], {"type": "function", "name": "g"}),
        ([FUNCTION], {"type": "mcp", "server_label": "docs"}),
        ([SERVER], {"type": "mcp", "server_label": "mail"}),
        ([{"type": "web_search"}], {"type": "web_search"}),
        ([FUNCTION], {"type": "custom", "name": "f"}),
        (
            [FUNCTION],
            {"type": "allowed_tools", "mode": "auto", "tools": [{"type": "function", "name": "g"}]},
        ),
        (
            [FUNCTION],
            {"type": "allowed_tools", "mode": "required", "tools": [{"type": "web_search"}]},
        ),
    ],
)
def test_choices_that_cannot_be_made(tools: list[Json], choice: Any) -> None:
    assert str(refused(tools=tools, tool_choice=choice).param).startswith("tool_choice")


@pytest.mark.parametrize(
    "tools",
    [
        [SERVER, SERVER],
        [{**SERVER, "server_url": None}],
        [{**SERVER, "connector_id": "mine"}],
    ],
)
def test_servers_that_cannot_be_meant(tools: list[Json]) -> None:
    assert str(refused(tools=tools).param).startswith("tools")


# --- parameters


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


@pytest.mark.parametrize(
    ("given", "logprobs"),
    [
        ({}, None),
        ({"top_logprobs": 0}, None),
        ({"top_logprobs": 3}, 3),
        ({"include": ["message.output_text.logprobs"]}, 0),
        ({"include": ["message.output_text.logprobs"], "top_logprobs": 3}, 3),
        ({"include": ["reasoning.encrypted_content"]}, None),
    ],
)
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
        found = body(truncation=given)
        made = to_request(found, input_items(found, unknown), opened=SIGNER.opened)
        assert made.truncates is truncates


def test_two_budgets() -> None:
    assert asked(chat_template_kwargs={"thinking_budget": 3})[0].thinking_budget == 3
    error = refused(chat_template_kwargs={"thinking_budget": 3}, thinking_budget=3)
    assert error.param == "chat_template_kwargs.thinking_budget"


# --- truncation


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
        yield Finished(0, "stop", 1, 0)


def answered(count: int, room: Room) -> list[Event]:
    async def everything() -> list[Event]:
        request = GenerateRequest("tiny", (Conversation(tuple(turns(count))),))
        return [event async for event in truncate_to_fit(request, room.respond)]

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
