"""Items of conversations: how many there are, and how they are read."""

from pathlib import Path

import pytest

from mlx_server.errors import BadRequest, NotFound
from mlx_server.store import ConversationRecord, ItemRecord, Store
from tests.store.make import big, items, limit, response, runs

EXPECTED = {"asc": [2, 1, 1, 3, 1], "desc": [2, 2, 1, 2, 1]}


@pytest.mark.parametrize("order", ["asc", "desc"])
@runs
async def test_pages_end_where_they_get_large(
    path: Path, monkeypatch: pytest.MonkeyPatch, order: str
) -> None:
    sizes = [10, 500, 500, 2000, 1, 1, 998, 2]
    limit(monkeypatch, "PAGE_BYTES", 1000)
    store = await Store.open(path)
    given = [big(f"{n}", size) for n, size in enumerate(sizes)]
    await store.create_conversation(ConversationRecord("c", 0, b"{}"), "me", given)
    pages: list[list[ItemRecord]] = []
    more, after = True, None
    while more:
        page = await store.conversation_items("c", "me", after, 5, order)  # type: ignore[arg-type]
        pages.append(list(page.items))
        more, after = page.has_more, page.items[-1].id
    found = [item for page in pages for item in page]
    assert found == (given if order == "asc" else given[::-1])
    for items_of_page in pages:
        assert len(items_of_page) == 1 or sum(len(i.body) for i in items_of_page) <= 1000
    assert [len(page) for page in pages] == EXPECTED[order]
    await store.close()


@runs
async def test_a_conversation_has_so_many_items(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    limit(monkeypatch, "CONVERSATION_ITEMS", 3)
    store = await Store.open(path)
    await store.create_conversation(ConversationRecord("c", 0, b"{}"), "me", items("1", "2"))
    with pytest.raises(BadRequest, match="3 items at most"):
        await store.add_items("c", "me", items("3", "4"), 0)
    await store.begin(response("r", conversation="c"), "me", items("3"))
    with pytest.raises(BadRequest, match="3 items at most"):
        await store.begin(response("s", conversation="c"), "me", items("4"))
    await store.delete_item("c", "me", "1")
    await store.begin(response("s", conversation="c"), "me", items("4"))
    await store.close()


@runs
async def test_the_newest_item_of_an_id_is_found_among_many(path: Path) -> None:
    store = await Store.open(path)
    for n in range(50):
        await store.begin(response(f"{n}"), "you", [big("i", 1 << 20)])
    await store.begin(response("mine"), "me", items("i"))
    assert [await store.item("i", "me", 100)] == items("i")
    with pytest.raises(NotFound):
        await store.item("i", "nobody")
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
