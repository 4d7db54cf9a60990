"""The routes of `/v1/responses`."""

import asyncio
import re
from collections.abc import AsyncGenerator, Callable, Mapping
from contextlib import aclosing, suppress
from dataclasses import replace
from typing import Annotated

from fastapi import Query, Request, Response, WebSocket

from mlx_server.api.fields import ignored_header
from mlx_server.api.handlers import documented, json_response, read, while_connected
from mlx_server.api.responses.create import CreatedResponse, create, read_all
from mlx_server.api.responses.items import Wire
from mlx_server.api.responses.protocol import ResponsesBody
from mlx_server.api.responses.runs import (
    SHARE_SECONDS,
    TERMINAL,
    Run,
    Runs,
    decoded,
)
from mlx_server.api.responses.web_socket import Socket
from mlx_server.api.stored import After, Limit, Sorted, page_body
from mlx_server.errors import BadRequest, NotFound
from mlx_server.generation.plan import plan
from mlx_server.http.resumable import EventLog
from mlx_server.http.security import keyed_router
from mlx_server.http.sse import KEEP_ALIVE, OPENAI, EventStream, Frames
from mlx_server.pool.pool import Pool
from mlx_server.request_threads import in_thread
from mlx_server.store import RUNNING, Store

INCLUDE = re.compile(r"include(?:\[\d*\])?")
"""How clients spell the name of a list in a query."""


def without_effect(http: Request) -> list[str]:
    """The names of what a query asks for in vain: stored items have all that there is of them."""
    return [
        f"include.{value}" if INCLUDE.fullmatch(name) else name
        for name, value in http.query_params.multi_items()
        if INCLUDE.fullmatch(name) or (name, value) == ("include_obfuscation", "true")
    ]


PATH = "/v1/responses"
ONE = PATH + "/{id}"
COUNT = PATH + "/input_tokens"

router = keyed_router()


@router.post(PATH, openapi_extra=documented(PATH, ResponsesBody))
async def create_response(http: Request) -> Response:
    body = await read(http, ResponsesBody)
    created = await create(http, body)
    if body.background:
        return await _in_background(http, created)
    run = created.run
    is_streaming = False
    try:
        started = await while_connected(http, run.begin())
        headers = ignored_header([*created.ignored, *started.ignored])
        if body.stream:
            is_streaming = True
            frames = Frames(
                # the last event has its number before it is stored
                keep_alive=lambda: OPENAI.encode(run.output.alive()) if run.goes_on else KEEP_ALIVE
            )
            return EventStream(run.chunks(), headers, source=run, frames=frames)
        return json_response(await while_connected(http, run.complete()), headers)
    finally:
        if not is_streaming:
            await run.aclose()


async def _in_background(http: Request, created: CreatedResponse) -> Response:
    runs, run = _runs(http), created.run
    try:
        runs.claim(run)
        run.output.add_ignored(())  # lists only what the model ignores; the header has the rest
        await run.store()
    except BaseException:
        runs.discard(run)
        await run.aclose()
        raise
    runs.go_on(run)
    headers = ignored_header(created.ignored)
    if run.log:
        return _followed(runs, run, run.log, 0, headers)
    return json_response(run.response, headers)


@router.websocket(PATH)
async def serve_web_socket(websocket: WebSocket) -> None:
    await Socket(websocket, _runs(websocket)).serve()


@router.post(COUNT, openapi_extra=documented(COUNT, ResponsesBody))
async def count_input_tokens(http: Request) -> Response:
    """Counts the prompt's tokens, without the tools of MCP servers, which are not contacted."""
    body = await read(http, ResponsesBody)
    tokens, ignored = await while_connected(http, _counted(http, body))
    counted = {"object": "response.input_tokens", "input_tokens": tokens}
    return json_response(counted, ignored_header(ignored))


async def _counted(http: Request, body: ResponsesBody) -> tuple[int, list[str]]:
    resolved = await read_all(http, body)
    pool: Pool = http.app.state.pool
    name, _ = pool.models.split(body.model)
    prepared = await pool.prepared(name)
    # without its transcript, a replay model does not advance to its next answer
    counted = replace(prepared, transcript=None)
    planned = await in_thread(plan, counted, resolved.parsed.request, model=name)
    return planned.prompt_tokens, [*resolved.parsed.ignored, *planned.ignored]


