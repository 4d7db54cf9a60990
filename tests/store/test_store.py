"""What is put in is got back, by its owner only; calls are in order and outlive who made them."""

import asyncio
import os
import sqlite3
import threading
from pathlib import Path

import msgspec
import pytest

from mlx_server.errors import BadRequest, NotFound, ShuttingDown, TooLarge
from mlx_server.store import ConversationRecord, ItemRecord, Retention, Store
from mlx_server.store import store as store_module
from tests.store.make import items, limit, response, runs

DAY = 86400


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "data" / "store.db"


@runs
async def test_a_response_comes_back_as_it_was_put(path: Path) -> None:
    store = await Store.open(path)
    await store.begin(response("r", "in_progress", previous="p"), "me", items("a", "b"))
    ended = response("r", "completed", items("c", "d"), note="\u00e9")
    assert await store.put(ended, "me", [b"e0", b"e1", b"e2"])
    await store.close()

    store = await Store.open(path)
    got = await store.get("r", "me")
    assert (got.status, got.body, got.output) == ("completed", ended.body, tuple(items("c", "d")))
    assert got.previous == "p"  # as begun
    assert await store.events("r", "me") == [b"e0", b"e1", b"e2"]
    assert await store.events("r", "me", starting_after=0, limit=1) == [b"e1"]
    await store.close()


@runs
async def test_another_owner_sees_nothing(path: Path) -> None:
    store = await Store.open(path)
    await store.begin(response("r", "in_progress"), "me", items("a"))
    await store.create_conversation(ConversationRecord("c", 0, b"{}"), "me", items("b"))
    foreign = [
        store.get("r", "you"),
        store.delete("r", "you"),
        store.input_items("r", "you"),
        store.events("r", "you"),
        store.chain("r", "you"),
        store.item("a", "you"),
        store.conversation("c", "you"),
        store.update_conversation("c", "you", b"{}", 0),
        store.delete_conversation("c", "you"),
        store.add_items("c", "you", items("x"), 0),
        store.conversation_items("c", "you"),
        store.conversation_item("c", "you", "b"),
        store.delete_item("c", "you", "b"),
    ]
    for call in foreign:
        with pytest.raises(NotFound):
            await call
    with pytest.raises(NotFound) as other:
        await store.get("r", "you")
    with pytest.raises(NotFound) as unknown:
        await store.get("s", "me")
    assert str(other.value) == str(unknown.value).replace("'s'", "'r'")
    assert not await store.put(response("r"), "you")
    assert (await store.get("r", "me")).status == "in_progress"
    # the id is not taken either
    await store.begin(response("r"), "you")
    await store.begin(response("s", conversation="c"), "you", items("y"))
    await store.begin(response("t", previous="s"), "me")
    with pytest.raises(NotFound, match="'s'"):
        await store.chain("t", "me")
    assert (await store.conversation_items("c", "me")).items == items("b")
    # one is not the other's kind
    with pytest.raises(NotFound):
        await store.get("c", "me")
    with pytest.raises(NotFound):
        await store.conversation("r", "me")
    await store.close()


@runs
async def test_who_ends_it_first_wins(path: Path) -> None:
    store = await Store.open(path)
    await store.begin(response("r", "queued"), "me")
    assert await store.put(response("r", "in_progress", items("a")), "me", [b"0"])
    assert await store.put(response("r", "in_progress", items("a", "b")), "me", [b"0", b"1"])
    assert await store.put(response("r", "cancelled", items("b")), "me")
    assert not await store.put(response("r", "completed", items("z")), "me", [b"z"])
    assert (await store.get("r", "me")).output == tuple(items("b"))
    assert await store.events("r", "me") == []
    await store.delete("r", "me")
    assert not await store.put(response("r"), "me")
    await store.close()


