"""What is put in is got back, by its owner only; calls are in order and outlive who made them."""

import asyncio
import re
import sqlite3
import threading
from pathlib import Path

import pytest

from mlx_server import limits
from mlx_server.errors import (
    BadRequest,
    NotFound,
    ShuttingDown,
    StoreFull,
    StoreUnavailable,
    TooLarge,
)
from mlx_server.store import ItemRecord, JobKind, Record, Retention, Store, file
from mlx_server.store import store as store_module
from mlx_server.store.database import DOUBT_SECONDS, AgeClock
from tests.store.make import big, items, limit, recounted, response

pytestmark = pytest.mark.anyio

DAY = 86400.0


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "data" / "store.db"


async def test_another_owner_sees_nothing(store: Store) -> None:
    await store.add(response("r", "in_progress"), "me", items("a"))
    await store.add(Record("conversation", "c", 0, b"{}"), "me", items("b"))
    foreign = [
        store.get("response", "r", "you"),
        store.delete("response", "r", "you"),
        store.items("response", "r", "you"),
        store.events("r", "you"),
        store.chain("r", "you"),
        store.item("a", "you"),
        store.get("conversation", "c", "you"),
        store.update("conversation", "c", "you", b"{}", used_at=0),
        store.delete("conversation", "c", "you"),
        store.add_items("c", "you", items("x"), 0),
        store.items("conversation", "c", "you"),
        store.conversation_item("c", "you", "b"),
        store.delete_item("c", "you", "b"),
    ]
    for call in foreign:
        with pytest.raises(NotFound):
            await call
    with pytest.raises(NotFound) as other:
        await store.get("response", "r", "you")
    with pytest.raises(NotFound) as unknown:
        await store.get("response", "s", "me")
    assert str(other.value) == str(unknown.value).replace("'s'", "'r'")
    assert not await store.put(response("r"), "you")
    assert (await store.get("response", "r", "me")).status == "in_progress"
    # the id is not taken either
    await store.add(response("r"), "you")
    await store.add(response("s", conversation="c"), "you", items("y"))
    await store.add(response("t", previous="s"), "me")
    with pytest.raises(NotFound, match="'s'"):
        await store.chain("t", "me")
    assert (await store.items("conversation", "c", "me")).items == items("b")
    # one is not the other's kind
    with pytest.raises(NotFound):
        await store.get("response", "c", "me")
    with pytest.raises(NotFound):
        await store.get("conversation", "r", "me")


