"""The app's start and end: what goes wrong is logged, and not sent on as text."""

import asyncio
import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest
from starlette.applications import Starlette
from starlette.types import Message

from mlx_server.errors import ModelUnusable
from mlx_server.http.middleware import DiscreetLifespan

SECRET = "/home/me/secret"
SENTENCES = {
    "startup": "the server could not start",
    "shutdown": "the server could not shut down cleanly",
}


def run(fails: str = "", error: Exception | None = None) -> tuple[list[Message], Exception | None]:
    """What an app sends to the server, and what it raises."""
    asked = iter([{"type": "lifespan.startup"}, {"type": "lifespan.shutdown"}])
    sent: list[Message] = []

    @asynccontextmanager
    async def lifespan(app: Starlette) -> AsyncIterator[None]:
        if error and fails == "startup":
            raise error
        yield
        if error:
            raise error

    async def receive() -> Message:
        return next(asked)

    async def send(message: Message) -> None:
        sent.append(message)

    app = Starlette(lifespan=lifespan)
    try:
        asyncio.run(DiscreetLifespan(app)({"type": "lifespan", "app": app}, receive, send))
    except Exception as raised:
        return sent, raised
    return sent, None


def test_a_start_and_an_end_without_errors_are_passed_on(caplog: pytest.LogCaptureFixture) -> None:
    sent, error = run()
    types = [message["type"] for message in sent]
    assert types == ["lifespan.startup.complete", "lifespan.shutdown.complete"]
    assert (error, caplog.records) == (None, [])


@pytest.mark.parametrize("at", SENTENCES)
@pytest.mark.parametrize("error", [ModelUnusable("It is damaged."), OSError(SECRET)])
def test_an_error_of_ours_is_logged_as_a_sentence_and_another_with_its_traceback(
    at: str, error: Exception, caplog: pytest.LogCaptureFixture
) -> None:
    sent, raised = run(at, error)
    assert raised is error
    assert sent[-1] == {"type": f"lifespan.{at}.failed"}, "no path and no message"
    (record,) = caplog.records
    assert record.levelno == logging.CRITICAL
    if isinstance(error, ModelUnusable):
        assert (record.getMessage(), record.exc_info) == (f"{SENTENCES[at]}: It is damaged.", None)
    else:
        assert record.getMessage() == SENTENCES[at]
        assert record.exc_info
        assert record.exc_info[1] is error
