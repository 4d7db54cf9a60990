"""Tools: of servers, in namespaces, of free text, found by a search, and the choice among them."""

import asyncio
from collections.abc import Sequence
from typing import Any

import pytest

from mlx_server.api.responses.answer import ResponseOutput
from mlx_server.api.responses.create import answered_within_context, drop_oldest
from mlx_server.api.responses.input import ParsedResponsesRequest, input_items, to_request
from mlx_server.api.responses.items import read_items, wire
from mlx_server.api.responses.protocol import ResponsesBody, new_response
from mlx_server.errors import BadRequest, ContextTooLong
from mlx_server.events import (
    Event,
    Finished,
    Started,
    TokenCounts,
    ToolCallDelta,
    ToolCallFinished,
    ToolCallStarted,
)
from mlx_server.http.security import Signer
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
from tests.api.responses_schema import assert_stream
from tests.api.wire import Json
from tests.tables import cases, messages_of

SIGNER = Signer(b"ours")
USER: Json = {"role": "user", "content": "hi"}
FUNCTION: Json = {"type": "function", "name": "f", "parameters": {"type": "object"}}
SERVER: Json = {"type": "mcp", "server_label": "docs", "server_url": "https://example.com"}


def body(**given: Any) -> ResponsesBody:
    return ResponsesBody.model_validate({"model": "tiny", "input": "hi", **given})


def parsed(earlier: Sequence[Json] = (), **given: Any) -> ParsedResponsesRequest:
    read = body(**given)
    items = input_items(read, dict[str, Json]().get)
    return to_request(read, items, read_items(earlier), opened=SIGNER.opened)


def asked(earlier: Sequence[Json] = (), **given: Any) -> tuple[GenerateRequest, McpTools]:
    found = parsed(earlier, **given)
    return found.request, found.mcp


def conversation(earlier: Sequence[Json] = (), **given: Any) -> Conversation:
    (prompt,) = parsed(earlier, **given).request.prompts
    assert isinstance(prompt, Conversation)
    return prompt


def names(earlier: Sequence[Json] = (), **given: Any) -> list[str]:
    """Of the tools that the model may call."""
    return [tool.name for tool in conversation(earlier, **given).tools]


def refused(**given: Any) -> BadRequest:
    with pytest.raises(BadRequest) as caught:
        parsed(**given)
    return caught.value


G: Json = {**FUNCTION, "name": "g"}
PATCH: Json = {"type": "custom", "name": "apply_patch", "description": "Patches."}
SEARCH: Json = {"type": "tool_search", "execution": "client", "description": "Finds tools."}
WEB: Json = {"type": "web_search"}


def docs(*tools: Json, name: str = "mcp__docs") -> Json:
    return {"type": "namespace", "name": name, "description": "The manual.", "tools": list(tools)}


# Servers


def test_tools() -> None:
    _, mcp = asked(tools=[FUNCTION, WEB, SERVER])
    assert names(tools=[FUNCTION, WEB, SERVER]) == ["f"]
    (server,) = mcp.servers
    assert (server.label, server.url, server.param) == ("docs", SERVER["server_url"], "tools[2]")


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
    "tools",
    [[SERVER, SERVER], [{**SERVER, "server_url": None}], [{**SERVER, "connector_id": "mine"}]],
)
def test_servers_that_cannot_be_meant(tools: list[Json]) -> None:
    assert str(refused(tools=tools).param).startswith("tools")


# The choice


@pytest.mark.parametrize(
    ("choice", "expected"),
    [
        (None, "auto"),
        ("none", "none"),
        ("required", "required"),
        ({"type": "function", "name": "f"}, NamedTool("f")),
        ({"type": "custom", "name": "apply_patch"}, NamedTool("apply_patch")),
        ({"type": "function", "name": "g"}, NamedTool("mcp__docs__g")),
        ({"type": "function", "name": "f", "namespace": "mcp__docs"}, NamedTool("mcp__docs__f")),
    ],
)
def test_choice(choice: Any, expected: Any) -> None:
    tools = [FUNCTION, PATCH, docs(FUNCTION, G)]
    assert asked(tools=tools, tool_choice=choice)[0].tool_choice == expected


