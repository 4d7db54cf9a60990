"""A request to a run: what it goes on from is read, what it will be is made, nothing has begun."""

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from types import MappingProxyType

from starlette.requests import HTTPConnection

from mlx_server.api.metrics import Metrics
from mlx_server.api.responses.background import Background
from mlx_server.api.responses.event_log import Log
from mlx_server.api.responses.input import Asked, input_items, to_request
from mlx_server.api.responses.items import Wire, new_id, read_items, wire
from mlx_server.api.responses.output import ResponseOutput
from mlx_server.api.responses.protocol import ResponsesBody
from mlx_server.api.responses.response import new_response
from mlx_server.api.responses.run import Events, Record, Run, Unkept
from mlx_server.api.responses.runs import Runs
from mlx_server.api.responses.state import (
    Recalled,
    Room,
    as_stored,
    earlier,
    read_wires,
    referred,
)
from mlx_server.api.responses.truncation import fitted
from mlx_server.errors import BadRequest
from mlx_server.generation.tool_loop import respond
from mlx_server.mcp import Connectors
from mlx_server.pool.pool import Pool
from mlx_server.request_threads import in_thread
from mlx_server.store import Item

NOTHING: Recalled = MappingProxyType({})


@dataclass(frozen=True)
class Created:
    run: Run
    background: Background | None
    said: Sequence[Item]
    """By whomever, up to this response."""
    ignored: Sequence[str]


@dataclass(frozen=True)
class Read:
    """A request with all that belongs to it."""

    asked: Asked
    earlier: Sequence[Wire]
    own: Sequence[Wire]
    said: Sequence[Item]
    """All of these."""
    input: Sequence[Item]
    """What is stored of it."""


async def create(
    connection: HTTPConnection, body: ResponsesBody, recalled: Recalled = NOTHING
) -> Created:
    runs: Runs = connection.app.state.runs
    stored = body.store is not False
    if body.background and not stored:
        raise BadRequest("`background` needs `store: true`.", param="background")
    pool: Pool = connection.app.state.pool
    name, _ = pool.named(body.model)
    pool.spec(name)  # an unknown one is refused, in the background too
    _check_ended(runs, body.previous_response_id, connection.state.owner)
    found = await read_all(connection, body, recalled)
    is_recalled = body.previous_response_id in recalled
    record = Record(
        id=new_id("response"),
        owner=connection.state.owner,
        created_at=time.time(),
        input=found.input,
        previous=None if is_recalled else body.previous_response_id,
        conversation=body.conversation_id,
    )
    response = new_response(body, record.id, stored=stored)
    output = ResponseOutput(response, encrypts=body.encrypts, interprets=body.interprets)
    events = partial(events_of, connection, found.asked)
    run = Run(record, output, events(), runs if stored else Unkept())
    log = Log(runs.logs) if body.stream else None
    background = Background(run, events, log) if body.background else None
    return Created(run, background, found.said, found.asked.ignored)


def _check_ended(runs: Runs, previous: str | None, owner: str) -> None:
    run = runs.find(previous, owner) if previous else None
    if run and not run.ended:
        raise BadRequest(
            f"Previous response '{previous}' has not ended yet.",
            param="previous_response_id",
            code="previous_response_not_ended",
        )


async def read_all(
    connection: HTTPConnection, body: ResponsesBody, recalled: Recalled = NOTHING
) -> Read:
    store, owner = connection.app.state.runs.store, connection.state.owner
    room = room_of(connection)
    before = await earlier(
        body.previous_response_id, body.conversation_id, store, owner, recalled, room
    )
    references = await referred(body.input, store, owner, room)
    whole = body.previous_response_id in recalled  # nobody finds those before it in the store
    return await in_thread(_read, body, before, references, whole)


def room_of(connection: HTTPConnection) -> Room:
    """For what a request reads back."""
    return Room(connection.app.state.max_body_bytes, connection.state.body_bytes)


def _read(
    body: ResponsesBody, stored: Sequence[Item], references: dict[str, Wire], whole: bool
) -> Read:
    before = read_wires(stored)
    items = input_items(body, references.__getitem__)
    asked = to_request(body, items, read_items(before))
    own = [wire(item) for item in items]
    told = as_stored(own)
    said = [*stored, *told]
    return Read(asked, before, own, said, said if whole else told)


def events_of(connection: HTTPConnection, asked: Asked) -> Events:
    pool: Pool = connection.app.state.pool
    metrics: Metrics = connection.app.state.metrics
    connectors: Connectors = connection.app.state.connectors
    answer = partial(respond, tools=asked.mcp, connectors=connectors, pool=pool)
    request = replace(asked.request, client=connection.state.client)
    events = fitted(request, answer) if asked.truncates else answer(request)
    return metrics.observed(events)
