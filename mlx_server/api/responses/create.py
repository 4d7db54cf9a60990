"""Creates the run of a request, with the earlier items it refers to, without starting it."""

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import aclosing, suppress
from dataclasses import dataclass, replace
from functools import partial
from itertools import count
from types import MappingProxyType

import msgspec
from starlette.requests import HTTPConnection

from mlx_server import limits
from mlx_server.api.file_inputs import give_files
from mlx_server.api.responses.answer import ResponseOutput
from mlx_server.api.responses.input import ParsedResponsesRequest, input_items, to_request
from mlx_server.api.responses.items import (
    InputItem,
    ItemReference,
    Wire,
    new_item_id,
    read_items,
    wire,
)
from mlx_server.api.responses.protocol import ResponsesBody, new_response
from mlx_server.api.responses.runs import Events, Run, Runs
from mlx_server.api.stored import store_of
from mlx_server.errors import BadRequest, ContextTooLong, NotFound
from mlx_server.generation.plan import PromptOverflow
from mlx_server.generation.tool_loop import respond
from mlx_server.http import strict_json
from mlx_server.http.errors import input_too_long
from mlx_server.http.metrics import Metrics
from mlx_server.http.resumable import EventLog
from mlx_server.http.security import Signer, signer_of, with_client
from mlx_server.mcp import Connectors
from mlx_server.messages import Conversation
from mlx_server.pool.pool import Pool
from mlx_server.prompts.branches import instructions
from mlx_server.request_threads import grow_request, in_thread
from mlx_server.requests import GenerateRequest, Tier
from mlx_server.store import ItemRecord, Record, items_too_large

Recalled = Mapping[str, Sequence[ItemRecord]]
"""Maps the id of a response that is not stored to all items up to and with its own output."""

NOTHING: Recalled = MappingProxyType({})

INSTEAD = "Send all items of the conversation as `input` instead."


@dataclass(frozen=True)
class CreatedResponse:
    run: Run
    context: Sequence[ItemRecord]
    """All items before this response, input included."""
    ignored: Sequence[str]


@dataclass(frozen=True)
class ResolvedRequest:
    """A request with the items that it refers to."""

    parsed: ParsedResponsesRequest
    context: Sequence[ItemRecord]
    """All items, earlier ones included."""
    input: Sequence[ItemRecord]
    """The items to store as the response's input."""


async def create(
    connection: HTTPConnection, body: ResponsesBody, recalled: Recalled = NOTHING
) -> CreatedResponse:
    runs: Runs = connection.app.state.runs
    owner: str = connection.state.owner
    stored = body.store is not False
    if body.background and not stored:
        raise BadRequest("`background` needs `store: true`.", param="background")
    pool: Pool = connection.app.state.pool
    name, _ = pool.models.split(body.model)
    pool.models.spec(name)  # refuses an unknown model now, also for a background response
    previous = body.previous_response_id
    resolved = await read_all(connection, body, recalled)
    if body.background and body.service_tier in (None, "auto"):
        connection.state.tier = max(connection.state.tier, Tier.FLEX)
    record = Record(
        "response",
        new_item_id("response"),
        time.time(),
        b"",
        previous=None if previous in recalled else previous,
        conversation=body.conversation_id,
    )
    signer = signer_of(connection)
    output = ResponseOutput(
        new_response(body, record.id, stored=stored),
        seal=signer.seal if body.encrypts else None,
        summarizes=body.summary is not None,
        table=resolved.parsed.table,
    )
    events = partial(events_of, connection, resolved.parsed)
    run = Run(record, owner, output, events, runs if stored else None, resolved.input)
    if body.background:
        run.queue(EventLog(runs.logs) if body.stream else None)
    return CreatedResponse(run, resolved.context, resolved.parsed.ignored)


async def read_all(
    connection: HTTPConnection, body: ResponsesBody, recalled: Recalled = NOTHING
) -> ResolvedRequest:
    stored = StoredItems(connection)
    earlier = await stored.earlier(body, recalled)
    references = await stored.referenced(body.input)
    await give_files(connection, *(item.body for item in earlier))
    is_recalled = body.previous_response_id in recalled
    signer = signer_of(connection)
    return await in_thread(_resolved, body, earlier, references, is_recalled, signer)


def _resolved(
    body: ResponsesBody,
    earlier: Sequence[ItemRecord],
    references: dict[str, Wire],
    is_recalled: bool,
    signer: Signer,
) -> ResolvedRequest:
    """`is_recalled`: the earlier items are not in the store, so they are stored as input too."""
    items = input_items(body, references.get)
    parsed = to_request(body, items, read_items(read_wires(earlier)), opened=signer.opened)
    new = as_stored(map(wire, items))
    context = [*earlier, *new]
    return ResolvedRequest(parsed, context, context if is_recalled else new)


