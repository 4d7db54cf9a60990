"""The guard of an MCP server ends all that it has started, also when it or we are killed."""

import asyncio
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest

from mlx_server.mcp import guard
from tests.mcp.habits import opened
from tests.mcp.wild import outcome

pytestmark = [pytest.mark.anyio, pytest.mark.slow]
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
