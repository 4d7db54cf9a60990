"""A well-behaved MCP server, made with the official SDK; run as a program, it speaks over stdio."""

import asyncio
import base64

from mcp.server.mcpserver import Image, MCPServer
from mcp.types import ToolAnnotations

DOT = "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABAQAAAAA3bvkkAAAACklEQVR42mNgAAAAAgAB5Sfe/AAAAABJRU5ErkJggg=="
"""A picture of one pixel."""


def make() -> MCPServer:
    """Each has its own tools: `meet` returns once two calls of it wait for each other."""
    server = MCPServer("official")
    both = asyncio.Barrier(2)

    @server.tool(annotations=ToolAnnotations(read_only_hint=True))
    def add(a: int, b: int) -> int:
        """Adds two numbers."""
        return a + b

    @server.tool()
    def shout(text: str) -> str:
        """Makes it loud."""
        return f"{text.upper()}!"

    @server.tool()
    def fail() -> str:
        raise ValueError("no luck")

    @server.tool(structured_output=False)
    def show(is_damaged: bool = False) -> list[object]:
        dot = base64.b64decode("AAAA" if is_damaged else DOT)
        return ["a dot:", Image(data=dot, format="png")]

    @server.tool(structured_output=False)
    async def meet(name: str) -> str:
        await both.wait()
        return f"met {name}"

    return server


if __name__ == "__main__":
    make().run()