def events_of(connection: HTTPConnection, parsed: ParsedResponsesRequest) -> Events:
    pool: Pool = connection.app.state.pool
    metrics: Metrics = connection.app.state.metrics
    connectors: Connectors = connection.app.state.connectors
    answer = partial(respond, tools=parsed.mcp, connectors=connectors, pool=pool)
    request = with_client(parsed.request, connection)
    events = answered_within_context(request, answer, truncates=parsed.truncates)
    return metrics.answers.observed(events, request.client, request.prompts)


async def answered_within_context(
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
    system = len(instructions(messages))
    return replace(
        conversation, messages=(*messages[:system], *messages[max(system, first_kept) :])
    )


class StoredItems:
    """Reads stored items back for a request: they count like bytes of its body."""

    def __init__(self, connection: HTTPConnection) -> None:
        self._store = store_of(connection)
        self._owner: str = connection.state.owner
        self._nbytes = max(0, connection.app.state.max_body_bytes - connection.state.body_bytes)

    async def earlier(self, body: ResponsesBody, recalled: Recalled) -> Sequence[ItemRecord]:
        """The items before those of the request."""
        previous, conversation = body.previous_response_id, body.conversation_id
        if previous and conversation:
            raise BadRequest(
                "Send either `previous_response_id` or `conversation`, not both.",
                param="previous_response_id",
            )
        if conversation:
            try:
                items = await self._store.whole_conversation(
                    conversation, self._owner, self._nbytes
                )
            except NotFound as error:
                raise NotFound(f"{error.message} {INSTEAD}", param="conversation") from None
            return self._counted(items, "conversation")
        if not previous:
            return []
        try:
            if previous in recalled:
                items = recalled[previous]
            else:
                items = await self._store.chain(previous, self._owner, self._nbytes)
        except NotFound:
            raise BadRequest(
                f"Previous response with id '{previous[:100]}' not found, or one before it was "
                f"deleted. {INSTEAD}",
                param="previous_response_id",
                code="previous_response_not_found",
            ) from None
        return self._counted(items, "previous_response_id")

    async def referenced(self, items: Sequence[InputItem] | str | None) -> dict[str, Wire]:
        """The stored items that `items` refers to, by id. A client may refer to those of another
        server, which are ignored."""
        listed = [] if isinstance(items, str) else items or []
        ids = [item.id for item in listed if isinstance(item, ItemReference)]
        if len(ids) > (most := limits.ITEM_REFERENCES):
            raise BadRequest(
                f"`input` has {len(ids)} item references; the limit is {most}. Send other items "
                "in full.",
                param="input",
            )
        records: dict[str, ItemRecord] = {}
        for id in ids:
            with suppress(NotFound):
                if id not in records:
                    records[id] = await self._store.item(id, self._owner, self._nbytes)
                self._counted([records[id]], "input")  # a repeated reference is one more item
        wires = await in_thread(read_wires, list(records.values()))
        return dict(zip(records, wires, strict=True))

    async def records(self, items: Sequence[InputItem]) -> list[ItemRecord]:
        """Records of items for a conversation, with references replaced by their items if they are
        stored."""
        references = await self.referenced(items)
        wires = (
            references[item.id] if isinstance(item, ItemReference) else wire(item)
            for item in items
            if not isinstance(item, ItemReference) or item.id in references
        )
        return await in_thread(as_stored, wires)

    def _counted(self, items: Sequence[ItemRecord], param: str) -> Sequence[ItemRecord]:
        size = sum(len(item.body) for item in items)
        self._nbytes -= size
        if self._nbytes < 0:
            raise items_too_large(param)
        grow_request(size)
        return items


def read_wires(items: Sequence[ItemRecord]) -> list[Wire]:
    """Decodes items. Raises BadRequest if they are larger than a request's body may be."""
    try:
        strict_json.check_size(b",".join(item.body for item in items))
    except BadRequest as error:
        raise BadRequest(
            f"The earlier items of this request are too large. {error.message}",
            param="previous_response_id",
        ) from None
    return [msgspec.json.decode(item.body, type=Wire) for item in items]


def as_stored(items: Iterable[Wire]) -> list[ItemRecord]:
    return [ItemRecord(item["id"], msgspec.json.encode(item)) for item in items]
