"""Clients that leave before their answer ends, and whether their rows are free then."""

import asyncio
import json
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from starlette.types import Message

from tests.api.wire import Json


class Leaver:
    """A client, as the app sees it, that sends its request and leaves some time later.

    body: None for a GET. leaves: when; None: as soon as it is sent something. stuck: nothing gets
    through to it.
    """

    def __init__(
        self,
        body: Json | None,
        leaves: asyncio.Event | None = None,
        *,
        stuck: bool = False,
        path: str = "/v1/chat/completions",
        headers: Mapping[str, str] = MappingProxyType({}),
    ) -> None:
        self._path = path
        self._method = "GET" if body is None else "POST"
        self._headers = [(name.encode(), value.encode()) for name, value in headers.items()]
        self.raw = b"" if body is None else json.dumps(body).encode()
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
            "method": self._method,
            "scheme": "http",
            "path": self._path,
            "raw_path": self._path.encode(),
            "query_string": b"",
            "headers": [
                (b"host", b"localhost"),
                (b"content-type", b"application/json"),
                (b"content-length", length),
                *self._headers,
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
