"""Reads the body of a request, generates its events and folds them into a response, for every
endpoint; the work is cancelled when the client disconnects.

A client that closes only its sending side, which HTTP allows, counts as disconnected: the server
can't tell the two apart.
"""

from collections.abc import (
    AsyncGenerator,
    AsyncIterator,
    Coroutine,
    Iterable,
    Iterator,
    Mapping,
)
from contextlib import aclosing, nullcontext
from typing import Any, TypeVar

import msgspec
from pydantic import BaseModel, ValidationError
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response, StreamingResponse

from mlx_server.api.fields import ignored_header
from mlx_server.api.file_inputs import give_files
from mlx_server.api.histories import WITHOUT_MENDING
from mlx_server.events import Event, Started
from mlx_server.generation.generate import generate
from mlx_server.generation.plan import MakeOverflowError, PromptOverflow
from mlx_server.http import strict_json
from mlx_server.http.errors import messages_too_long, validation_error
from mlx_server.http.metrics import Metrics
from mlx_server.http.resumable import RESUMABLE_HEADER, ResumableStreams, StreamOwner
from mlx_server.http.security import wants, with_client
from mlx_server.http.sse import (
    OPENAI,
    DisconnectGuard,
    EventStream,
    Frames,
    Output,
    Store,
    StreamedOutput,
    chunks_of,
)
from mlx_server.pool.pool import Pool
from mlx_server.request_threads import SMALL_BYTES, in_thread, size_of_request
from mlx_server.requests import GenerateRequest
from mlx_server.system.turns import turn

Body = TypeVar("Body", bound=BaseModel)

JSON = "application/json"


async def read(http: Request, wire_type: type[Body], *, gives_files: bool = True) -> Body:
    """gives_files: whether the request gets the files that it names. The first body of each type
    is parsed off the event loop, as it has to wait for its validator.

    Raises BadRequest for a body that is not strict JSON or not of this type."""
    # not `http.body()`, which keeps the bytes until the response is sent
    raw = b"".join([chunk async for chunk in http.stream()])
    http.state.body_bytes = len(raw)
    size_of_request.set(len(raw))
    if gives_files:
        await give_files(http, raw)
    if len(raw) > SMALL_BYTES or not wire_type.__pydantic_complete__:
        return await in_thread(_parsed, raw, wire_type)
    body = strict_json.parse_request(raw)
    try:
        return wire_type.model_validate(body, context=WITHOUT_MENDING)
    except ValidationError:
        return await in_thread(_validated, body, wire_type)


def _parsed(raw: bytes, wire_type: type[Body]) -> Body:
    return _validated(strict_json.parse_request(raw), wire_type)


def _validated(body: Any, wire_type: type[Body]) -> Body:
    try:
        return wire_type.model_validate(body)
    except ValidationError as error:
        raise validation_error(error, body) from None


_wire_types: dict[str, type[BaseModel]] = {}
"""What `read` parses for each path."""


def documented(path: str, wire_type: type[BaseModel]) -> dict[str, Any]:
    """A route's `openapi_extra`: FastAPI does not see a body that `read` parses."""
    _wire_types[path] = wire_type
    return {"requestBody": {"required": True, "content": {JSON: {}}}}


USUAL = ("/v1/chat/completions", "/v1/completions", "/v1/messages", "/v1/responses")


def build_validators() -> None:
    """Builds those of the usual bodies, while models load: a first request would wait for its own
    for longer than for its first token."""
    for path in USUAL:
        _wire_types[path].model_rebuild()


def describe_bodies(openapi: Mapping[str, Any]) -> None:
    """Adds the schemas of the bodies, which a server's start does not wait for: they take 0.2 s."""
    for path, operations in openapi["paths"].items():
        if wire_type := _wire_types.get(path):
            place = path.replace("/", "~1").replace("{", "{{").replace("}", "}}")
            here = f"#/paths/{place}/post/requestBody/content/application~1json/schema"
            schema = wire_type.model_json_schema(ref_template=here + "/$defs/{model}")
            operations["post"]["requestBody"]["content"][JSON]["schema"] = schema


T = TypeVar("T")


async def while_connected(http: Request, work: Coroutine[Any, Any, T]) -> T:
    """The result of `work`. Cancels it and raises ClientDisconnect when the client leaves."""
    with DisconnectGuard(http.receive):
        return await work
    raise ClientDisconnect


