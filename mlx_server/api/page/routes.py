"""The page at `/`: its files, which hold no secret and need no key, and the data that only it
shows, for clients with a key if the server has keys.

With several keys, a client sees only its own requests; times, memory and models are for all.
"""

import asyncio
import gzip
import hashlib
import time
from collections.abc import AsyncGenerator, Mapping
from contextlib import AbstractContextManager, AsyncExitStack, suppress
from dataclasses import dataclass
from importlib.resources import files
from importlib.resources.abc import Traversable
from threading import Thread
from typing import Annotated, Any

import msgspec
from fastapi import Path as PathParameter
from fastapi import Request, Response
from pydantic import Field
from starlette.routing import Match, Route
from starlette.types import Scope

from mlx_server import __version__, limits
from mlx_server.api.fields import WireModel
from mlx_server.api.handlers import documented, json_response, read
from mlx_server.api.pool import check_runtime_models, shown
from mlx_server.api.stored import store_of
from mlx_server.errors import Forbidden, ModelUnusable, NotFound, Overloaded, message_of
from mlx_server.http.metrics import Metrics
from mlx_server.http.security import keyed_router
from mlx_server.http.sse import EventStream, Frames
from mlx_server.mcp import Connectors
from mlx_server.pool.pool import Pool
from mlx_server.sources.source import resolve
from mlx_server.sources.suggested import suggested_models
from mlx_server.store import Record, Store
from mlx_server.system.logs import recent_lines
from mlx_server.system.shared_budget import ClientCounts

PREFIX = "/page"
INDEX = "index.html"

MEDIA_TYPES = {".html": "text/html", ".css": "text/css", ".js": "text/javascript"}
"""Files of other kinds (licences, hashes) are not served."""

HEADERS: Mapping[str, str] = {
    "content-security-policy": "default-src 'none'; script-src 'self'; style-src 'self'; "
    "connect-src 'self'; img-src 'self' data:; frame-ancestors 'none'; base-uri 'none'; "
    "form-action 'none'; require-trusted-types-for 'script'; trusted-types dompurify",
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
    "cache-control": "no-cache",  # a browser asks each time whether the ETag is still the same
    "vary": "Accept, Accept-Encoding",
}


@dataclass(frozen=True)
class PageFile:
    path: str
    stored: bytes
    media_type: str
    is_packed: bool
    """By gzip, as the libraries are."""

    @property
    def content(self) -> bytes:
        return gzip.decompress(self.stored) if self.is_packed else self.stored

    async def respond(self, http: Request) -> Response:
        etag = f'"{hashlib.sha256(self.stored).hexdigest()[:32]}"'
        headers = {**HEADERS, "etag": etag}
        if etag in http.headers.get("if-none-match", ""):
            return Response(status_code=304, headers=headers)
        if self.is_packed and "gzip" in http.headers.get("accept-encoding", ""):
            headers["content-encoding"] = "gzip"
            return Response(self.stored, media_type=self.media_type, headers=headers)
        return Response(self.content, media_type=self.media_type, headers=headers)


class BrowserRoute(Route):
    """Matches the requests of browsers only: other clients ask `/` whether a server is there."""

    def matches(self, scope: Scope) -> tuple[Match, Scope]:
        accepted = b",".join(value for name, value in scope.get("headers", ()) if name == b"accept")
        return super().matches(scope) if b"text/html" in accepted else (Match.NONE, {})


def page_files() -> list[PageFile]:
    return _files_in(files(__package__).joinpath("static"), PREFIX)


def page_routes() -> list[Route]:
    others = {file.path: file for file in page_files()}
    index = others.pop(f"{PREFIX}/{INDEX}")
    return [BrowserRoute("/", index.respond), *(Route(p, f.respond) for p, f in others.items())]


def _files_in(folder: Traversable, path: str) -> list[PageFile]:
    pages: list[PageFile] = []
    for entry in sorted(folder.iterdir(), key=lambda entry: entry.name):
        name = entry.name.removesuffix(".gz")
        kind = MEDIA_TYPES.get(name[name.rfind(".") :])
        if entry.is_dir():
            pages += _files_in(entry, f"{path}/{name}")
        elif kind:
            packed = name != entry.name
            pages.append(PageFile(f"{path}/{name}", entry.read_bytes(), kind, packed))
    return pages


SECONDS = 0.5
"""The interval at which a stream looks for changes, as long as its client reads."""


