"""Stored responses: pages of their items, chains of them, and who ends them."""

from pathlib import Path

import msgspec
import pytest

from mlx_server.errors import BadRequest, NotFound, TooLarge
from mlx_server.store import ItemRecord, Store
from tests.store.make import items, limit, response, runs


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
