"""A server without the SDK, reached by HTTP, which a test makes do what it should not."""

import json
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from types import MappingProxyType
from typing import Any

from mlx_server.mcp import Connectors, McpError, Toolset
from mlx_server.requests import McpServer
from tests.mcp.playing import all_gone, lowered

HASTY = {"MCP_CALL_SECONDS": 0.5}
SMALL = {"MCP_MESSAGE_BYTES": 1 << 16, "MCP_SESSION_BYTES": 1 << 18}
TOOL = {"name": "look", "inputSchema": {"type": "object"}}


Send = Callable[[dict[str, Any]], Awaitable[None]]


class Wild:
    """A server without the SDK: it is well-behaved until a tool is called."""

    def __init__(self, call: Callable[[Send, Any], Awaitable[None]]) -> None:
        self.heads: list[dict[str, str]] = []
        self.paths: list[str] = []
        self.bodies: list[Any] = []
        self._call = call

    async def __call__(self, scope: Any, receive: Any, send: Send) -> None:
        if scope["type"] == "lifespan":
            await receive()
            await send({"type": "lifespan.startup.complete"})
            await receive()
            await send({"type": "lifespan.shutdown.complete"})
            return
        self.heads.append({k.decode(): v.decode() for k, v in scope["headers"]})
        self.paths.append(scope["path"])
        body = b""
        while (message := await receive())["type"] == "http.request":
            body += message["body"]
            if not message.get("more_body"):
                break
        asked = json.loads(body or "{}")
        self.bodies.append(asked)
        match asked.get("method"):
            case "initialize":
                result: Any = {
                    "protocolVersion": asked["params"]["protocolVersion"],
                    "capabilities": {"tools": {}},
                    "serverInfo": {"name": "wild", "version": "1"},
                }
                await said(send, {"id": asked["id"], "result": result})
            case "tools/list":
                await said(send, {"id": asked["id"], "result": {"tools": [TOOL]}})
            case "tools/call":
                await self._call(send, asked["id"])
            case "notifications/initialized":
                await answered(send, 202, b"")
            case _:
                await answered(send, 404, b"")


async def answered(send: Send, status: int, body: bytes, *head: tuple[bytes, bytes]) -> None:
    await send({"type": "http.response.start", "status": status, "headers": list(head)})
    await send({"type": "http.response.body", "body": body})


async def said(send: Send, message: dict[str, Any]) -> None:
    body = json.dumps({"jsonrpc": "2.0", **message}).encode()
    await answered(send, 200, body, (b"content-type", b"application/json"))


def seen(id: Any) -> dict[str, Any]:
    return {"id": id, "result": {"content": [{"type": "text", "text": "seen"}]}}


@asynccontextmanager
async def opened(
    server: McpServer,
    limits: Mapping[str, float] = MappingProxyType({}),
    *,
    allow_private_urls: bool = True,
    **connectors: Any,
) -> AsyncIterator[Toolset]:
    with lowered(**limits):
        found = Connectors(connectors, allow_private_urls=allow_private_urls)
        async with found.open([server]) as toolset:
            yield toolset
        await all_gone()


def listed(toolset: Toolset) -> tuple[list[str], str]:
    (server,) = toolset.servers
    return list(server.listing.tools), server.listing.error or ""


async def outcome(toolset: Toolset, label: str = "wild") -> str:
    try:
        return (await toolset.call(label, "look", "{}")).text
    except McpError as error:
        return f"error: {error}"


async def quiet(send: Send, id: Any) -> None:
    await said(send, seen(id))


JSON, TEXT = (b"content-type", b"application/json"), (b"content-type", b"text/plain")
