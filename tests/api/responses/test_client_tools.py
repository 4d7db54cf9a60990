"""Tools that the client runs and that are no plain functions: in namespaces, custom, searched."""

from collections.abc import Mapping, Sequence
from typing import Any

import pytest

from mlx_server.api.responses.answer import ResponseOutput
from mlx_server.api.responses.input import ParsedResponsesRequest, input_items, to_request
from mlx_server.api.responses.items import read_items, wire
from mlx_server.api.responses.protocol import ResponsesBody, new_response
from mlx_server.errors import BadRequest, NotFound
from mlx_server.events import (
    Event,
    Finished,
    Started,
    ToolCallDelta,
    ToolCallFinished,
    ToolCallStarted,
)
from mlx_server.messages import Conversation, Message, ToolCall
from mlx_server.requests import NamedTool
from tests.api.folding import body_of
from tests.api.responses_schema import assert_stream

Json = dict[str, Any]

USER: Json = {"role": "user", "content": "hi"}
F: Json = {"type": "function", "name": "f", "parameters": {"type": "object"}}
PATCH: Json = {"type": "custom", "name": "apply_patch", "description": "Patches."}
SEARCH: Json = {"type": "tool_search", "execution": "client", "description": "Finds tools."}


def docs(*tools: Json, name: str = "mcp__docs") -> Json:
    return {"type": "namespace", "name": name, "description": "The manual.", "tools": list(tools)}


def unknown(id: str) -> Mapping[str, Any]:
    raise NotFound(f"There is no item {id!r}.")


def body(**asked: Any) -> ResponsesBody:
    return ResponsesBody.model_validate({"model": "tiny", "input": [USER], **asked})


def parsed(earlier: Sequence[Json] = (), **asked: Any) -> ParsedResponsesRequest:
    read = body(**asked)
    return to_request(
        read, input_items(read, unknown), read_items(earlier), opened=lambda text: None
    )


def conversation(earlier: Sequence[Json] = (), **asked: Any) -> Conversation:
    (found,) = parsed(earlier, **asked).request.prompts
    assert isinstance(found, Conversation)
    return found


def names(earlier: Sequence[Json] = (), **asked: Any) -> list[str]:
    return [tool.name for tool in conversation(earlier, **asked).tools]


def refused(**asked: Any) -> BadRequest:
    with pytest.raises(BadRequest) as caught:
        parsed(**asked)
    return caught.value


def call(name: str, *arguments: str) -> list[Event]:
    deltas = [ToolCallDelta(0, 0, piece) for piece in arguments]
    return [ToolCallStarted(0, 0, "c1", name), *deltas, ToolCallFinished(0, 0)]


def output(**asked: Any) -> ResponseOutput:
    response = new_response(body(**asked), "r", stored=False)
    return ResponseOutput(response, table=parsed(**asked).table)


def streamed(events: Sequence[Event], reason: Any = "tool_calls", **asked: Any) -> list[Json]:
    made = output(**asked)
    reported = [Started("tiny", 1), *events, Finished(0, reason, 1, 0)]
    return [chunk for event in reported for chunk in made.chunks(event)]


def item(events: Sequence[Event], reason: Any = "tool_calls", **asked: Any) -> Json:
    """The only item of the response, streamed or not."""

    reported = [Started("tiny", 1), *events, Finished(0, reason, 1, 0)]
    (last,) = assert_stream(streamed(events, reason, **asked), is_open=False)["output"]
    (found,) = body_of(output(**asked), reported)["output"]
    assert {**found, "id": last["id"]} == last
    return dict(last)


# Namespaces


def test_the_tools_of_a_namespace_are_functions_with_names_that_differ() -> None:
    offered = conversation(tools=[F, docs(F, {**F, "name": "g"}), docs(F, name="crm__")]).tools
    assert [tool.name for tool in offered] == ["f", "mcp__docs__f", "mcp__docs__g", "crm__f"]
    assert [tool.description for tool in offered] == [None, "The manual.", None, "The manual."]


@pytest.mark.parametrize(
    ("tools", "shown"),
    [
        ([docs(F), {**F, "name": "mcp__docs__f"}], ["mcp__docs__f_2", "mcp__docs__f"]),
        (
            [docs({**F, "name": "a.b"}, {**F, "name": "a b"})],
            ["mcp__docs__a_b", "mcp__docs__a_b_2"],
        ),
        ([docs({**F, "name": "x" * 80})], ["mcp__docs__" + "x" * 53]),
        ([docs(F, name="Übersicht: é")], ["_bersicht_____f"]),
    ],
)
def test_a_name_is_one_that_every_family_can_write(tools: list[Json], shown: list[str]) -> None:
    assert names(tools=tools) == shown


