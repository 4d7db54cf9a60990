"""A file that is locked, full, damaged, newer, gone or another's: said clearly, survived."""

import errno
import fcntl
import os
import resource
import shutil
import sqlite3
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from mlx_server.errors import BadRequest, NotFound, StoreUnavailable
from mlx_server.store import ItemRecord, Retention, RunNews, Store, database, file
from mlx_server.system.servers import Servers
from tests.store.make import items, response

pytestmark = pytest.mark.anyio


@pytest.fixture(autouse=True)
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(database, "RETRY_SECONDS", 0)
    monkeypatch.setattr(file, "BUSY_SECONDS", 0.01)


async def filled(path: Path, count: int = 3) -> Store:
    store = await Store.open(path)
    for n in range(count):
        await store.add(response(f"{n}"), "me", [ItemRecord("i", b"x" * 3000)])
    return store


def aside(path: Path) -> list[Path]:
    return sorted(path.parent.glob("store.db.damaged-*"))


async def test_a_locked_file_can_be_read_and_is_written_again_later(path: Path) -> None:
    store = await filled(path)
    other = sqlite3.connect(path, isolation_level=None)
    other.execute("BEGIN EXCLUSIVE")
    with pytest.raises(StoreUnavailable, match="locked by another program") as error:
        await store.add(response("r"), "me")
    assert (error.value.status, error.value.code) == (503, "store_unavailable")
    assert (await store.get("response", "1", "me")).status == "completed"
    assert "locked" in store.trouble  # reads still work
    other.rollback()
    other.close()
    await store.add(response("r"), "me")
    assert not store.trouble
    await store.close()


