"""`/v1/conversations` on the wire, as OpenAI documents it."""

import time
import uuid
from collections.abc import Sequence
from typing import Annotated, Any

import msgspec
from fastapi import APIRouter, Request, Response
from pydantic import Field

from mlx_server import limits
from mlx_server.api.fields import Items, WireModel, ignored_header
from mlx_server.api.handlers import documented, json_response, read
from mlx_server.api.histories import MENDED
from mlx_server.api.responses.create import page_body, room_of, stored_items
from mlx_server.api.responses.items import InputItem
from mlx_server.api.responses.protocol import Metadata
from mlx_server.api.responses.routes import After, Limit, Sorted, included
from mlx_server.request_threads import in_thread
from mlx_server.store import ConversationRecord, ItemRecord, Store

SomeItems = Annotated[Items[InputItem], Field(max_length=limits.ADDED_ITEMS), MENDED]


class ConversationBody(WireModel):
    items: SomeItems | None = None
    metadata: Metadata | None = None


class UpdateBody(WireModel):
    metadata: Metadata | None = None


class ItemsBody(WireModel):
    items: Annotated[SomeItems, Field(min_length=1)]


PATH = "/v1/conversations"
ONE = PATH + "/{id}"
ITEMS = ONE + "/items"
ITEM = ITEMS + "/{item}"

router = APIRouter()


@router.post(PATH, openapi_extra=documented(PATH, ConversationBody))
async def create(http: Request) -> Response:
    body = await read(http, ConversationBody)
    store, owner = _store(http), http.state.owner
    items = await stored_items(body.items or (), store, owner, room_of(http))
    stored = msgspec.json.encode({"metadata": body.metadata or {}})
    created = ConversationRecord(f"conv_{uuid.uuid4().hex}", int(time.time()), stored)
    await store.create_conversation(created, owner, items)
    return json_response(_wire(created), ignored_header(await _ignored(body, items)))


@router.get(ONE)
async def retrieve(http: Request, id: str) -> Response:
    return json_response(_wire(await _store(http).conversation(id, http.state.owner)))


@router.post(ONE, openapi_extra=documented(ONE, UpdateBody))
async def update(http: Request, id: str) -> Response:
    body = await read(http, UpdateBody)
    store, owner = _store(http), http.state.owner
    stored = msgspec.json.encode({"metadata": body.metadata or {}})
    await store.update_conversation(id, owner, stored, time.time())
    updated = await store.conversation(id, owner)
    return json_response(_wire(updated), ignored_header(body.ignored()))


@router.delete(ONE)
async def delete(http: Request, id: str) -> Response:
    await _store(http).delete_conversation(id, http.state.owner)
    return json_response({"id": id, "object": "conversation.deleted", "deleted": True})


@router.post(ITEMS, openapi_extra=documented(ITEMS, ItemsBody))
async def add_items(http: Request, id: str) -> Response:
    body = await read(http, ItemsBody)
    more = included(http)
    store, owner = _store(http), http.state.owner
    items = await stored_items(body.items, store, owner, room_of(http))
    await store.add_items(id, owner, items, time.time())
    data = await in_thread(more.records, items)
    found = {**page_body(items, has_more=False), "data": data}
    ignored = await _ignored(body, items)
    return json_response(found, ignored_header([*ignored, *more.ignored()]))


@router.get(ITEMS)
async def list_items(
    http: Request, id: str, after: After = None, limit: Limit = 20, order: Sorted = "desc"
) -> Response:
    more = included(http)
    page = await _store(http).conversation_items(id, http.state.owner, after, limit, order)
    found = page_body(page.items, has_more=page.has_more)
    data = await in_thread(more.records, page.items)
    return json_response({**found, "data": data}, ignored_header(more.ignored()))


@router.get(ITEM)
async def retrieve_item(http: Request, id: str, item: str) -> Response:
    more = included(http)
    found = await _store(http).conversation_item(id, http.state.owner, item)
    (shown,) = await in_thread(more.records, [found])
    return json_response(shown, ignored_header(more.ignored()))


@router.delete(ITEM)
async def delete_item(http: Request, id: str, item: str) -> Response:
    store, owner = _store(http), http.state.owner
    await store.delete_item(id, owner, item)
    return json_response(_wire(await store.conversation(id, owner)))


async def _ignored(body: ConversationBody | ItemsBody, stored: Sequence[ItemRecord]) -> list[str]:
    """The paths of what has no effect, references to items that are not stored included."""
    unknown = ["items.item_reference"] if len(stored) < len(body.items or ()) else []
    return [*await in_thread(body.ignored), *unknown]  # a walk through thousands of items


def _store(http: Request) -> Store:
    found: Store = http.app.state.runs.store
    return found


def _wire(conversation: ConversationRecord) -> dict[str, Any]:
    fields = msgspec.json.decode(conversation.body, type=dict[str, Any])
    created = int(conversation.created_at)
    return {"id": conversation.id, "object": "conversation", "created_at": created, **fields}
