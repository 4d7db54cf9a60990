"""An upstream that breaks HTTP or server-sent events costs its own request an error at most."""

import gzip
import itertools
import json
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from threading import Event
from typing import cast

import pytest
from fastapi import FastAPI
from starlette.testclient import TestClient

from mlx_server.pool.pool import Pool
from mlx_server.upstream.connection import UpstreamBreaker
from tests.hostile.upstreams import RawServer
from tests.upstream.playing import (
    USAGE,
    AnswerReader,
    PlayingServer,
    as_message,
    as_response,
    chat,
    delta,
    gateway,
    in_chunks,
    in_one,
    says,
    sse,
)

Parts = Iterable[bytes]

SECONDS = 1.0
OK = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\n"
JSON = b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\n"
CLOSED = b"connection: close\r\n\r\n"
OLD = b"HTTP/1.0 200 OK\r\ncontent-type: text/event-stream\r\n\r\n"
CHUNKED = b"transfer-encoding: chunked\r\n\r\n"
BOM = b"\xef\xbb\xbf"
STREAM = sse(delta(content="Yes"), delta("stop"), USAGE)
BODY = json.dumps({"choices": [{"message": {"content": "Yes"}, "finish_reason": "stop"}]}).encode()


@pytest.fixture(scope="module")
def hostile() -> Iterator[RawServer]:
    with closing(RawServer(tuple)) as server:
        yield server


@pytest.fixture(scope="module")
def client(hostile: RawServer, upstream: PlayingServer) -> Iterator[TestClient]:
    hasty = {"retries": 0, "first_seconds": SECONDS}
    other = {"source": f"openai+{upstream.url}/v1"}
    with gateway(hostile.url, {"up": {"upstream": hasty}, "other": other}) as client:
        yield client


@pytest.fixture(autouse=True)
def closed_breaker(client: TestClient) -> None:
    pool: Pool = cast(FastAPI, client.app).state.pool
    model = pool.models.upstream("up")
    assert model
    model.connection.breaker = UpstreamBreaker()


def chunked(data: bytes, end: bytes = b"0\r\n\r\n") -> bytes:
    return b"%x\r\n%s\r\n%s" % (len(data), data, end)


def for_ever(*begin: bytes, then: bytes) -> Callable[[], Parts]:
    return lambda: itertools.chain(begin, itertools.repeat(then))


def dripping(*begin: bytes) -> Callable[[], Parts]:
    """A byte now and then, so that the connection is never idle for long."""

    def drops() -> Iterator[bytes]:
        pause = Event()
        while not pause.wait(SECONDS / 10):
            yield b"x"

    return lambda: itertools.chain(begin, drops())


FIRST, *OTHERS = (json.dumps(each) for each in (delta(content="Yes"), delta("stop"), USAGE))
VALUES = [FIRST, *OTHERS]


def of_values(form: str) -> bytes:
    """The answer's values, each in this form."""
    return OK + CLOSED + "".join(form.format(each) for each in VALUES).encode()


PAGE = b"<!doctype html><html><body>Please log in.</body></html>"
ANSWERS = {
    "a 100 before": b"HTTP/1.1 100 Continue\r\n\r\n" + OK + CLOSED + STREAM,
    "trailers": OK + CHUNKED + chunked(STREAM, b"0\r\nx: y\r\n\r\n"),
    "both lengths": OK + b"content-length: 5\r\n" + CHUNKED + chunked(STREAM),
    "a chunk that is too short": OK + CHUNKED + b"ffff\r\n" + STREAM,
    "a length that is too long": OK + b"content-length: 5000\r\n\r\n" + STREAM,
    "bytes in a header": OK + b"x: \xff\xfe\r\n" + CLOSED + STREAM,
    "a byte order mark": OK + CLOSED + BOM + STREAM,
    "a byte order mark before JSON": JSON + CLOSED + BOM + BODY,
    "returns alone": OK + CLOSED + STREAM.replace(b"\n", b"\r"),
    "carriage returns and line feeds": OK + CLOSED + STREAM.replace(b"\n", b"\r\n"),
    "no space after the colon": OK + CLOSED + STREAM.replace(b"data: ", b"data:"),
    "comments alone for long": OK + CLOSED + b": ping\n\n" * 10_000 + STREAM,
    "HTTP/1.0 and no end": OLD + STREAM.replace(b"data: [DONE]\n\n", b""),
    "HTTP/1.0 and JSON": OLD + BODY,
    "events of nothing": OK + CLOSED + b"data\n\ndata: \n\n" + STREAM,
    "a space after the end": OK + CLOSED + STREAM.replace(b"[DONE]", b"[DONE] "),
    "JSON as events": OK + CLOSED + BODY,
    "events as JSON": JSON + CLOSED + STREAM,
    "no type": b"HTTP/1.1 200 OK\r\n" + CLOSED + STREAM,
    "two ends": OK + CLOSED + STREAM + b"data: [DONE]\n\n",
    "a list of all values": OK + CLOSED + f"[{','.join(VALUES)}]".encode(),
    "values of nothing": OK + CLOSED + b"data: null\n\n" + STREAM,
    "nonsense after the end": OK + CLOSED + STREAM.replace(b"[DONE]", b"{"),
    "another end": OK + CLOSED + STREAM.replace(b"[DONE]", b"DONE"),
    "an error of nothing": of_values("data: {}\n\n").replace(
        b'{"choices', b'{"error": {"code": null, "message": ""}, "choices'
    ),
    "an answer after the end": OK + CLOSED + STREAM + sse(delta(content="No")),
}