async def test_calls_do_not_wait_in_line_for_the_same_failure(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = await filled(path)
    monkeypatch.setattr(database, "RETRY_SECONDS", 3600)
    other = sqlite3.connect(path, isolation_level=None)
    other.execute("BEGIN EXCLUSIVE")
    with pytest.raises(StoreUnavailable, match="locked"):
        await store.add(response("r"), "me")
    other.rollback()
    other.close()
    with pytest.raises(StoreUnavailable, match="locked"):
        await store.add(response("r"), "me")
    assert (await store.get("response", "1", "me")).status == "completed"
    await store.close()


async def test_a_file_locked_at_the_start(path: Path) -> None:
    await (await filled(path)).close()
    other = sqlite3.connect(path, isolation_level=None)
    other.execute("PRAGMA locking_mode = EXCLUSIVE")
    other.execute("BEGIN EXCLUSIVE")
    store = await Store.open(path)
    with pytest.raises(StoreUnavailable, match="locked"):
        await store.get("response", "1", "me")
    other.rollback()
    other.close()
    assert (await store.get("response", "1", "me")).status == "completed"
    await store.close()


async def test_a_file_that_may_not_grow(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(file, "PRAGMAS", (*file.PRAGMAS, "PRAGMA max_page_count = 40"))
    store = await filled(path)
    with pytest.raises(StoreUnavailable, match="disk is full: free some space"):
        await store.add(response("r"), "me", [ItemRecord("i", b"x" * 200_000)])
    with pytest.raises(NotFound):
        await store.get("response", "r", "me")
    assert (await store.stats()).items == 3
    await store.delete("response", "1", "me")
    await store.add(response("r"), "me", [ItemRecord("i", b"x" * 3000)])
    await store.close()


@contextmanager
def files_up_to(size: int) -> Iterator[None]:
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


async def test_a_disk_that_refuses_writes(path: Path) -> None:
    store = await filled(path)
    with files_up_to(300_000):
        with pytest.raises(StoreUnavailable, match="check the disk"):
            await store.add(response("r"), "me", [ItemRecord("i", b"x" * 500_000)])
        assert (await store.get("response", "1", "me")).status == "completed"
        with pytest.raises(NotFound):
            await store.get("response", "r", "me")
    await store.add(response("r"), "me", [ItemRecord("i", b"x" * 500_000)])
    await store.close()
    assert sound(path)


def sound(path: Path) -> bool:
    db = sqlite3.connect(path)
    found = db.execute("PRAGMA integrity_check").fetchall()
    db.close()
    return found == [("ok",)]


@pytest.mark.parametrize("damage", ["garbage", "header", "cut"])
async def test_a_damaged_file_is_set_aside_at_the_start(
    path: Path, damage: str, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(database, "RETRY_SECONDS", 3600)
    await (await filled(path, 20)).close()
    whole = path.read_bytes()
    broken = {
        "garbage": b"not a database, " * 1000,
        "header": whole[:16] + b"\xff" * 84 + whole[100:],
        "cut": whole[:5000],
    }[damage]
    path.write_bytes(broken)
    store = await Store.open(path)
    await store.add(response("r"), "me", items("i"))
    assert (await store.stats()).responses == 1
    (set_aside,) = aside(path)
    assert set_aside.read_bytes() == broken
    assert f"was renamed to {set_aside.name}" in caplog.text
    await store.close()


async def test_damage_found_while_serving(path: Path) -> None:
    await (await filled(path, 50)).close()
    db = sqlite3.connect(path)
    root = db.execute("SELECT rootpage FROM sqlite_master WHERE name = 'items'").fetchone()[0]
    db.close()
    whole = path.read_bytes()
    page = 4096
    path.write_bytes(whole[: (root - 1) * page] + b"\xa5" * page + whole[root * page :])
    store = await Store.open(path, Retention(days=1e6))
    with pytest.raises(StoreUnavailable, match="damaged"):
        await store.chain("1", "me")
    assert len(aside(path)) == 1
    with pytest.raises(NotFound):
        await store.get("response", "1", "me")
    await store.add(response("1"), "me")
    await store.close()


async def test_two_servers_and_damage_that_one_of_them_finds(path: Path) -> None:
    await (await filled(path, 50)).close()
    one, other = await Store.open(path), await Store.open(path)
    path.write_bytes(b"not a database, " * 1000)
    with pytest.raises(StoreUnavailable, match="damaged"):
        await one.stats()
    for store in (one, other):
        await store.add(response(f"{id(store)}"), "me")
    assert (await one.stats()).responses == (await other.stats()).responses == 2
    await one.close()
    await other.close()
    assert sound(path)


def test_damage_that_two_servers_find_is_set_aside_once(path: Path) -> None:
    one, other = (file.StoreFile(path, Servers(path.parent)) for _ in range(2))
    for each in (one, other):
        each.open().close()
    one.set_aside()
    one.open().close()
    other.set_aside()
    assert len(aside(path)) == 1
    assert path.exists()


async def test_a_file_of_another_version_is_refused_and_not_touched(path: Path) -> None:
    await (await filled(path)).close()
    db = sqlite3.connect(path)
    db.execute(f"PRAGMA user_version = {file.VERSION + 1}")
    db.close()
    before = path.read_bytes()
    store = await Store.open(path)
    with pytest.raises(StoreUnavailable, match="written by another version of mlx-server"):
        await store.add(response("r"), "me")
    await store.close()
    assert path.read_bytes() == before
    assert aside(path) == []


async def test_servers_share_a_file(path: Path) -> None:
    one = await filled(path)
    await one.add(response("running", "queued"), "me", events=[b"0"])
    other = await Store.open(path)
    assert (await other.stats()).responses == 4
    with pytest.raises(BadRequest, match="has not ended yet"):
        await other.chain("running", "me")
    news = RunNews("running", "me", "in_progress", 1, [b"1", b"2"])
    assert await one.share([news]) == []
    assert await other.events("running", "me") == ([b"0", b"1", b"2"], True)
    got = await other.get("response", "running", "me")
    assert (got.status, b'"status":"in_progress"' in got.body) == ("in_progress", True)
    await other.adopt()
    await other.cancel("running", "me")
    assert await one.share([news]) == [("running", "me")]
    assert await one.put(response("running", "incomplete"), "me", [b"0"])
    assert await other.events("running", "me") == ([b"0"], False)
    await one.add(response("deleted", "queued"), "me")
    await other.delete("response", "deleted", "me")
    assert await one.share([RunNews("deleted", "me", "queued", 0, [])]) == [("deleted", "me")]
    await one.close()
    await other.close()


async def test_responses_of_a_server_that_has_ended_are_ended(path: Path) -> None:
    one, other = await filled(path), await Store.open(path)
    await one.add(response("running", "in_progress"), "me")
    await one.add(response("streamed", "in_progress"), "me", events=[b"0", b"1"])
    await other.adopt()
    assert (await other.get("response", "running", "me")).status == "in_progress"
    await one.close()
    await other.adopt()
    assert (await other.get("response", "running", "me")).status == "failed"
    (_, _, last), is_running = await other.events("streamed", "me")
    assert b'{"type":"response.failed","sequence_number":2,"response":{"id":"streamed"' in last
    assert (b'"output":[]' in last, is_running) == (True, False)
    await other.close()


async def test_a_file_system_without_locks_is_no_other_server(
    path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def flock(file: int, how: int) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "flock", flock)
    store = await Store.open(path)
    with pytest.raises(StoreUnavailable, match="see the server's log"):
        await store.get("response", "r", "me")
    assert "No locks available" in caplog.text
    await store.close()


@pytest.mark.parametrize("how", ["deleted", "replaced", "folder"])
async def test_a_file_taken_away_is_not_written_on(path: Path, how: str) -> None:
    path = path.parent / "data" / path.name
    store = await filled(path)
    if how == "deleted":
        path.unlink()
    elif how == "replaced":
        copy = path.with_name("copy")
        await store._submit(store._disconnect)
        shutil.copy(path, copy)
        await store.add(response("lost"), "me")
        copy.replace(path)
    else:
        shutil.rmtree(path.parent)
    await store.add(response("r"), "me")
    await store.close()
    store = await Store.open(path)
    assert (await store.get("response", "r", "me")).status == "completed"
    await store.close()


@contextmanager
def unprivileged() -> Iterator[Path]:
    """A folder of nobody's, and root turned into nobody: permissions do not bind root."""
    root = os.geteuid() == 0
    folder = Path(tempfile.mkdtemp())
    if root:
        os.chown(folder, 65534, 65534)
        os.seteuid(65534)
    try:
        yield folder
    finally:
        if root:
            os.seteuid(0)
        folder.chmod(0o700)
        shutil.rmtree(folder)


async def test_a_folder_that_may_not_be_written() -> None:
    with unprivileged() as folder:
        path = folder / "store.db"
        await (await filled(path)).close()
        folder.chmod(0o500)
        store = await Store.open(path)
        with pytest.raises(StoreUnavailable, match="check its permissions"):
            await store.add(response("r"), "me")
        folder.chmod(0o700)
        await store.add(response("r"), "me")
        assert (await store.stats()).responses == 4
        await store.close()


@pytest.mark.parametrize(
    ("number", "remedy"),
    [(errno.EROFS, "check its permissions"), (errno.ENOSPC, "the disk is full: free some space")],
)
async def test_a_disk_on_which_no_file_can_be_made(
    path: Path, monkeypatch: pytest.MonkeyPatch, number: int, remedy: str
) -> None:
    """What SQLite is not there to tell: the lock is made before its files."""
    with monkeypatch.context() as patched:

        def open_(*args: object) -> int:
            raise OSError(number, os.strerror(number), str(path))

        patched.setattr(os, "open", open_)
        store = await Store.open(path)
        with pytest.raises(StoreUnavailable, match=remedy):
            await store.add(response("r"), "me")
    await store.add(response("r"), "me")
    await store.close()
