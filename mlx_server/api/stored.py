"""What the routes of stored objects share: the store, and the pages of a list."""

from collections.abc import Callable
from typing import Annotated, Any, Literal

import msgspec
from fastapi import Query
from starlette.requests import HTTPConnection

from mlx_server import limits
from mlx_server.api.accumulator import Wire
from mlx_server.errors import BadRequest
from mlx_server.store import ALL, Kind, Page, RecordFilter, Store

After = Annotated[str | None, Query(description="Id after which the list starts.")]
Limit = Annotated[int, Query(ge=1, le=limits.PAGE_ITEMS)]
Sorted = Annotated[Literal["asc", "desc"], Query()]


def store_of(connection: HTTPConnection) -> Store:
    store: Store = connection.app.state.runs.store
    return store


def page_body(page: Page, wire: Callable[[bytes], Any] = msgspec.Raw) -> Wire:
    """wire: makes what is shown of the stored body of an object."""
    items = page.items
    return {
        "object": "list",
        "data": [wire(item.body) for item in items],
        "first_id": items[0].id if items else None,
        "last_id": items[-1].id if items else None,
        "has_more": page.has_more,
    }


def anthropic_page(page: Page, wire: Callable[[bytes], Wire]) -> Wire:
    """OpenAI's page, with what Anthropic's clients send to have the next one."""
    body = page_body(page, wire)
    del body["object"]
    return {**body, "next_page": body["last_id"] if page.has_more else None}


async def newest(
    store: Store,
    kind: Kind,
    owner: str,
    after: str | None,
    before: str | None,
    limit: int,
    wanted: RecordFilter = ALL,
) -> Page:
    """A page with the newest first, as Anthropic's clients ask for it."""
    if after and before:
        raise BadRequest("Send either `after_id` or `before_id`, not both.", param="after_id")
    if not before:
        return await store.records(kind, owner, wanted, after, limit, "desc")
    page = await store.records(kind, owner, wanted, before, limit, "asc")
    return Page(page.items[::-1], page.has_more)
