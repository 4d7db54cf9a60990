"""One server of a response: its tools, its results, and its failures, which cost no other."""

import asyncio
import json
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import anyio
import psutil
import pytest
from mcp.shared.message import SessionMessage
from mcp.types import JSONRPCNotification

from mlx_server import limits
from mlx_server.mcp import Connector, Connectors, guard
from mlx_server.mcp.stdio import Read, _write_messages
from mlx_server.requests import McpServer
from tests.event_loops import NewLoop, on_each_loop, run_on
from tests.mcp.habits import opened
from tests.mcp.playing import lowered
from tests.mcp.wild import listed, outcome
from tests.tables import cases

pytestmark = [pytest.mark.anyio, pytest.mark.slow]


async def test_a_tool_with_a_remote_reference_is_left_out() -> None:
    async with opened("remote refs") as toolset:
        names, error = listed(toolset)
        assert names == ["look"]
        assert error == (
            "'far' is left out: its schema refers to 'http://127.0.0.1:9/secret', which is not "
            "fetched."
        )
        assert await outcome(toolset, "remote refs") == "seen"


async def test_lists_without_end_are_cut() -> None:
    async with opened("many tools") as toolset:
        names, error = listed(toolset)
        assert len(names) == 256
        assert error == (
            "The server has more than 256 tools, or more than 262144 bytes of tools: the rest is "
            "left out."
        )
    async with opened("endless pages") as toolset:
        names, error = listed(toolset)
        assert len(names) == 256
        assert error
    async with opened("large schemas") as toolset:
        names, error = listed(toolset)
        assert names == ["look"]
        assert error


async def test_two_tools_of_one_name_are_one() -> None:
    async with opened("unusable schema") as toolset:
        names, error = listed(toolset)
        assert names == ["odd", "look"]
        assert error == "'look' is left out: another tool has the same name."


async def test_a_large_result_is_cut_with_a_notice() -> None:
    async with opened("floods a result") as toolset:
        result = await outcome(toolset, "floods a result")
    assert result == f"{'x' * (1 << 20)}\n[cut here; it has {3 << 20} bytes]"


@pytest.mark.parametrize(
    ("habit", "seconds", "message"),
    [
        ("no tools", 10, "did not follow the protocol"),
        ("never speaks", 0.5, "did not answer within 0.5 s"),
    ],
)
async def test_a_list_that_never_comes(habit: str, seconds: float, message: str) -> None:
    with lowered(MCP_OPEN_SECONDS=seconds):
        async with opened(habit) as toolset:
            names, error = listed(toolset)
    assert names == []
    assert message in error


async def test_a_command_that_is_not_there(caplog: pytest.LogCaptureFixture) -> None:
    connectors = Connectors({"x": Connector(command=("/no/such/program",))})
    async with connectors.open([McpServer("x", connector="x")]) as toolset:
        missing = "There is no program 'program': install it, or correct `command` in models.yaml."
        assert listed(toolset) == ([], missing)
    assert "x has no tools (NoProgram)" in caplog.text
    await connectors.stop()


@cases
async def test_a_call_fails_alone(habit: str, said: str) -> None:
    seconds = 2 if "within 2 s" in said else 10
    with lowered(MCP_CALL_SECONDS=seconds, MCP_SESSION_BYTES=16 << 20):
        async with opened(habit, "quiet") as toolset:
            both = await asyncio.gather(outcome(toolset, habit), outcome(toolset, "quiet"))
            assert tuple(both) == (said, "seen")
            assert await outcome(toolset, "quiet") == "seen"


async def test_a_server_that_died_is_started_once_more(tmp_path: Path) -> None:
    async with opened("dies once", file=tmp_path / "died") as toolset:
        said = [await outcome(toolset, "dies once") for _ in range(3)]
    assert said == ["error: The server closed the connection.", "seen", "seen"]
    async with opened("dies") as toolset:
        said = [await outcome(toolset, "dies") for _ in range(limits.MCP_OPENINGS + 1)]
    closed = ["error: The server closed the connection."] * limits.MCP_OPENINGS
    assert said == [*closed, "error: The server's connection was lost twice."]


GONE_SECONDS = 3.0
"""Promised; a machine that does much else takes longer."""
PATIENCE_SECONDS = 20.0


def processes(file: Path) -> list[psutil.Process]:
    return [psutil.Process(int(pid)) for pid in file.read_text().split()]


def is_alive(process: psutil.Process) -> bool:
    """One without a parent may stay in the table until somebody asks for it."""
    try:
        return process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


async def test_servers_go_with_all_that_they_started(tmp_path: Path) -> None:
    file = tmp_path / "pids"
    async with opened("leaves children", "will not go", file=file) as toolset:
        assert await outcome(toolset, "leaves children") == "seen"
        started = processes(file)
        assert len(started) == (4 if sys.platform == "linux" else 3)
    assert not any(map(is_alive, started))


def test_servers_go_when_we_are_killed(tmp_path: Path) -> None:
    file = tmp_path / "pids"
    with ours_with("leaves children", file) as ours:
        started = [*processes(file), *ours.children(recursive=True)]
        ours.kill()
        assert 2 * guard.GRACE_SECONDS < GONE_SECONDS / 2
        asyncio.run(are_gone(started))


@contextmanager
def ours_with(habit: str, file: Path) -> Iterator[psutil.Process]:
    """A process like ours, which has a server."""
    program = f"""
import asyncio, sys
from pathlib import Path
from tests.mcp.habits import opened

async def main():
    async with opened({habit!r}, file=Path({str(file)!r})):
        print("open", flush=True)
        await asyncio.sleep(60)

asyncio.run(main())
"""
    ours = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True)
    assert ours.stdout
    with ours, ours.stdout:
        assert ours.stdout.readline() == "open\n"
        try:
            yield psutil.Process(ours.pid)
        finally:
            ours.kill()


async def are_gone(processes: Sequence[psutil.Process]) -> None:
    async with asyncio.timeout(PATIENCE_SECONDS):
        while any(map(is_alive, processes)):  # noqa: ASYNC110
            await asyncio.sleep(0.02)


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
