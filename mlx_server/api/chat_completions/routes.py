"""The routes of chat completions: creating them, those that are stored, and a request's prompt
without an answer.
"""

import re
import time
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec
from fastapi import Request, Response
from pydantic import TypeAdapter, ValidationError

from mlx_server import limits
from mlx_server.api.accumulator import Wire
from mlx_server.api.chat_completions.answer import REASONING_FIELDS, ChatOutput
from mlx_server.api.chat_completions.input import ChatBody, MessageParam, to_request
from mlx_server.api.conversations import UpdateBody
from mlx_server.api.fields import ignored_header
from mlx_server.api.handlers import documented, json_pieces, json_response, read, respond
from mlx_server.api.responses.protocol import Metadata
from mlx_server.api.stored import After, Limit, Sorted, page_body, store_of
from mlx_server.errors import BadRequest
from mlx_server.http.errors import validation_error
from mlx_server.http.resumable import resumed
from mlx_server.http.security import keyed_router
from mlx_server.http.sse import Store as Storing
from mlx_server.request_threads import in_thread, in_thread_if_large
from mlx_server.store import ItemRecord, Record, RecordFilter

ECHOED = {
    *("seed", "temperature", "top_p", "presence_penalty", "frequency_penalty"),
    *("tools", "tool_choice", "response_format"),
}
"""Fields of a request that the stored completion has."""

DUMPED: dict[str, Any] = {"mode": "json", "by_alias": True, "exclude_none": True}
"""How a request is stored."""

LABEL = re.compile(r"metadata\[(.*)\]", re.DOTALL)
"""How a query spells one pair of `metadata`."""

_metadata: TypeAdapter[dict[str, str]] = TypeAdapter(Metadata)


async def _storing(http: Request, body: ChatBody, id: str) -> Storing:
    """What stores the completion. Raises ServerError before anything is generated if it could not
    be stored."""
    store, owner = store_of(http), http.state.owner
    metadata = checked_metadata(body)
    echo = body.model_dump(include=ECHOED, **DUMPED)
    messages = await in_thread(_message_records, id, body.messages)
    await store.check_room(owner)

    async def add(completion: Mapping[str, Any]) -> None:
        stored = await in_thread(with_metadata, {**echo, **completion}, metadata, time.time())
        await store.add(stored, owner, messages)

    return add


def checked_metadata(body: ChatBody) -> dict[str, str]:
    try:
        return _metadata.validate_python(body.metadata or {})
    except ValidationError as error:
        refusal = validation_error(error, body.metadata)
        param = f"metadata.{refusal.param}" if refusal.param else "metadata"
        raise BadRequest(f"`{param}`: {refusal.message}", param=param) from None


def with_metadata(completion: Wire, metadata: Mapping[str, str], created_at: float) -> Record:
    labels = {"model": completion["model"], "metadata": metadata}
    body = b"".join(json_pieces({**completion, "metadata": metadata}))
    listed = msgspec.json.encode(labels).decode()
    return Record("completion", completion["id"], created_at, body, labels=listed)


def _message_records(completion: str, messages: Sequence[MessageParam]) -> list[ItemRecord]:
    """OpenAI's stored messages have text as `content`, and other content as `content_parts`."""
    records = []
    for number, message in enumerate(messages):
        id, sent = f"{completion}-{number}", message.model_dump(**DUMPED)
        content = sent.pop("content", None)
        text, parts = (None, content) if isinstance(content, list) else (content, None)
        stored = {"id": id, "content": text, "content_parts": parts, "refusal": None, **sent}
        records.append(ItemRecord(id, msgspec.json.encode(stored)))
    return records


def filter_of(http: Request) -> RecordFilter:
    """Which completions the query asks for."""
    metadata = {
        label[1]: value
        for name, value in http.query_params.multi_items()
        if (label := LABEL.fullmatch(name))
    }
    if len(metadata) > (most := limits.METADATA):
        raise BadRequest(f"`metadata` can have {most} pairs at most.", param="metadata")
    return RecordFilter(http.query_params.get("model"), metadata)


PATH = "/v1/chat/completions"
ONE = PATH + "/{id}"

router = keyed_router()
router.get(ONE + "/stream")(resumed)


@router.post(PATH, openapi_extra=documented(PATH, ChatBody))
async def chat_completions(http: Request) -> Response:
    body = await read(http, ChatBody)
    request = await in_thread_if_large(to_request, body)
    output = ChatOutput(
        body.model,
        request.n,
        body.reporting(request.logprobs, is_stored=bool(body.store)),
        freeform=body.freeform_names,
        reasoning_fields=()
        if body.hides_reasoning
        else REASONING_FIELDS[http.app.state.reasoning_field],
    )
    ignored = await in_thread_if_large(body.ignored)
    store = await _storing(http, body, output.id) if body.store else None
    return await respond(http, request, output, ignored=ignored, store=store)


@router.get(PATH)
async def stored(
    http: Request, after: After = None, limit: Limit = 20, order: Sorted = "asc"
) -> Response:
    filter, owner = filter_of(http), http.state.owner
    page = await store_of(http).records("completion", owner, filter, after, limit, order)
    return json_response(page_body(page))


@router.get(ONE)
async def retrieve(http: Request, id: str) -> Response:
    completion = await store_of(http).get("completion", id, http.state.owner)
    return json_response(msgspec.Raw(completion.body))


@router.post(ONE, openapi_extra=documented(ONE, UpdateBody))
async def update(http: Request, id: str) -> Response:
    body = await read(http, UpdateBody)
    store, owner = store_of(http), http.state.owner
    stored = await store.get("completion", id, owner)
    completion = msgspec.json.decode(stored.body, type=Wire)
    updated = with_metadata(completion, body.metadata or {}, stored.created_at)
    await store.update("completion", id, owner, updated.body, labels=updated.labels)
    return json_response(msgspec.Raw(updated.body), ignored_header(body.ignored()))


@router.delete(ONE)
async def delete(http: Request, id: str) -> Response:
    await store_of(http).delete("completion", id, http.state.owner)
    return json_response({"object": "chat.completion.deleted", "id": id, "deleted": True})


@router.get(ONE + "/messages")
async def list_messages(
    http: Request, id: str, after: After = None, limit: Limit = 20, order: Sorted = "asc"
) -> Response:
    owner = http.state.owner
    page = await store_of(http).items("completion", id, owner, after, limit, order)
    return json_response(page_body(page))
