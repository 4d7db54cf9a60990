"""Conversations and their items."""

from pathlib import Path

import pytest

from mlx_server.errors import BadRequest, NotFound
from mlx_server.store import ConversationRecord, Store
from tests.store.make import items, response, runs
from tests.store.test_store import DAY


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
async def test_an_old_response_does_not_age_its_conversation(path: Path) -> None:
    store = await Store.open(path, clock=lambda: 100 * DAY)
    await store.create_conversation(ConversationRecord("c", 90 * DAY, b"{}"), "me")
    await store.begin(response("r", at=0, conversation="c"), "me")
    assert await store.prune() == 1
    assert (await store.conversation("c", "me")).created_at == 90 * DAY
    await store.close()
