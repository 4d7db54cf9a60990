"""What a request goes on from: earlier responses, a conversation, items by their ids."""

import asyncio
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import msgspec

from mlx_server.api.responses.items import InputItem, ItemReference, Wire, wire
from mlx_server.errors import BadRequest, NotFound
from mlx_server.store import Item, Store

PAGE = 1000
MOST_BYTES = 64 * 2**20

Recalled = Mapping[str, Sequence[Wire]]
"""All that was said up to responses that are not stored, and by them."""


async def earlier(
    previous: str | None, conversation: str | None, store: Store, owner: str, recalled: Recalled
) -> Sequence[Wire]:
    if previous and conversation:
        raise BadRequest(
            "`previous_response_id` and `conversation` can't be sent together.",
            param="previous_response_id",
        )
    if conversation:
        return await _of_conversation(conversation, store, owner)
    if previous and previous in recalled:
        return recalled[previous]
    return await _of_response(previous, store, owner) if previous else []


async def referred(
    items: Sequence[InputItem] | str | None, store: Store, owner: str
) -> dict[str, Wire]:
    """The items that others are only references to."""
    given = [] if isinstance(items, str) else items or []
    ids = {item.id for item in given if isinstance(item, ItemReference)}
    return {id: await _item(id, store, owner) for id in ids}


async def _item(id: str, store: Store, owner: str) -> Wire:
    try:
        return _read(await store.item(id, owner))
    except NotFound as error:
        raise BadRequest(error.message, param="input", code=error.code) from None


async def _of_response(id: str, store: Store, owner: str) -> list[Wire]:
    try:
        found = await store.chain(id, owner)
    except NotFound:
        raise BadRequest(
            f"Previous response with id '{id[:100]}' not found.",
            param="previous_response_id",
            code="previous_response_not_found",
        ) from None
    return await asyncio.to_thread(_read_all, found)


async def _of_conversation(id: str, store: Store, owner: str) -> list[Wire]:
    found: list[Item] = []
    size, after, has_more = 0, None, True
    while has_more:
        page = await store.conversation_items(id, owner, after, PAGE, "asc")
        found += page.items
        has_more, after = page.has_more, found[-1].id if found else None
        size += sum(len(item.body) for item in page.items)
        if size > MOST_BYTES:
            raise BadRequest(
                f"Conversation '{id}' is too long to be read. Begin anew.", param="conversation"
            )
    return await asyncio.to_thread(_read_all, found)


def _read_all(items: Iterable[Item]) -> list[Wire]:
    return [_read(item) for item in items]


def _read(item: Item) -> Wire:
    return msgspec.json.decode(item.body, type=dict[str, Any])


async def taken(items: Iterable[InputItem], store: Store, owner: str) -> list[Item]:
    """For a conversation, with what they refer to in its place."""
    items = list(items)
    references = await referred(items, store, owner)
    wires = (references[i.id] if isinstance(i, ItemReference) else wire(i) for i in items)
    return await asyncio.to_thread(as_stored, wires)


def as_stored(items: Iterable[Wire]) -> list[Item]:
    return [Item(item["id"], msgspec.json.encode(item)) for item in items]


def page_body(items: Sequence[Item], *, has_more: bool) -> Wire:
    return {
        "object": "list",
        "data": [msgspec.Raw(item.body) for item in items],
        "first_id": items[0].id if items else None,
        "last_id": items[-1].id if items else None,
        "has_more": has_more,
    }
