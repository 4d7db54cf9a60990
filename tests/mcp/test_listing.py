"""Lists of tools are cut, and tools of no use are left out by name."""

import pytest

from tests.mcp.habits import listed, opened, outcome

pytestmark = [pytest.mark.anyio, pytest.mark.hostile]


async def test_a_tool_with_a_remote_reference_is_left_out() -> None:
    async with opened("remote refs") as toolset:
        names, error = listed(toolset)
        assert names == ["look"]
        assert error == (
            "'far' is left out: its schema refers to 'http://127.0.0.1:9/secret', which is not "
            "fetched."
        )
        assert await outcome(toolset, "remote refs") == "seen"


async def test_lists_without_end_are_cut() -> None:
    async with opened("many tools") as toolset:
        names, error = listed(toolset)
        assert len(names) == 256
        assert error == (
            "The server has more than 256 tools, or more than 262144 bytes of tools: the rest is "
            "left out."
        )
    async with opened("endless pages") as toolset:
        names, error = listed(toolset)
        assert len(names) == 256
        assert error
    async with opened("large schemas") as toolset:
        names, error = listed(toolset)
        assert names == ["look"]
        assert error


async def test_two_tools_of_one_name_are_one() -> None:
    async with opened("unusable schema") as toolset:
        names, error = listed(toolset)
        assert names == ["odd", "look"]
        assert error == "'look' is left out: another tool has the same name."
