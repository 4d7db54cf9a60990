"""`kill -9` of one of two servers at any moment takes nothing that was acknowledged by either, ends
nothing of the other's, and leaves nothing of its own running.

STORE_KILLS=1000 kills as often.
"""

import os
import random
import sqlite3
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cache
from multiprocessing import get_context
from multiprocessing.connection import Connection
from multiprocessing.context import ForkServerContext, ForkServerProcess
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest

from mlx_server.errors import NotFound
from mlx_server.prompt_files import DRAFT
from mlx_server.store import RUNNING, Store
from mlx_server.system.daily_bytes import DailyBytes
from tests.store import writer
from tests.store.make import recounted, runs
from tests.store.writer import OWNER, check_file, given, opened, prompt_file, stored

SHM = Path("/dev/shm")
KILLS = int(os.environ.get("STORE_KILLS", "100"))


@cache
def template() -> ForkServerContext:
    context = get_context("forkserver")
    context.set_forkserver_preload(["tests.store.writer"])
    return context


@dataclass
class Server:
    process: ForkServerProcess
    acknowledged: Connection
    said: list[tuple[str, str]] = field(default_factory=list)

    def hear(self) -> None:
        verb, what = self.acknowledged.recv()
        assert verb != "failed", what
        self.said.append((verb, what))

    def kill(self) -> None:
        self.process.kill()
        self.process.join()
        try:
            while True:
                self.hear()
        except (EOFError, OSError):  # a half of the last message is none
            self.acknowledged.close()


def begun(path: Path, run: int) -> Server:
    read, write = template().Pipe(duplex=False)
    process = template().Process(target=writer.serve, args=(path, f"{run}", write))
    process.start()
    write.close()
    return Server(process, read)


MAY_BE = {
    "begun": {"failed", "completed"},  # it may have been put before the kill
    "put": {"completed"},
    "deleting": {"completed", "deleted"},
    "deleted": {"deleted"},
}


async def state(store: Store, id: str) -> str:
    """What is found of it, which must be the whole of something that was written."""
    try:
        got = await store.get("response", id, OWNER)
    except NotFound:
        return "deleted"
    assert list((await store.items("response", id, OWNER)).items) == given(id)
    assert got.status not in RUNNING
    if got.status == "failed":
        assert b"stopped before" in got.body
        assert got.output == stored(id, "in_progress").output
        return "failed"
    assert got == stored(id, "completed")
    assert await store.events(id, OWNER) == ([b"e"] * 3, False)
    return "completed"


@runs
async def check_store(path: Path, said: list[tuple[str, str]]) -> None:
    store = await Store.open(path)
    for id, verb in {id: verb for verb, id in said if verb != "file"}.items():
        assert await state(store, id) in MAY_BE[verb], (id, verb)
    assert (await store.stats()).stored == await recounted(store)
    await store.close()
    db = sqlite3.connect(path)
    assert db.execute("PRAGMA integrity_check").fetchall() == [("ok",)]
    running = "SELECT count(*) FROM records WHERE status IN ('queued', 'in_progress')"
    assert db.execute(running).fetchone() == (0,)
    db.close()


def check_files(path: Path, said: list[tuple[str, str]]) -> None:
    folder = opened(path)
    files = {prompt_file(id) for verb, id in said if verb == "file"}
    assert files
    for file in files:
        assert file in folder
        check_file(folder, file)
    assert not list(folder.path.glob(f"*{DRAFT}")), "none of a killed server"
    assert DailyBytes(folder.path, 1).today >= len(files) * 1024


@pytest.fixture
def in_memory(tmp_path: Path) -> Iterator[Path]:
    """A folder where nothing waits for a disk: what a kill leaves does not depend on one."""
    if not SHM.is_dir():
        yield tmp_path
        return
    with TemporaryDirectory(dir=SHM) as folder:
        yield Path(folder)


def test_a_hundred_kills_of_either(in_memory: Path) -> None:
    rng = random.Random(7)
    path = in_memory / "data" / "store.db"
    said: list[tuple[str, str]] = []
    survivor = begun(path, 0)
    for run in range(1, KILLS + 1):
        servers = [survivor, begun(path, run)]
        rng.shuffle(servers)
        victim, survivor = servers
        for _ in range(rng.randrange(1, 8)):
            victim.hear()
        for _ in range(rng.randrange(20_000)):  # anywhere within a write
            pass
        victim.kill()
        said += victim.said
        while survivor.acknowledged.poll():
            survivor.hear()
    survivor.kill()
    said += survivor.said
    check_store(path, said)
    check_files(path, said)
    assert not list(path.parent.glob("*.damaged-*"))
    assert not list((path.parent / "servers").iterdir())


OUTLIVES = """
import asyncio, sys, threading
from pathlib import Path
from mlx_server.store import Store

async def main():
    store = await Store.open(Path(sys.argv[1]))
    opened.set()
    while any(thread.name.startswith("store") for thread in threading.enumerate()):
        await asyncio.sleep(0.01)
    await store.close()

opened = threading.Event()
threading.Thread(target=asyncio.run, args=(main(),)).start()
opened.wait()
"""


def test_a_loop_that_outlives_the_main_thread_closes_quietly(path: Path) -> None:
    """By then the interpreter has shut all executors down."""
    ended = subprocess.run([sys.executable, "-c", OUTLIVES, path], capture_output=True, timeout=60)
    assert (ended.returncode, ended.stderr.decode()) == (0, "")
