"""Tools of a request, and those that are deferred."""

from typing import Any

import pytest

from mlx_server.messages import Tool
from mlx_server.requests import NamedTool
from tests.api.messages.bodies import (
    CACHED,
    HI,
    LAST,
    LATER,
    SCHEMA,
    TOOL,
    assistant,
    conversation,
    parsed,
    refused,
    result,
    use,
    user,
)
from tests.api.wire import Json

# Tools


def test_tools() -> None:
    found = conversation(tools=[{**TOOL, **CACHED}, {**TOOL, "name": "g", "type": "custom"}])
    assert found.tools == (Tool("f", "does f", SCHEMA), Tool("g", "does f", SCHEMA))
    assert conversation(tools=[{**TOOL, "strict": True}]).tools[0].strict


@pytest.mark.parametrize(
    ("choice", "expected"),
    [
        (None, "auto"),
        ({"type": "auto"}, "auto"),
        ({"type": "any"}, "required"),
        ({"type": "none"}, "none"),
        ({"type": "tool", "name": "f"}, NamedTool("f")),
    ],
)
def test_choices(choice: Json | None, expected: Any) -> None:
    request = parsed(tools=[TOOL], tool_choice=choice).request
    assert (request.tool_choice, request.parallel_calls) == (expected, True)
    if choice:
        alone = {**choice, "disable_parallel_tool_use": True}
        assert not parsed(tools=[TOOL], tool_choice=alone).request.parallel_calls


@pytest.mark.parametrize(
    ("asked", "param"),
    [
        ({"tool_choice": {"type": "any"}}, "tool_choice"),
        ({"tools": [TOOL], "tool_choice": {"type": "tool", "name": "g"}}, "tool_choice"),
        ({"tools": [TOOL], "tool_choice": {"type": "tool"}}, "tool_choice.name"),
        ({"tools": [TOOL, TOOL]}, "tools[1].name"),
        ({"tools": [{"type": "web_search_20250305", "name": "web_search"}]}, "tools"),
        ({"tools": [{"type": "bash_20250124", "name": "bash"}]}, "tools"),
        ({"tools": [{"type": "mcp_toolset", "mcp_server_name": "a"}]}, "tools"),
        ({"tools": [{"type": "tool_search_tool_regex_20251119", "name": "a"}]}, "tools"),
    ],
)
def test_tools_that_can_not_be_offered(asked: Json, param: str) -> None:
    found = refused(**asked)
    assert found.param == param
    if param == "tools":
        assert repr(asked["tools"][-1]["type"]) in found.message


SEARCHED: Json = {
    "type": "tool_search_tool_result",
    "tool_use_id": "s",
    "content": {
        "type": "tool_search_tool_search_result",
        "tool_references": [{"type": "tool_reference", "tool_name": "later"}],
    },
}


@pytest.mark.parametrize(
    ("given", "offered"),
    [
        ([HI], ["f"]),
        ([assistant(use("1")), user(result("1", "later"))], ["f"]),
        (
            [
                assistant(use("1")),
                user(result("1", [{"type": "tool_reference", "tool_name": "later"}])),
            ],
            ["f", "later"],
        ),
        (
            [assistant(use("1")), user({"type": "tool_reference", "tool_name": "last"}), HI],
            ["f", "last"],
        ),
        ([assistant(SEARCHED), HI], ["f", "later"]),
        ([assistant({**use("1"), "name": "last"}), user(result("1")), HI], ["f", "last"]),
        (
            [
                assistant({**use("1"), "name": "last"}),
                user(result("1", [{"type": "tool_reference", "tool_name": "later"}])),
            ],
            ["f", "last", "later"],
        ),
    ],
)
def test_a_deferred_tool_is_offered_once_it_is_referenced(
    given: list[Json], offered: list[str]
) -> None:
    found = conversation(messages=given, tools=[LATER, TOOL, LAST])
    assert [tool.name for tool in found.tools] == offered


def test_a_deferred_tool_that_is_chosen_is_offered() -> None:
    choice = {"type": "tool", "name": "later"}
    assert conversation(tools=[LATER], tool_choice=choice).tools[0].name == "later"


def test_a_failed_search_references_nothing() -> None:
    failed = {"type": "tool_search_tool_result_error", "error_code": "unavailable"}
    given = [assistant({**SEARCHED, "content": failed}), HI]
    assert conversation(messages=given, tools=[LATER]).tools == ()