@runs
async def test_pages(path: Path) -> None:
    store = await Store.open(path)
    await store.begin(response("r", output=items("o")), "me", items(*"abcde"))
    first = await store.input_items("r", "me", limit=2)
    assert (first.items, first.has_more) == (items("e", "d"), True)
    last = await store.input_items("r", "me", after="d", limit=3)
    assert (last.items, last.has_more) == (items("c", "b", "a"), False)
    forth = await store.input_items("r", "me", after="a", limit=3, order="asc")
    assert (forth.items, forth.has_more) == (items("b", "c", "d"), True)
    with pytest.raises(BadRequest) as error:
        await store.input_items("r", "me", after="o")
    assert error.value.param == "after"
    await store.close()


@runs
async def test_a_chain_is_every_item_from_the_first(path: Path) -> None:
    store = await Store.open(path)
    await store.begin(response("1", output=items("b")), "me", items("a"))
    await store.begin(response("2", output=items("d", "e"), previous="1"), "me", items("c"))
    await store.begin(response("3", "in_progress", previous="2"), "me", items("f"))
    await store.begin(response("other", previous="1"), "me", items("z"))
    assert await store.chain("3", "me") == items(*"abcdef")
    await store.delete("2", "me")
    with pytest.raises(NotFound, match="'2' not found; it is the `previous_response_id` of '3'"):
        await store.chain("3", "me")
    await store.close()


