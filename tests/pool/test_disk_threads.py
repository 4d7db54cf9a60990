"""A disk that does not answer: the models on it wait, and no other."""

import asyncio
import threading
from functools import partial
from pathlib import Path

import pytest

from mlx_server.pool.models import DiskThreads
from mlx_server.pool.prepare import ModelSpec
from tests.pool.machine import running

pytestmark = pytest.mark.anyio

CLIENTS = 40
"""More than asyncio's own threads on most machines."""
HANG = 20.0


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


class SlowDisk:
    """A source whose files are read when the test lets it answer."""

    def __init__(self) -> None:
        self.answers = threading.Event()
        self.asked = threading.Event()
        self.readers = 0

    def read(self) -> str:
        self.readers += 1
        self.asked.set()
        self.answers.wait()
        return "read"


async def test_other_models_do_not_wait() -> None:
    threads, slow, quick = DiskThreads(["slow", "quick"]), SlowDisk(), SlowDisk()
    quick.answers.set()
    clients = [asyncio.create_task(threads.run_in_turn("slow", slow.read)) for _ in range(CLIENTS)]
    await asyncio.to_thread(slow.asked.wait, HANG)
    assert await asyncio.wait_for(threads.run_in_turn("quick", quick.read), HANG) == "read"
    assert await asyncio.wait_for(threads.run(quick.read), HANG) == "read"
    assert slow.readers == 1
    slow.answers.set()
    assert await asyncio.gather(*clients) == ["read"] * CLIENTS


async def test_clients_that_leave_are_not_read_for() -> None:
    threads, slow = DiskThreads(["slow"]), SlowDisk()
    clients = [asyncio.create_task(threads.run_in_turn("slow", slow.read)) for _ in range(CLIENTS)]
    await asyncio.to_thread(slow.asked.wait, HANG)
    for client in clients:
        client.cancel()
    await asyncio.gather(*clients, return_exceptions=True)
    slow.answers.set()
    assert await asyncio.wait_for(threads.run_in_turn("slow", slow.read), HANG) == "read"
    assert slow.readers == 2


async def test_the_turn_of_a_reader_that_left_ends_with_its_thread() -> None:
    threads, slow = DiskThreads(["slow"]), SlowDisk()
    first = asyncio.create_task(threads.run_in_turn("slow", slow.read))
    await asyncio.to_thread(slow.asked.wait, HANG)
    first.cancel()
    second = asyncio.create_task(threads.run_in_turn("slow", slow.read))
    await asyncio.wait({second}, timeout=0.05)
    assert slow.readers == 1
    slow.answers.set()
    assert await asyncio.wait_for(second, HANG) == "read"


async def test_an_error_ends_the_turn() -> None:
    threads = DiskThreads(["a"])
    for _ in range(2):
        with pytest.raises(OSError, match="gone"):
            await asyncio.wait_for(threads.run_in_turn("a", partial(_fail, "gone")), HANG)


def _fail(why: str) -> None:
    raise OSError(why)


async def test_stopping_waits_for_no_disk() -> None:
    threads, slow = DiskThreads(["slow"]), SlowDisk()
    client = asyncio.create_task(threads.run_in_turn("slow", slow.read))
    await asyncio.to_thread(slow.asked.wait, HANG)
    await asyncio.wait_for(threads.stop(0.01), HANG)
    assert not client.done()
    slow.answers.set()
    await client


async def test_a_pool_serves_models_of_other_disks(
    tiny_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each request for a model that is not in memory looks whether its files were replaced."""
    slow, path = SlowDisk(), str(tiny_path)

    def is_current(prepared: object) -> bool:
        if getattr(prepared, "id", "") == "slow":
            slow.read()
        return True

    async with running(ModelSpec("slow", path), ModelSpec("quick", path)) as (pool, _):
        await asyncio.gather(pool.prepared("slow"), pool.prepared("quick"))
        monkeypatch.setattr("mlx_server.pool.models.is_current", is_current)
        clients = [asyncio.create_task(pool.prepared("slow")) for _ in range(CLIENTS)]
        await asyncio.to_thread(slow.asked.wait, HANG)
        try:
            assert (await asyncio.wait_for(pool.prepared("quick"), HANG)).id == "quick"
            assert await asyncio.wait_for(pool.adapter_names("quick"), HANG) == []
        finally:
            slow.answers.set()
        await asyncio.gather(*clients)
