"""Which servers a request may name, what is sent to them, and how many calls run at a time."""

import asyncio
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, cast

import pytest

from mlx_server.errors import BadRequest
from mlx_server.mcp import Connector, Connectors, McpError, Toolset
from mlx_server.mcp.server import ToolResult
from mlx_server.requests import McpServer
from tests.mcp.playing import lowered, served
from tests.mcp.wild import Wild, listed, opened, outcome, quiet

pytestmark = pytest.mark.anyio


async def test_headers_and_authorization_are_sent() -> None:
    wild = Wild(quiet)
    async with served(wild) as url:
        server = McpServer("wild", url=url, headers={"X-Team": "a"}, authorization="token")
        async with opened(server) as toolset:
            assert await outcome(toolset) == "seen"
    assert {head["authorization"] for head in wild.heads} == {"Bearer token"}
    assert {head["x-team"] for head in wild.heads} == {"a"}
    assert {head["accept-encoding"] for head in wild.heads} == {"identity"}
    assert {head["host"] for head in wild.heads} == {url.removeprefix("http://")}


async def test_the_owners_headers_win_over_those_of_a_request() -> None:
    wild = Wild(quiet)
    async with served(wild) as url:
        connector = Connector(url=url, headers={"Authorization": "owner"}, allow_private=True)
        server = McpServer("wild", connector="wiki", authorization="mine", headers={"X-A": "1"})
        async with opened(server, allow_private_urls=False, wiki=connector) as toolset:
            assert await outcome(toolset) == "seen"
    assert {head["authorization"] for head in wild.heads} == {"owner"}
    assert {head["x-a"] for head in wild.heads} == {"1"}


async def test_private_addresses_are_for_those_whom_the_owner_lets() -> None:
    wild = Wild(quiet)
    async with served(wild) as url:
        port = url.rpartition(":")[2]
        hosts = ["127.0.0.1", "localhost", "2130706433", "0x7f.1", "[::ffff:127.0.0.1]", "127.1"]
        for host in hosts:
            server = McpServer("wild", url=f"http://{host}:{port}")
            async with opened(server, allow_private_urls=False) as toolset:
                tools, error = listed(toolset)
            assert not tools
            assert "private network" in error, host
        assert wild.heads == []
        async with opened(McpServer("wild", url=url)) as toolset:
            assert await outcome(toolset) == "seen"


GOOD = McpServer("s", url="https://example.com/mcp", param="tools[0]")


@pytest.mark.parametrize(
    ("server", "message"),
    [
        *(
            (replace(GOOD, url=url), "needs an http or https URL")
            for url in (
                *("ftp://x/", "file:///etc/passwd", "x", "", "http://", "http:///x", "//x/y"),
                *("http://[::1", "http://x:99999/", "http://x y/", "http://x/\n", "javascript:0"),
                "http://" + "x" * 3000,
            )
        ),
        (replace(GOOD, url="http://a:b@x/"), "user name"),
        (replace(GOOD, url=None, connector="nobody"), "models.yaml has: tool"),
        (replace(GOOD, url=None, connector="tool", authorization="x"), "takes no headers"),
        *(
            (replace(GOOD, headers={name: "x"}), "can't have the header")
            for name in ("Host", "content-length", "Transfer-Encoding", "a b", "", "mcp-session-id")
        ),
        (replace(GOOD, headers={"x": "a\r\nb: c"}), "not printable"),
        (replace(GOOD, headers={"x": "é"}), "not printable"),
        (replace(GOOD, authorization="a\nb"), "not printable"),
    ],
)
async def test_what_can_not_be_a_server(server: McpServer, message: str) -> None:
    with pytest.raises(BadRequest, match=message) as error:
        async with opened(server, tool=Connector(command=("true",))):
            raise AssertionError
    assert error.value.param == "tools[0]"


async def test_servers_are_few() -> None:
    servers = [replace(GOOD, label=str(i)) for i in range(17)]
    with pytest.raises(BadRequest, match="the limit is 16"):
        async with Connectors().open(servers):
            raise AssertionError


class Server:
    """Has the tool `look`, which answers when it may."""

    def __init__(self) -> None:
        self.requested = SimpleNamespace(label="s")
        self.listing = SimpleNamespace(tools={"look": None})
        self.may = asyncio.Event()
        self.called = 0

    async def call(self, tool: str, arguments: str) -> ToolResult:
        self.called += 1
        await self.may.wait()
        return ToolResult("x" * 40)


def toolset(server: Server, **limits: float) -> Toolset:
    with lowered(**limits):
        return Toolset([cast(Any, server)])


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
    found = toolset(server, MCP_PARALLEL_CALLS=2)
    calls = [asyncio.create_task(found.call("s", "look", "{}")) for _ in range(5)]
    for _ in range(10):
        await asyncio.sleep(0)
    assert server.called == 2
    server.may.set()
    await asyncio.gather(*calls)
    assert server.called == 5
