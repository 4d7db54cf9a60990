"""Tools of servers get names that the model can tell apart, and those of no use are left out."""

import json
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from mlx_server.errors import BadRequest
from mlx_server.events import McpCallStarted, ToolsListed
from mlx_server.generation.tool_loop import respond
from mlx_server.mcp import Connector, Connectors
from mlx_server.mcp import McpLimits as McpLimits
from mlx_server.messages import Conversation, Message, Tool, ToolCall
from mlx_server.requests import (
    ALL_TOOLS,
    Approval,
    GenerateRequest,
    McpChoice,
    McpServer,
    McpTools,
    ToolFilter,
)
from tests.generation.tool_lab import FUNCTION, HOSTILE, asking, call, lab, only, results
from tests.mcp.playing import MODEL, playing

pytestmark = pytest.mark.anyio


async def test_names_that_are_taken_get_their_servers(tmp_path: Path) -> None:
    say = call("weather") + call("a__add", a=1, b=2) + call("b__add", a=3, b=4)
    async with lab(tmp_path, say, "Never.") as the:
        servers = tuple(
            replace(the.server, label=label, allowed=ToolFilter(frozenset({"add", "shout"})))
            for label in ("a", "b")
        )
        shout = Tool("shout", "The client's own.", {})
        events = await the.events(McpTools(servers), conversation=asking(FUNCTION, shout))
    assert [(e.server, e.name) for e in only(events, McpCallStarted)] == [
        ("a", "add"),
        ("b", "add"),
    ]
    assert sorted(results(events)) == [("3", None), ("7", None)]
    offered = [line for line in the.engine.prompts[0].splitlines() if line.startswith("tool: ")]
    names = [json.loads(line.removeprefix("tool: "))["name"] for line in offered]
    assert names == ["weather", "shout", "a__add", "a__shout", "b__add", "b__shout"]


async def test_earlier_calls_go_by_the_names_of_now(tmp_path: Path) -> None:
    made = ToolCall("c1", "add", '{"a": 1, "b": 2}', server="calc")
    other = ToolCall("c2", "odd name!", "{}", server="gone")
    said = Message("assistant", tool_calls=(made, other))
    answers = (Message("tool", "3", tool_call_id="c1"), Message("tool", "?", tool_call_id="c2"))
    taken = Tool("add", "The client's own.", {})
    async with lab(tmp_path, "Yes.") as the:
        conversation = Conversation((Message("user", "Hi"), said, *answers), (taken,))
        await the.events(conversation=conversation)
        prompt = the.engine.prompts[0]
    assert "call c1: calc__add" in prompt
    assert "call c2: odd_name_" in prompt


async def test_only_allowed_tools_are_offered(tmp_path: Path) -> None:
    async with lab(tmp_path, call("shout", text="a")) as the:
        tools = McpTools((replace(the.server, allowed=ToolFilter(read_only=True)),))
        events = await the.events(tools)
        (listed,) = only(events, ToolsListed)
        assert [tool.name for tool in listed.tools] == ["add"]
        assert results(events) == []
        approval = Approval("r", "calc", "shout", "{}", approve=True)
        events = await the.events(replace(tools, approvals=(approval,)))
        assert results(events) == [(None, "There is no such tool.")]


async def test_a_list_that_the_client_has_is_not_told_again(tmp_path: Path) -> None:
    async with lab(tmp_path, "Hi.") as the:
        known = replace(the.server, listed=True)
        assert only(await the.events(McpTools((known,))), ToolsListed) == []
        gone = replace(known, url="http://127.0.0.1:9/mcp")
        (listed,) = only(await the.events(McpTools((gone,))), ToolsListed)
        assert "can't be reached" in listed.error


async def test_a_tool_that_has_to_be_called(tmp_path: Path) -> None:
    async with lab(tmp_path, call("calc__add", a=1, b=2), "Three.") as the:
        choice = McpChoice("calc", "add")
        taken = asking(Tool("add", "The client's own.", {}))
        events = await the.events(the.tools(choice=choice), conversation=taken)
        assert results(events) == [("3", None)]
        for wrong in (McpChoice("calc", "nothing"), McpChoice("nobody")):
            with pytest.raises(BadRequest) as error:
                await the.events(the.tools(choice=wrong))
            assert error.value.param == "tool_choice"
        empty = replace(the.server, allowed=ToolFilter(frozenset()))
        with pytest.raises(BadRequest, match="does not offer"):
            await the.events(McpTools((empty,), choice=McpChoice("calc")))


async def test_a_tool_with_a_schema_of_no_use_costs_only_itself(tmp_path: Path) -> None:
    connectors = {"odd": Connector(command=(sys.executable, str(HOSTILE), "unusable schema"))}
    async with playing(tmp_path, "qwen3", call("look"), "No.") as (pool, _):
        found = Connectors(connectors)
        server = McpServer("odd", connector="odd", never_approve=ALL_TOOLS)
        asked = GenerateRequest(MODEL, (asking(),), tool_choice="required")
        events = [e async for e in respond(asked, McpTools((server,)), found, pool)]
        await found.stop()
    (listed,) = only(events, ToolsListed)
    assert [tool.name for tool in listed.tools] == ["look"]
    assert "'odd' is left out:" in listed.error
    assert results(events) == [("seen", None)]
