"""What is put in is got back, by its owner only; calls are in order and outlive who made them."""

import asyncio
import sqlite3
import threading
from pathlib import Path

import pytest

from mlx_server import limits
from mlx_server.errors import BadRequest, NotFound, ShuttingDown, TooLarge
from mlx_server.store import ItemRecord, JobKind, Record, Retention, Store, file
from mlx_server.store import store as store_module
from tests.store.make import big, items, limit, response

pytestmark = pytest.mark.anyio

DAY = 86400


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