async def test_what_is_refused_leaves_nothing(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    limit(monkeypatch, "STORED_PIECE_BYTES", 1000)
    big = [*items("a"), ItemRecord("b", b"x" * 1001)]
    with pytest.raises(TooLarge, match="1001 bytes"):
        await store.add(response("r"), "me", big)
    with pytest.raises(TooLarge):
        await store.add(response("r", note="x" * 1000), "me")
    with pytest.raises(TooLarge):
        await store.add(response("r"), "me", events=[b"x" * 1001])
    with pytest.raises(BadRequest, match="'a' already"):
        await store.add(response("r"), "me", items("a", "a"))
    assert (await store.stats()).responses == (await store.stats()).items == 0
    await store.add(response("r"), "me", [ItemRecord("b", b"x" * 1000)])
    with pytest.raises(sqlite3.IntegrityError):  # the same id twice is our own mistake
        await store.add(response("r"), "me")
    assert (await store.stats()).responses == 1


@pytest.mark.parametrize("id", ["\ud800", "\0", "' OR 1=1 --", "%", "\U0001f980" * 1000, ""])
async def test_hostile_ids(store: Store, id: str) -> None:
    await store.add(response("r"), "me", items("i"))
    for call in (
        store.get("response", id, "me"),
        store.get("response", "r", id),
        store.item(id, "me"),
    ):
        with pytest.raises((NotFound, BadRequest)):
            await call
    with pytest.raises(BadRequest):
        await store.items("response", "r", "me", after=id)
    with pytest.raises(BadRequest):
        await store.events("r", "me", starting_after=10**30)
    assert (await store.stats()).responses == 1


async def test_pruning_by_age_and_count(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    now = 100.0 * DAY
    store = await Store.open(path, Retention(days=30), clock=lambda: now)
    monkeypatch.setattr(limits, "STORED_RESPONSES", 5)
    monkeypatch.setattr(store_module, "BATCH_RECORDS", 2)
    for day in range(60, 101, 4):
        await store.add(response(f"{day}", at=day * DAY), "me", items("i"), [b"e"])
    await store.add(response("running", "in_progress", at=0), "me")
    await store.add(Record("conversation", "idle", 0, b"{}"), "me", items("i"))
    await store.add(Record("conversation", "used", 0, b"{}"), "me")
    await store.add_items("used", "me", items("i"), now)
    assert await store.prune() == 3 + 4 + 1  # too old; too many, with the running one; idle
    stats = await store.stats()
    assert (stats.responses, stats.conversations, stats.items) == (5, 1, 5)
    assert (stats.oldest, stats.newest) == (0, 100 * DAY)
    assert (await store.get("response", "88", "me")).created_at == 88 * DAY
    assert await store.prune() == 0
    await store.close()


async def test_pruning_lets_others_in_between_and_gives_space_back(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(limits, "STORED_RESPONSES", 0)
    store = await Store.open(path)
    for n in range(120):
        await store.add(response(f"{n}"), "me", [ItemRecord("i", b"x" * 50_000)])
    pruning = asyncio.create_task(store.prune())
    await asyncio.sleep(0)  # it has made its first call
    seen = (await store.stats()).responses
    assert 0 < seen < 120
    assert await pruning == 120
    await store.close()
    assert path.stat().st_size < 200_000


async def test_the_event_loop_never_waits_and_calls_are_in_order(store: Store) -> None:
    held = threading.Event()
    store._submit(held.wait)
    begun = asyncio.create_task(store.add(response("r", "in_progress"), "me"))
    put = asyncio.create_task(store.put(response("r", "completed"), "me"))
    got = asyncio.create_task(store.get("response", "r", "me"))
    await asyncio.sleep(0)
    assert not begun.done()
    held.set()
    assert (await got).status == "completed"
    assert await put
    await begun


async def test_a_write_that_was_begun_is_done_though_its_caller_is_cancelled(store: Store) -> None:
    held = threading.Event()
    store._submit(held.wait)
    write = asyncio.create_task(store.add(response("r"), "me"))
    read = asyncio.create_task(store.get("response", "r", "me"))
    await asyncio.sleep(0)
    for task in (write, read):
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
    held.set()
    assert (await store.get("response", "r", "me")).status == "completed"


async def test_close_drains_and_refuses_what_comes_later(path: Path, store: Store) -> None:
    writes = [asyncio.create_task(store.add(response(f"{n}"), "me")) for n in range(50)]
    await asyncio.sleep(0)
    await store.close()
    await asyncio.gather(*writes)
    await store.close()
    with pytest.raises(ShuttingDown):
        await store.get("response", "1", "me")
    store = await Store.open(path)
    assert (await store.stats()).responses == 50


# Items: how many there may be, in which pages and chains they are read, and by which id.


EXPECTED = {"asc": [2, 1, 1, 3, 1], "desc": [2, 2, 1, 2, 1]}


@pytest.mark.parametrize("order", ["asc", "desc"])
async def test_pages_end_where_they_get_large(
    path: Path, monkeypatch: pytest.MonkeyPatch, order: str
) -> None:
    sizes = [10, 500, 500, 2000, 1, 1, 998, 2]
    limit(monkeypatch, "PAGE_BYTES", 1000)
    store = await Store.open(path)
    given = [big(f"{n}", size) for n, size in enumerate(sizes)]
    await store.add(Record("conversation", "c", 0, b"{}"), "me", given)
    pages: list[list[ItemRecord]] = []
    more, after = True, None
    while more:
        page = await store.items("conversation", "c", "me", after, 5, order)  # type: ignore[arg-type]
        pages.append(list(page.items))
        more, after = page.has_more, page.items[-1].id
    found = [item for page in pages for item in page]
    assert found == (given if order == "asc" else given[::-1])
    for items_of_page in pages:
        assert len(items_of_page) == 1 or sum(len(i.body) for i in items_of_page) <= 1000
    assert [len(page) for page in pages] == EXPECTED[order]
    await store.close()


async def test_a_conversation_has_so_many_items(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    limit(monkeypatch, "CONVERSATION_ITEMS", 3)
    store = await Store.open(path)
    await store.add(Record("conversation", "c", 0, b"{}"), "me", items("1", "2"))
    with pytest.raises(BadRequest, match="3 items at most"):
        await store.add_items("c", "me", items("3", "4"), 0)
    await store.add(response("r", conversation="c"), "me", items("3"))
    with pytest.raises(BadRequest, match="3 items at most"):
        await store.add(response("s", conversation="c"), "me", items("4"))
    await store.delete_item("c", "me", "1")
    await store.add(response("s", conversation="c"), "me", items("4"))
    await store.close()


async def test_an_item_by_its_id_is_the_owners_newest(store: Store) -> None:
    await store.add(response("r", output=[ItemRecord("i", b"old")]), "me")
    await store.add(response("s"), "me", [ItemRecord("i", b"new")])
    for n in range(50):
        await store.add(response(f"{n}"), "you", [big("i", 1 << 20)])
    assert (await store.item("i", "me", 100)).body == b"new"
    await store.delete("response", "s", "me")
    assert (await store.item("i", "me")).body == b"old"
    with pytest.raises(NotFound):
        await store.item("i", "nobody")


async def test_input_items_are_paged_without_the_output(store: Store) -> None:
    await store.add(response("r", output=items("o")), "me", items(*"abcde"))
    forth = await store.items("response", "r", "me", after="a", limit=3, order="asc")
    assert (forth.items, forth.has_more) == (items("b", "c", "d"), True)
    with pytest.raises(BadRequest) as error:
        await store.items("response", "r", "me", after="o")
    assert error.value.param == "after"


async def test_a_page_and_a_claim_look_at_no_other_records(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    steps, own = 0, file.open_database

    def count() -> None:
        nonlocal steps
        steps += 1

    def opened(path: Path) -> sqlite3.Connection:
        db = own(path)
        db.set_progress_handler(count, 1)
        return db

    monkeypatch.setattr(file, "open_database", opened)
    store = await Store.open(path)
    for owner in ("me", "you"):
        await asyncio.gather(*(store.add(response(f"{n}"), owner) for n in range(200)))
    await store.add(response("other"), "third")
    for call in (
        lambda: store.records("response", "third", order="desc"),
        lambda: store.records("response", "me", limit=1, order="desc"),
        lambda: store.records("response", "you", after="50", limit=1),
        lambda: store.claim(["me"], list[JobKind](["batch"])),
    ):
        steps = 0
        await call()
        assert steps < 200
    await store.close()


async def test_a_chain_is_bounded(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    for n in range(5):
        previous = f"{n - 1}" if n else None
        await store.add(response(f"{n}", previous=previous), "me", [ItemRecord("i", b"x" * 100)])
    await store.add(response("itself", previous="itself"), "me")
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
    await store.delete("response", "1", "me")
    with pytest.raises(NotFound, match="'1' not found; it is the `previous_response_id` of '2'"):
        await store.chain("2", "me")


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


YEAR = 365 * DAY
NOW = 55 * YEAR


class Clocks:
    def __init__(self) -> None:
        self.wall, self.steady = NOW, 0.0

    def pass_(self, seconds: float) -> None:
        self.wall += seconds
        self.steady += seconds


async def opened(path: Path, clocks: Clocks) -> Store:
    store = await Store.open(path, Retention(days=30), clock=lambda: clocks.wall)
    store._ageing = AgeClock(lambda: clocks.wall, lambda: clocks.steady)
    return store


async def filled(path: Path, clocks: Clocks) -> Store:
    store = await opened(path, clocks)
    for day in (40, 20, 0):
        await store.add(response(f"{day}", at=clocks.wall - day * DAY), "me", items("i"))
    await store.add(Record("conversation", "c", clocks.wall, b"{}"), "me")
    return store


async def kept(store: Store) -> int:
    stats = await store.stats()
    return stats.responses + stats.conversations


async def test_a_conversation_of_the_page_ages_from_its_last_use(path: Path) -> None:
    clocks = Clocks()
    store = await opened(path, clocks)
    for day in (40, 20):
        used = clocks.wall - day * DAY
        await store.put_page_conversation(Record("page conversation", "c", used, b"{}"), "me")
    assert (await store.prune(), await kept(store)) == (0, 1)
    clocks.pass_(11 * DAY)
    assert (await store.prune(), await kept(store)) == (1, 0)
    await store.close()


@pytest.mark.parametrize("leap", [12 * YEAR, 68 * YEAR, 1e12])
async def test_a_clock_that_leaps_ahead_and_comes_back_deletes_nothing(
    path: Path, leap: float
) -> None:
    clocks = Clocks()
    store = await filled(path, clocks)
    assert await store.prune() == 1, "as ever"
    clocks.wall += leap
    await store.add(response("ahead", at=clocks.wall), "me")
    for _ in range(4):
        clocks.pass_(3600)
        assert await store.prune() == 0
    await store.close()
    store = await opened(path, clocks)  # started anew, it knows no better
    assert await store.prune() == 0
    clocks.wall -= leap
    assert await store.prune() == 0
    assert await kept(store) == 4
    clocks.pass_(31 * DAY)
    assert await store.prune() == 3, "and then they age as ever"
    await store.close()


async def test_new_records_are_kept_after_a_clock_was_set_back(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(limits, "STORED_RESPONSES", 3)
    clocks = Clocks()
    store = await opened(path, clocks)
    for at in range(3):
        await store.add(response(f"ahead{at}", at=clocks.wall), "me")
    clocks.wall -= 3600
    await store.add(response("new", at=clocks.wall), "me")
    assert await store.prune() == 1
    assert (await store.get("response", "new", "me")).id == "new"
    with pytest.raises(NotFound):
        await store.get("response", "ahead0", "me")
    await store.close()


async def test_a_clock_that_stays_ahead_is_believed(path: Path) -> None:
    clocks = Clocks()
    store = await filled(path, clocks)
    await store.prune()
    clocks.wall += 2 * YEAR
    assert await store.prune() == 0
    clocks.pass_(DOUBT_SECONDS)
    assert await store.prune() == 3
    await store.close()


@pytest.mark.parametrize("back", [3600.0, 20 * YEAR, NOW])
async def test_a_clock_that_goes_back(path: Path, back: float) -> None:
    clocks = Clocks()
    store = await filled(path, clocks)
    await store.prune()
    clocks.wall -= back
    assert await store.prune() == 0
    await store.add(response("back", at=clocks.wall), "me")
    clocks.wall += back
    assert await store.prune() == 0
    assert await kept(store) == 4
    await store.close()


async def test_a_count_holds_whatever_the_clock_says(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    clocks = Clocks()
    store = await filled(path, clocks)
    await store.close()
    monkeypatch.setattr(limits, "STORED_RESPONSES", 1)
    store = await opened(path, clocks)
    await store.prune()
    clocks.wall += 12 * YEAR
    await store.add(response("new", at=clocks.wall), "me")
    assert await store.prune() == 1
    await store.close()
