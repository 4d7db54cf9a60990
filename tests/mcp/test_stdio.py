"""The transport over pipes."""

import asyncio
import json
import sys
from pathlib import Path

import anyio
import pytest
from mcp.shared.message import SessionMessage
from mcp.types import JSONRPCNotification

from mlx_server.mcp import Connector, Connectors
from mlx_server.mcp.stdio import Read, _write_messages
from mlx_server.requests import McpServer
from tests.event_loops import NewLoop, on_each_loop, run_on

SECONDS = 20.0


@on_each_loop
def test_messages_to_a_server_that_has_ended_end_the_session(new_loop: NewLoop) -> None:
    run_on(new_loop, _write_to_an_ended_server(), SECONDS)


async def _write_to_an_ended_server() -> None:
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-c", "", stdin=asyncio.subprocess.PIPE
    )
    await process.wait()
    assert process.stdin
    while not process.stdin.is_closing():  # noqa: ASYNC110 - nothing tells when
        await asyncio.sleep(0)
    into, read = anyio.create_memory_object_stream[Read](1)
    write, out_of = anyio.create_memory_object_stream[SessionMessage](1)
    async with into, read, write, out_of:
        note = JSONRPCNotification(jsonrpc="2.0", method="notifications/initialized")
        await write.send(SessionMessage(note))
        await _write_messages(process.stdin, out_of, into)
        with pytest.raises(anyio.EndOfStream):
            read.receive_nowait()


@pytest.mark.slow
@pytest.mark.anyio
async def test_it_sees_no_variables_but_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MLX_SERVER_API_KEYS", "hush")
    show = "import json, os, sys; json.dump(dict(os.environ), open(sys.argv[1], 'w'))"
    file = tmp_path / "environment"
    connector = Connector(command=(sys.executable, "-c", show, str(file)), env={"LEVEL": "3"})
    connectors = Connectors({"x": connector})
    async with connectors.open([McpServer("x", connector="x")]):
        pass
    await connectors.stop()
    environment = json.loads(file.read_text())
    assert environment["LEVEL"] == "3"
    assert "PATH" in environment
    assert "hush" not in environment.values()