def test_choice_of_a_servers_tool() -> None:
    for name in (None, "find"):
        choice = {"type": "mcp", "server_label": "docs", "name": name}
        assert asked(tools=[SERVER], tool_choice=choice)[1].choice == McpChoice("docs", name)
    assert asked(tools=[SERVER], tool_choice="required")[0].tool_choice == "required"


def some(*tools: Json, mode: str = "required") -> Json:
    return {"type": "allowed_tools", "mode": mode, "tools": list(tools)}


NAMED: Json = {"type": "function", "name": "f"}
OF_DOCS: Json = {"type": "mcp", "server_label": "docs"}


@pytest.mark.parametrize(
    ("choice", "offered", "servers"),
    [
        (some(NAMED), ["f"], {}),
        (some({"type": "custom", "name": "apply_patch"}), ["apply_patch"], {}),
        (some({**NAMED, "namespace": "mcp__docs"}), ["mcp__docs__f"], {}),
        (
            some({**OF_DOCS, "name": "a"}, {**OF_DOCS, "name": "b"}, WEB),
            [],
            {"docs": ToolFilter(frozenset("ab"))},
        ),
        (some({**OF_DOCS, "name": "a"}, OF_DOCS), [], {"docs": ALL_TOOLS}),
    ],
)
def test_choice_among_some(choice: Json, offered: list[str], servers: Any) -> None:
    tools = [FUNCTION, SERVER, G, PATCH, docs(FUNCTION), {**SERVER, "server_label": "mail"}]
    request, mcp = asked(tools=tools, tool_choice=choice)
    assert request.tool_choice == "required"
    assert names(tools=tools, tool_choice=choice) == offered
    assert {server.label: server.allowed for server in mcp.servers} == servers


@cases
def test_choices_that_cannot_be_made(tools: list[Json], choice: Any, message: str) -> None:
    error = refused(tools=tools, tool_choice=choice)
    assert str(error.param).startswith("tool_choice")
    assert message in error.message


@pytest.mark.parametrize("tools", [[WEB], [WEB, docs(WEB)], [{"type": "tool_search"}]])
def test_tools_of_which_none_can_be_offered_are_refused_by_name(tools: list[Json]) -> None:
    error = refused(tools=tools)
    assert error.param == "tools"
    assert repr(tools[0]["type"]) in error.message
    assert names(tools=tools, tool_choice="none") == []
    assert names(tools=[*tools, FUNCTION]) == ["f"]


# Calls of the client's tools


def call(name: str, *arguments: str, whole: bool = True) -> list[Event]:
    deltas = [ToolCallDelta(0, 0, piece) for piece in arguments]
    end = [ToolCallFinished(0, 0)] if whole else []
    return [ToolCallStarted(0, 0, "c1", name), *deltas, *end]


def streamed(events: Sequence[Event], *tools: Json, reason: Any = "tool_calls") -> list[Json]:
    asked = {"tools": list(tools)}
    output = ResponseOutput(
        new_response(body(**asked), "r", stored=False), table=parsed(**asked).table
    )
    reported = [Started("tiny", 1), *events, Finished(0, reason, TokenCounts(1))]
    return [chunk for event in reported for chunk in output.chunks(event)]


def item(events: Sequence[Event], *tools: Json, reason: Any = "tool_calls") -> Json:
    """The only item of the response."""
    chunks = streamed(events, *tools, reason=reason)
    (only,) = assert_stream(chunks, is_open=False)["output"]
    return dict(only)


