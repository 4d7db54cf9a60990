"""`/v1/conversations` on the wire, as OpenAI documents it."""

import time
import uuid
from collections.abc import Sequence
from typing import Annotated, Any

import msgspec
from fastapi import Request, Response
from pydantic import Field

from mlx_server import limits
from mlx_server.api.fields import Items, WireModel, ignored_header
from mlx_server.api.handlers import documented, json_response, read
from mlx_server.api.histories import MENDED
from mlx_server.api.responses.create import StoredItems
from mlx_server.api.responses.items import InputItem
from mlx_server.api.responses.protocol import Metadata
from mlx_server.api.responses.routes import without_effect
from mlx_server.api.stored import After, Limit, Sorted, page_body, store_of
from mlx_server.http.security import keyed_router
from mlx_server.request_threads import in_thread_if_large
from mlx_server.store import ItemRecord, Page, Record

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

router = keyed_router()


@router.post(PATH, openapi_extra=documented(PATH, ConversationBody))
async def create_conversation(http: Request) -> Response:
    body = await read(http, ConversationBody)
    items = await StoredItems(http).records(body.items or [])
    id, metadata = f"conv_{uuid.uuid4().hex}", _encoded(body.metadata)
    conversation = Record("conversation", id, int(time.time()), metadata)
    await store_of(http).add(conversation, http.state.owner, items)
    return json_response(_wire(conversation), ignored_header(await _ignored(body, items)))


@router.get(ONE)
async def retrieve_conversation(http: Request, id: str) -> Response:
    return json_response(_wire(await store_of(http).get("conversation", id, http.state.owner)))


@router.post(ONE, openapi_extra=documented(ONE, UpdateBody))
async def update_conversation(http: Request, id: str) -> Response:
    body = await read(http, UpdateBody)
    store, owner = store_of(http), http.state.owner
    metadata = _encoded(body.metadata)
    await store.update("conversation", id, owner, metadata, used_at=time.time())
    updated = await store.get("conversation", id, owner)
    return json_response(_wire(updated), ignored_header(body.ignored()))


@router.delete(ONE)
async def delete_conversation(http: Request, id: str) -> Response:
    await store_of(http).delete("conversation", id, http.state.owner)
    return json_response({"id": id, "object": "conversation.deleted", "deleted": True})


@router.post(ITEMS, openapi_extra=documented(ITEMS, ItemsBody))
async def add_items(http: Request, id: str) -> Response:
    body = await read(http, ItemsBody)
    items = await StoredItems(http).records(body.items)
    await store_of(http).add_items(id, http.state.owner, items, time.time())
    ignored = [*await _ignored(body, items), *without_effect(http)]
    return json_response(page_body(Page(items, has_more=False)), ignored_header(ignored))


@router.get(ITEMS)
async def list_items(
    http: Request, id: str, after: After = None, limit: Limit = 20, order: Sorted = "desc"
) -> Response:
    owner = http.state.owner
    page = await store_of(http).items("conversation", id, owner, after, limit, order)
    return json_response(page_body(page), ignored_header(without_effect(http)))


@router.get(ITEM)
async def retrieve_item(http: Request, id: str, item: str) -> Response:
    stored = await store_of(http).conversation_item(id, http.state.owner, item)
    return json_response(msgspec.Raw(stored.body), ignored_header(without_effect(http)))


@router.delete(ITEM)
async def delete_item(http: Request, id: str, item: str) -> Response:
    store, owner = store_of(http), http.state.owner
    await store.delete_item(id, owner, item)
    return json_response(_wire(await store.get("conversation", id, owner)))


async def _ignored(body: ConversationBody | ItemsBody, stored: Sequence[ItemRecord]) -> list[str]:
    """The paths of what has no effect, references to items that are not stored included."""
    unknown = ["items.item_reference"] if len(stored) < len(body.items or ()) else []
    return [*await in_thread_if_large(body.ignored), *unknown]  # a walk through thousands of items


def _encoded(metadata: Metadata | None) -> bytes:
    return msgspec.json.encode({"metadata": metadata or {}})


def _wire(conversation: Record) -> dict[str, Any]:
    fields = msgspec.json.decode(conversation.body, type=dict[str, Any])
    created = int(conversation.created_at)
    return {"id": conversation.id, "object": "conversation", "created_at": created, **fields}
