"""A session says who we are, and is closed by the task that opened it."""

import json
from typing import Any

import pytest

from mlx_server import __version__
from mlx_server.requests import McpServer
from tests.mcp.playing import served
from tests.mcp.wild import Send, Wild, opened, quiet

pytestmark = pytest.mark.anyio


async def test_it_is_told_who_we_are() -> None:
    seen: list[Any] = []

    class Noting(Wild):
        async def __call__(self, scope: Any, receive: Any, send: Send) -> None:
            async def noted() -> Any:
                message = await receive()
                if message["type"] == "http.request" and message["body"]:
                    seen.append(json.loads(message["body"]))
                return message

            await super().__call__(scope, noted, send)

    async with served(Noting(quiet)) as url, opened(McpServer("wild", url=url)):
        pass
    reported = [m["params"]["clientInfo"] for m in seen if m["method"] == "initialize"]
    assert reported == [{"name": "mlx-server", "version": __version__}]
