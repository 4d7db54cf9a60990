"""Clients that leave before their answer ends, and whether their rows are free then."""

import asyncio
import json
from typing import Any

from starlette.types import Message

from tests.api.wire import Json


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
