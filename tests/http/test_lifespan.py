"""The app's start and end: what goes wrong is logged, and not sent on as text."""

import asyncio
import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest
from starlette.applications import Starlette
from starlette.types import Message, Receive, Scope, Send

from mlx_server.errors import ModelUnusable
from mlx_server.http.middleware import DiscreetLifespan

SECRET = "/home/me/secret"


def app(start: Exception | None = None, end: Exception | None = None) -> Starlette:
    @asynccontextmanager
    async def lifespan(app: Starlette) -> AsyncIterator[None]:
        if start:
            raise start
        yield
        if end:
            raise end

    return Starlette(lifespan=lifespan)


def run(app: Starlette) -> tuple[list[Message], Exception | None]:
    """What it sends to the server, and what it raises."""
    asked = iter([{"type": "lifespan.startup"}, {"type": "lifespan.shutdown"}])
    sent: list[Message] = []

    async def receive() -> Message:
        return next(asked)

    async def send(message: Message) -> None:
        sent.append(message)

    try:
        asyncio.run(DiscreetLifespan(app)({"type": "lifespan", "app": app}, receive, send))
    except Exception as error:
        return sent, error
    return sent, None


def test_a_start_and_an_end_without_errors_are_passed_on(caplog: pytest.LogCaptureFixture) -> None:
    sent, error = run(app())
    assert [message["type"] for message in sent] == [
        "lifespan.startup.complete",
        "lifespan.shutdown.complete",
    ]
    assert error is None
    assert caplog.records == []


@pytest.mark.parametrize(
    ("at", "said"),
    [
        ("startup", "the server could not start"),
        ("shutdown", "the server could not shut down cleanly"),
    ],
)
def test_an_error_of_ours_is_logged_as_a_sentence_and_another_with_its_traceback(
    at: str, said: str, caplog: pytest.LogCaptureFixture
) -> None:
    for error in (ModelUnusable("It is damaged."), OSError(SECRET)):
        caplog.clear()
        sent, raised = run(app(start=error) if at == "startup" else app(end=error))
        assert raised is error
        assert sent[-1] == {"type": f"lifespan.{at}.failed"}, "no path and no message"
        (record,) = caplog.records
        assert record.levelno == logging.CRITICAL
        assert SECRET not in record.getMessage()
        if isinstance(error, ModelUnusable):
            assert record.getMessage() == f"{said}: It is damaged."
            assert not record.exc_info
        else:
            assert record.getMessage() == said
            assert record.exc_info
            assert record.exc_info[1] is error


def test_requests_are_passed_on_untouched() -> None:
    seen: list[tuple[Scope, Receive, Send]] = []

    async def inner(scope: Scope, receive: Receive, send: Send) -> None:
        seen.append((scope, receive, send))

    async def receive() -> Message:
        return {}

    async def send(message: Message) -> None:
        pass

    for kind in ("http", "websocket"):
        asyncio.run(DiscreetLifespan(inner)({"type": kind}, receive, send))
        assert seen.pop() == ({"type": kind}, receive, send)
