"""The routes of `/v1/responses`, and the summary of a conversation that `/compact` makes."""

import re
import time
from collections.abc import AsyncGenerator, Iterable, Mapping, Sequence
from contextlib import aclosing, suppress
from dataclasses import replace
from typing import Annotated, Any, Literal, get_args

import msgspec
from fastapi import APIRouter, Query, Request, Response, WebSocket

from mlx_server import limits
from mlx_server.api.fields import SUMMARIZE, ignored_header
from mlx_server.api.handlers import documented, json_response, read, while_connected
from mlx_server.api.responses.answer import ResponseOutput
from mlx_server.api.responses.create import CreatedResponse, create, events_of, page_body, read_all
from mlx_server.api.responses.input import ParsedResponsesRequest
from mlx_server.api.responses.items import Seal, Wire, new_id
from mlx_server.api.responses.protocol import NOT_HERE, NotHere, ResponsesBody, new_response
from mlx_server.api.responses.runs import Background, EventLog, Run, Runs, decoded
from mlx_server.api.responses.web_socket import Socket
from mlx_server.errors import BadRequest, NotFound
from mlx_server.generation.plan import plan
from mlx_server.http.security import signer_of
from mlx_server.http.sse import OPENAI, EventStream, Frames
from mlx_server.messages import Conversation, Message, media_places
from mlx_server.pool.pool import Pool
from mlx_server.request_threads import in_thread
from mlx_server.requests import GenerateRequest, McpTools
from mlx_server.store import ItemRecord, Store

After = Annotated[str | None, Query(description="Id after which the list starts.")]
Limit = Annotated[int, Query(ge=1, le=limits.PAGE_ITEMS)]
Sorted = Annotated[Literal["asc", "desc"], Query()]


async def counted_tokens(http: Request, body: ResponsesBody) -> tuple[int, tuple[str, ...]]:
    """The prompt tokens, without the tools of MCP servers, which are not contacted, and the names
    of what has no effect."""
    found = await read_all(http, body)
    pool: Pool = http.app.state.pool
    name, _ = pool.models.split(body.model)
    prepared = await pool.prepared(name)
    # without its transcript, a replay model does not advance to its next answer
    counted = replace(prepared, transcript=None)
    planned = await in_thread(plan, counted, found.parsed.request, model=name)
    return planned.prompt_tokens, (*found.parsed.ignored, *planned.ignored)


NAME = re.compile(r"include(?:\[\d*\])?")
"""How clients spell the name of a list in a query."""

ENCRYPTED, LOGPROBS = "reasoning.encrypted_content", "message.output_text.logprobs"
KNOWN = frozenset({ENCRYPTED, LOGPROBS, *get_args(NotHere)})


class Included:
    """The values of one request, and which of them its items turned out not to have."""

    def __init__(self, wanted: Iterable[str], seal: Seal) -> None:
        self._seal = seal
        self._wanted = list(dict.fromkeys(wanted))
        self._has_texts = self._has_logprobs = False

    def records(self, items: Sequence[ItemRecord]) -> list[Any]:
        if not self._wanted:
            return [msgspec.Raw(item.body) for item in items]
        return self.items(msgspec.json.decode(item.body, type=dict[str, Any]) for item in items)

    def items(self, items: Iterable[Wire]) -> list[Wire]:
        return [self._item(item) for item in items]

    def wanted(self) -> list[str]:
        return [f"include.{value}" for value in self._wanted]

    def ignored(self) -> list[str]:
        absent = set(NOT_HERE)
        if self._has_texts and not self._has_logprobs:
            absent.add(LOGPROBS)  # they were not computed
        return [name for name in self.wanted() if name.removeprefix("include.") in absent]

    def _item(self, item: Wire) -> Wire:
        match item:
            case {"type": "reasoning", "content": [*parts]} if ENCRYPTED in self._wanted:
                text = "".join(part["text"] for part in parts)
                return {"encrypted_content": self._seal(text), **item}
            case {"type": "message", "role": "assistant", "content": [*parts]}:
                texts = [part for part in parts if part["type"] == "output_text"]
                self._has_texts = self._has_texts or bool(texts)
                self._has_logprobs = self._has_logprobs or any(p.get("logprobs") for p in texts)
        return item


