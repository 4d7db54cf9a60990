"""A model that plays its part, with a real MCP server, and what comes of its rounds."""

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mlx_server.events import Event, McpCallFinished, TextDelta
from mlx_server.generation.tool_loop import respond
from mlx_server.mcp import Connectors
from mlx_server.messages import Conversation, Message, Tool
from mlx_server.pool.pool import Pool
from mlx_server.requests import ALL_TOOLS, GenerateRequest, McpServer, McpTools
from tests.mcp.official import make
from tests.mcp.playing import MODEL, Playing, all_gone, playing, served

HOSTILE = Path(__file__).parents[1] / "mcp" / "hostile.py"
FUNCTION = Tool("weather", "Of today.", {"type": "object"})
PATIENCE_SECONDS = 60.0


def call(name: str, /, **arguments: Any) -> str:
    said = json.dumps({"name": name, "arguments": arguments})
    return f"<tool_call>\n{said}\n</tool_call>"


@dataclass
class Lab:
    pool: Pool
    engine: Playing
    connectors: Connectors
    server: McpServer
    """A well-behaved one, over HTTP."""

    def tools(self, **more: Any) -> McpTools:
        return McpTools((self.server,), **more)

    async def events(
        self,
        tools: McpTools | None = None,
        conversation: Conversation | None = None,
        **request: Any,
    ) -> list[Event]:
        asked = GenerateRequest(MODEL, (conversation or asking(),), **request)
        tools = self.tools() if tools is None else tools
        events = respond(asked, tools, self.connectors, self.pool)
        return [event async for event in events]


def asking(*tools: Tool, text: str = "1 + 2?") -> Conversation:
    return Conversation((Message("user", text),), tools)


@asynccontextmanager
async def lab(
    folder: Path, *outputs: str, family: str = "qwen3", **spec: Any
) -> AsyncIterator[Lab]:
    connectors = Connectors(allow_private_urls=True)
    app = make().streamable_http_app()
    async with (
        asyncio.timeout(PATIENCE_SECONDS),
        served(app) as url,
        playing(folder, family, *outputs, **spec) as (pool, engine),
    ):
        server = McpServer("calc", url=f"{url}/mcp", never_approve=ALL_TOOLS)
        yield Lab(pool, engine, connectors, server)
        await all_gone()


def kinds(events: list[Event]) -> list[str]:
    """Their names; deltas of one kind in a row are one."""
    names: list[str] = []
    for event in events:
        name = type(event).__name__
        if not (name.endswith("Delta") and names[-1:] == [name]):
            names.append(name)
    return names


def only(events: list[Event], kind: type[Any]) -> list[Any]:
    return [event for event in events if isinstance(event, kind)]


def text(events: list[Event]) -> str:
    return "".join(event.text for event in only(events, TextDelta))


def results(events: list[Event]) -> list[tuple[str | None, str | None]]:
    return [(event.output, event.error) for event in only(events, McpCallFinished)]
