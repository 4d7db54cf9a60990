"""Creates the run of a request, with the earlier items it refers to, without starting it."""

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import aclosing, suppress
from dataclasses import dataclass, replace
from functools import partial
from itertools import count
from types import MappingProxyType
from typing import Any

import msgspec
from starlette.requests import HTTPConnection

from mlx_server import limits
from mlx_server.api.responses.answer import ResponseOutput
from mlx_server.api.responses.input import ParsedResponsesRequest, input_items, to_request
from mlx_server.api.responses.items import InputItem, ItemReference, Wire, new_id, read_items, wire
from mlx_server.api.responses.protocol import ResponsesBody, new_response
from mlx_server.api.responses.runs import (
    Background,
    EventLog,
    Events,
    NullRunStore,
    Run,
    RunRecord,
    Runs,
)
from mlx_server.errors import BadRequest, ContextTooLong, NotFound
from mlx_server.generation.plan import PromptOverflow
from mlx_server.generation.tool_loop import respond
from mlx_server.http import strict_json
from mlx_server.http.errors import input_too_long
from mlx_server.http.metrics import Metrics
from mlx_server.http.security import Signer, signer_of, with_client
from mlx_server.mcp import Connectors
from mlx_server.messages import Conversation
from mlx_server.pool.pool import Pool
from mlx_server.request_threads import grow_request, in_thread
from mlx_server.requests import GenerateRequest
from mlx_server.store import ItemRecord, Store, items_too_large

Recalled = Mapping[str, Sequence[ItemRecord]]
"""Maps the id of a response that is not stored to all items up to and with its own output."""

NOTHING: Recalled = MappingProxyType({})


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
