"""Replay models, for tests: their transcripts begin again, tests give them answers and see what was
asked, and what the server answers is written into a transcript.

`/v1/replay/reset` exists only where replay models are served; `/v1/replay/given` only on the server
that the pytest plugin starts, which alone has the key.
"""

import asyncio
import json
import logging
from collections import defaultdict, deque
from collections.abc import AsyncGenerator, Collection
from contextlib import aclosing, suppress
from pathlib import Path
from typing import Annotated, Any

import yaml
from fastapi import APIRouter, Depends, FastAPI, Request, Response
from pydantic import Field
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from mlx_server import limits
from mlx_server.api.fields import WireModel, ignored_header
from mlx_server.api.handlers import documented, json_response, read
from mlx_server.errors import BadRequest, ServerError, SettingsError, public_message
from mlx_server.events import Answer, Event, Finished, Started
from mlx_server.families import family_named
from mlx_server.http.security import authorise, keyed_router
from mlx_server.pool.pool import Pool
from mlx_server.pool.prepare import PreparedModel
from mlx_server.request_threads import in_thread
from mlx_server.requests import GenerateRequest, Prompt
from mlx_server.sources.given_answers import GivenAnswers, matching, without_secrets
from mlx_server.sources.transcript import TranscriptEntry, checked_entry, facts_of
from mlx_server.system.files import not_linked, own_path

RESET = "/v1/replay/reset"

router = keyed_router()


class Reset(WireModel):
    model: Annotated[str, Field(min_length=1)] | None = None
    """All replay models by default."""


@router.post(RESET, openapi_extra=documented(RESET, Reset))
async def reset(http: Request) -> Response:
    body = await read(http, Reset)
    pool: Pool = http.app.state.pool
    models = [pool.models.spec(body.model).id] if body.model else pool.models.replays
    for id in models:
        if id not in pool.models.replays:
            raise BadRequest(
                f"{id} plays no transcript. Replay models here: {', '.join(pool.models.replays)}.",
                param="model",
            )
        pool.models.reset_replay(id)
    return json_response(
        {"object": "replay.reset", "models": models}, ignored_header(body.ignored())
    )


GIVEN = "/v1/replay/given"

given_router = APIRouter()


def install_given(app: FastAPI, given: GivenAnswers, key: str) -> None:
    """Adds the route, for clients with this key, and keeps what all clients ask."""
    app.state.given_answers = given
    app.state.recorded_requests = recorded = RecordedRequests()
    app.include_router(given_router, dependencies=[Depends(authorise([key]))])
    app.add_middleware(RequestRecorder, recorded=recorded)


class GivenBody(WireModel):
    family: str
    model: Annotated[str, Field(min_length=1)] | None = None
    """The name by which requests ask for it; None: the family's."""
    answers: Annotated[list[dict[str, Any]], Field(min_length=1)]
    """Entries of a transcript."""


@given_router.post(GIVEN, openapi_extra=documented(GIVEN, GivenBody))
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
    entries = await in_thread(_entries, prepared, body.answers)
    given.add(name, entries)
    http.app.state.loading_given = loading  # asyncio itself keeps no strong reference
    return json_response({"model": name}, ignored_header(body.ignored()))


async def _loaded(pool: Pool, id: str) -> None:
    """Loads the model while its answers are written; the first request would wait for it."""
    with suppress(ServerError):  # the request reports it
        await pool.load(id)


@given_router.get(GIVEN)
async def given_state(http: Request) -> Response:
    given: GivenAnswers = http.app.state.given_answers
    recorded: RecordedRequests = http.app.state.recorded_requests
    return json_response(
        {"left": given.left, "unanswered": given.unanswered, "requests": recorded.shown()}
    )


@given_router.delete(GIVEN)
async def reset_given(http: Request) -> Response:
    """Begins the next test."""
    http.app.state.given_answers.reset()
    http.app.state.recorded_requests.clear()
    return json_response({})


def _entries(prepared: PreparedModel, answers: list[dict[str, Any]]) -> list[TranscriptEntry]:
    """Raises BadRequest for one that can't be played."""
    tokenizer = prepared.checkpoint.tokenizer
    try:
        entries = [checked_entry(answer, tokenizer.vocabulary) for answer in answers]
    except ValueError as error:
        raise BadRequest(f"An answer can't be used: {error}.", param="answers") from None
    for entry in entries:
        entry.tokens(tokenizer, prepared.family)
    return entries


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


log = logging.getLogger("mlx_server")

Entry = dict[str, Any]


class TranscriptRecorder:
    def __init__(self, file: Path, secrets: Collection[str] = ()) -> None:
        """Entries are added to the file. secrets: texts that it must not have."""
        self._file = file
        self._secrets = secrets
        self._writing = asyncio.Lock()

    async def recorded(
        self, request: GenerateRequest, events: AsyncGenerator[Event]
    ) -> AsyncGenerator[Event]:
        """The same events. An answer is in the file before its end goes on to the client."""
        answers: dict[int, Answer] = defaultdict(Answer)
        async with aclosing(events):
            async for event in events:
                if not isinstance(event, Started):
                    answers[event.index].add(event)
                if isinstance(event, Finished):
                    prompt = request.prompts[event.index // request.n]
                    await self._write(request.model, prompt, answers.pop(event.index))
                yield event

    async def _write(self, model: str, prompt: Prompt, answer: Answer) -> None:
        try:
            async with self._writing:
                await asyncio.to_thread(self._append, prompt, answer)
        except (ValueError, OSError) as error:  # the client has its answer all the same
            log.error("an answer of %s was not recorded: %s", model, public_message(error))

    def _append(self, prompt: Prompt, answer: Answer) -> None:
        """Runs in a thread, since writing a large answer as YAML takes seconds."""
        entry = {**conditions(prompt), "answer": in_words(answer)}
        text = written([without_keys(entry, self._secrets)])
        with open(own_path(self._file), "a", encoding="utf-8", opener=not_linked) as file:
            file.write(text)


def conditions(prompt: Prompt) -> Entry:
    """By the last user text, and by the turn for all but the first answer of a conversation."""
    facts = facts_of(prompt, ())
    return {"match": facts.user} | ({"turn": facts.turn} if facts.turn > 1 else {})


def in_words(answer: Answer) -> Entry:
    """The answer as a transcript has it for any family. Raises ValueError for a broken call."""
    calls = [{"name": c.name, "arguments": json.loads(c.arguments or "{}")} for c in answer.calls]
    entry: Entry = {"reasoning": answer.thoughts, "text": answer.text, "calls": calls}
    return {name: value for name, value in entry.items() if value} or {"text": ""}


def without_keys(entry: Entry, known: Collection[str] = ()) -> Entry:
    return {**without_secrets(entry, known), "match": matching(entry["match"], known)}


def written(entries: Collection[Entry]) -> str:
    return yaml.safe_dump(list(entries), allow_unicode=True, sort_keys=False, width=100)