def included(http: Request) -> Included:
    """Raises BadRequest for a value that no route has."""
    values = [value for name, value in http.query_params.multi_items() if NAME.fullmatch(name)]
    for value in values:
        if value not in KNOWN:
            raise BadRequest(
                f"`include` should be one of {', '.join(sorted(KNOWN))}.", param="include"
            )
    return Included(values, signer_of(http).seal)


PATH = "/v1/responses"
ONE = PATH + "/{id}"
COMPACT = PATH + "/compact"
COUNT = PATH + "/input_tokens"

NOTHING_MORE = Included((), str)  # it seals nothing

router = APIRouter()


@router.post(PATH, openapi_extra=documented(PATH, ResponsesBody))
async def responses(http: Request) -> Response:
    body = await read(http, ResponsesBody)
    created = await create(http, body)
    if created.background:
        return await _in_background(http, created, created.background)
    run = created.run
    is_streaming = False
    try:
        started = await while_connected(http, run.begin())
        headers = ignored_header([*created.ignored, *started.ignored])
        if body.stream:
            is_streaming = True
            frames = Frames(keep_alive=lambda: OPENAI.encode(run.output.alive()))
            return EventStream(run.chunks(), headers, source=run, frames=frames)
        return json_response(await while_connected(http, run.complete()), headers)
    finally:
        if not is_streaming:
            await run.aclose()


async def _in_background(
    http: Request, created: CreatedResponse, background: Background
) -> Response:
    runs, run = _runs(http), created.run
    try:
        runs.claim(background)
        run.output.add_ignored(())  # lists only what the model ignores; the header has the rest
        await run.store()
    except BaseException:
        runs.discard(background)
        await run.aclose()
        raise
    runs.go_on(background)
    headers = ignored_header(created.ignored)
    if run.log:
        return _stream(_followed(runs, run, run.log, 0), headers)
    return json_response(run.response, headers)


def _stream(events: AsyncGenerator[Wire], headers: Mapping[str, str] | None = None) -> Response:
    return EventStream(events, headers or {}, source=events)


@router.websocket(PATH)
async def connect(websocket: WebSocket) -> None:
    await Socket(websocket, _runs(websocket)).serve()


@router.post(COMPACT, openapi_extra=documented(COMPACT, ResponsesBody))
async def compact(http: Request) -> Response:
    parsed = await read(http, ResponsesBody)
    body, ignored = await while_connected(http, compacted(http, parsed))
    return json_response(body, ignored_header(ignored))


@router.post(COUNT, openapi_extra=documented(COUNT, ResponsesBody))
async def input_tokens(http: Request) -> Response:
    body = await read(http, ResponsesBody)
    tokens, ignored = await while_connected(http, counted_tokens(http, body))
    counted = {"object": "response.input_tokens", "input_tokens": tokens}
    return json_response(counted, ignored_header(ignored))


@router.get(ONE)
async def retrieve(
    http: Request,
    id: str,
    stream: bool = False,
    starting_after: Annotated[int | None, Query(ge=0, lt=2**53)] = None,
    include_obfuscation: bool = False,
) -> Response:
    runs, owner = _runs(http), http.state.owner
    more = included(http)
    without_effect = ["include_obfuscation"] if include_obfuscation else []
    if stream:
        start = 0 if starting_after is None else starting_after + 1
        headers = ignored_header([*more.wanted(), *without_effect])
        return await _streamed_again(runs, id, owner, start, headers)
    if starting_after is not None:
        raise BadRequest("`starting_after` needs `stream=true`.", param="starting_after")
    response = await _response(runs, id, owner, more)
    return json_response(response, ignored_header([*more.ignored(), *without_effect]))


async def _response(runs: Runs, id: str, owner: str, more: Included = NOTHING_MORE) -> Wire:
    if run := runs.find(id, owner):
        return {**run.response, "output": more.items(run.response["output"])}
    stored = await runs.store.get(id, owner)
    output = await in_thread(more.records, stored.output)
    return {**msgspec.json.decode(stored.body, type=dict[str, Any]), "output": output}


async def _streamed_again(
    runs: Runs, id: str, owner: str, start: int, headers: Mapping[str, str]
) -> Response:
    if run := runs.find(id, owner):
        if run.log is None:
            raise _no_stream(id)
        return _stream(_followed(runs, run, run.log, start), headers)
    if not await runs.store.has_events(id, owner):
        raise _no_stream(id)
    return _stream(_stored_events(runs.store, id, owner, start), headers)


