"""Servers over stdio that do what they should not: it costs the call, or the list of tools."""

import asyncio
import json
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path

import psutil
import pytest

from mlx_server import limits
from mlx_server.mcp import Connector, Connectors, McpError, McpLimits, Toolset, guard
from mlx_server.requests import McpServer
from tests.mcp.playing import all_gone

pytestmark = [pytest.mark.anyio, pytest.mark.hostile]

HOSTILE = str(Path(__file__).with_name("hostile.py"))
GONE_SECONDS = 3.0
"""Promised; a machine that does much else takes longer."""
PATIENCE_SECONDS = 20.0
LIMITS = McpLimits(open_seconds=10, call_seconds=10)
HASTY = McpLimits(open_seconds=0.5, call_seconds=0.5)


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


@asynccontextmanager
async def opened(
    *habits: str, file: Path | None = None, limits: McpLimits = LIMITS
) -> AsyncIterator[Toolset]:
    connectors = Connectors(
        {
            habit: Connector(
                command=(sys.executable, HOSTILE, habit, *([str(file)] if file else []))
            )
            for habit in habits
        },
        limits=limits,
    )
    servers = [McpServer(habit, connector=habit) for habit in habits]
    async with connectors.open(servers) as toolset:
        yield toolset
    await all_gone()


async def outcome(toolset: Toolset, habit: str) -> str:
    try:
        return await toolset.call(habit, "look", "{}")
    except McpError as error:
        return f"error: {error}"


def listed(toolset: Toolset) -> tuple[list[str], str | None]:
    (server,) = toolset.servers
    return list(server.listing.tools), server.listing.error


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


@pytest.mark.parametrize(
    ("habit", "limits", "message"),
    [
        ("no tools", LIMITS, "did not follow the protocol"),
        ("never speaks", HASTY, "did not answer within 0.5 s"),
    ],
)
async def test_a_list_that_never_comes(habit: str, limits: McpLimits, message: str) -> None:
    async with opened(habit, limits=limits) as toolset:
        names, error = listed(toolset)
    assert names == []
    assert message in (error or "")


async def test_a_command_that_is_not_there() -> None:
    connectors = Connectors({"x": Connector(command=("/no/such/program",))}, limits=LIMITS)
    async with connectors.open([McpServer("x", connector="x")]) as toolset:
        assert listed(toolset) == ([], "The server closed the connection.")
    await connectors.stop()


@pytest.mark.parametrize(
    ("habit", "said"),
    [
        ("dies", "error: The server closed the connection."),
        ("lies about ids", "error: The server did not answer within 2 s."),
        ("hangs", "error: The server did not answer within 2 s."),
        ("floods a line", "error: The server sent a message of more than 8388608 bytes."),
        ("floods notices", "error: The server sent more than 16777216 bytes."),
        ("changes its list", "error: Unknown tool: look"),
        ("no result", "error: The server did not follow the protocol (ValidationError)."),
        ("noise", "seen"),
        ("asks the user", "Elicitation not supported"),  # nobody is there to be asked
    ],
)
async def test_a_call_fails_alone(habit: str, said: str) -> None:
    limits = McpLimits(call_seconds=2 if "within 2 s" in said else 10, session_bytes=16 << 20)
    async with opened(habit, "quiet", limits=limits) as toolset:
        both = await asyncio.gather(outcome(toolset, habit), outcome(toolset, "quiet"))
        assert tuple(both) == (said, "seen")
        assert await outcome(toolset, "quiet") == "seen"


async def test_a_large_result_is_cut_with_a_notice() -> None:
    async with opened("floods a result") as toolset:
        result = await outcome(toolset, "floods a result")
    assert result == f"{'x' * (1 << 20)}\n[cut here; it has {3 << 20} bytes]"


async def test_a_server_that_died_is_started_once_more(tmp_path: Path) -> None:
    async with opened("dies once", file=tmp_path / "died") as toolset:
        said = [await outcome(toolset, "dies once") for _ in range(3)]
    assert said == ["error: The server closed the connection.", "seen", "seen"]
    async with opened("dies") as toolset:
        said = [await outcome(toolset, "dies") for _ in range(limits.MCP_OPENINGS.value + 1)]
    closed = ["error: The server closed the connection."] * limits.MCP_OPENINGS.value
    assert said == [*closed, "error: The server's connection was lost twice."]


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
from tests.mcp.test_hostile import opened

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


def guards_of(server: psutil.Process) -> list[psutil.Process]:
    """The first one, by its parent, and the second."""
    first = server.parents()[0]
    others = [child for child in first.children() if child.cmdline()[2:3] == first.cmdline()[2:3]]
    return [first, *others]


async def are_gone(processes: Sequence[psutil.Process]) -> None:
    async with asyncio.timeout(PATIENCE_SECONDS):
        while any(map(is_alive, processes)):  # noqa: ASYNC110
            await asyncio.sleep(0.02)


@pytest.mark.parametrize("harmed", [(0,), (1,), (0, 1)], ids=["first", "second", "both"])
async def test_a_server_whose_guard_is_killed_ends_at_once(
    tmp_path: Path, harmed: tuple[int, ...]
) -> None:
    file = tmp_path / "pids"
    async with opened("harms its guards", "quiet", file=file) as toolset:
        started = processes(file)
        guards = guards_of(started[0])
        assert len(guards) == 2
        for each in harmed:
            guards[each].kill()
        await are_gone([*started, *guards])
        assert await outcome(toolset, "harms its guards") in (
            "error: The server closed the connection.",
            "seen",  # by one that was started anew
        )
        assert await outcome(toolset, "quiet") == "seen"


@pytest.mark.parametrize("harmed", [(0,), (1,), (0, 1)], ids=["first", "second", "both"])
async def test_a_server_whose_guard_is_stopped_ends_with_its_request(
    tmp_path: Path, harmed: tuple[int, ...]
) -> None:
    file = tmp_path / "pids"
    async with opened("harms its guards", file=file):
        started = processes(file)
        guards = guards_of(started[0])
        for each in harmed:
            guards[each].suspend()
    await are_gone([*started, *guards])


@pytest.mark.parametrize("harm", ["kill", "suspend"])
def test_servers_of_harmed_guards_go_when_we_are_killed(tmp_path: Path, harm: str) -> None:
    """At the same moment: only the other guard is left to see to it."""
    file = tmp_path / "pids"
    with ours_with("harms its guards", file) as ours:
        started = processes(file)
        guards = guards_of(started[0])
        ours.suspend()  # so that it sees nothing
        getattr(guards[0], harm)()
        ours.kill()
        asyncio.run(are_gone([*started, *guards]))


async def test_it_sees_no_variables_but_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MLX_SERVER_API_KEYS", "hush")
    show = "import json, os, sys; json.dump(dict(os.environ), open(sys.argv[1], 'w'))"
    file = tmp_path / "environment"
    connector = Connector(command=(sys.executable, "-c", show, str(file)), env={"LEVEL": "3"})
    connectors = Connectors({"x": connector}, limits=LIMITS)
    async with connectors.open([McpServer("x", connector="x")]):
        pass
    await connectors.stop()
    environment = json.loads(file.read_text())
    assert environment["LEVEL"] == "3"
    assert "PATH" in environment
    assert "hush" not in environment.values()
