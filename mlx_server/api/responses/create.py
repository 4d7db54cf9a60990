"""Creates the run of a request, with the earlier items it refers to, without starting it."""

import time
from collections.abc import Callable, Sequence
from contextlib import aclosing
from dataclasses import dataclass, replace
from functools import partial
from itertools import count
from types import MappingProxyType

from starlette.requests import HTTPConnection

from mlx_server.api.metrics import Metrics
from mlx_server.api.overflow import input_too_long
from mlx_server.api.responses.input import ParsedResponsesRequest, input_items, to_request
from mlx_server.api.responses.items import Wire, new_id, read_items, wire
from mlx_server.api.responses.output import ResponseOutput
from mlx_server.api.responses.protocol import ResponsesBody
from mlx_server.api.responses.response import new_response
from mlx_server.api.responses.runs import (
    Background,
    EventLog,
    Events,
    NullRunStore,
    Run,
    RunRecord,
    Runs,
)
from mlx_server.api.responses.state import (
    ReadBackBudget,
    Recalled,
    as_stored,
    earlier_items,
    read_wires,
    referenced_items,
)
from mlx_server.api.security import signer_of, with_client
from mlx_server.api.signatures import Signer
from mlx_server.errors import BadRequest, ContextTooLong
from mlx_server.generation.plan import PromptOverflow
from mlx_server.generation.tool_loop import respond
from mlx_server.mcp import Connectors
from mlx_server.messages import Conversation
from mlx_server.pool.pool import Pool
from mlx_server.request_threads import in_thread
from mlx_server.requests import GenerateRequest
from mlx_server.store import ItemRecord

NOTHING: Recalled = MappingProxyType({})


@dataclass(frozen=True)
class CreatedResponse:
    run: Run
    background: Background | None
    context: Sequence[ItemRecord]
    """All items before this response, input included."""
    ignored: Sequence[str]


@dataclass(frozen=True)
class ResolvedRequest:
    """A request with the items that it refers to."""

    parsed: ParsedResponsesRequest
    earlier: Sequence[Wire]
    own: Sequence[Wire]
    context: Sequence[ItemRecord]
    """The earlier and the own items."""
    input: Sequence[ItemRecord]
    """The items to store as the response's input."""


async def create(
    connection: HTTPConnection, body: ResponsesBody, recalled: Recalled = NOTHING
) -> CreatedResponse:
    runs: Runs = connection.app.state.runs
    stored = body.store is not False
    if body.background and not stored:
        raise BadRequest("`background` needs `store: true`.", param="background")
    pool: Pool = connection.app.state.pool
    name, _ = pool.models.split(body.model)
    pool.models.spec(name)  # refuses an unknown model now, also for a background response
    _check_ended(runs, body.previous_response_id, connection.state.owner)
    found = await read_all(connection, body, recalled)
    is_recalled = body.previous_response_id in recalled
    record = RunRecord(
        id=new_id("response"),
        owner=connection.state.owner,
        created_at=time.time(),
        input=found.input,
        previous=None if is_recalled else body.previous_response_id,
        conversation=body.conversation_id,
    )
    response = new_response(body, record.id, stored=stored)
    signer = signer_of(connection)
    output = ResponseOutput(
        response,
        seal=signer.seal if body.encrypts else None,
        summarizes=body.summary is not None,
        offered=body.hosted_tools,
        table=found.parsed.table,
    )
    events = partial(events_of, connection, found.parsed)
    run = Run(record, output, events(), runs if stored else NullRunStore())
    log = EventLog(runs.logs) if body.stream else None
    background = Background(run, events, log) if body.background else None
    return CreatedResponse(run, background, found.context, found.parsed.ignored)


def _check_ended(runs: Runs, previous: str | None, owner: str) -> None:
    run = runs.find(previous, owner) if previous else None
    if run and not run.ended:
        raise BadRequest(
            f"Previous response '{previous}' has not ended yet. Wait for it, or cancel it.",
            param="previous_response_id",
            code="previous_response_not_ended",
        )


async def read_all(
    connection: HTTPConnection, body: ResponsesBody, recalled: Recalled = NOTHING
) -> ResolvedRequest:
    store, owner = connection.app.state.runs.store, connection.state.owner
    room = room_of(connection)
    before = await earlier_items(
        body.previous_response_id, body.conversation_id, store, owner, recalled, room
    )
    references = await referenced_items(body.input, store, owner, room)
    is_recalled = body.previous_response_id in recalled
    signer = signer_of(connection)
    return await in_thread(_resolved, body, before, references, is_recalled, signer)


def room_of(connection: HTTPConnection) -> ReadBackBudget:
    """The budget for the items that a request reads back from the store."""
    return ReadBackBudget(connection.app.state.max_body_bytes, connection.state.body_bytes)


def _resolved(
    body: ResponsesBody,
    stored: Sequence[ItemRecord],
    references: dict[str, Wire],
    is_recalled: bool,
    signer: Signer,
) -> ResolvedRequest:
    """`is_recalled`: the earlier items are not in the store, so they are stored as input too."""
    before = read_wires(stored)
    items = input_items(body, references.get)
    parsed = to_request(body, items, read_items(before), opened=signer.opened)
    own = [wire(item) for item in items]
    own_records = as_stored(own)
    context = [*stored, *own_records]
    return ResolvedRequest(parsed, before, own, context, context if is_recalled else own_records)


def events_of(connection: HTTPConnection, parsed: ParsedResponsesRequest) -> Events:
    pool: Pool = connection.app.state.pool
    metrics: Metrics = connection.app.state.metrics
    connectors: Connectors = connection.app.state.connectors
    answer = partial(respond, tools=parsed.mcp, connectors=connectors, pool=pool)
    request = with_client(parsed.request, connection)
    events = fitted(request, answer, truncates=parsed.truncates)
    return metrics.answers.observed(events, request.client, request.prompts)


async def fitted(
    request: GenerateRequest, respond: Callable[[GenerateRequest], Events], *, truncates: bool
) -> Events:
    """Answers the conversation. With `truncation: auto`, one that is too long for the model loses
    its oldest turns: each attempt drops twice as many, so that it is not rendered many times."""
    (whole,) = request.prompts
    assert isinstance(whole, Conversation)
    remaining = whole
    for attempt in count():
        begun = False
        try:
            async with aclosing(respond(replace(request, prompts=(remaining,)))) as events:
                async for event in events:
                    begun = True
                    yield event
            return
        except ContextTooLong as error:
            may_shorten = truncates and not begun
            shorter = await in_thread(drop_oldest, whole, 2**attempt) if may_shorten else remaining
            if len(shorter.messages) == len(remaining.messages):
                if isinstance(error, PromptOverflow):
                    raise input_too_long(error, await error.tokens()) from None
                raise
            remaining = shorter


def drop_oldest(conversation: Conversation, turns: int) -> Conversation:
    """The conversation without its oldest turns. A turn is a user's message and all messages up to
    the next one. The first system messages and the last turn always stay."""
    messages = conversation.messages
    starts = [i for i, message in enumerate(messages) if message.role == "user"]
    if not starts:
        return conversation
    first_kept = starts[min(turns, len(starts) - 1)]
    system = next(
        i for i, message in enumerate(messages) if message.role not in ("system", "developer")
    )
    return replace(
        conversation, messages=(*messages[:system], *messages[max(system, first_kept) :])
    )