def test_a_call_has_its_name_and_its_namespace() -> None:
    made = item(call("mcp__docs__f", '{"a"', ": 1}"), tools=[docs(F)])
    assert (made["type"], made["name"], made["namespace"]) == ("function_call", "f", "mcp__docs")
    assert made["arguments"] == '{"a": 1}'
    assert "namespace" not in item(call("f", "{}"), tools=[F, docs(F)])


def test_a_call_with_a_namespace_is_taken_back() -> None:
    made = item(call("mcp__docs__f", "{}"), tools=[docs(F)])
    reported = conversation([wire(read_items([made])[0])], tools=[docs(F)]).messages
    assert reported[0].tool_calls == (ToolCall("c1", "mcp__docs__f", "{}"),)
    later = conversation([made], tools=[F]).messages  # when the tool is not offered any more
    assert later[0].tool_calls == reported[0].tool_calls


@pytest.mark.parametrize(
    ("choice", "named"),
    [
        ({"name": "f"}, "f"),
        ({"name": "f", "namespace": "mcp__docs"}, "mcp__docs__f"),
        ({"name": "g"}, "mcp__docs__g"),
    ],
)
def test_a_choice_may_name_the_namespace(choice: Json, named: str) -> None:
    tools = [F, docs(F, {**F, "name": "g"})]
    found = parsed(tools=tools, tool_choice={"type": "function", **choice}).request
    assert found.tool_choice == NamedTool(named)
    some = {"type": "allowed_tools", "mode": "auto", "tools": [{"type": "function", **choice}]}
    assert names(tools=tools, tool_choice=some) == [named]


@pytest.mark.parametrize(
    ("choice", "message"),
    [
        ({"type": "function", "name": "f"}, "several of the `tools` have"),
        ({"type": "function", "name": "f", "namespace": "x"}, "'x.f', which is not among"),
        ({"type": "custom", "name": "f"}, "'f', which is not among"),
        ({"type": "namespace", "name": "a"}, "'namespace', which is not supported"),
    ],
)
def test_a_forced_tool_that_can_not_be_offered_is_named(choice: Json, message: str) -> None:
    found = refused(tools=[docs(F, name="a"), docs(F, name="b")], tool_choice=choice)
    assert message in found.message
    assert str(found.param).startswith("tool_choice")


def test_namespaces_count_by_their_tools() -> None:
    many = [docs(*({**F, "name": f"f{i}"} for i in range(100)), name=name) for name in "ab"]
    assert refused(tools=many).param == "tools"
    assert len(names(tools=many[:1])) == 100


@pytest.mark.parametrize(
    "tools",
    [
        [{"type": "web_search"}],
        [{"type": "web_search"}, docs({"type": "file_search"})],
        [{"type": "tool_search"}],
    ],
)
def test_tools_of_which_none_can_be_offered_are_refused_by_name(tools: list[Json]) -> None:
    found = refused(tools=tools)
    assert found.param == "tools"
    assert repr(tools[0]["type"]) in found.message
    assert names(tools=tools, tool_choice="none") == []
    assert names(tools=[*tools, F]) == ["f"]


def test_a_tool_that_is_allowed_but_not_here_is_named() -> None:
    choice = {"type": "allowed_tools", "mode": "auto", "tools": [{"type": "web_search"}]}
    assert "'web_search'" in refused(tools=[F], tool_choice=choice).message


# Custom tools


def test_a_custom_tool_has_one_argument() -> None:
    (tool,) = conversation(tools=[PATCH]).tools
    assert (tool.name, tool.description) == ("apply_patch", "Patches.")
    assert list(tool.parameters["properties"]) == ["input"]


def test_a_custom_call_comes_as_text() -> None:
    pieces = ['{"input": "', "*** Begin", "\\n", 'End"', "}"]
    chunks = streamed(call("apply_patch", *pieces), tools=[PATCH])
    deltas = [c["delta"] for c in chunks if c["type"] == "response.custom_tool_call_input.delta"]
    assert deltas == ["*** Begin", "\n", "End"]
    (done,) = (c for c in chunks if c["type"] == "response.custom_tool_call_input.done")
    assert done["input"] == "*** Begin\nEnd"
    made = item(call("apply_patch", *pieces), tools=[PATCH])
    assert (made["type"], made["name"]) == ("custom_tool_call", "apply_patch")
    assert (made["input"], made["status"]) == ("*** Begin\nEnd", "completed")


