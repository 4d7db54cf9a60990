"""The documents' example of an MCP server, run as the documents do."""

import sys

import pytest

from mlx_server.mcp import Connector, Connectors
from mlx_server.mcp.sample import NOTES
from mlx_server.requests import McpServer

pytestmark = [pytest.mark.anyio, pytest.mark.slow]


async def test_its_tool_finds_a_note_by_a_word_in_any_case() -> None:
    connector = Connector(command=(sys.executable, "-m", "mlx_server.mcp.sample"))
    connectors = Connectors({"notes": connector})
    try:
        async with connectors.open([McpServer("notes", connector="notes")]) as toolset:
            for query, expected in (
                ("The RELEASE, please", NOTES["release"]),
                ("", "Nothing was found."),
                ("Salü 🙂", "Nothing was found."),
            ):
                found = await toolset.call("notes", "search", f'{{"query": "{query}"}}')
                assert found == expected
    finally:
        await connectors.stop()
