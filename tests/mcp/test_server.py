"""A server that fails costs its call or its list of tools, and is started once more."""

import asyncio
from pathlib import Path

import pytest

from mlx_server import limits
from mlx_server.mcp import Connector, Connectors, McpLimits
from mlx_server.requests import McpServer
from tests.mcp.habits import HASTY, LIMITS, listed, opened, outcome

pytestmark = [pytest.mark.anyio, pytest.mark.hostile]


@pytest.mark.parametrize(
    ("habit", "limits", "message"),
    [
        ("no tools", LIMITS, "did not follow the protocol"),
        ("never speaks", HASTY, "did not answer within 0.5 s"),
    ],
)
async def test_a_list_that_never_comes(habit: str, limits: McpLimits, message: str) -> None:
    async with opened(habit, limits=limits) as toolset:
        names, error = listed(toolset)
    assert names == []
    assert message in (error or "")


async def test_a_command_that_is_not_there() -> None:
    connectors = Connectors({"x": Connector(command=("/no/such/program",))}, limits=LIMITS)
    async with connectors.open([McpServer("x", connector="x")]) as toolset:
        assert listed(toolset) == ([], "The server closed the connection.")
    await connectors.stop()


@pytest.mark.tables
@pytest.mark.parametrize(
    ("habit", "said"),
    [
        ("dies", "error: The server closed the connection."),
        ("lies about ids", "error: The server did not answer within 2 s."),
        ("hangs", "error: The server did not answer within 2 s."),
        ("floods a line", "error: The server sent a message of more than 8388608 bytes."),
        ("floods with lists", "error: The server sent a message of more than 262144 values."),
        ("floods notices", "error: The server sent more than 16777216 bytes."),
        ("changes its list", "error: Unknown tool: look"),
        ("no result", "error: The server did not follow the protocol (ValidationError)."),
        ("noise", "seen"),
        ("asks the user", "Elicitation not supported"),  # nobody is there to be asked
    ],
)
async def test_a_call_fails_alone(habit: str, said: str) -> None:
    limits = McpLimits(call_seconds=2 if "within 2 s" in said else 10, session_bytes=16 << 20)
    async with opened(habit, "quiet", limits=limits) as toolset:
        both = await asyncio.gather(outcome(toolset, habit), outcome(toolset, "quiet"))
        assert tuple(both) == (said, "seen")
        assert await outcome(toolset, "quiet") == "seen"


async def test_a_server_that_died_is_started_once_more(tmp_path: Path) -> None:
    async with opened("dies once", file=tmp_path / "died") as toolset:
        said = [await outcome(toolset, "dies once") for _ in range(3)]
    assert said == ["error: The server closed the connection.", "seen", "seen"]
    async with opened("dies") as toolset:
        said = [await outcome(toolset, "dies") for _ in range(limits.MCP_OPENINGS.value + 1)]
    closed = ["error: The server closed the connection."] * limits.MCP_OPENINGS.value
    assert said == [*closed, "error: The server's connection was lost twice."]
