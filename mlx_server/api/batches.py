"""`/v1/batches` as OpenAI documents it, and `/v1/messages/batches` as Anthropic does."""

import asyncio
import secrets
import time
from collections.abc import Sequence
from typing import Annotated, Any, Literal

import msgspec
from fastapi import Query, Request, Response
from pydantic import Field

from mlx_server import limits
from mlx_server.api.accumulator import Wire
from mlx_server.api.batch_runner import ENDED, WINDOW_SECONDS, BatchJob, BatchRunner, batch_of
from mlx_server.api.fields import Items, WireModel, ignored_header
from mlx_server.api.file_inputs import disk_errors, find_file_for
from mlx_server.api.files import checked_seconds, content_response, new_file_id, rfc3339
from mlx_server.api.handlers import documented, json_response, read
from mlx_server.api.responses.protocol import Metadata
from mlx_server.api.stored import After, Limit, anthropic_page, newest, page_body, store_of
from mlx_server.errors import BadRequest, BatchEnded, NotFound
from mlx_server.http.errors import MESSAGES_PATH
from mlx_server.http.security import keyed_router
from mlx_server.request_threads import in_thread
from mlx_server.store import BatchKind, Record


class ExpiresAfter(WireModel):
    anchor: Literal["created_at"]
    seconds: int


class BatchBody(WireModel):
    input_file_id: str
    endpoint: Literal["/v1/chat/completions", "/v1/completions", "/v1/embeddings", "/v1/responses"]
    completion_window: Literal["24h"]
    metadata: Metadata | None = None
    output_expires_after: ExpiresAfter | None = None


class MessageRequest(WireModel):
    custom_id: Annotated[str, Field(pattern=r"^[a-zA-Z0-9_-]{1,64}$")]
    params: dict[str, Any]


class MessageBatchBody(WireModel):
    requests: Annotated[Items[MessageRequest], Field(min_length=1, max_length=limits.BATCH_LINES)]


def openai_batch(batch: BatchJob) -> Wire:
    ended: dict[str, int | None] = {f"{each}_at": None for each in sorted(ENDED)}
    if batch.status in ENDED:
        ended[f"{batch.status}_at"] = batch.ended_at
    output, errors = (
        name if name in batch.files else None for name in (batch.results_id, batch.errors_id)
    )
    return {
        "id": batch.id,
        "object": "batch",
        "endpoint": batch.endpoint,
        "errors": {"object": "list", "data": batch.errors} if batch.errors else None,
        "input_file_id": batch.input_file_id,
        "completion_window": "24h",
        "status": batch.status,
        "output_file_id": output,
        "error_file_id": errors,
        "created_at": batch.created_at,
        "in_progress_at": batch.in_progress_at,
        "expires_at": batch.expires_at,
        "finalizing_at": batch.ended_at,
        "cancelling_at": batch.cancelling_at,
        **ended,
        "request_counts": {
            "total": batch.total,
            "completed": batch.counts.get("completed", 0),
            "failed": batch.counts.get("failed", 0),
        },
        "usage": {
            "input_tokens": (prompt := batch.counts.get("input_tokens", 0)),
            "input_tokens_details": {"cached_tokens": batch.counts.get("cached_tokens", 0)},
            "output_tokens": (answer := batch.counts.get("output_tokens", 0)),
            "output_tokens_details": {"reasoning_tokens": batch.counts.get("reasoning_tokens", 0)},
            "total_tokens": prompt + answer,
        },
        "metadata": batch.metadata,
    }


AnthropicLimit = Annotated[int, Query(ge=1, le=1000)]
OUTCOMES = ("succeeded", "errored", "canceled", "expired")


def anthropic_batch(http: Request, batch: BatchJob) -> Wire:
    """Its counts are those of the end, before which all requests are being processed."""
    is_ended = batch.status in ENDED
    counts = {name: batch.counts.get(name, 0) if is_ended else 0 for name in OUTCOMES}
    results = f"{http.base_url}{BATCHES[1:]}/{batch.id}/results"
    return {
        "id": batch.id,
        "type": "message_batch",
        "processing_status": "ended"
        if is_ended
        else "canceling"
        if batch.status == "cancelling"
        else "in_progress",
        "request_counts": {"processing": 0 if is_ended else batch.total, **counts},
        "created_at": rfc3339(batch.created_at),
        "expires_at": rfc3339(batch.expires_at),
        "ended_at": rfc3339(batch.ended_at),
        "cancel_initiated_at": rfc3339(batch.cancelling_at),
        "archived_at": None,
        "results_url": results if is_ended else None,
    }


PATH = "/v1/batches"
ONE = PATH + "/{id}"
BATCHES = f"{MESSAGES_PATH}/batches"
BATCH = BATCHES + "/{id}"

router = keyed_router()


