"""A stream has an end, whatever becomes of its chunks, and is closed when its client leaves."""

import asyncio
import json
from collections.abc import AsyncGenerator, Mapping
from typing import Any

import pytest

from mlx_server.api import sse
from mlx_server.api.sse import DONE, KEEP_ALIVE, EventStream, event
from mlx_server.errors import BadRequest

pytestmark = pytest.mark.anyio

Chunks = AsyncGenerator[Mapping[str, Any]]


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


class Source:
    is_closed = False

    async def aclose(self) -> None:
        self.is_closed = True


class Client:
    def __init__(self) -> None:
        self.leaves = asyncio.Event()
        self.is_kept = asyncio.Event()
        self.messages: list[Any] = []

    async def receive(self) -> dict[str, str]:
        await self.leaves.wait()
        return {"type": "http.disconnect"}

    async def send(self, message: Any) -> None:
        self.messages.append(message)
        if message.get("body") == KEEP_ALIVE:
            self.is_kept.set()

    async def take(self, chunks: Chunks) -> list[bytes]:
        """The bodies that it gets of a stream."""
        source = Source()
        stream = EventStream(chunks, {"x-more": "1"}, source=source)
        await asyncio.wait_for(stream({"type": "http"}, self.receive, self.send), 20)
        assert source.is_closed
        begin, *rest = self.messages
        assert (b"x-more", b"1") in begin["headers"]
        return [message["body"] for message in rest]


async def saying(*texts: str, error: Exception | None = None) -> Chunks:
    for text in texts:
        yield {"text": text}
    if error:
        raise error


def error_in(body: bytes) -> Any:
    return json.loads(body.removeprefix(b"data: "))["error"]


def test_an_event_is_named_by_its_type() -> None:
    assert event({"a": 1}) == b'data: {"a":1}\n\n'
    assert event({"type": "x.y"}) == b'event: x.y\ndata: {"type":"x.y"}\n\n'


async def test_each_chunk_is_written_and_then_the_end() -> None:
    client = Client()
    bodies = await client.take(saying("a", "b"))
    assert bodies == [event({"text": "a"}), event({"text": "b"}), DONE]
    assert [message["more_body"] for message in client.messages[1:]] == [True, True, False]


async def test_an_error_is_the_last_event_before_the_end() -> None:
    _, error, end = await Client().take(saying("a", error=BadRequest("No.", param="x")))
    assert (error_in(error)["message"], error_in(error)["param"], end) == ("No.", "x", DONE)


async def test_an_error_of_ours_is_logged_and_not_shown(caplog: pytest.LogCaptureFixture) -> None:
    _, error, end = await Client().take(saying("a", error=KeyError("secret")))
    assert (error_in(error)["code"], end) == ("internal_error", DONE)
    assert b"secret" not in error
    assert "secret" in caplog.text


async def test_an_idle_stream_has_comments(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sse, "KEEP_ALIVE_SECONDS", 0.01)
    client = Client()

    async def slow() -> Chunks:
        await client.is_kept.wait()
        yield {"text": "a"}

    bodies = await client.take(slow())
    assert bodies[0] == KEEP_ALIVE
    assert bodies[-2:] == [event({"text": "a"}), DONE]


async def test_a_client_that_leaves_ends_the_stream() -> None:
    client, closed = Client(), list[str]()

    async def endless() -> Chunks:
        try:
            yield {"text": "a"}
            client.leaves.set()
            await asyncio.Event().wait()
        finally:
            closed.append("chunks")

    assert await client.take(endless()) == [event({"text": "a"})]
    assert closed == ["chunks"]