@router.get(ONE)
async def retrieve_response(
    http: Request,
    id: str,
    stream: bool = False,
    starting_after: Annotated[int | None, Query(ge=0, lt=2**53)] = None,
) -> Response:
    runs, owner = _runs(http), http.state.owner
    headers = ignored_header(without_effect(http))
    if stream:
        start = 0 if starting_after is None else starting_after + 1
        return await _streamed_again(runs, id, owner, start, headers)
    if starting_after is not None:
        raise BadRequest("`starting_after` needs `stream=true`.", param="starting_after")
    return json_response(await runs.response(id, owner), headers)


async def _streamed_again(
    runs: Runs, id: str, owner: str, start: int, headers: Mapping[str, str]
) -> Response:
    run = runs.find(id, owner)
    if run and run.log:
        return _followed(runs, run, run.log, start, headers)
    response = await runs.response(id, owner)
    if run or not (await runs.store.events(id, owner, limit=1))[0]:
        raise BadRequest(
            f"Response '{id}' can't be streamed: create it with `background` and `stream`.",
            param="stream",
        )

    events = _stored_events(runs.store, id, owner, start)
    if response["status"] not in RUNNING:
        return EventStream(events, headers, source=events)

    def alive(number: int) -> Wire:  # another server runs it
        return {"type": "response.in_progress", "sequence_number": number, "response": response}

    return _counted_events(events, alive, start, headers)


def _followed(
    runs: Runs, run: Run, log: EventLog, start: int, headers: Mapping[str, str]
) -> Response:
    """Streams the events of a running response: from memory, then from the store once it has
    ended."""

    async def followed() -> AsyncGenerator[Wire]:
        event: Wire = {"type": "", "sequence_number": start - 1}
        async for body in log.read(start):
            event = decoded(body)
            yield event
        if event["type"] not in TERMINAL:
            with suppress(NotFound):  # deleted in the meantime
                after = event["sequence_number"] + 1
                async for event in _stored_events(runs.store, run.id, run.owner, after):
                    yield event

    return _counted_events(followed(), run.output.alive, start, headers)


def _counted_events(
    events: AsyncGenerator[Wire],
    alive: Callable[[int], Wire],
    start: int,
    headers: Mapping[str, str],
) -> Response:
    """While there are no events, one repeats the state of the response and the number of the last
    event, for clients that count events."""
    position = start - 1

    async def counted() -> AsyncGenerator[Wire]:
        nonlocal position
        async with aclosing(events):
            async for event in events:
                position = event["sequence_number"]
                yield event

    frames = Frames(keep_alive=lambda: OPENAI.encode(alive(max(position, 0))))
    return EventStream(counted(), headers, source=events, frames=frames)


async def _stored_events(store: Store, id: str, owner: str, start: int) -> AsyncGenerator[Wire]:
    """The events from `start` on, of a response that another server may be running."""
    while True:
        events, is_running = await store.events(id, owner, start - 1)
        for event in events:
            yield decoded(event)
        start += len(events)
        if not events:
            if not is_running:
                return
            await asyncio.sleep(SHARE_SECONDS)


@router.delete(ONE)
async def delete_response(http: Request, id: str) -> Response:
    runs, owner = _runs(http), http.state.owner
    run = runs.find(id, owner)
    if run and run.task:
        await run.stop()
    await runs.store.delete("response", id, owner)
    return json_response({"id": id, "object": "response.deleted", "deleted": True})


@router.post(ONE + "/cancel")
async def cancel_response(http: Request, id: str) -> Response:
    """Cancels a background response; one that has ended is returned unchanged."""
    return json_response(await _runs(http).cancel(id, http.state.owner))


@router.get(ONE + "/input_items")
async def list_input_items(
    http: Request, id: str, after: After = None, limit: Limit = 20, order: Sorted = "desc"
) -> Response:
    owner = http.state.owner
    page = await _runs(http).store.items("response", id, owner, after, limit, order)
    return json_response(page_body(page), ignored_header(without_effect(http)))


def _runs(connection: Request | WebSocket) -> Runs:
    runs: Runs = connection.app.state.runs
    return runs
