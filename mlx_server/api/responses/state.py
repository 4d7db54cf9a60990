"""What a request goes on from: earlier responses, a conversation, items by their ids."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import msgspec

from mlx_server import limits
from mlx_server.api import strict_json
from mlx_server.api.responses.items import InputItem, ItemReference, Wire, wire
from mlx_server.errors import BadRequest, NotFound
from mlx_server.request_threads import grow_request, in_thread
from mlx_server.store import ItemRecord, Store, too_much

Recalled = Mapping[str, Sequence[ItemRecord]]
"""All that was said up to responses that are not stored, and by them."""


class ReadBackBudget:
    """What a request may still read back: that counts as the request's own size does."""

    def __init__(self, most_bytes: int, request_bytes: int) -> None:
        self.nbytes = max(0, most_bytes - request_bytes)

    def take(self, items: Sequence[ItemRecord], param: str) -> Sequence[ItemRecord]:
        size = sum(len(item.body) for item in items)
        self.nbytes -= size
        if self.nbytes < 0:
            raise too_much(param)
        grow_request(size)
        return items


async def earlier_items(
    previous: str | None,
    conversation: str | None,
    store: Store,
    owner: str,
    recalled: Recalled,
    room: ReadBackBudget,
) -> Sequence[ItemRecord]:
    if previous and conversation:
        raise BadRequest(
            "`previous_response_id` and `conversation` can't be sent together.",
            param="previous_response_id",
        )
    if conversation:
        found = await store.whole_conversation(conversation, owner, room.nbytes)
        return room.take(found, "conversation")
    if not previous:
        return []
    if previous in recalled:
        found = recalled[previous]
    else:
        found = await _of_response(previous, store, owner, room)
    return room.take(found, "previous_response_id")


async def referenced_items(
    items: Sequence[InputItem] | str | None, store: Store, owner: str, room: ReadBackBudget
) -> dict[str, Wire]:
    """The items that others are only references to."""
    given = [] if isinstance(items, str) else items or []
    ids = [item.id for item in given if isinstance(item, ItemReference)]
    if len(ids) > (most := limits.ITEM_REFERENCES.value):
        raise BadRequest(
            f"{len(ids)} items are sent by their ids, and {most} may be. Send the others in full.",
            param="input",
        )
    found: dict[str, ItemRecord] = {}
    for id in ids:
        if id not in found:
            found[id] = await _item(id, store, owner, room)
        room.take([found[id]], "input")  # each time: it is one more item then
    return await in_thread(_wires_of, found)


async def _item(id: str, store: Store, owner: str, room: ReadBackBudget) -> ItemRecord:
    try:
        return await store.item(id, owner, room.nbytes)
    except NotFound as error:
        raise BadRequest(error.message, param="input", code=error.code) from None


async def _of_response(
    id: str, store: Store, owner: str, room: ReadBackBudget
) -> Sequence[ItemRecord]:
    try:
        return await store.chain(id, owner, room.nbytes)
    except NotFound:
        raise BadRequest(
            f"Previous response with id '{id[:100]}' not found.",
            param="previous_response_id",
            code="previous_response_not_found",
        ) from None


def read_wires(items: Sequence[ItemRecord]) -> list[Wire]:
    """Of many lists and objects no more than a request's body may have."""
    try:
        strict_json.check_size(b",".join(item.body for item in items))
    except BadRequest as error:
        raise BadRequest(
            f"What this request reads back is too much to be read. {error.message}",
            param="previous_response_id",
        ) from None
    return [_wire_of(item) for item in items]


def _wire_of(item: ItemRecord) -> Wire:
    return msgspec.json.decode(item.body, type=dict[str, Any])


def _wires_of(found: Mapping[str, ItemRecord]) -> dict[str, Wire]:
    return dict(zip(found, read_wires(list(found.values())), strict=True))


async def stored_items(
    items: Iterable[InputItem], store: Store, owner: str, room: ReadBackBudget
) -> list[ItemRecord]:
    """For a conversation, with what they refer to in its place."""
    items = list(items)
    references = await referenced_items(items, store, owner, room)
    wires = (references[i.id] if isinstance(i, ItemReference) else wire(i) for i in items)
    return await in_thread(as_stored, wires)


def as_stored(items: Iterable[Wire]) -> list[ItemRecord]:
    return [ItemRecord(item["id"], msgspec.json.encode(item)) for item in items]


def page_body(items: Sequence[ItemRecord], *, has_more: bool) -> Wire:
    return {
        "object": "list",
        "data": [msgspec.Raw(item.body) for item in items],
        "first_id": items[0].id if items else None,
        "last_id": items[-1].id if items else None,
        "has_more": has_more,
    }