class PageStreams:
    """The streams of the page's data: how many there are, and when they end."""

    def __init__(self) -> None:
        self._open = ClientCounts()
        self._ended = asyncio.Event()

    def take(self, client: str) -> AbstractContextManager[None]:
        """Raises Overloaded if the client has too many."""
        if (count := self._open.of(client)) >= limits.PAGE_STREAMS:
            raise Overloaded(f"The page is open {count} times already: close some of its tabs.")
        return self._open.one_more(client)

    def end(self) -> None:
        """Ends all streams: the server stops, and should not wait for them."""
        self._ended.set()

    async def pause(self, seconds: float) -> bool:
        """Whether the stream goes on after so many seconds."""
        with suppress(TimeoutError):
            await asyncio.wait_for(self._ended.wait(), seconds)
        return not self._ended.is_set()


router = keyed_router()


@router.get("/page/events")
async def events(http: Request) -> Response:
    """The present state, and again whenever it has changed. A client that reads slowly misses
    states: none is kept for it."""
    place = AsyncExitStack()  # it is to be left even if no state is ever read
    place.enter_context(http.app.state.page_streams.take(http.state.source))
    return EventStream(_states(http), {}, source=place, frames=Frames(end=b""))


@router.get("/page/history")
async def history(http: Request) -> Response:
    pool: Pool = http.app.state.pool
    metrics: Metrics = http.app.state.metrics
    body = {
        "object": "page.history",
        "requests": metrics.answers.log.ended(_client(http)),
        "samples": metrics.samples.columns(),
        "budget": pool.memory()["budget"],
    }
    return json_response(body)


@router.get("/page/suggested")
async def suggested(http: Request) -> Response:
    """Models of the hub that fit this machine, and the commands that fetch them."""
    pool: Pool = http.app.state.pool
    budget = pool.engines[0].budget.nbytes
    fitting = [each for each in suggested_models() if each.context_in(budget)]
    models = await asyncio.to_thread(lambda: [each.described(budget) for each in fitting])
    return json_response({"object": "page.suggested", "budget": budget, "models": models})


class ModelFetch:
    """The download of a suggested model. It goes on when the page is closed; a later one goes on
    where it was cancelled or has failed."""

    def __init__(self, id: str, budget: int) -> None:
        self.id = id
        self.state = "running"
        self._problem = ""
        self._progress = (0, 0)
        self._budget = budget
        self._thread = Thread(target=self._run, daemon=True)
        self._thread.start()

    def join(self) -> None:
        self._thread.join()

    def _run(self) -> None:
        try:
            resolve(self.id, self._on_progress, budget=self._budget)
            self.state = "fetched"
        except Exception as error:  # whatever it is, the next download is not kept from running
            self._problem = message_of(error)
            self.state = "cancelled" if self.state == "cancelling" else "failed"

    def _on_progress(self, what: str, done: int, total: int) -> None:
        if self.state == "cancelling":
            raise ModelUnusable("The download was cancelled. What was fetched is kept.")
        self._progress = (done, total)

    def cancel(self) -> None:
        if self.state == "running":
            self.state = "cancelling"

    def shown(self) -> dict[str, Any]:
        done, total = self._progress
        return {
            "id": self.id,
            "state": self.state,
            "done": done,
            "total": total,
            "problem": self._problem,
        }


class ModelFetches:
    """The latest download of each model; one runs at a time."""

    def __init__(self) -> None:
        self._of: dict[str, ModelFetch] = {}

    def start(self, id: str, budget: int) -> ModelFetch:
        """Raises NotFound if the model is not suggested for this budget."""
        if all(each.id != id for each in suggested_models() if each.context_in(budget)):
            raise NotFound("No model of this name is suggested for this machine.")
        if any(each.state in ("running", "cancelling") for each in self._of.values()):
            raise Overloaded("Another model is being fetched: wait for it, or cancel it.")
        self._of[id] = ModelFetch(id, budget)
        return self._of[id]

    def cancel(self, id: str) -> ModelFetch:
        if id not in self._of:
            raise NotFound("No model of this name is being fetched.")
        self._of[id].cancel()
        return self._of[id]

    def shown(self) -> list[dict[str, Any]]:
        return [each.shown() for each in self._of.values()]


class FetchBody(WireModel):
    model: str


FETCH, CANCEL = "/page/fetches", "/page/fetches/cancel"


