"""Clients that leave before their answer ends, and whether their rows are free then."""

import asyncio
import json
import logging
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from starlette.types import Message

from tests.api import wire
from tests.api.wire import Json, ScriptedEngine


class Leaver:
    """A client, as the app sees it, that sends its request and leaves some time later.

    leaves: when; None: as soon as it is sent something. stuck: nothing gets through to it.
    """

    def __init__(
        self,
        body: Json,
        leaves: asyncio.Event | None = None,
        *,
        stuck: bool = False,
        path: str = "/v1/chat/completions",
    ) -> None:
        self._path = path
        self.raw = json.dumps(body).encode()
        self.sent: list[Message] = []
        self._coming: list[Message] = [{"type": "http.request", "body": self.raw}]
        self._sending = asyncio.Event()
        self._leaves = leaves or self._sending
        self._stuck = stuck

    @property
    def scope(self) -> dict[str, Any]:
        length = str(len(self.raw)).encode()
        return {
            "type": "http",
            "http_version": "1.1",
            "method": "POST",
            "scheme": "http",
            "path": self._path,
            "raw_path": self._path.encode(),
            "query_string": b"",
            "headers": [
                (b"host", b"localhost"),
                (b"content-type", b"application/json"),
                (b"content-length", length),
            ],
            "state": {},
        }

    async def receive(self) -> Message:
        if self._coming:
            return self._coming.pop()
        await self._leaves.wait()
        return {"type": "http.disconnect"}

    async def send(self, message: Message) -> None:
        self._sending.set()
        if self._stuck:
            await asyncio.Event().wait()
        self.sent.append(message)


@dataclass
class Stage:
    """An app whose engine takes rows and says nothing, and whether they are free afterwards."""

    model: Path
    engine: ScriptedEngine = field(default_factory=ScriptedEngine)
    free: list[bool] = field(default_factory=list)

    def play(self, *clients: Leaver) -> None:
        self.engine.silent = True
        asyncio.run(self._play(clients))

    async def _play(self, clients: tuple[Leaver, ...]) -> None:
        app = wire.app(self.model, self.engine)
        async with app.router.lifespan_context(app):
            for client in clients:
                called = app(client.scope, client.receive, client.send)
                await asyncio.wait_for(called, 2 * wire.PATIENCE_SECONDS)
                assert not self.engine.gave_up
                self.free.append(not self.engine.running)
                self.engine.took.clear()


def assert_its_work_ends(
    model: Path, engine: ScriptedEngine, body: Json, path: str, log: pytest.LogCaptureFixture
) -> None:
    """If the client leaves while the engine computes: its rows are free, and only the access log
    says that it is gone."""
    stage = Stage(model, engine)
    with log.at_level(logging.INFO):
        stage.play(Leaver(body, engine.took, path=path))
    assert stage.free == [True]
    (access,) = [each.getMessage() for each in log.records if each.name == "mlx_server.access"]
    assert " gone " in access
    assert not [each for each in log.records if each.levelno > logging.INFO]
