"""One line a request, with its id: how it ended and what it used, and not a word of it."""

import asyncio
import json
import logging
from collections.abc import Iterator
from concurrent.futures import CancelledError
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from starlette.testclient import TestClient
from starlette.types import Message, Receive, Scope, Send

from mlx_server.http.middleware import AccessLog
from mlx_server.system import logs
from tests.api import wire
from tests.api.wire import MODEL, Json, ScriptedEngine
from tests.live.server import eventually
from tests.tables import cases

START: Message = {"type": "http.response.start", "status": 200, "headers": []}
PIECE: Message = {"type": "http.response.body", "body": b"data: 1", "more_body": True}
END: Message = {"type": "http.response.body", "body": b"data: [DONE]", "more_body": False}
OWN_ID = {"x-request-id": "mine"}
COMPLETION = {"model": MODEL, "prompt": "four", "max_tokens": 3}
RESPONSE = {"model": MODEL, "input": "a", "max_output_tokens": 16}


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


@pytest.mark.parametrize(
    ("before", "after", "status"),
    [
        ([START, PIECE, END], [], "200"),
        ([], [PIECE], "gone"),
        ([START], [PIECE], "gone"),
        ([START, PIECE], [PIECE], "gone"),
    ],
)
def test_a_client_that_leaves_before_the_end_is_gone(
    caplog: pytest.LogCaptureFixture, before: list[Message], after: list[Message], status: str
) -> None:
    assert logged(caplog, before, after).startswith(f"POST */*/* {status} ")


def test_an_app_that_says_nothing_has_failed(caplog: pytest.LogCaptureFixture) -> None:
    async def silent(*_: Any) -> None:
        raise RuntimeError

    scope: Scope = {"type": "http", "method": "GET", "path": "/"}
    with caplog.at_level(logging.INFO, "mlx_server.access"), pytest.raises(RuntimeError):
        asyncio.run(AccessLog(silent)(scope, silent, silent))  # type: ignore[arg-type]
    assert " 500 " in caplog.records[0].getMessage()


class Lines(logging.Handler):
    """What programs read of the log."""

    def __init__(self) -> None:
        super().__init__()
        self.reported: list[Any] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.reported.append(json.loads(logs.JsonFormatter().format(record)))

    def only(self, **facts: Any) -> None:
        (line,) = self.reported
        assert facts.items() <= line.items()
        assert 0 <= line["seconds"] < 60
        self.reported.clear()


@pytest.fixture
def lines() -> Iterator[Lines]:
    log, found = logging.getLogger("mlx_server.access"), Lines()
    log.addHandler(found)
    log.setLevel(logging.INFO)
    yield found
    log.removeHandler(found)
    log.setLevel(logging.NOTSET)


@pytest.mark.parametrize("stream", [False, True])
def test_what_a_request_used(client: TestClient, lines: Lines, stream: bool) -> None:
    client.post("/v1/completions", json={**COMPLETION, "stream": stream}, headers=OWN_ID)
    lines.only(
        method="POST",
        route="/v1/completions",
        status=200,
        prompt_tokens=4,
        completion_tokens=3,
        request_id="mine",
        level="info",
        logger="mlx_server.access",
    )
    client.post("/v1/responses", json={**RESPONSE, "stream": stream}, headers=OWN_ID)
    lines.only(route="/v1/responses", completion_tokens=16, request_id="mine")


@cases
def test_every_answer_is_told_by_its_route_and_has_an_id(
    client: TestClient, lines: Lines, method: str, path: str, headers: Any, reported: Any
) -> None:
    for sent in (OWN_ID, {}, {"x-request-id": "x" * 1000}):
        answer = client.request(method, path, headers={**headers, **sent})
        id = answer.headers["x-request-id"]
        assert id == "mine" if sent == OWN_ID else id.startswith("req_")
        lines.only(method=reported[0], route=reported[1], status=reported[2], request_id=id)


def test_responses_over_a_websocket_are_told_one_by_one(client: TestClient, lines: Lines) -> None:
    frames: tuple[tuple[Json, str, int, int], ...] = (
        ({**RESPONSE, "type": "response.create"}, "response.incomplete", 200, 16),
        ({"type": "response.create", "model": "none", "input": "a"}, "error", 404, 0),
        ({"type": "session.update"}, "error", 400, 0),
    )
    with (
        suppress(CancelledError),  # starlette's client leaves by cancelling the app
        client.websocket_connect("ws://localhost/v1/responses", headers=OWN_ID) as line,
    ):
        assert (b"x-request-id", b"mine") in (line.extra_headers or [])
        for frame, last, *_ in frames:
            line.send_json(frame)
            while line.receive_json()["type"] != last:
                pass
    eventually(lambda: any(reported["status"] == 101 for reported in lines.reported), "it has left")
    assert all(reported["request_id"] == "mine" for reported in lines.reported)
    found = [
        (reported["method"], reported["route"], reported["status"], reported["completion_tokens"])
        for reported in lines.reported
    ]
    turns = [("WS", "/v1/responses", status, tokens) for _, _, status, tokens in frames]
    assert found == [*turns, ("GET", "/v1/responses", 101, 0)]


def test_other_lines_have_the_id_too(
    tiny_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ScriptedEngine, "said", None)
    monkeypatch.setattr(caplog.handler, "formatter", logs.PlainFormatter())
    with wire.client(tiny_path, ScriptedEngine()) as client:
        client.post("/v1/completions", json=COMPLETION, headers=OWN_ID)
    (reported,) = [line for line in caplog.text.splitlines() if "unexpected error" in line]
    assert reported.endswith("ERROR   mlx_server: unexpected error in request mine mine")
