"""Tools that come and go between messages."""

import pytest

from tests.api.messages.bodies import HI, LAST, LATER, TOOL, conversation, parsed, refused, system
from tests.api.wire import Json

# Tools that come and go


def added(name: str) -> Json:
    return {"type": "tool_addition", "tool": {"type": "tool_reference", "name": name}}


def removed(name: str) -> Json:
    return {"type": "tool_removal", "tool": {"type": "tool_reference", "name": name}}


def defined(name: str) -> Json:
    tool = {"type": "tool_definition", "definition": {**TOOL, "name": name}}
    return {"type": "tool_addition", "tool": tool}


@pytest.mark.parametrize(
    ("blocks", "offered"),
    [
        ([added("later")], ["f", "later"]),
        ([added("last"), added("later")], ["f", "last", "later"]),
        ([added("later"), removed("later")], ["f"]),
        ([removed("f")], []),
        ([removed("f"), added("f")], ["f"]),
        ([defined("new")], ["f", "new"]),
        ([defined("new"), removed("new")], ["f"]),
        ([defined("new"), removed("new"), added("new")], ["f", "new"]),
        ([{"type": "compaction", "content": "x", "tool_changes": [added("last")]}], ["f", "last"]),
        ([removed("unknown"), added("unknown")], ["f"]),
    ],
)
def test_messages_change_the_tools(blocks: list[Json], offered: list[str]) -> None:
    found = conversation(messages=[HI, system(*blocks)], tools=[LATER, TOOL, LAST])
    assert [tool.name for tool in found.tools] == offered


def test_a_tool_that_was_withdrawn_can_not_be_chosen() -> None:
    choice = {"type": "tool", "name": "f"}
    assert (
        "not among"
        in refused(messages=[HI, system(removed("f"))], tools=[TOOL], tool_choice=choice).message
    )


@pytest.mark.parametrize(
    "tool",
    [
        {"type": "mcp_tool_reference", "server_name": "s", "name": "n"},
        {"type": "mcp_toolset_reference", "server_name": "s"},
        {"type": "tool_definition", "definition": {"type": "web_search_20250305"}},
    ],
)
def test_tools_of_others_that_were_added_are_reported(tool: Json) -> None:
    asked = [HI, system({"type": "tool_addition", "tool": tool}), HI]
    assert conversation(messages=asked, tools=[TOOL]).tools[0].name == "f"
    kind = tool.get("definition", tool)["type"]
    (path,) = parsed(messages=asked, tools=[TOOL]).ignored
    assert path.endswith(f".{kind}")
