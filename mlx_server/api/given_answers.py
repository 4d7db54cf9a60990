"""`/v1/replay/given`: tests give replay models their answers, and see what was asked.

Only the server that the pytest plugin starts has this route, and only the plugin has its key.
"""

import asyncio
from collections import deque
from contextlib import suppress
from typing import Annotated, Any

from fastapi import APIRouter, Depends, FastAPI, Request, Response
from pydantic import Field
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from mlx_server import limits
from mlx_server.api.body import documented, read
from mlx_server.api.fields import WireModel, ignored_header
from mlx_server.api.handlers import json_response
from mlx_server.api.security import authorise
from mlx_server.errors import BadRequest, ServerError, SettingsError
from mlx_server.families import family_named
from mlx_server.pool.pool import Pool
from mlx_server.pool.prepare import PreparedModel
from mlx_server.request_threads import in_thread
from mlx_server.sources.given_answers import GivenAnswers
from mlx_server.sources.transcript import RecordedAnswer, RecordedCall, TranscriptEntry

GIVEN = "/v1/replay/given"

router = APIRouter()


def install(app: FastAPI, given: GivenAnswers, key: str) -> None:
    """Adds the route, for clients with this key, and keeps what all clients ask."""
    app.state.given_answers = given
    app.state.recorded_requests = recorded = RecordedRequests()
    app.include_router(router, dependencies=[Depends(authorise([key]))])
    app.add_middleware(RequestRecorder, recorded=recorded)


class GivenCall(WireModel):
    name: Annotated[str, Field(min_length=1)]
    arguments: dict[str, Any]


class GivenAnswer(WireModel):
    """One answer, given in words, as raw output or as tokens."""

    reasoning: str | None = None
    text: str | None = None
    calls: list[GivenCall] = Field(default_factory=list)
    raw: str | None = None
    token_ids: list[int] | None = None


class GivenBody(WireModel):
    family: str
    model: Annotated[str, Field(min_length=1)] | None = None
    """The name by which requests ask for it; None: the family's."""
    answers: Annotated[list[GivenAnswer], Field(min_length=1)]
    delay_ms: Annotated[float, Field(ge=0, le=60_000)] = 0.0


@router.post(GIVEN, openapi_extra=documented(GIVEN, GivenBody))
async def give(http: Request) -> Response:
    """Adds answers: the first is for the next request, if none is left of earlier ones."""
    body = await read(http, GivenBody)
    pool: Pool = http.app.state.pool
    given: GivenAnswers = http.app.state.given_answers
    try:
        id = family_named(body.family).name
    except SettingsError as error:
        raise BadRequest(error.message, param="family") from None
    name = body.model or id
    pool.models.add_alias(name, id)
    prepared = await pool.prepared(id)
    loading = asyncio.create_task(_loaded(pool, id))
    entries = await in_thread(_entries, prepared, body)
    given.add(name, entries)
    http.app.state.loading_given = loading  # asyncio itself keeps no strong reference
    return json_response({"model": name}, ignored_header(body.ignored()))


async def _loaded(pool: Pool, id: str) -> None:
    """Loads the model while its answers are written; the first request would wait for it."""
    with suppress(ServerError):  # the request reports it
        await pool.load(id)


@router.get(GIVEN)
async def state(http: Request) -> Response:
    given: GivenAnswers = http.app.state.given_answers
    recorded: RecordedRequests = http.app.state.recorded_requests
    return json_response(
        {"left": given.left, "unanswered": given.unanswered, "requests": recorded.shown()}
    )


@router.delete(GIVEN)
async def reset(http: Request) -> Response:
    """Begins the next test."""
    http.app.state.given_answers.reset()
    http.app.state.recorded_requests.clear()
    return json_response({})


def _entries(prepared: PreparedModel, body: GivenBody) -> list[TranscriptEntry]:
    return [_entry(prepared, answer, body.delay_ms) for answer in body.answers]


def _entry(prepared: PreparedModel, answer: GivenAnswer, delay_ms: float) -> TranscriptEntry:
    """Raises BadRequest for one that can't be played."""
    tokenizer = prepared.checkpoint.tokenizer
    ids = None if answer.token_ids is None else tuple(answer.token_ids)
    for id in ids or ():
        if not 0 <= id < tokenizer.vocabulary:
            raise BadRequest(
                f"There is no token {id} in {prepared.id}: its ids go from 0 to "
                f"{tokenizer.vocabulary - 1}.",
                param="answers",
            )
    words = _in_words(answer) if answer.raw is None and ids is None else None
    try:
        entry = TranscriptEntry(answer.raw, ids, words, delay_ms=delay_ms)
    except ValueError as error:
        raise BadRequest(f"An answer can't be used: {error}.", param="answers") from None
    entry.tokens(tokenizer, prepared.family)
    return entry


def _in_words(answer: GivenAnswer) -> RecordedAnswer:
    calls = tuple(RecordedCall(call.name, call.arguments) for call in answer.calls)
    return RecordedAnswer(answer.reasoning or "", answer.text or "", calls)


class RecordedRequests:
    """The bodies of the requests that came since the test began."""

    def __init__(self) -> None:
        self._requests: deque[tuple[str, bytes]] = deque()
        self._bytes = 0

    def add(self, path: str, body: bytes) -> None:
        self._requests.append((path, body))
        self._bytes += len(body)
        while self._bytes > limits.RECORDED_REQUEST_BYTES:
            self._bytes -= len(self._requests.popleft()[1])

    def clear(self) -> None:
        self._requests.clear()
        self._bytes = 0

    def shown(self) -> list[dict[str, str]]:
        return [
            {"path": path, "body": body.decode(errors="replace")} for path, body in self._requests
        ]


class RequestRecorder:
    """Middleware that keeps what the app reads of each POST request, except for the test's own."""

    def __init__(self, app: ASGIApp, recorded: RecordedRequests) -> None:
        self._app = app
        self._recorded = recorded

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["method"] != "POST" or scope["path"] == GIVEN:
            await self._app(scope, receive, send)
            return
        pieces: list[bytes] = []

        async def observed_receive() -> Message:
            message = await receive()
            if message["type"] == "http.request":
                pieces.append(message.get("body", b""))
                if not message.get("more_body", False):
                    self._recorded.add(scope["path"], b"".join(pieces))
                    pieces.clear()
            return message

        await self._app(scope, observed_receive, send)