@pytest.mark.slow
@pytest.mark.parametrize("sent", ANSWERS.values(), ids=ANSWERS)
@pytest.mark.parametrize("read_answer", [in_one, in_chunks, as_response, as_message])
def test_an_answer_nevertheless(
    read_answer: AnswerReader, sent: bytes, client: TestClient, hostile: RawServer
) -> None:
    hostile.stream = lambda: (sent,)
    assert read_answer(client, {})["text"] == "Yes"


REDIRECTS = ("file:///etc/passwd", "http://169.254.169.254/latest", "http://[::1", "//10.0.0.1/")

FAILURES: dict[str, tuple[int, Callable[[], Parts]]] = {
    "headers without end": (502, for_ever(OK, then=b"x: " + b"a" * 1000 + b"\r\n")),
    "a header without end": (502, for_ever(OK, b"x: ", then=b"a" * 1000)),
    "trailers without end": (
        502,
        for_ever(OK, CHUNKED, b"0\r\n", then=b"x: " + b"a" * 1000 + b"\r\n"),
    ),
    "a chunk's size without end": (502, for_ever(OK, CHUNKED, b"5;", then=b"a" * 1000)),
    "early hints without end": (502, for_ever(then=b"HTTP/1.1 103 Early\r\nlink: </a>\r\n\r\n")),
    "comments without end": (504, for_ever(OK, CLOSED, then=b": ping\n\n" * 100)),
    "a line that drips": (504, dripping(OK, CLOSED, b"data: {")),
    "headers that drip": (504, dripping(OK)),
    "a web page": (502, lambda: (b"HTTP/1.1 200 OK\r\ncontent-type: text/html\r\n", CLOSED, PAGE)),
    "another protocol": (502, lambda: (b"HTTP/1.1 101 Switching\r\nupgrade: x\r\n\r\n",)),
    "no HTTP": (502, lambda: (b"SSH-2.0-x\r\n",)),
    "nothing": (502, tuple),
    "a negative chunk": (502, lambda: (OK, CHUNKED, b"-5\r\n", STREAM)),
    "a chunk that is too long": (502, lambda: (OK, CHUNKED, b"5\r\n", STREAM)),
    "a negative length": (502, lambda: (OK, b"content-length: -1\r\n\r\n", STREAM)),
    "two lengths": (502, lambda: (OK, b"content-length: 5\r\ncontent-length: 7\r\n\r\n", STREAM)),
    "a length that is too short": (502, lambda: (OK, b"content-length: 20\r\n\r\n", STREAM)),
    "a null byte in a header": (502, lambda: (OK, b"x: \0\r\n", CLOSED, STREAM)),
    "no content": (502, lambda: (b"HTTP/1.1 204 None\r\n\r\n",)),
    "no such status": (502, lambda: (b"HTTP/1.1 999 No\r\n", CLOSED)),
    "a bomb that is not announced": (502, lambda: (OK, CLOSED, gzip.compress(b" " * 10**7))),
    "a bomb as transfer": (
        502,
        lambda: (OK, b"transfer-encoding: gzip, chunked\r\n\r\n", chunked(gzip.compress(STREAM))),
    ),
    "UTF-16": (502, lambda: (OK, CLOSED, STREAM.decode().encode("utf-16"))),
    "the end alone": (502, lambda: (OK, CLOSED, b"data: [DONE]\n\n")),
    "a pause in the past": (
        503,
        lambda: (b"HTTP/1.1 429 x\r\nretry-after: Mon, 01 Jan 0001 00:00:00 +2359\r\n", CLOSED),
    ),
    "a pause for ever": (503, lambda: (b"HTTP/1.1 429 x\r\nretry-after: inf\r\n", CLOSED)),
}
for to in REDIRECTS:
    moved = b"HTTP/1.1 302 Found\r\nlocation: " + to.encode() + b"\r\n" + CLOSED
    FAILURES[f"a redirect to {to}"] = (502, lambda moved=moved: (moved,))  # type: ignore[misc]


@pytest.mark.slow
@pytest.mark.parametrize(("status", "parts"), FAILURES.values(), ids=FAILURES)
def test_an_error(
    status: int, parts: Callable[[], Parts], client: TestClient, hostile: RawServer
) -> None:
    hostile.stream = parts
    response = chat(client)
    assert response.status_code == status, response.text
    assert response.json()["error"]["code"].startswith("upstream_")
    hostile.stream = lambda: (OK + CLOSED + STREAM,)
    assert chat(client).status_code == 200


@pytest.mark.slow
@pytest.mark.parametrize(
    "what", ["comments without end", "headers without end", "headers that drip"]
)
def test_others_are_answered_meanwhile(
    what: str, client: TestClient, hostile: RawServer, upstream: PlayingServer
) -> None:
    status, hostile.stream = FAILURES[what]
    hostile.asked.clear()
    upstream.plays(says("Yes"))
    with ThreadPoolExecutor(1) as threads:
        attacked = threads.submit(chat, client)
        assert hostile.asked.wait(10)
        assert in_one(client, {"model": "other"})["text"] == "Yes"
        assert attacked.result().status_code == status


def test_an_end_by_an_error(client: TestClient, hostile: RawServer) -> None:
    hostile.stream = lambda: (OK + CLOSED + sse(delta(content="Ye"), delta("error")),)
    assert "the answer failed" in chat(client).json()["error"]["message"]