def _no_stream(id: str) -> BadRequest:
    return BadRequest(
        f"Response '{id}' can't be streamed: create it with `background` and `stream`.",
        param="stream",
    )


async def _followed(runs: Runs, run: Run, log: EventLog, start: int) -> AsyncGenerator[Wire]:
    """The events of a running response: from memory, then from the store once it has ended."""
    async for event in log.read(start):
        yield event
        start += 1
    with suppress(NotFound):  # deleted in the meantime
        async for event in _stored_events(runs.store, run.record.id, run.record.owner, start):
            yield event


async def _stored_events(store: Store, id: str, owner: str, start: int) -> AsyncGenerator[Wire]:
    while events := await store.events(id, owner, start - 1):
        for event in events:
            yield decoded(event)
        start += len(events)


@router.delete(ONE)
async def delete(http: Request, id: str) -> Response:
    runs, owner = _runs(http), http.state.owner
    run = runs.find(id, owner)
    if run and (background := runs.in_background(run)):
        await background.cancel()
    await runs.store.delete(id, owner)
    return json_response({"id": id, "object": "response.deleted", "deleted": True})


@router.post(ONE + "/cancel")
async def cancel(http: Request, id: str) -> Response:
    """Cancels a background response; one that has ended is returned unchanged."""
    runs, owner = _runs(http), http.state.owner
    run = runs.find(id, owner)
    if run and (background := runs.in_background(run)):
        await background.cancel()
        return json_response(run.response)
    response = await _response(runs, id, owner)
    if not response["background"]:
        raise BadRequest("Only responses with `background: true` can be cancelled.", param="id")
    return json_response(response)


@router.get(ONE + "/input_items")
async def input_items(
    http: Request, id: str, after: After = None, limit: Limit = 20, order: Sorted = "desc"
) -> Response:
    more = included(http)
    page = await _runs(http).store.input_items(id, http.state.owner, after, limit, order)
    found = page_body(page.items, has_more=page.has_more)
    data = await in_thread(more.records, page.items)
    return json_response({**found, "data": data}, ignored_header(more.ignored()))


def _runs(connection: Request | WebSocket) -> Runs:
    found: Runs = connection.app.state.runs
    return found


async def compacted(http: Request, body: ResponsesBody) -> tuple[Wire, list[str]]:
    """The shortened conversation, and the names of what has no effect."""
    found = await read_all(http, body)
    output = ResponseOutput(new_response(body, "", stored=False))
    async with aclosing(events_of(http, _asking(found.parsed.request))) as events:
        async for event in events:
            output.add(event)
    response = output.response
    summary = "".join(_message_texts(response["output"])).strip()
    if not summary:
        raise BadRequest(
            "The model wrote no summary. Allow more output tokens, or use another model.",
            param="model",
        )
    users = [item for item in [*found.earlier, *found.own] if _is_users(item)]
    sealed = signer_of(http).seal(summary)
    short = {"id": new_id("compaction"), "type": "compaction", "encrypted_content": sealed}
    compacted = {
        "id": new_id("response"),
        "object": "response.compaction",
        "created_at": int(time.time()),
        "output": [*users, short],
        "usage": response["usage"],
    }
    unseen = dict.fromkeys(media_places(found.parsed.request.prompts))
    return compacted, [*found.parsed.ignored, *unseen]


def _asking(request: GenerateRequest) -> ParsedResponsesRequest:
    """The request for the summary: the conversation without tools or an output format."""
    (conversation,) = request.prompts
    assert isinstance(conversation, Conversation)
    messages = (*conversation.messages, Message("user", SUMMARIZE))
    prompt = Conversation(messages, template_kwargs=conversation.template_kwargs)
    text_only = replace(request, prompts=(prompt,), format=None, tool_choice="auto")
    return ParsedResponsesRequest(text_only, McpTools(), ())


def _is_users(item: Wire) -> bool:
    return (item["type"], item.get("role")) == ("message", "user")


def _message_texts(output: Sequence[Wire]) -> list[str]:
    messages = [item for item in output if item["type"] == "message"]
    return [part["text"] for message in messages for part in message["content"]]
