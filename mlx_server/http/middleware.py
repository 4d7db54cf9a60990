"""ASGI middleware around the app: headers of all answers, the access log, the
paths of base URLs, errors without text."""

import asyncio
import logging
import re
import time
from collections.abc import Iterable, Iterator, Mapping
from functools import lru_cache
from typing import Any

from fastapi.routing import iter_route_contexts
from starlette.applications import Starlette
from starlette.datastructures import MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from mlx_server import limits
from mlx_server.errors import ServerError
from mlx_server.system.logs import ACCESS, RequestLogContext, request_context

log = logging.getLogger(ACCESS)

SOCKET = "WS"
"""Logged as the method of a response over a WebSocket."""
METHODS = {"GET", "POST", "DELETE", "OPTIONS", "HEAD", "PUT", "PATCH", "TRACE", "CONNECT", SOCKET}
HIDDEN = "*"

STARTS = {"http.response.start", "websocket.http.response.start"}
RESPONSE_STARTS = {*STARTS, "websocket.accept"}
SWITCHING_PROTOCOLS, BROKEN = 101, 500


class StampedSend:
    """`send` that adds headers to every response."""

    def __init__(self, send: Send, stamp: dict[str, str]) -> None:
        self._send = send
        self._stamp = stamp
        self.started = False

    async def __call__(self, message: Message) -> None:
        if message["type"] in RESPONSE_STARTS:
            self.started = True
            headers = MutableHeaders(raw=list(message.get("headers", ())))
            for name, value in self._stamp.items():
                if name == "vary":
                    headers.add_vary_header(value)
                else:
                    headers[name] = value
            message = {**message, "headers": headers.raw}
        await self._send(message)


class AccessLog:
    """Writes one line for each request: method, route, status, duration, token counts and model.

    Path segments that are not part of a route may hold a client's text, so they are logged as `*`.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] not in {"http", "websocket"}:
            await self._app(scope, receive, send)
            return
        began = time.perf_counter()
        status = 0
        gone = complete = False

        async def observed_receive() -> Message:
            nonlocal gone
            message = await receive()
            # a disconnect after the complete answer is no early end
            gone = gone or (message["type"] == "http.disconnect" and not complete)
            return message

        async def observed_send(message: Message) -> None:
            nonlocal status, complete
            if message["type"] in STARTS:
                status = message["status"]
            elif message["type"] == "websocket.accept":
                status = SWITCHING_PROTOCOLS
            elif message["type"] == "http.response.body":
                complete = not message.get("more_body", False)
            await send(message)

        try:
            await self._app(scope, observed_receive, observed_send)
        finally:
            method = scope.get("method", "GET")
            note(method, scope, "gone" if gone else status or BROKEN, began)


def note(method: str, scope: Scope, status: int | str, began: float) -> None:
    turn = request_context.get() or RequestLogContext("")
    facts = {
        "method": method if method in METHODS else HIDDEN,
        "route": _route_words_of(scope),
        "status": status,
        "seconds": round(time.perf_counter() - began, 3),
    }
    tokens = {"prompt_tokens": turn.prompt_tokens, "completion_tokens": turn.completion_tokens}
    model = {"model": turn.model, "family": turn.family} if turn.model else {}
    everything = {**facts, **tokens, **model}
    line = "%s %s %s %.3fs" + (" %d+%d tokens, %s (%s)" if model else "")
    log.info(line, *(everything if model else facts).values(), extra={"facts": everything})


def _route_words_of(scope: Scope) -> str:
    known = _route_words(scope["app"]) if "app" in scope else frozenset()
    parts = scope["path"].split("/", limits.LOGGED_PATH_PARTS)
    return "/".join(part if part in known else HIDDEN for part in parts)


@lru_cache(maxsize=8)
def _route_words(app: Starlette) -> frozenset[str]:
    """The literal segments of the paths of the app's routes."""
    paths: Iterable[str] = (str(route.path) for route in iter_route_contexts(app.routes))
    return frozenset(part for path in paths for part in path.split("/") if "{" not in part)


VERSION = "/v1"
ONE_TOO_MANY = (f"{VERSION}{VERSION}/", f"{VERSION}/api/", f"{VERSION}/infill")
"""What Anthropic's, Ollama's and llama.cpp's clients ask for, given a base URL with `/v1`."""

LM_STUDIO = f"/api{VERSION}/models/"
"""Where its clients load and unload models."""

VERSIONED = {
    "batches",
    "chat",
    "completions",
    "conversations",
    "embeddings",
    "files",
    "fim",
    "fine_tuning",
    "messages",
    "models",
    "rerank",
    "responses",
}
"""The first segments of paths that OpenAI's and Anthropic's APIs have below `/v1`."""

SLASHES = re.compile("/{2,}")
ORIGIN = re.compile("https?://[^/]*")


class BasePaths:
    """Takes the paths that clients make from a base URL with one `/v1` too few or too many. It is
    in front of all that looks at a request's path.

    Whether a base URL ends with `/v1` differs by client: Anthropic's add `/v1`, OpenAI's don't, and
    some drop it. The servers of llama.cpp and mlx-lm take OpenAI's paths without it, too. A base
    URL that ends with a slash makes two of them, and a client that takes this server for a proxy
    writes the whole URL. Monitors ask with HEAD whether a server answers.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] in {"http", "websocket"}:
            scope["path"] = served_path(scope["path"])
        if scope.get("method") == "HEAD":
            await _answer_head(self._app, {**scope, "method": "GET"}, send)
        else:
            await self._app(scope, receive, send)


async def _answer_head(app: ASGIApp, scope: Scope, send: Send) -> None:
    """Sends the head of what GET would get. To the app the client then leaves: a stream ends."""
    begun = asyncio.Event()
    body: Iterator[Message] = iter([{"type": "http.request"}])

    async def receive() -> Message:
        for message in body:
            return message
        await begun.wait()
        return {"type": "http.disconnect"}

    async def send_head(message: Message) -> None:
        if message["type"] == "http.response.start":
            await send(message)
            begun.set()

    await app(scope, receive, send_head)
    await send({"type": "http.response.body"})


def served_path(path: str) -> str:
    """The path of the route that was meant."""
    path = SLASHES.sub("/", ORIGIN.sub("", path, count=1) if path.startswith("http") else path)
    path = path.rstrip("/") or path[:1]
    if path.startswith(LM_STUDIO):
        return path.removeprefix("/api")
    if path.startswith(ONE_TOO_MANY):
        return path.removeprefix(VERSION)
    first = path.removeprefix("/").partition("/")[0]
    return VERSION + path if first in VERSIONED else path


FILES_PATH = "/v1/files"


def is_upload(scope: Mapping[str, Any]) -> bool:
    """Whether the request brings a file, which is written to disk while it arrives."""
    return scope.get("method") == "POST" and served_path(scope["path"]) == FILES_PATH


server_log = logging.getLogger("mlx_server")

FAILURES = {
    "lifespan.startup.failed": "the server could not start",
    "lifespan.shutdown.failed": "the server could not shut down cleanly",
}


class DiscreetLifespan:
    """ASGI middleware."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "lifespan":
            await self._app(scope, receive, send)
            return
        failure = ""

        async def send_without_text(message: Message) -> None:
            nonlocal failure
            failure = FAILURES.get(message["type"], failure)
            await send({"type": message["type"]})

        try:
            await self._app(scope, receive, send_without_text)
        except Exception as error:
            if isinstance(error, ServerError):
                server_log.critical("%s: %s", failure, error.message)
            else:
                server_log.critical("%s", failure, exc_info=error)
            raise
