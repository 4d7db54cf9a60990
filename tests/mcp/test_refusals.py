"""A server's refusal keeps its status and its words."""

from typing import Any

import pytest

from mlx_server import limits
from mlx_server.mcp import McpError
from mlx_server.requests import McpServer
from tests.mcp.playing import served
from tests.mcp.wild import JSON, SMALL, TEXT, Send, Wild, answered, listed, opened, quiet

pytestmark = pytest.mark.anyio


@pytest.mark.slow
@pytest.mark.parametrize(
    ("status", "body", "head", "message"),
    [
        (401, b'{"error": "invalid_token"}', JSON, "401 Unauthorized: invalid_token"),
        (403, b'{"detail": "Not yours."}', JSON, "403 Forbidden: Not yours."),
        (404, b"", TEXT, "404 Not Found."),
        (
            429,
            b'{"error": {"message": "Slow\\n down."}}',
            JSON,
            "429 Too Many Requests: Slow down.",
        ),
        (503, b"Down for repair.", TEXT, "503 Service Unavailable: Down for repair."),
        (500, b"x" * 50_000, TEXT, "500 Internal Server Error: xxx"),
        (500, b"x" * (1 << 17), TEXT, "500 Internal Server Error."),
        (500, b"[" * 50_000, JSON, "500 Internal Server Error."),
        (599, b"\xff\xfe", TEXT, "599: \ufffd\ufffd"),
        (
            400,
            b'{"jsonrpc": "2.0", "id": null, "error": {"code": -32602, "message": "No such day."}}',
            JSON,
            "No such day.",
        ),
    ],
)
async def test_a_refusal_keeps_its_cause(
    status: int,
    body: bytes,
    head: tuple[bytes, bytes],
    message: str,
    caplog: pytest.LogCaptureFixture,
) -> None:
    async def refuses(send: Send, id: Any) -> None:
        await answered(send, status, body, head)

    async with served(Wild(refuses)) as url, opened(McpServer("wild", url=url), SMALL) as toolset:
        with pytest.raises(McpError) as caught:
            await toolset.call("wild", "look", "{}")
    said = str(caught.value)
    assert said.removeprefix("The server answered ").startswith(message)
    assert len(said) < 2 * limits.QUOTED_ERROR_CHARACTERS
    is_http = not message.startswith("No such")
    assert caught.value.kind == (f"HTTP {status}" if is_http else "McpError")


async def test_a_server_that_refuses_at_once_says_why(caplog: pytest.LogCaptureFixture) -> None:
    async def refuses(scope: Any, receive: Any, send: Send) -> None:
        if scope["type"] == "lifespan":
            await Wild(quiet)(scope, receive, send)
            return
        await answered(send, 401, b'{"error_description": "The token is too old."}', JSON)

    async with served(refuses) as url, opened(McpServer("wild", url=url)) as toolset:
        tools, error = listed(toolset)
    assert not tools
    assert error == "The server answered 401 Unauthorized: The token is too old."
    assert "an MCP server has no tools (HTTP 401)" in caplog.text
    assert "too old" not in caplog.text
