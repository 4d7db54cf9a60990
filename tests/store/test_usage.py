"""What is stored has limits, counted rightly in any case; what is read back is measured first."""

import asyncio
import re
import threading
from pathlib import Path

import pytest

from mlx_server.errors import BadRequest, StoreFull, StoreUnavailable, TooLarge
from mlx_server.store import Record, Retention, Store
from tests.store.make import big, items, limit, recounted, response

pytestmark = pytest.mark.anyio

DAY = 86400.0


async def test_the_count_is_that_of_what_is_there(path: Path, store: Store) -> None:
    counts = []

    async def note() -> None:
        stored = (await store.stats()).stored
        assert stored == await recounted(store)
        counts.append(stored)

    await note()
    await store.add(Record("conversation", "c", 0, b"{}"), "me", items("1"))
    await note()
    await store.add(response("r", "in_progress", conversation="c"), "me", [big("a")], [b"e"])
    await note()
    await store.put(response("r", output=[big("b", 500)], note="n" * 99), "me", [b"e" * 77] * 3)
    await note()  # its items are the conversation's too
    await store.update("conversation", "c", "me", b'{"a":"longer"}', used_at=1)
    await note()
    await store.add(response("\u00e9", output=[big("b", 500)]), "you", [big("a" * 300)])
    await note()
    await store.delete_item("c", "me", "1")
    await note()
    with pytest.raises(BadRequest):
        await store.add_items("c", "me", [big("new"), big("a")], 2)  # all or nothing
    await note()
    await store.close()
    store = await Store.open(path)
    await note()
    await store.delete("response", "r", "me")
    await note()
    await store.delete("conversation", "c", "me")
    await store.delete("response", "\u00e9", "you")
    await note()
    assert counts[-1] == counts[0] == 0
    assert len(set(counts)) == 8


async def test_a_key_has_its_limit_and_all_have_one(path: Path) -> None:
    store = await Store.open(path, Retention(bytes=60_000))
    await store.add(response("1"), "me", [big("a", 20_000)])
    for call in (
        store.add(response("2"), "me", [big("b")]),
        store.add(response("2", output=[big("b")]), "me"),
        store.add(response("2", note="x" * 10_000), "me"),
        store.add(response("2"), "me", events=[b"x" * 10_000]),
        store.add(Record("conversation", "c", 0, b"{}"), "me", [big("b")]),
        store.add(Record("conversation", "c", 0, b"x" * 10_000), "me"),
    ):
        with pytest.raises(StoreFull, match=r"Your key would have .* the limit is 30000") as error:
            await call
        assert (error.value.status, error.value.code) == (507, "store_full")
        assert "DELETE /v1/responses" in error.value.message
        assert "`store.bytes`" in error.value.message
    assert (await store.stats()).responses == 1
    await store.add(Record("conversation", "c", 0, b"{}"), "me", [big("b", 5000)])
    for call in (
        store.add_items("c", "me", [big("c")], 1),
        store.update("conversation", "c", "me", b"x" * 10_000, used_at=1),
    ):
        with pytest.raises(StoreFull):
            await call
    await store.add(response("1"), "you", [big("a", 25_000)])
    with pytest.raises(
        StoreFull, match=r"The server would have .* the limit is 60000.*`store.bytes`"
    ):
        await store.add(response("2"), "they", [big("b")])
    await store.delete("response", "1", "me")
    await store.add(response("2"), "they", [big("b")])
    await store.close()


async def test_an_end_that_finds_no_room_can_still_be_told(path: Path) -> None:
    store = await Store.open(path, Retention(bytes=40_000))
    await store.add(response("r", "in_progress"), "me", [big("a", 15_000)])
    with pytest.raises(StoreFull):
        await store.put(response("r", output=[big("b")]), "me")
    assert (await store.get("response", "r", "me")).status == "in_progress"
    assert await store.put(response("r", "failed", note="x" * 10_000), "me")
    await store.close()