@router.post(PATH, openapi_extra=documented(PATH, BatchBody))
async def create_batch(http: Request) -> Response:
    body = await read(http, BatchBody)
    file = await find_file_for(http, body.input_file_id, "batch", "input_file_id")
    expiry = body.output_expires_after
    batch = BatchJob(
        id=f"batch_{secrets.token_hex(12)}",
        kind="batch",
        endpoint=body.endpoint,
        created_at=int(time.time()),
        expires_at=int(time.time()) + WINDOW_SECONDS,
        results_id=new_file_id(),
        errors_id=new_file_id(),
        input_file_id=file.id,
        metadata=body.metadata,
        output_seconds=checked_seconds(expiry.seconds) if expiry else None,
    )
    store = store_of(http)
    runner: BatchRunner = http.app.state.batches
    try:
        with runner.room(http.state.owner), disk_errors():
            linking = asyncio.to_thread(store.contents.share, file.id, batch.input_name)
            with await linking:  # the lock keeps its input from being swept before it has a record
                await store.add(batch.record(), http.state.owner)
            runner.start("batch", batch.id, http.state.owner)
    except FileNotFoundError:
        raise NotFound(f"The content of file '{file.id}' was deleted.") from None
    return json_response(openai_batch(batch), ignored_header(body.ignored()))


@router.get(PATH)
async def list_batches(http: Request, after: After = None, limit: Limit = 20) -> Response:
    owner = http.state.owner
    page = await store_of(http).records("batch", owner, after=after, limit=limit, order="desc")
    return json_response(page_body(page, lambda body: openai_batch(batch_of(body))))


@router.get(ONE)
async def retrieve_batch(http: Request, id: str) -> Response:
    return json_response(openai_batch(await _found(http, "batch", id)))


@router.post(ONE + "/cancel")
async def cancel_batch(http: Request, id: str) -> Response:
    batch = await _cancelled(http, "batch", id)
    if batch.status not in ("cancelling", "cancelled"):
        raise BatchEnded(f"Cannot cancel a batch with status '{batch.status}'.")
    return json_response(openai_batch(batch))


@router.post(BATCHES, openapi_extra=documented(BATCHES, MessageBatchBody))
async def create_message_batch(http: Request) -> Response:
    body = await read(http, MessageBatchBody, gives_files=False)
    ids = {request.custom_id for request in body.requests}
    if len(ids) < len(body.requests):
        raise BadRequest("Two requests have the same `custom_id`.", param="requests")
    id = f"msgbatch_{secrets.token_hex(12)}"
    batch = BatchJob(
        id=id,
        kind="message batch",
        endpoint=MESSAGES_PATH,
        created_at=int(time.time()),
        expires_at=int(time.time()) + WINDOW_SECONDS,
        results_id=f"{id}.results",
        total=len(body.requests),
    )
    store = store_of(http)
    runner: BatchRunner = http.app.state.batches
    with runner.room(http.state.owner), disk_errors():
        with await asyncio.to_thread(store.contents.create, batch.input_name) as content:
            try:
                for start in range(0, len(body.requests), 100):  # takes few at a time
                    content.write(await in_thread(_lines, body.requests[start : start + 100]))
                content.flush()
            except BaseException:
                store.contents.remove([batch.input_name])
                raise
            await store.add(batch.record(), http.state.owner)
        runner.start("message batch", id, http.state.owner)
    return json_response(anthropic_batch(http, batch), ignored_header(body.ignored()))


@router.get(BATCHES)
async def list_message_batches(
    http: Request, after_id: After = None, before_id: After = None, limit: AnthropicLimit = 20
) -> Response:
    kind: BatchKind = "message batch"
    page = await newest(store_of(http), kind, http.state.owner, after_id, before_id, limit)
    wires = anthropic_page(page, lambda body: anthropic_batch(http, batch_of(body)))
    return json_response(wires)


@router.get(BATCH)
async def retrieve_message_batch(http: Request, id: str) -> Response:
    return json_response(anthropic_batch(http, await _found(http, "message batch", id)))


@router.post(BATCH + "/cancel")
async def cancel_message_batch(http: Request, id: str) -> Response:
    return json_response(anthropic_batch(http, await _cancelled(http, "message batch", id)))


@router.delete(BATCH)
async def delete_message_batch(http: Request, id: str) -> Response:
    batch = await _found(http, "message batch", id)
    if batch.status not in ENDED:
        raise BadRequest("The batch has not ended. Cancel it first.")
    await store_of(http).delete("message batch", id, http.state.owner)
    await asyncio.to_thread(store_of(http).contents.remove, batch.contents)
    return json_response({"id": id, "type": "message_batch_deleted"})


@router.get(BATCH + "/results")
async def message_batch_results(http: Request, id: str) -> Response:
    batch = await _found(http, "message batch", id)
    if batch.status not in ENDED:
        raise BadRequest("The batch has not ended: it has no results yet.")
    return await content_response(store_of(http), batch.results_id, "application/x-jsonl")


async def _found(http: Request, kind: BatchKind, id: str) -> BatchJob:
    return batch_of((await store_of(http).get(kind, id, http.state.owner)).body)


async def _cancelled(http: Request, kind: BatchKind, id: str) -> BatchJob:
    """The batch once it is marked: the server that runs it ends it within seconds."""

    def mark(record: Record) -> Record:
        batch = batch_of(record.body)
        if batch.status not in ENDED and batch.status != "cancelling":
            batch.status, batch.cancelling_at = "cancelling", int(time.time())
        return batch.record()

    return batch_of((await store_of(http).edit(kind, id, http.state.owner, mark)).body)


def _lines(requests: Sequence[MessageRequest]) -> bytes:
    fields = ({"custom_id": each.custom_id, "params": each.params} for each in requests)
    return b"".join(msgspec.json.encode(line) + b"\n" for line in fields)
