"""Calls to the tools of one response: a few at a time, and so many bytes of results together."""

import asyncio
from types import SimpleNamespace
from typing import Any, cast

import pytest

from mlx_server.mcp import McpError, McpLimits, Toolset

pytestmark = pytest.mark.anyio


class Server:
    """Has the tool `look`, which answers when it may."""

    def __init__(self) -> None:
        self.requested = SimpleNamespace(label="s")
        self.listing = SimpleNamespace(tools={"look": None})
        self.may = asyncio.Event()
        self.called = 0

    async def call(self, tool: str, arguments: str) -> str:
        self.called += 1
        await self.may.wait()
        return "x" * 40


def toolset(server: Server, **limits: Any) -> Toolset:
    return Toolset([cast(Any, server)], McpLimits(**limits))


async def test_only_tools_of_the_list_are_called() -> None:
    server = Server()
    found = toolset(server)
    for label, tool in (("s", "write"), ("other", "look")):
        assert not found.has(label, tool)
        with pytest.raises(McpError, match="no such tool"):
            await found.call(label, tool, "{}")
    assert server.called == 0


async def test_a_few_calls_run_at_a_time() -> None:
    server = Server()
    found = toolset(server, parallel_calls=2)
    calls = [asyncio.create_task(found.call("s", "look", "{}")) for _ in range(5)]
    for _ in range(10):
        await asyncio.sleep(0)
    assert server.called == 2
    server.may.set()
    await asyncio.gather(*calls)
    assert server.called == 5


async def test_results_share_their_bytes() -> None:
    server = Server()
    server.may.set()
    found = toolset(server, all_result_bytes=60)
    first, second = [await found.call("s", "look", "{}") for _ in range(2)]
    assert first == "x" * 40
    assert second.startswith("x" * 20)
    assert second.count("x") == 20