@router.post(FETCH, openapi_extra=documented(FETCH, FetchBody))
async def fetch(http: Request) -> Response:
    """Begins to fetch a suggested model; the stream of the page's data tells how far it is."""
    body = await read(http, FetchBody)
    check_runtime_models(http)
    pool: Pool = http.app.state.pool
    fetches: ModelFetches = http.app.state.model_fetches
    return json_response(fetches.start(body.model, pool.engines[0].budget.nbytes).shown())


@router.post(CANCEL, openapi_extra=documented(CANCEL, FetchBody))
async def cancel_fetch(http: Request) -> Response:
    body = await read(http, FetchBody)
    check_runtime_models(http)
    fetches: ModelFetches = http.app.state.model_fetches
    return json_response(fetches.cancel(body.model).shown())


class PageConversation(WireModel):
    title: str
    changed: Annotated[float, Field(ge=0, le=1e15)]
    """When, in milliseconds, as the browser's clock had it."""
    text: str
    """The conversation as JSON, which only the page reads."""


CONVERSATIONS = "/page/conversations"
CONVERSATION = CONVERSATIONS + "/{id}"
PageId = Annotated[str, PathParameter(max_length=40)]


@router.get(CONVERSATIONS)
async def list_conversations(http: Request) -> Response:
    """What is listed of the client's conversations, if the server stores those of the page."""
    stored = http.app.state.keeps_conversations
    labels = await _store(http).page_conversations(http.state.owner) if stored else []
    data = [msgspec.Raw(each.encode()) for each in labels]
    return json_response({"object": "page.conversations", "stored": stored, "data": data})


@router.get(CONVERSATION)
async def retrieve_conversation(http: Request, id: PageId) -> Response:
    record = await _store(http).get("page conversation", id, http.state.owner)
    labels = msgspec.json.decode(record.labels or "{}", type=dict[str, Any])
    return json_response({**labels, "text": record.body.decode()})


@router.post(CONVERSATION, openapi_extra=documented(CONVERSATION, PageConversation))
async def put_conversation(http: Request, id: PageId) -> Response:
    body = await read(http, PageConversation)
    store, text = _store(http), body.text.encode("utf-8", "replace")
    title = body.title[: limits.LISTED_TITLE]
    labels = {"id": id, "title": title, "changed": body.changed, "bytes": len(text)}
    shown = msgspec.json.encode(labels).decode()
    record = Record("page conversation", id, time.time(), text, labels=shown)
    await store.put_page_conversation(record, http.state.owner)
    return json_response(labels)


@router.delete(CONVERSATION)
async def delete_conversation(http: Request, id: PageId) -> Response:
    await _store(http).delete("page conversation", id, http.state.owner)
    return json_response({"id": id, "object": "page.conversation.deleted", "deleted": True})


def _store(http: Request) -> Store:
    """Raises Forbidden unless the owner wants the page's conversations stored."""
    if not http.app.state.keeps_conversations:
        raise Forbidden(
            "This server stores no conversations of the page: with `page: conversations` under "
            "`server` in models.yaml it does."
        )
    return store_of(http)


@router.get("/page/log")
async def log(http: Request) -> Response:
    """The latest lines of the server's log, which tell of the requests of all clients."""
    if http.state.cache_scope:
        raise Forbidden("With several API keys the log is not shown: it tells of all clients.")
    return json_response({"object": "page.log", "lines": list(recent_lines)})


async def _states(http: Request) -> AsyncGenerator[Mapping[str, Any]]:
    """The state of the server, whenever it has changed."""
    streams: PageStreams = http.app.state.page_streams
    last: Mapping[str, Any] = {}
    going_on = True
    while going_on:
        if (state := _now(http)) != last:
            last = state
            yield state
        going_on = await streams.pause(SECONDS)


def _now(http: Request) -> Mapping[str, Any]:
    pool: Pool = http.app.state.pool
    metrics: Metrics = http.app.state.metrics
    connectors: Connectors = http.app.state.connectors
    fetches: ModelFetches = http.app.state.model_fetches
    log = metrics.answers.log
    return {
        "type": "now",
        "version": __version__,
        "started": http.app.state.started,
        "healthy": pool.healthy,
        "restarts": pool.restarts,
        "resumed": pool.resumed,
        "rows": pool.row_slots.taken,
        "runtime_models": http.app.state.runtime_models,
        "connectors": connectors.names,
        "fetches": fetches.shown(),
        "totals": dict(log.totals),
        **shown(pool),
        "answers": log.running(_client(http)),
    }


def _client(http: Request) -> str | None:
    """The client whose requests are shown; None shows everybody's."""
    return http.state.client if http.state.cache_scope else None
