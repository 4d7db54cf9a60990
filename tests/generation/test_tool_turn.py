"""The events of one turn: what the client sees of its calls, and what is run."""

from dataclasses import replace
from pathlib import Path

import pytest

from mlx_server.events import (
    ApprovalRequested,
    McpCallStarted,
    Repaired,
    ToolCallDelta,
    ToolCallFinished,
    ToolCallStarted,
)
from mlx_server.mcp import McpLimits as McpLimits
from mlx_server.requests import ALL_TOOLS, McpServer, McpTools, ToolFilter
from tests.generation.tool_lab import FUNCTION, asking, call, kinds, lab, only, results, text

pytestmark = pytest.mark.anyio


async def test_a_function_of_the_clients_ends_the_turn_behind_our_own_calls(
    tmp_path: Path,
) -> None:
    mixed = call("add", a=1, b=2) + call("weather") + call("add", a=2, b=2)
    async with lab(tmp_path, mixed, "Never said.") as the:
        events = await the.events(conversation=asking(FUNCTION))
    assert [event.call for event in only(events, ToolCallStarted)] == [1]
    assert [event.call for event in only(events, ToolCallFinished)] == [1]
    assert {event.call for event in only(events, ToolCallDelta)} == {1}
    assert [event.call for event in only(events, McpCallStarted)] == [0, 2]
    assert sorted(results(events)) == [("3", None), ("4", None)]
    assert events[-1].reason == "tool_calls"  # type: ignore[union-attr]
    assert len(the.engine.rows) == 1


async def test_calls_over_max_tool_calls_are_ignored(tmp_path: Path) -> None:
    three = "".join(call("add", a=1, b=n) for n in range(3))
    async with lab(tmp_path, three, "Enough.") as the:
        events = await the.events(the.tools(max_calls=2))
        assert sorted(results(events)) == [("1", None), ("2", None)]
        assert [event.call for event in only(events, McpCallStarted)] == [0, 1]
        assert text(events) == "Enough."
        assert '"b": 2' not in the.engine.prompts[1], "the model does not hear of it either"


async def test_a_call_that_was_cut_off_is_not_made(tmp_path: Path) -> None:
    async with lab(tmp_path, call("shout", text="long enough to be cut")) as the:
        events = await the.events(max_tokens=50)
    assert "McpCallReady" not in kinds(events)
    assert results(events) == []
    assert events[-1].reason == "length"  # type: ignore[union-attr]


@pytest.mark.parametrize(
    ("server", "asks"),
    [
        (McpServer("s"), {"add", "shout"}),
        (McpServer("s", never_approve=ALL_TOOLS), set()),
        (McpServer("s", never_approve=ToolFilter(read_only=True)), {"shout"}),
        (
            McpServer("s", always_approve=ToolFilter(frozenset({"add"})), never_approve=ALL_TOOLS),
            {"add"},
        ),
    ],
)
async def test_what_needs_approval(tmp_path: Path, server: McpServer, asks: set[str]) -> None:
    both = call("add", a=1, b=2) + call("shout", text="a")
    async with lab(tmp_path, both, "Done.") as the:
        tools = McpTools((replace(server, url=the.server.url),))
        events = await the.events(tools)
    assert {event.name for event in only(events, ApprovalRequested)} == asks
    assert {event.name for event in only(events, McpCallStarted)} == {"add", "shout"} - asks


async def test_repairs_are_of_the_call_they_are_told_of(tmp_path: Path) -> None:
    wrong = call("add", a="1", b=2)
    async with lab(tmp_path, call("add", a=1, b=2), wrong, "Three.") as the:
        events = await the.events()
    assert [event.where for event in only(events, Repaired)] == [
        "tool_calls[1].function.arguments.a"
    ]
    assert results(events) == [("3", None), ("3", None)]
