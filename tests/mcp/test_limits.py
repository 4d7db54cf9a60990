"""How much MCP servers may send, and how many there may be at a time."""

import asyncio
from collections.abc import Callable
from contextlib import AsyncExitStack

import psutil
import pytest

from mlx_server import limits
from mlx_server.errors import Overloaded
from mlx_server.limits import MCP_MESSAGE_BRACKETS
from mlx_server.mcp.limits import ConnectionLost, ValueMeter, messages_meter
from mlx_server.requests import McpServer
from tests.mcp.habits import connectors, named
from tests.mcp.playing import all_gone, served
from tests.mcp.wild import Wild, quiet

pytestmark = pytest.mark.anyio


MANY = MCP_MESSAGE_BRACKETS


@pytest.mark.parametrize("unit", [b"[" * 4, b"{" * 4, b'"' * 16, b"," * 16])
def test_a_message_has_so_many_values(unit: bytes) -> None:
    meter = ValueMeter()
    for _ in range(MANY // 4):
        meter.count(unit)
    with pytest.raises(ConnectionLost, match="more than"):
        meter.count(unit)


@pytest.mark.parametrize("end", [b"\n\n", b"\r\n\r\n", b"\r\r"])
def test_each_event_of_a_stream_is_a_message(end: bytes) -> None:
    event = b"data: " + b"[" * MANY
    stream, body = ValueMeter(messages_meter()), ValueMeter()
    for _ in range(3):
        stream.count(event + end)
    body.count(event + end)
    with pytest.raises(ConnectionLost):
        body.count(event)


def processes() -> int:
    """Servers of ours and their guards."""
    return sum("guard.py" in " ".join(c.cmdline()) for c in psutil.Process().children())


Lower = Callable[..., None]


@pytest.fixture
def few(monkeypatch: pytest.MonkeyPatch) -> Lower:
    """Sets limits, by their names."""
    monkeypatch.setattr(limits, "MCP_WAIT_SECONDS", 0.2)

    def lower(**values: float) -> None:
        for name, value in values.items():
            monkeypatch.setattr(limits, name, value)

    return lower


@pytest.mark.slow
async def test_processes_are_so_many_until_the_last_one_is_gone(few: Lower) -> None:
    few(MCP_PROCESSES=2)
    found = connectors("a", "b", "will not go")
    async with AsyncExitStack() as stack:
        await stack.enter_async_context(found.open(named("a", "will not go")))
        assert processes() == 2
        with pytest.raises(Overloaded, match="all 2 processes for MCP servers"):
            await stack.enter_async_context(found.open(named("b")))
        assert processes() == 2
    assert processes() > 0, "it takes its time to go"
    few(MCP_WAIT_SECONDS=20)
    async with found.open(named("a", "b")) as toolset:
        assert processes() == 2
        assert [len(server.listing.tools) for server in toolset.servers] == [1, 1]
    await all_gone()


async def test_a_server_that_is_started_again_has_its_old_place(few: Lower) -> None:
    few(MCP_PROCESSES=1)
    found = connectors("dies")
    async with found.open(named("dies")) as toolset:
        for _ in range(2):
            with pytest.raises(Exception, match="closed the connection"):
                await toolset.call("dies", "look", "{}")
            assert processes() <= 1
    await all_gone()
    await asyncio.sleep(0)
    async with found.open(named("dies")):
        assert processes() == 1
    await all_gone()


@pytest.mark.slow
async def test_connections_by_http_are_so_many(few: Lower) -> None:
    few(MCP_SESSIONS=2, MCP_PROCESSES=1)
    found = connectors("a")
    async with served(Wild(quiet)) as url:
        two = [McpServer(label, url=url) for label in "xy"]
        async with found.open([*two, *named("a")]) as toolset:
            assert all(server.listing.tools for server in toolset.servers)
            with pytest.raises(Overloaded, match="all 2 connections"):
                async with found.open(two[:1]):
                    raise AssertionError
        await all_gone()
        async with found.open(two):
            pass
        await all_gone()


async def test_who_waits_for_processes_holds_up_none_that_needs_fewer_in_the_end(
    few: Lower,
) -> None:
    few(MCP_PROCESSES=2, MCP_SESSIONS=1, MCP_WAIT_SECONDS=5)
    found = connectors("a", "b")

    async def asking(servers: list[McpServer]) -> asyncio.Task[int]:
        async def opened() -> int:
            async with found.open(servers) as toolset:
                return len(toolset.servers)

        task = asyncio.create_task(opened())
        for _ in range(9):
            await asyncio.sleep(0)
        return task

    async with served(Wild(quiet)) as url, found.open(named("a")):
        two = await asking(named("a", "b"))
        assert await (await asking([McpServer("x", url=url)])) == 1, "it needs no process"
        one = await asking(named("b"))
        two.cancel()
        assert await one == 1
    await all_gone()


async def test_tools_of_all_servers_together(few: Lower) -> None:
    few(MCP_ALL_TOOLS=256)
    async with connectors("many tools", "a").open(named("many tools", "a")) as toolset:
        assert [len(server.listing.tools) for server in toolset.servers] == [256, 0]
        assert "256 tools" in (toolset.servers[1].listing.error or "")
        assert not toolset.has("a", "look")
    few(MCP_ALL_SCHEMA_BYTES=60)
    async with connectors("a", "b").open(named("a", "b")) as toolset:
        assert [len(server.listing.tools) for server in toolset.servers] == [1, 0]
    await all_gone()