async def test_pruning_makes_room(path: Path) -> None:
    now = 100.0 * DAY
    store = await Store.open(path, Retention(bytes=30_000), clock=lambda: now)
    await store.add(response("old", at=0), "me", [big("a")])
    with pytest.raises(StoreFull):
        await store.add(response("new", at=now), "me", [big("a")])
    assert await store.prune() == 1
    assert (await store.stats()).stored == 0
    await store.add(response("new", at=now), "me", [big("a")])
    await store.close()


async def test_writers_at_once_do_not_pass_the_limit(path: Path) -> None:
    store = await Store.open(path, Retention(bytes=110_000))
    writing = [store.add(response(f"{n}"), "me", [big("a")]) for n in range(20)]
    done = await asyncio.gather(*writing, return_exceptions=True)
    assert [type(error) for error in done if error] == [StoreFull] * 15
    assert (await store.stats()).stored == await recounted(store) < 55_000
    await store.close()


async def test_pages_of_events_end_where_they_get_large(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    limit(monkeypatch, "PAGE_BYTES", 1000)
    events = [b"a" * 600, b"b" * 600, b"c" * 3000, b"d", b"e"]
    store = await Store.open(path)
    await store.add(response("r"), "me", events=events)
    pages = []
    start = 0
    while page := (await store.events("r", "me", start - 1))[0]:
        pages.append(len(page))
        start += len(page)
    assert pages == [1, 1, 1, 2]
    await store.close()


async def test_what_is_read_back_is_measured_before(store: Store) -> None:
    for n in range(8):
        previous = f"{n - 1}" if n else None
        await store.add(response(f"{n}", previous=previous), "me", [big("i")])
    await store.add(Record("conversation", "c", 0, b"{}"), "me", [big("i")])
    asked: list[str] = []
    await store._submit(lambda: store._connected().set_trace_callback(asked.append))
    for call in (
        store.chain("7", "me", 50_000),
        store.whole_conversation("c", "me", 1000),
        store.item("i", "me", 1000),
    ):
        with pytest.raises(TooLarge, match=r"`server.max_body_bytes`"):
            await call
    assert asked
    assert not [statement for statement in asked if re.search(r"[ ,.]body\b", statement)]
    assert len(await store.chain("4", "me", 50_000)) == 5


async def test_a_slow_disk_keeps_only_so_many_waiting(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    disk = threading.Event()
    store._submit(disk.wait)
    limit(monkeypatch, "STORE_CALLS", 5)
    limit(monkeypatch, "STORE_CALL_BYTES", 25_000)
    await asyncio.sleep(0.01)  # the thread has taken it
    writes = [asyncio.create_task(store.add(response(f"{n}"), "me", [big("i")])) for n in "ab"]
    await asyncio.sleep(0)
    with pytest.raises(StoreUnavailable, match="can't keep up with the requests"):
        await store.add(response("c"), "me", [big("i")])
    reads = [asyncio.create_task(store.get("response", "a", "me")) for _ in range(3)]
    await asyncio.sleep(0)
    for read in reads:  # who has left still takes its place until its turn
        read.cancel()
    await asyncio.gather(*reads, return_exceptions=True)
    with pytest.raises(StoreUnavailable):
        await store.get("response", "a", "me")
    disk.set()
    await asyncio.gather(*writes)
    await store.add(response("c"), "me", [big("i"), big("j", 30_000)])  # large, but alone


async def test_close_waits_for_a_slow_disk_in_a_full_line(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    limit(monkeypatch, "STORE_CALLS", 1)
    disk = threading.Event()
    store._submit(disk.wait)
    await asyncio.sleep(0.01)
    write = asyncio.create_task(store.add(response("r"), "me"))
    await asyncio.sleep(0)
    closing = asyncio.create_task(store.close())
    await asyncio.sleep(0)
    disk.set()
    await write
    await closing
