"""The HTTP server: uvicorn with our connection handling, and a shutdown that lets answers end."""

import asyncio
import errno
import gc
import json
import logging
import os
import shlex
import signal
import socket
import sys
from collections.abc import Callable, Mapping
from types import FrameType
from typing import Any

import uvicorn
from fastapi import FastAPI
from uvicorn.server import ServerState

from mlx_server import limits
from mlx_server.errors import ShuttingDown
from mlx_server.http.connections import StrictHttp
from mlx_server.pool.pool import Pool
from mlx_server.pool.prepare import PreparedModel, Task
from mlx_server.pool.scheduler import cancelled
from mlx_server.system.listening_sockets import DEFAULT_URL, url_of

log = logging.getLogger("mlx_server")

EXIT_CODES = {signal.SIGTERM: 0, signal.SIGINT: 130}
EXHAUSTED = {errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM}
SILENCE_SECONDS = 60.0
"""Pause between log lines about refused connections."""
POLL_SECONDS = 0.1
COLLECTIONS = 5_000, 20, 100
"""Thresholds of Python's garbage collector: rare, since full collections pause the event loop."""
SWITCH_SECONDS = 0.0005
"""Interval after which the event loop gets the GIL back from a thread that parses: a tenth of
Python's default, since each read and write of a socket gives the GIL away."""


EXAMPLES: Mapping[Task, tuple[str, dict[str, Any]]] = {
    "generate": ("chat/completions", {"messages": [{"role": "user", "content": "Hello"}]}),
    "embed": ("embeddings", {"input": "Hello"}),
    "rerank": ("rerank", {"query": "What is MLX?", "documents": ["A library.", "A lake."]}),
}
"""The route and a body for a model of each kind."""


class HttpServer(uvicorn.Server):
    """Prints its URL; ends streams that outlast the drain time with an error event."""

    def __init__(self, config: uvicorn.Config, app: FastAPI, drain_seconds: float) -> None:
        super().__init__(config)
        self.on_stop: Callable[[], None] = lambda: None
        """Called when a signal ends the server."""
        self.on_ready: Callable[[], None] = lambda: None
        """Called when the server listens."""
        self._app = app
        self._drain_seconds = drain_seconds
        self._successors: list[socket.socket] = []
        self._is_leaving = self._is_stopping = self._had_signal = False

    def leave(self, successor: socket.socket) -> None:
        """Takes no more connections, and ends when all answers have. Any thread may call it.

        successor: a connection to the server that takes this one's place.
        """
        self._successors.append(successor)
        self.config.timeout_graceful_shutdown = (
            limits.LEAVING_SECONDS + int(self._drain_seconds) + 5
        )
        self._is_leaving = self.should_exit = True

    def stop(self) -> None:
        """Ends as at SIGTERM. Any thread may call it."""
        self._is_stopping = self.should_exit = True

    async def startup(self, sockets: list[Any] | None = None) -> None:
        await super().startup(sockets)
        # keeps the objects of the server itself out of further collections
        gc.collect()
        gc.freeze()
        # the many objects of a large body must not cause one collection after another
        gc.set_threshold(*COLLECTIONS)
        sys.setswitchinterval(SWITCH_SECONDS)
        urls = []
        for server in getattr(self, "servers", []):
            _queue_in_kernel(server)
            urls.append(url_of(server.sockets[0]))
            _print_line(f"Listening on {urls[-1]}")
        if urls:
            if servers := self._app.state.pool.servers:
                servers.url = urls[0]
            _announce_models(self._app.state.pool, urls[0])
        self.on_ready()

    async def shutdown(self, sockets: list[Any] | None = None) -> None:
        runs, pool = self._app.state.runs, self._app.state.pool
        self._app.state.page_streams.end()
        ending = asyncio.create_task(self._end_streams())
        for server in self.servers:  # no new connections; uvicorn would also cut off WebSockets
            server.close()
        handing_over: list[asyncio.Task[None]] = []
        if self._successors:
            runs.stopping.set()
            # connections that were kept open may bring one more request each
            asyncio.get_running_loop().call_later(limits.IDLE_SECONDS, pool.retire)
            # a connection that was just accepted is not among `connections` yet
            await asyncio.sleep(POLL_SECONDS)
        while self._is_leaving and (
            self.server_state.connections or runs.is_busy or self._app.state.relay
        ):
            for connection in list(self.server_state.connections):
                if isinstance(connection, StrictHttp):
                    connection.leave()
            if self._is_stopping:
                break
            while self._successors:
                successor = self._successors.pop()
                handing_over.append(asyncio.create_task(pool.hand_over(successor)))
            await asyncio.sleep(POLL_SECONDS)
        if self.server_state.tasks or runs.is_busy:
            seconds = f"{self._drain_seconds:g}"
            _print_line(f"Answers have {seconds} s to end; Ctrl-C again ends them at once.")
        draining = asyncio.create_task(runs.drain())
        while not (draining.done() or self.force_exit):
            await asyncio.wait({draining}, timeout=POLL_SECONDS)
        draining.cancel()
        await super().shutdown(sockets)
        await cancelled([ending, *handing_over])

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """A second signal exits at once; MCP servers are ended by their guard processes."""
        self.on_stop()
        if self._had_signal:
            self._app.state.pool.kill()
            os._exit(EXIT_CODES[signal.Signals(sig)])
        self._had_signal = self._is_stopping = self.should_exit = True
        self._captured_signals.append(sig)

    async def _end_streams(self) -> None:
        clock = asyncio.get_running_loop().time
        latest = clock() + limits.LEAVING_SECONDS
        # signals and other threads end it
        while self._is_leaving and not self._is_stopping and clock() < latest:  # noqa: ASYNC110
            await asyncio.sleep(POLL_SECONDS)
        await asyncio.sleep(self._drain_seconds)
        pool: Pool = self._app.state.pool
        # answers that wait for an MCP server continue without it, until the pool ends them
        stopping = asyncio.create_task(self._app.state.connectors.stop())
        await pool.stop(ShuttingDown("The server is shutting down."))
        await let_last_words_out(self.server_state)
        for connection in list(self.server_state.connections):
            connection.transport.abort()
        await stopping