async def respond(
    http: Request,
    request: GenerateRequest,
    output: StreamedOutput,
    *,
    ignored: list[str],
    frames: Frames = OPENAI,
    overflow: MakeOverflowError = messages_too_long,
    store: Store | None = None,
) -> Response:
    wants_resumable = wants(http, RESUMABLE_HEADER)
    if wants_resumable and (request.buffered or frames.media_type != OPENAI.media_type):
        ignored, wants_resumable = [*ignored, RESUMABLE_HEADER], False
    if request.buffered:
        return await respond_buffered(
            http, request, output, ignored=ignored, overflow=overflow, store=store
        )
    streams: ResumableStreams = http.app.state.resumable
    with streams.place(http.state.source) if wants_resumable else nullcontext():
        events, started = await _started(http, request, overflow)
    chunks = chunks_of(started, events, output, store)
    headers = ignored_header([*ignored, *started.ignored])
    if wants_resumable:
        owner = StreamOwner(http.scope["path"], http.state.owner, http.state.source)
        return streams.begin(owner, chunks, events, frames).response(0, headers)
    return EventStream(chunks, headers, source=events, frames=frames)


async def respond_buffered(
    http: Request,
    request: GenerateRequest,
    output: Output,
    *,
    ignored: list[str],
    overflow: MakeOverflowError = messages_too_long,
    store: Store | None = None,
) -> Response:
    events, started = await _started(http, request, overflow)
    async with aclosing(events):
        body = await while_connected(http, _body(started, events, output, store))
    headers = ignored_header([*ignored, *started.ignored])
    if request.logprobs is None:
        return json_response(body, headers)
    return in_pieces(await in_thread(list, json_pieces(body)), headers)


async def _body(
    started: Started,
    events: AsyncIterator[Event],
    output: Output,
    store: Store | None,
) -> Mapping[str, Any]:
    output.add(started)
    async for event in events:
        output.add(event)
    body = output.body()
    if store:
        await store(body)
    return body


async def _started(
    http: Request, request: GenerateRequest, overflow: MakeOverflowError
) -> tuple[AsyncGenerator[Event], Started]:
    """Waits for the engine to accept the request: an error before that keeps its HTTP status."""
    pool: Pool = http.app.state.pool
    metrics: Metrics = http.app.state.metrics
    request = with_client(request, http)
    events = metrics.answers.observed(generate(request, pool), request.client, request.prompts)
    try:
        started = await while_connected(http, anext(events))
    except PromptOverflow as error:
        raise overflow(error, await while_connected(http, error.tokens())) from None
    assert isinstance(started, Started)
    return events, started


def json_response(
    body: object, headers: Mapping[str, str] | None = None, status: int = 200
) -> Response:
    encoded = msgspec.json.encode(body)
    return Response(encoded, status, headers, "application/json")


SLICE = 16
"""The items of a long list that are encoded together."""


def json_pieces(body: object) -> Iterator[bytes]:
    """Encodes a body that may have a million values, of which each piece has few: no other thread
    runs while one is encoded. The items of an iterator are made one by one."""
    if isinstance(body, Mapping):
        yield b"{"
        for at, (name, value) in enumerate(body.items()):
            yield (b"," if at else b"") + msgspec.json.encode(name) + b":"
            yield from json_pieces(value)
        yield b"}"
    elif isinstance(body, list):
        yield b"["
        for at in range(0, len(body), SLICE):
            yield b"," if at else b""
            if len(body) > SLICE:
                yield msgspec.json.encode(body[at : at + SLICE])[1:-1]
                continue
            for place, item in enumerate(body):
                yield b"," if place else b""
                yield from json_pieces(item)
        yield b"]"
    elif isinstance(body, Iterator):
        yield b"["
        for at, item in enumerate(body):
            yield (b"," if at else b"") + msgspec.json.encode(item)
        yield b"]"
    else:
        yield msgspec.json.encode(body)


def in_pieces(pieces: Iterable[bytes], headers: Mapping[str, str]) -> Response:
    """A large answer. It is not joined to one text, as long as it takes to copy that. Of an
    iterator each piece is made when it is sent, and the answer has no Content-Length."""
    length = {"content-length": str(sum(map(len, pieces)))} if isinstance(pieces, list) else {}
    return StreamingResponse(_sent(pieces), headers={**headers, **length}, media_type=JSON)


async def _sent(pieces: Iterable[bytes]) -> AsyncIterator[bytes]:
    sent = bytearray()
    for piece in pieces:
        sent += piece
        if len(sent) >= SENT_BYTES:
            await turn()
            yield bytes(sent)
            sent.clear()
    yield bytes(sent)


SENT_BYTES = 64 << 10
