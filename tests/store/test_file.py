"""Power cuts: of what SQLite wrote and had not synced, any part is lost, in any order.

STORE_POWER_CUTS=5000 cuts as often.
"""

import os
import random
import shutil
import sqlite3
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import pytest

from mlx_server import limits
from mlx_server.errors import NotFound
from mlx_server.store import RUNNING, ConversationRecord, ItemRecord, Retention, Store, file
from tests.store.make import finish, items, response
from tests.store.recording import Disk, Recording, library, recorded

CUTS = int(os.environ.get("STORE_POWER_CUTS", "100"))

OFTEN = ("PRAGMA wal_autocheckpoint = 20", "PRAGMA journal_size_limit = 40000")
"""So that a short recording has many checkpoints, and a log that is cut."""

Snapshot = dict[str, Any]
Write = Callable[[], Coroutine[Any, Any, Any]]

SQLITE = library()
pytestmark = pytest.mark.skipif(SQLITE is None, reason="this Python hides its SQLite")

IDS = [f"r{n}" for n in range(24)]


async def snapshot(store: Store) -> Snapshot:
    found: Snapshot = {}
    for id in IDS:
        try:
            got = await store.get(id, "me")
        except NotFound:
            continue
        ended = got.status not in RUNNING and got.status != "failed"
        found[id] = (
            got.status if ended else "failed",
            got.body if ended else b"",
            got.output,
            (await store.input_items(id, "me")).items,
            await store.events(id, "me"),
        )
    try:
        found["c"] = await store.conversation("c", "me")
        found["its items"] = (await store.conversation_items("c", "me", limit=100)).items
    except NotFound:
        pass
    return found


def writes(store: Store, rng: random.Random) -> list[Write]:
    def ended(id: str) -> Write:
        item = ItemRecord(f"big-{id}", rng.randbytes(rng.choice([10, 2000, 30_000])))
        made = response(id, "completed", [item])
        return lambda: store.put(made, "me", [b"e1", b"e2"])

    def begun(id: str) -> Write:
        made = response(id, "in_progress", at=int(id[1:]), conversation="c")
        return lambda: store.begin(made, "me", items(f"in-{id}"))

    plan: list[Write] = [lambda: store.create_conversation(ConversationRecord("c", 0, b"{}"), "me")]
    for n, id in enumerate(IDS):
        plan += [begun(id), ended(id)] if n % 5 else [begun(id)]
        if n % 4 == 3:
            plan.append(lambda gone=IDS[n - 2]: store.delete(gone, "me"))  # type: ignore[misc]
        if n % 10 == 9:
            plan.append(lambda: store._prune_some("response"))
    return plan


async def record(path: Path) -> tuple[Recording, list[Snapshot]]:
    """With a note as each write is acknowledged, and what was to be found then."""
    assert SQLITE is not None
    with recorded(SQLITE) as recording, pytest.MonkeyPatch.context() as patch:
        patch.setattr(limits, "STORED_RESPONSES", 12)
        store = await Store.open(path, Retention(days=1), clock=lambda: 0)
        found: list[Snapshot] = [{}]
        for write in writes(store, random.Random(1)):
            await write()
            recording.note("acknowledged")
            found.append(await snapshot(store))
        await store.close()
    return recording, found


async def reopened(folder: Path, files: dict[str, bytes]) -> Snapshot:
    """What a server finds there, in files that are whole."""
    folder.mkdir()
    for name, content in files.items():
        (folder / name).write_bytes(content)
    store = await Store.open(folder / "store.db")
    found = await snapshot(store)
    await store.close()
    db = sqlite3.connect(folder / "store.db")
    assert db.execute("PRAGMA integrity_check").fetchall() == [("ok",)]
    assert db.execute("SELECT 1 FROM records WHERE status = 'in_progress'").fetchall() == []
    db.close()
    assert not list(folder.glob("*.damaged-*"))
    shutil.rmtree(folder)
    return found


def losses(folder: Path, recording: Recording, known: list[Snapshot]) -> int:
    """How many of the cuts lose what was acknowledged, or leave half a write."""
    rng = random.Random(2)
    cuts = sorted(rng.choices(range(len(recording.log) + 1), k=CUTS))
    disk, done, acknowledged, lost = Disk(), 0, 0, 0
    for number, cut in enumerate(cuts):
        for event in recording.log[done:cut]:
            disk.do(event)
            acknowledged += event.what == "note"
        done = cut
        found = finish(reopened(folder / f"{number}", disk.after_power_cut(rng)))
        lost += found not in known[acknowledged : acknowledged + 2]
    return lost


@pytest.mark.soak
def test_a_power_cut_takes_nothing_that_was_acknowledged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(file, "PRAGMAS", (*file.PRAGMAS, *OFTEN))
    recording, known = finish(record(tmp_path / "store.db"))
    assert {event.what for event in recording.log} >= {"truncate", "sync folder", "delete"}
    assert sum(event.what == "sync" for event in recording.log) > 50
    assert losses(tmp_path, recording, known) == 0


@pytest.mark.soak
def test_without_full_syncs_the_cuts_are_felt(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lax = (*file.PRAGMAS, *OFTEN, "PRAGMA synchronous = NORMAL")
    monkeypatch.setattr(file, "PRAGMAS", lax)
    recording, known = finish(record(tmp_path / "store.db"))
    assert losses(tmp_path, recording, known) > CUTS / 4