SEARCHED: Json = {
    "type": "tool_search_call",
    "call_id": "c1",
    "execution": "client",
    "arguments": {"query": "x"},
    "status": "completed",
}
CUT: Json = {"status": "incomplete"}
F_CALL: Json = {"type": "function_call", "call_id": "c1", "status": "completed"}
PATCHED: Json = {**F_CALL, "type": "custom_tool_call", "name": "apply_patch"}

CALLS: dict[str, tuple[list[Event], Json, Json]] = {
    "in a namespace": (
        call("mcp__docs__f", '{"a"', ": 1}"),
        docs(FUNCTION),
        {**F_CALL, "name": "f", "namespace": "mcp__docs", "arguments": '{"a": 1}'},
    ),
    "in none": (call("f", "{}"), FUNCTION, {**F_CALL, "name": "f", "arguments": "{}"}),
    "free text": (
        call("apply_patch", '{"input": "', "*** Begin", "\\n", 'End"', "}"),
        PATCH,
        {**PATCHED, "input": "*** Begin\nEnd"},
    ),
    "free text in a namespace": (
        call("mcp__docs__apply_patch", '{"input": "a"}'),
        docs(PATCH),
        {**PATCHED, "namespace": "mcp__docs", "input": "a"},
    ),
    "free text, cut": (
        call("apply_patch", '{"input": "a', whole=False),
        PATCH,
        {**PATCHED, "input": "a", **CUT},
    ),
    "a search": (call("tool_search", '{"query"', ': "x"}'), SEARCH, SEARCHED),
    "a search, cut": (
        call("tool_search", '{"query"', whole=False),
        SEARCH,
        {**SEARCHED, "arguments": {}, **CUT},
    ),
    "half a character": (
        call("tool_search", '{"query": "\\ud800"}'),
        SEARCH,
        {**SEARCHED, "arguments": {"query": "?"}},
    ),
}


@pytest.mark.parametrize(("events", "tool", "expected"), CALLS.values(), ids=CALLS)
def test_a_call_is_one_of_what_the_client_knows(
    events: list[Event], tool: Json, expected: Json
) -> None:
    reason = "length" if expected["status"] == "incomplete" else "tool_calls"
    found = item(events, tool, reason=reason)
    assert {name: value for name, value in found.items() if name != "id"} == expected
    assert found["id"].startswith(
        {"function_call": "fc_", "custom_tool_call": "ctc_"}.get(found["type"], "tsc_")
    )


def test_free_text_is_streamed_as_such() -> None:
    chunks = streamed(CALLS["free text"][0], PATCH)
    kind = "response.custom_tool_call_input"
    deltas = [c["delta"] for c in chunks if c["type"] == f"{kind}.delta"]
    assert deltas == ["*** Begin", "\n", "End"]
    (done,) = (c for c in chunks if c["type"] == f"{kind}.done")
    assert done["input"] == "*** Begin\nEnd"


@pytest.mark.parametrize(
    ("name", "called"),
    [
        ("in a namespace", ToolCall("c1", "mcp__docs__f", '{"a": 1}')),
        ("free text", ToolCall("c1", "apply_patch", '{"input": "*** Begin\\nEnd"}')),
    ],
)
def test_a_call_and_its_output_are_taken_back(name: str, called: ToolCall) -> None:
    events, tool, _ = CALLS[name]
    made = item(events, tool)
    result = {"type": "custom_tool_call_output", "call_id": "c1", "output": "Done."}
    for tools in ([tool], [FUNCTION]):  # it may not be offered any more
        messages = conversation([wire(read_items([made])[0])], input=[result], tools=tools).messages
        assert messages[0].tool_calls == (called,)
        assert messages[1] == Message("tool", "Done.", tool_call_id="c1")


# Names