@runs
async def test_a_chain_is_bounded(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = await Store.open(path)
    for n in range(5):
        previous = f"{n - 1}" if n else None
        await store.begin(response(f"{n}", previous=previous), "me", [ItemRecord("i", b"x" * 100)])
    await store.begin(response("itself", previous="itself"), "me")
    limit(monkeypatch, "CHAIN_RESPONSES", 5)
    assert len(await store.chain("4", "me")) == 5
    limit(monkeypatch, "CHAIN_RESPONSES", 4)
    for too_long in ("4", "itself"):
        with pytest.raises(BadRequest, match="is longer than 4"):
            await store.chain(too_long, "me")
    assert len(await store.chain("2", "me", 399)) == 3
    with pytest.raises(TooLarge, match=r"larger than `server.max_body_bytes`") as error:
        await store.chain("3", "me", 399)
    assert error.value.param == "previous_response_id"
    limit(monkeypatch, "READ_BACK_ITEMS", 3)
    assert len(await store.chain("2", "me")) == 3
    with pytest.raises(TooLarge, match="more than 3 stored items"):
        await store.chain("3", "me")
    await store.close()


@runs
async def test_conversations(path: Path) -> None:
    store = await Store.open(path)
    await store.create_conversation(ConversationRecord("c", 7, b'{"a":1}'), "me", items("1", "2"))
    await store.update_conversation("c", "me", b'{"a":2}', 8)
    assert await store.conversation("c", "me") == ConversationRecord("c", 7, b'{"a":2}')
    await store.add_items("c", "me", items("3"), 9)
    with pytest.raises(BadRequest, match="'2'"):
        await store.add_items("c", "me", items("4", "2"), 9)
    await store.delete_item("c", "me", "1")
    with pytest.raises(NotFound):
        await store.delete_item("c", "me", "1")
    with pytest.raises(NotFound):
        await store.conversation_item("c", "me", "1")
    assert await store.conversation_item("c", "me", "3") == items("3")[0]
    assert (await store.conversation_items("c", "me", order="asc")).items == items("2", "3")
    await store.delete_conversation("c", "me")
    with pytest.raises(NotFound):
        await store.conversation("c", "me")
    assert (await store.stats()).items == 0
    await store.close()


@runs
async def test_a_conversation_takes_the_items_of_what_was_answered(path: Path) -> None:
    store = await Store.open(path)
    await store.create_conversation(ConversationRecord("c", 0, b"{}"), "me", items("1"))
    for id, status in (("r", "completed"), ("s", "failed"), ("t", "incomplete")):
        await store.begin(response(id, "in_progress", conversation="c"), "me", items("1", f"{id}i"))
        await store.put(response(id, status, items(f"{id}o")), "me")
    reported = (await store.conversation_items("c", "me", order="asc")).items
    assert reported == items("1", "ri", "ro", "ti", "to")
    await store.delete_conversation("c", "me")
    assert (await store.input_items("r", "me", order="asc")).items == items("1", "ri")
    await store.close()


@runs
async def test_an_item_by_its_id_is_the_newest(path: Path) -> None:
    store = await Store.open(path)
    await store.begin(response("r", output=[ItemRecord("i", b"old")]), "me")
    await store.begin(response("s"), "me", [ItemRecord("i", b"new")])
    assert (await store.item("i", "me")).body == b"new"
    await store.delete("s", "me")
    assert (await store.item("i", "me")).body == b"old"
    await store.close()


@runs
async def test_what_is_refused_leaves_nothing(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = await Store.open(path)
    limit(monkeypatch, "STORED_PIECE_BYTES", 1000)
    big = [*items("a"), ItemRecord("b", b"x" * 1001)]
    with pytest.raises(TooLarge, match="1001 bytes"):
        await store.begin(response("r"), "me", big)
    with pytest.raises(TooLarge):
        await store.begin(response("r", note="x" * 1000), "me")
    with pytest.raises(TooLarge):
        await store.begin(response("r"), "me", events=[b"x" * 1001])
    with pytest.raises(BadRequest, match="'a' already"):
        await store.begin(response("r"), "me", items("a", "a"))
    assert (await store.stats()).responses == (await store.stats()).items == 0
    await store.begin(response("r"), "me", [ItemRecord("b", b"x" * 1000)])
    with pytest.raises(sqlite3.IntegrityError):  # the same id twice is our own mistake
        await store.begin(response("r"), "me")
    with pytest.raises(msgspec.DecodeError):
        await store.begin(response("s").__class__("s", 0, "queued", b"[]"), "me")
    assert (await store.stats()).responses == 1
    await store.close()


@pytest.mark.parametrize("id", ["\ud800", "\0", "' OR 1=1 --", "%", "\U0001f980" * 1000, ""])
@runs
async def test_hostile_ids(path: Path, id: str) -> None:
    store = await Store.open(path)
    await store.begin(response("r"), "me", items("i"))
    for call in (store.get(id, "me"), store.get("r", id), store.item(id, "me")):
        with pytest.raises((NotFound, BadRequest)):
            await call
    with pytest.raises(BadRequest):
        await store.input_items("r", "me", after=id)
    with pytest.raises(BadRequest):
        await store.events("r", "me", starting_after=10**30)
    assert (await store.stats()).responses == 1
    await store.close()


@runs
async def test_what_was_running_at_a_stop_has_failed_and_says_why(path: Path) -> None:
    store = await Store.open(path)
    for status in ("queued", "in_progress", "completed", "cancelled"):
        await store.begin(response(status, status, items("o")), "me", items("i"))
    await store.close()
    store = await Store.open(path)
    for id in ("queued", "in_progress"):
        got = await store.get(id, "me")
        body = msgspec.json.decode(got.body)
        assert got.status == body["status"] == "failed"
        assert "stopped before" in body["error"]["message"]
        assert (body["id"], got.output) == (id, tuple(items("o")))
    assert (await store.get("completed", "me")).body == response("completed").body
    assert (await store.get("cancelled", "me")).status == "cancelled"
    await store.close()


@runs
async def test_pruning_by_age_and_count(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    now = 100.0 * DAY
    store = await Store.open(path, Retention(days=30, count=5), clock=lambda: now)
    monkeypatch.setattr(store_module, "BATCH_RECORDS", 2)
    for day in range(60, 101, 4):
        await store.begin(response(f"{day}", at=day * DAY), "me", items("i"), [b"e"])
    await store.begin(response("running", "in_progress", at=0), "me")
    await store.create_conversation(ConversationRecord("idle", 0, b"{}"), "me", items("i"))
    await store.create_conversation(ConversationRecord("used", 0, b"{}"), "me")
    await store.add_items("used", "me", items("i"), now)
    assert await store.prune() == 3 + 4 + 1  # too old; too many, with the running one; idle
    stats = await store.stats()
    assert (stats.responses, stats.conversations, stats.items) == (5, 1, 5)
    assert (stats.oldest, stats.newest) == (0, 100 * DAY)
    assert (await store.get("88", "me")).created_at == 88 * DAY
    assert await store.prune() == 0
    await store.close()


@runs
async def test_an_old_response_does_not_age_its_conversation(path: Path) -> None:
    store = await Store.open(path, clock=lambda: 100 * DAY)
    await store.create_conversation(ConversationRecord("c", 90 * DAY, b"{}"), "me")
    await store.begin(response("r", at=0, conversation="c"), "me")
    assert await store.prune() == 1
    assert (await store.conversation("c", "me")).created_at == 90 * DAY
    await store.close()


@runs
async def test_one_step_of_pruning_is_bounded_in_bytes(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = await Store.open(path, Retention(count=0))
    for n in range(5):
        await store.begin(response(f"{n}"), "me", [ItemRecord("i", b"x" * 500)], [b"e" * 500])
    monkeypatch.setattr(store_module, "BATCH_BYTES", 1001)
    assert await store._prune_some("response") == 2
    await store.close()


@runs
async def test_pruning_lets_others_in_between_and_gives_space_back(path: Path) -> None:
    store = await Store.open(path, Retention(count=0))
    for n in range(120):
        await store.begin(response(f"{n}"), "me", [ItemRecord("i", b"x" * 50_000)])
    pruning = asyncio.create_task(store.prune())
    await asyncio.sleep(0)  # it has made its first call
    seen = (await store.stats()).responses
    assert 0 < seen < 120
    assert await pruning == 120
    await store.close()
    assert path.stat().st_size < 200_000


@runs
async def test_the_event_loop_never_waits_and_calls_are_in_order(path: Path) -> None:
    store = await Store.open(path)
    held = threading.Event()
    store._submit(held.wait)
    begun = asyncio.create_task(store.begin(response("r", "in_progress"), "me"))
    put = asyncio.create_task(store.put(response("r", "completed"), "me"))
    got = asyncio.create_task(store.get("r", "me"))
    await asyncio.sleep(0)
    assert not begun.done()
    held.set()
    assert (await got).status == "completed"
    assert await put
    await begun
    await store.close()


@runs
async def test_a_write_that_was_begun_is_done_though_its_caller_is_cancelled(path: Path) -> None:
    store = await Store.open(path)
    held = threading.Event()
    store._submit(held.wait)
    write = asyncio.create_task(store.begin(response("r"), "me"))
    read = asyncio.create_task(store.get("r", "me"))
    await asyncio.sleep(0)
    for task in (write, read):
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
    held.set()
    assert (await store.get("r", "me")).status == "completed"
    await store.close()


@runs
async def test_close_drains_and_refuses_what_comes_later(path: Path) -> None:
    store = await Store.open(path)
    writes = [asyncio.create_task(store.begin(response(f"{n}"), "me")) for n in range(50)]
    await asyncio.sleep(0)
    await store.close()
    await asyncio.gather(*writes)
    await store.close()
    with pytest.raises(ShuttingDown):
        await store.get("1", "me")
    store = await Store.open(path)
    assert (await store.stats()).responses == 50
    await store.close()


@runs
async def test_new_folders_are_synced_by_name(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    synced: list[tuple[int, bool]] = []
    deep = path.parent / "a" / "b" / path.name

    def fsync(folder: int) -> None:
        synced.append((os.fstat(folder).st_ino, deep.exists()))

    monkeypatch.setattr(os, "fsync", fsync)
    await (await Store.open(deep)).close()
    above = [path.parent.parent, path.parent, path.parent / "a"]
    assert synced == [(folder.stat().st_ino, False) for folder in above]


@runs
async def test_the_settings_that_make_it_durable(path: Path) -> None:
    store = await Store.open(path)
    db = store._connected
    found = await store._submit(
        lambda: [
            db().execute(f"PRAGMA {name}").fetchone()[0]
            for name in ("journal_mode", "synchronous", "fullfsync", "checkpoint_fullfsync")
        ]
    )
    assert found == ["wal", 2, 1, 1]
    assert path.stat().st_mode & 0o777 == 0o600
    assert path.parent.stat().st_mode & 0o777 == 0o700
    await store.close()
