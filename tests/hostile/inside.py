"""The server on a thread of the test's own process: real sockets, and its parts within reach."""

import asyncio
import json
import os
import signal
import socket
import struct
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any, TypeVar

import pytest
from fastapi import FastAPI

from mlx_server.app import create_app, server_of
from mlx_server.config.settings import Settings
from mlx_server.engine import liveness
from mlx_server.engine.messages import StepOutput
from mlx_server.http.server import HttpServer
from mlx_server.pool.pool import Pool
from tests.live.server import eventually

T = TypeVar("T")

START_SECONDS = 60.0
LONG = 3600.0


class Inside:
    def __init__(self, settings: Settings) -> None:
        self.app: FastAPI = create_app(settings)
        self.server: HttpServer = server_of(settings, self.app)
        self._thread = threading.Thread(target=asyncio.run, args=(self._serve(),))
        self._loop: asyncio.AbstractEventLoop | None = None
        self._clients = ExitStack()
        self.steps: list[StepOutput] = []
        """What the engine said of each."""
        self.pool.events.step = self.steps.append

    async def _serve(self) -> None:
        self._loop = asyncio.get_running_loop()
        await self.server.serve()

    def __enter__(self) -> "Inside":
        self._thread.start()
        eventually(lambda: self.server.started, "it listens", START_SECONDS)
        return self

    def __exit__(self, *_: object) -> None:
        self._clients.close()
        self.server.should_exit = True
        self._thread.join()

    @property
    def port(self) -> int:
        port: int = self.server.servers[0].sockets[0].getsockname()[1]
        return port

    @property
    def pool(self) -> Pool:
        pool: Pool = self.app.state.pool
        return pool

    def within(self, look: Callable[[], T]) -> T:
        """What this says on the server's own thread."""

        async def call() -> T:
            return look()

        assert self._loop
        return asyncio.run_coroutine_threadsafe(call(), self._loop).result(START_SECONDS)

    def leases(self) -> dict[str, int]:
        return self.within(lambda: {view.spec.id: view.leases for view in self.pool.views()})

    def state_of(self, model: str) -> str:
        return self.within(lambda: next(v.state for v in self.pool.views() if v.spec.id == model))

    @property
    def batch(self) -> int:
        """Rows that the engine gave a token in its last step."""
        return len(self.steps[-1].tokens) if self.steps else 0

    def rows(self) -> int:
        """Of requests that are under way."""
        return self.within(lambda: self.pool.row_slots.taken)

    def given(self) -> int:
        """Rows that the engine has not been asked to forget."""
        return self.within(lambda: len(self.pool.engines[0].engine.row_streams))

    def is_free(self) -> bool:
        """Nobody holds anything."""
        memory = self.within(self.pool.memory)
        return not (self.rows() or self.given() or any(self.leases().values())) and (
            memory["kv_reserved"] == 0
        )

    @contextmanager
    def frozen(self) -> Iterator[None]:
        """The engine's process does nothing meanwhile, and takes no notice of its commands."""
        (pid,) = self.within(lambda: [self.pool.engines[0].engine.pid])
        assert pid
        os.kill(pid, signal.SIGSTOP)
        try:
            yield
        finally:
            os.kill(pid, signal.SIGCONT)

    def connect(self, receive_bytes: int | None = None) -> socket.socket:
        found = self._clients.enter_context(socket.socket())
        found.settimeout(60)
        if receive_bytes is not None:
            found.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_bytes)
        found.connect(("127.0.0.1", self.port))
        return found


@contextmanager
def serving(settings: Settings) -> Iterator[Inside]:
    with pytest.MonkeyPatch.context() as patched:
        # a frozen engine is no dead one
        patched.setattr(liveness, "SILENT_SECONDS", LONG)
        patched.setattr(liveness, "STALLED_SECONDS", LONG)
        patched.setattr(liveness, "FIRST_STEP_SECONDS", LONG)
        with Inside(settings) as found:
            yield found


def request(path: str, body: Mapping[str, Any] | None = None, method: str = "POST") -> bytes:
    content = json.dumps(body).encode() if body is not None else b""
    head = [f"{method} {path} HTTP/1.1", "Host: localhost", f"Content-Length: {len(content)}"]
    if body is not None:
        head.append("Content-Type: application/json")
    return "\r\n".join(head).encode() + b"\r\n\r\n" + content


def reset(connection: socket.socket) -> None:
    """RST in place of FIN."""
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    connection.close()