def test_the_tools_of_a_namespace_are_functions_with_names_that_differ() -> None:
    tools = [FUNCTION, docs(FUNCTION, G), docs(FUNCTION, name="crm__"), docs(PATCH, name="x")]
    offered = conversation(tools=tools).tools
    assert [tool.name for tool in offered] == [
        *("f", "mcp__docs__f", "mcp__docs__g", "crm__f", "x__apply_patch")
    ]
    assert [tool.description for tool in offered[:4]] == [None, "The manual.", None, "The manual."]
    assert offered[4].description == "The manual.\n\nPatches."
    assert list(offered[4].parameters["properties"]) == ["input"]


@pytest.mark.parametrize(
    ("tools", "shown"),
    [
        (
            [docs(FUNCTION), {**FUNCTION, "name": "mcp__docs__f"}],
            ["mcp__docs__f_2", "mcp__docs__f"],
        ),
        (
            [docs({**FUNCTION, "name": "a.b"}, {**FUNCTION, "name": "a b"})],
            ["mcp__docs__a_b", "mcp__docs__a_b_2"],
        ),
        ([docs({**FUNCTION, "name": "x" * 80})], ["mcp__docs__" + "x" * 53]),
        ([docs(FUNCTION, name="Übersicht: é")], ["_bersicht_____f"]),
        ([FUNCTION, docs({**PATCH, "name": "f"})], ["f", "mcp__docs__f"]),
    ],
)
def test_a_name_is_one_that_every_family_can_write(tools: list[Json], shown: list[str]) -> None:
    assert names(tools=tools) == shown


def test_one_name_is_one_tool() -> None:
    assert refused(tools=[FUNCTION, {**PATCH, "name": "f"}]).param == "tools[1].name"


def test_namespaces_count_by_their_tools() -> None:
    many = [docs(*({**FUNCTION, "name": f"f{i}"} for i in range(300)), name=name) for name in "ab"]
    assert refused(tools=many).param == "tools"
    assert len(names(tools=many[:1])) == 300


# Tools that are added later

LATER: Json = {**FUNCTION, "name": "later", "defer_loading": True}
FOUND: Json = {
    "type": "tool_search_output",
    "call_id": "c1",
    "execution": "client",
    "status": "completed",
    "tools": [LATER, docs(FUNCTION)],
}


def test_a_deferred_tool_is_offered_once_it_is_found() -> None:
    assert names(tools=[SEARCH, LATER, FUNCTION]) == ["tool_search", "f"]
    items = [USER, SEARCHED, FOUND]
    offered = ["tool_search", "later", "mcp__docs__f"]
    assert names(input=items, tools=[SEARCH, LATER]) == offered
    assert names(items, tools=[SEARCH, LATER]) == offered
    _, search, result = conversation(input=items, tools=[SEARCH, LATER]).messages
    assert search.tool_calls == (ToolCall("c1", "tool_search", '{"query": "x"}'),)
    assert result.content == "These tools can be called now: later, mcp__docs__f"


@pytest.mark.parametrize("search", [[], [{"type": "tool_search"}]])
def test_where_nobody_can_search_every_tool_is_offered(search: list[Json]) -> None:
    assert names(tools=[*search, LATER]) == ["later"]
    kinds = [f"tools.{each['type']}" for each in search]
    assert parsed(tools=[*search, LATER]).ignored == ("tools.defer_loading", *kinds)


def test_items_add_tools() -> None:
    added = {"type": "additional_tools", "role": "developer", "tools": [FUNCTION, WEB]}
    assert parsed(input=[added, USER]).ignored == ("input.tools.web_search",)
    assert names(input=[added, USER]) == ["f"]
    assert conversation(input=[added, USER]).messages == (Message("user", "hi"),)
    (stored,) = read_items([wire(read_items([added])[0])])
    assert names([wire(stored)]) == ["f"]


def test_a_search_by_the_server_is_ignored() -> None:
    items = [USER, {**SEARCHED, "call_id": None}, {**FOUND, "call_id": None}]
    assert parsed(input=items, tools=[FUNCTION]).ignored == ("input.tool_search_call",)
    assert conversation(input=items, tools=[FUNCTION]).messages == (Message("user", "hi"),)


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