def _announce_models(pool: Pool, url: str) -> None:
    """Prints a line for each model when it is ready for the first time, or what to try if none is
    loaded without a request."""
    if pool.models.specs and not any(spec.preload for spec in pool.models.specs):
        command = _curl(url, "generate", pool.models.specs[0].id)
        _print_line(f"Ready: models are loaded when they are first used; try: {command}")
    announced: set[str] = set()

    def announce(model: PreparedModel) -> None:
        if model.id not in announced:
            announced.add(model.id)
            _print_line(f"{model.id} is ready at {url}/v1; try: {_to_try(model, url)}")

    for model in pool.models.loaded:
        announce(model.prepared)
    pool.events.ready = announce


def _to_try(model: PreparedModel, url: str) -> str:
    """A command that uses the model."""
    if model.task == "generate":
        return f"mlx-server chat {shlex.quote(model.id)}" + (
            "" if url == DEFAULT_URL else f" --url {url}"
        )
    return _curl(url, model.task, model.id)


def _curl(url: str, task: Task, id: str) -> str:
    route, fields = EXAMPLES[task]
    body = json.dumps({"model": id, **fields})
    return f"curl {url}/v1/{route} --json {shlex.quote(body)}"


def _print_line(line: str) -> None:
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


def _queue_in_kernel(server: asyncio.Server) -> None:
    """Raises the kernel's queue of connections. asyncio's `backlog` also sets how many it accepts
    at once, and so has to stay small."""
    for listening in server.sockets:
        with socket.socket(fileno=os.dup(listening.fileno())) as same:
            same.listen(socket.SOMAXCONN)


class LoopErrors:
    """asyncio's exception handler, without the task's arguments, which asyncio itself would log."""

    def __init__(self) -> None:
        self._next_time = 0.0

    def __call__(self, loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        error = context.get("exception")
        if not (isinstance(error, OSError) and error.errno in EXHAUSTED):
            log.error("unhandled error in a background task", exc_info=error)
        elif loop.time() >= self._next_time:  # asyncio retries, so there may be many a second
            self._next_time = loop.time() + SILENCE_SECONDS
            log.error("new connections can't be accepted for now: %s", error.strerror)


UNREAD_SECONDS = 0.25
"""How long a client may take to read its last event."""

WORKING_SECONDS = 2.0
"""How long answers may take to end, store what they have and write their last event."""

UNREAD_POLL_SECONDS = 0.02


async def let_last_words_out(state: ServerState) -> None:
    """Returns when all answers have ended and are sent, or their clients don't read them."""
    clock = asyncio.get_running_loop().time
    began = working = clock()
    while clock() - began < WORKING_SECONDS and clock() - working < UNREAD_SECONDS:
        unread = sum(map(_is_unread, state.connections))
        if len(state.tasks) > unread:
            working = clock()
        elif not unread:
            return
        await asyncio.sleep(UNREAD_POLL_SECONDS)


def _is_unread(connection: object) -> bool:
    """Whether the client has not yet read all that was sent to it."""
    transport = getattr(connection, "transport", None)
    return bool(transport and transport.get_write_buffer_size())
