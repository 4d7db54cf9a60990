"""Stored chat completions, and files of before there were any."""

import sqlite3
from dataclasses import replace
from pathlib import Path

import pytest

from mlx_server import limits
from mlx_server.errors import BadRequest, NotFound
from mlx_server.store import CompletionFilter, CompletionRecord, Store, file
from tests.store.make import items, recounted, response, runs

ANY = CompletionFilter()


def completion(id: str, created_at: float = 0.0, note: bytes = b"") -> CompletionRecord:
    labels = b'{"model": "m", "metadata": {"id": "%s"}}' % id.encode()
    return CompletionRecord(id, created_at, labels, b'{"note": "%s"}' % note)


@runs
async def test_it_comes_back_as_it_was_put(path: Path) -> None:
    store = await Store.open(path)
    await store.add_completion(completion("a"), "me", items("x", "y"))
    await store.add_completion(completion("b"), "me")
    await store.add_completion(completion("a"), "you")
    await store.close()
    store = await Store.open(path)
    assert await store.completion("a", "me") == completion("a")
    page = await store.completions("me", CompletionFilter("m", {"id": "b"}))
    assert [item.id for item in page.items] == ["b"]
    assert (await store.completion_messages("a", "me")).items == items("x", "y")
    assert (await store.stats()).completions == 3
    assert (await store.stats()).stored == await recounted(store)
    await store.delete_completion("a", "me")
    with pytest.raises(NotFound):
        await store.completion("a", "me")
    assert (await store.completion("a", "you")).id == "a"
    with pytest.raises(BadRequest):
        await store.completions("me", ANY, after="a")
    await store.close()


@runs
async def test_labels_count_as_stored_bytes(path: Path) -> None:
    store = await Store.open(path)
    await store.add_completion(completion("a"), "me")
    before, notes = (await store.stats()).stored, b'{"model": "%s"}'
    for length in (1000, 300):
        labels = notes % (b"m" * length)
        await store.update_completion(replace(completion("a"), labels=labels), "me")
        more = len(labels) - len(completion("a").labels)
        assert (await store.stats()).stored == before + more == await recounted(store)
    await store.delete_completion("a", "me")
    assert (await store.stats()).stored == 0
    await store.close()


@runs
async def test_the_oldest_are_pruned(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "STORED_RESPONSES", 2)
    store = await Store.open(path, clock=lambda: 10.0)
    await store.begin(response("r"), "me")
    for id in "abc":
        await store.add_completion(completion(id, 5.0), "me")
    assert await store.prune() == 1
    left = await store.completions("me", ANY, order="desc")
    assert [item.id for item in left.items] == ["c", "b"]
    assert await store.get("r", "me")
    await store.close()


@runs
@pytest.mark.parametrize("version", [1, 2])
async def test_a_file_of_before_keeps_what_it_has(path: Path, version: int) -> None:
    db = sqlite3.connect(path, isolation_level=None)
    db.execute("PRAGMA auto_vacuum = INCREMENTAL")
    db.execute("PRAGMA foreign_keys = ON")
    for statements in file.SCHEMAS[:version]:
        for statement in statements:
            db.execute(statement)
    db.execute(f"PRAGMA user_version = {version}")
    for seq, kind in ((3, "response"), (7, "conversation")):
        db.execute(
            "INSERT INTO records (seq, kind, owner, id, created_at, used_at, status, body)"
            " VALUES (?, ?, 'me', 'r', 1, 2, 'completed', x'7b7d')",
            (seq, kind),
        )
        db.execute("INSERT INTO items VALUES (NULL, ?, 0, 'i', x'7b7d')", (seq,))
    db.execute("INSERT INTO events VALUES (3, 0, x'6565')")
    db.close()
    store = await Store.open(path)
    assert [item.id for item in (await store.input_items("r", "me")).items] == ["i"]
    assert await store.events("r", "me") == [b"ee"]
    assert [item.id for item in (await store.conversation_items("r", "me")).items] == ["i"]
    await store.add_completion(completion("a"), "me", items("x"))
    assert (await store.stats()).stored == await recounted(store)
    await store.delete("r", "me")
    assert (await store.stats()).items == 2
    assert (await store.stats()).stored == await recounted(store)
    await store.close()
    db = sqlite3.connect(path)
    assert db.execute("PRAGMA integrity_check").fetchone() == ("ok",)
    assert db.execute("PRAGMA foreign_key_check").fetchall() == []
    db.close()
