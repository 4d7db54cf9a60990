"""One line a request: a client that leaves too early is told from one that was answered."""

import asyncio
import logging

import pytest
from starlette.types import Message, Receive, Scope, Send

from mlx_server.api.access_log import AccessLog

START: Message = {"type": "http.response.start", "status": 200, "headers": []}
PIECE: Message = {"type": "http.response.body", "body": b"data: 1", "more_body": True}
END: Message = {"type": "http.response.body", "body": b"data: [DONE]", "more_body": False}


def logged(caplog: pytest.LogCaptureFixture, before: list[Message], after: list[Message]) -> str:
    """What is logged of an answer that hears of the client's leaving between these messages."""

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        for message in before:
            await send(message)
        await receive()
        for message in after:
            await send(message)

    async def receive() -> Message:
        return {"type": "http.disconnect"}

    async def send(message: Message) -> None:
        pass

    scope: Scope = {"type": "http", "method": "POST", "path": "/v1/x\n", "state": {}}
    with caplog.at_level(logging.INFO, "mlx_server.access"):
        asyncio.run(AccessLog(app)(scope, receive, send))
    (record,) = caplog.records
    return record.getMessage()


def test_a_stream_that_was_sent_to_its_end_is_a_success(caplog: pytest.LogCaptureFixture) -> None:
    assert logged(caplog, [START, PIECE, END], []).startswith("POST /v1/x\\n 200 ")


@pytest.mark.parametrize("before", [[], [START], [START, PIECE]])
def test_a_client_that_leaves_before_the_end_is_gone(
    caplog: pytest.LogCaptureFixture, before: list[Message]
) -> None:
    assert logged(caplog, before, [PIECE]).startswith("POST /v1/x\\n gone ")


def test_an_app_that_says_nothing_has_failed(caplog: pytest.LogCaptureFixture) -> None:
    async def silent(scope: Scope, receive: Receive, send: Send) -> None:
        raise RuntimeError

    async def receive() -> Message:
        raise AssertionError

    async def send(message: Message) -> None:
        raise AssertionError

    scope: Scope = {"type": "http", "method": "GET", "path": "/"}
    with caplog.at_level(logging.INFO, "mlx_server.access"), pytest.raises(RuntimeError):
        asyncio.run(AccessLog(silent)(scope, receive, send))
    assert " 500 " in caplog.records[0].getMessage()
