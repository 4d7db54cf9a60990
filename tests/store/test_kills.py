"""`kill -9` at any moment takes nothing that was acknowledged and leaves nothing running.

STORE_KILLS=1000 kills as often.
"""

import os
import random
import sqlite3
import subprocess
import sys
from pathlib import Path

import pytest

from mlx_server.errors import NotFound
from mlx_server.store import RUNNING, Store
from tests.store.make import recounted, runs
from tests.store.writer import OWNER, given, stored

pytestmark = pytest.mark.slow

KILLS = int(os.environ.get("STORE_KILLS", "20"))

Acknowledged = dict[str, str]
"""What was last said of each id."""


def killed_writer(path: Path, run: int, rng: random.Random) -> Acknowledged:
    command = [sys.executable, "-m", "tests.store.writer", str(path), str(run)]
    writer = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert writer.stdout is not None
    lines = [writer.stdout.readline() for _ in range(rng.randrange(60))]
    for _ in range(rng.randrange(20_000)):  # anywhere within a write
        pass
    writer.kill()
    lines += writer.stdout.readlines()
    writer.stdout.close()
    writer.wait()
    whole = (line.split() for line in lines if line.endswith("\n"))
    return {id: verb for verb, id in whole}


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
    assert await store.events(id, OWNER) == [b"e"] * 3
    return "completed"


MAY_BE = {
    "begun": {"failed", "completed"},  # it may have been put before the kill
    "put": {"completed"},
    "deleting": {"completed", "deleted"},
    "deleted": {"deleted"},
}


@runs
async def check(path: Path, acknowledged: Acknowledged) -> None:
    store = await Store.open(path)
    for id, verb in acknowledged.items():
        assert await state(store, id) in MAY_BE[verb], (id, verb)
    assert (await store.stats()).stored == await recounted(store)
    await store.close()
    db = sqlite3.connect(path)
    assert db.execute("PRAGMA integrity_check").fetchall() == [("ok",)]
    running = "SELECT count(*) FROM records WHERE status IN ('queued', 'in_progress')"
    assert db.execute(running).fetchone() == (0,)
    db.close()


def test_kills(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(Path(__file__).parents[2])
    rng = random.Random(7)
    acknowledged = 0
    path = tmp_path / "store.db"
    earlier: Acknowledged = {}
    for run in range(KILLS):
        if run % 20 == 0:  # or each check reads more than the last
            path = tmp_path / f"{run}" / "store.db"
            earlier = {}
        earlier |= killed_writer(path, run, rng)
        check(path, earlier)
        acknowledged += len(earlier)
    assert acknowledged > KILLS
    assert not list(tmp_path.rglob("*.damaged-*"))


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