def test_a_custom_call_that_was_cut_off_is_incomplete() -> None:
    events = call("apply_patch", '{"input": "a')[:-1]
    made = item(events, "length", tools=[PATCH])
    assert (made["input"], made["status"]) == ("a", "incomplete")


def test_a_custom_tool_may_be_in_a_namespace() -> None:
    made = item(call("mcp__docs__apply_patch", '{"input": "a"}'), tools=[docs(PATCH)])
    assert (made["name"], made["namespace"]) == ("apply_patch", "mcp__docs")


def test_a_custom_call_and_its_output_are_taken_back() -> None:
    made = item(call("apply_patch", '{"input": "é\\n"}'), tools=[PATCH])
    result = {"type": "custom_tool_call_output", "call_id": "c1", "output": "Done."}
    reported = conversation(input=[USER, made, result], tools=[PATCH]).messages
    assert reported[1].tool_calls == (ToolCall("c1", "apply_patch", '{"input": "é\\n"}'),)
    assert reported[2] == Message("tool", "Done.", tool_call_id="c1")


def test_a_custom_tool_can_be_forced() -> None:
    choice = {"type": "custom", "name": "apply_patch"}
    found = parsed(tools=[PATCH, F], tool_choice=choice).request
    assert found.tool_choice == NamedTool("apply_patch")


def test_one_name_is_one_tool() -> None:
    found = refused(tools=[F, {**PATCH, "name": "f"}])
    assert found.param == "tools[1].name"
    assert names(tools=[F, docs({**PATCH, "name": "f"})]) == ["f", "mcp__docs__f"]


# Tools that are added later

LATER: Json = {**F, "name": "later", "defer_loading": True}
SEARCHED: Json = {
    "type": "tool_search_call",
    "call_id": "s1",
    "execution": "client",
    "arguments": {"query": "x"},
    "status": "completed",
}
FOUND: Json = {
    "type": "tool_search_output",
    "call_id": "s1",
    "execution": "client",
    "status": "completed",
    "tools": [LATER, docs(F)],
}


def test_a_search_is_a_call() -> None:
    made = item(call("tool_search", '{"query"', ': "x"}'), tools=[SEARCH])
    assert made.pop("id").startswith("tsc_")
    assert made == {**SEARCHED, "call_id": "c1"}


def test_a_search_that_was_cut_off_has_no_arguments() -> None:
    made = item(call("tool_search", '{"query"')[:-1], "length", tools=[SEARCH])
    assert (made["arguments"], made["status"]) == ({}, "incomplete")


def test_half_a_character_in_a_search_is_replaced() -> None:
    made = item(call("tool_search", '{"query": "\\ud800"}'), tools=[SEARCH])
    assert made["arguments"] == {"query": "?"}


def test_a_deferred_tool_is_offered_once_it_is_found() -> None:
    assert names(tools=[SEARCH, LATER, F]) == ["tool_search", "f"]
    items = [USER, SEARCHED, FOUND]
    assert names(input=items, tools=[SEARCH, LATER]) == ["tool_search", "later", "mcp__docs__f"]
    assert names(items, tools=[SEARCH, LATER]) == ["tool_search", "later", "mcp__docs__f"]
    _, asked, reported = conversation(input=items, tools=[SEARCH, LATER]).messages
    assert asked.tool_calls == (ToolCall("s1", "tool_search", '{"query": "x"}'),)
    assert reported.content == "These tools can be called now: later, mcp__docs__f"


@pytest.mark.parametrize("search", [[], [{"type": "tool_search"}]])
def test_where_nobody_can_search_every_tool_is_offered(search: list[Json]) -> None:
    found = parsed(tools=[*search, LATER])
    assert names(tools=[*search, LATER]) == ["later"]
    kinds = [f"tools.{each['type']}" for each in search]
    assert found.ignored == ("tools.defer_loading", *kinds)


def test_items_add_tools() -> None:
    added = {"type": "additional_tools", "role": "developer", "tools": [F, {"type": "web_search"}]}
    found = parsed(input=[added, USER])
    assert found.ignored == ("input.tools.web_search",)
    assert names(input=[added, USER]) == ["f"]
    assert conversation(input=[added, USER]).messages == (Message("user", "hi"),)
    (stored,) = read_items([wire(read_items([added])[0])])
    assert names([wire(stored)]) == ["f"]


def test_a_search_by_the_server_is_ignored() -> None:
    items = [USER, {**SEARCHED, "call_id": None}, {**FOUND, "call_id": None}]
    assert parsed(input=items, tools=[F]).ignored == ("input.tool_search_call",)
    assert conversation(input=items, tools=[F]).messages == (Message("user", "hi"),)
