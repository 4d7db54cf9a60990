"""Reads what a request refers to: earlier responses, a conversation, items by their ids."""

from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from typing import Any

import msgspec

from mlx_server import limits
from mlx_server.api import strict_json
from mlx_server.api.responses.items import InputItem, ItemReference, Wire, wire
from mlx_server.errors import BadRequest, NotFound
from mlx_server.request_threads import grow_request, in_thread
from mlx_server.store import ItemRecord, Store, items_too_large

Recalled = Mapping[str, Sequence[ItemRecord]]
"""Maps the id of a response that is not stored to all items up to and with its own output."""


class ReadBackBudget:
    """How many bytes a request may still read back: they count like bytes of its body."""

    def __init__(self, most_bytes: int, request_bytes: int) -> None:
        self.nbytes = max(0, most_bytes - request_bytes)

    def take(self, items: Sequence[ItemRecord], param: str) -> Sequence[ItemRecord]:
        size = sum(len(item.body) for item in items)
        self.nbytes -= size
        if self.nbytes < 0:
            raise items_too_large(param)
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
            "Send either `previous_response_id` or `conversation`, not both.",
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
    """The stored items that `items` refers to, by id. A client may refer to those of another
    server, which are ignored."""
    given = [] if isinstance(items, str) else items or []
    ids = [item.id for item in given if isinstance(item, ItemReference)]
    if len(ids) > (most := limits.ITEM_REFERENCES):
        raise BadRequest(
            f"`input` has {len(ids)} item references; the limit is {most}. Send other items in "
            "full.",
            param="input",
        )
    found: dict[str, ItemRecord] = {}
    for id in ids:
        with suppress(NotFound):
            found[id] = found.get(id) or await store.item(id, owner, room.nbytes)
            room.take([found[id]], "input")  # each time: a repeated reference is one more item
    return await in_thread(_wires_of, found)


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
    """Decodes items. Raises BadRequest if they are larger than a request's body may be."""
    try:
        strict_json.check_size(b",".join(item.body for item in items))
    except BadRequest as error:
        raise BadRequest(
            f"The earlier items of this request are too large. {error.message}",
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
    """Records of items for a conversation, with references replaced by their items if they are
    stored."""
    items = list(items)
    references = await referenced_items(items, store, owner, room)
    wires = (
        references[item.id] if isinstance(item, ItemReference) else wire(item)
        for item in items
        if not isinstance(item, ItemReference) or item.id in references
    )
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
