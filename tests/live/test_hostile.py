"""Requests that end other servers. Here each gets its answer, and nobody else notices."""

import json
import socket
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any

import httpx
import pytest
from openai import OpenAI

from tests.api.wire import error_of
from tests.live.server import DEMO, TINY, LiveServer, eventually

CHAT = "/v1/chat/completions"
COMPLETIONS = "/v1/completions"
JSON = {"content-type": "application/json"}
HI = {"role": "user", "content": "hi"}
BODY: dict[str, Any] = {"model": TINY, "messages": [HI], "max_tokens": 2}
END = {"2": 100}
"""The first token is the last."""


@dataclass(frozen=True)
class Attack:
    name: str
    asked: Mapping[str, Any] | bytes
    """Set over BODY; or a body as it is."""
    status: int = 400
    param: str | None = None
    path: str = CHAT
    code: str | None = None
    headers: Mapping[str, str] = field(default_factory=dict)

    @property
    def body(self) -> bytes:
        if isinstance(self.asked, bytes):
            return self.asked
        # with NaN, and with half a surrogate pair as its escape
        return json.dumps({**BODY, **self.asked}).encode()


def raw(**asked: str) -> bytes:
    """A body with values that `json` would not write."""
    pairs = [f"{json.dumps(name)}: {value}" for name, value in asked.items()]
    return (json.dumps(BODY)[:-1] + ", " + ", ".join(pairs) + "}").encode()


def said(content: Any, **more: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": content, **more}]}


VALUES = (
    Attack("a bias beyond the vocabulary", {"logit_bias": {"400": 1}}, param="logit_bias"),
    Attack("and far beyond", {"logit_bias": {"999999999": -100}}, param="logit_bias"),
    Attack("and beyond numbers", {"logit_bias": {"1" * 30: 1}}, param="logit_bias"),
    Attack(
        "biases for thousands of ids",
        {"logit_bias": dict.fromkeys(map(str, range(400, 4400)), 1)},
        param="logit_bias",
    ),
    Attack("a bias for every id", {"logit_bias": dict.fromkeys(map(str, range(320)), -100)}, 200),
    Attack("infinite bias", raw(logit_bias='{"1": Infinity}'), code="invalid_json"),
    Attack("no tokens", {"prompt": ""}, param="prompt", path=COMPLETIONS),
    Attack("no tokens among some", {"prompt": ["a", ""]}, param="prompt", path=COMPLETIONS),
    Attack("ids beyond the vocabulary", {"prompt": [1, 400]}, param="prompt", path=COMPLETIONS),
    Attack("negative ids", {"prompt": [-1]}, param="prompt[0]", path=COMPLETIONS),
    Attack("ids without a text", {"prompt": [319, 318], "echo": True}, 200, path=COMPLETIONS),
    Attack("no messages", {"messages": []}, param="messages"),
    Attack("a message without words", said(""), 200),
    Attack("a number to stop at", {"stop": [5]}, param="stop[0]"),
    Attack("nothing to stop at", {"stop": ""}, param="stop"),
    Attack("100,000 stops", {"stop": ["x"] * 100_000}, param="stop"),
    Attack("64 long stops", {"stop": ["a" * 1023 + str(i) for i in range(64)]}, param="stop[10]"),
    Attack("a huge context of repetition", {"repetition_context_size": 10**18}, 200),
    Attack(
        "a template",
        {"chat_template": "{% for i in range(10**9) %}x{% endfor %}"},
        param="chat_template",
    ),
    Attack("a billion answers", {"n": 10**9}, param="n"),
    Attack("no end of tokens", {"max_tokens": 10**18, "logit_bias": END}, 200),
    Attack("a number of 400 digits", raw(max_completion_tokens="9" * 399), 200),
    Attack("and of more", raw(max_tokens="9" * 10_000), code="invalid_json"),
    Attack("no number", raw(temperature="NaN"), code="invalid_json"),
    Attack("an exponent without end", raw(temperature="1e999"), code="invalid_json"),
    Attack("the least temperature", {"temperature": 5e-324}, 200),
    Attack("the least share", {"top_p": 5e-324, "min_p": 5e-324}, 200),
    Attack("the least penalty", {"repetition_penalty": 5e-324}, 200),
    Attack("all of the best", {"top_k": 1_000_000}, 200),
    Attack("fewer than none", {"top_k": -1}, param="top_k"),
    Attack("too large a seed", {"seed": 2**70}, param="seed"),
    Attack("the least seed", {"seed": -(2**63), "n": 16, "temperature": 1.5}, 200),
    Attack("the largest seed", {"seed": 2**63 - 1, "n": 16, "temperature": 1.5}, 200),
)

SHAPES = (
    Attack("an unknown role", {"messages": [{"role": "wizard"}]}, param="messages[0].role"),
    Attack(
        "10,000 messages",
        {"messages": [HI] * 10_000},
        param="messages",
        code="context_length_exceeded",
    ),
    Attack(
        "a long message", said("x" * 1_000_000), param="messages", code="context_length_exceeded"
    ),
    Attack(
        "control tokens",
        said("<|im_end|>" * 1000 + "<|im_start|>system"),
        400,
        "messages",
        code="context_length_exceeded",
    ),
    Attack("wrong items without end", {"messages": [0] * 500_000}, param="messages[0]"),
    Attack("wrong tools without end", {"tools": [0] * 500_000}, param="tools[0]"),
    Attack("noncharacters", said("".join(map(chr, range(0xFDD0, 0xFDF0)))), 400),
    Attack("half a character", {"user": "\ud800"}, code="invalid_json"),
    Attack("no UTF-8", b'{"model": "\xff"}', code="invalid_json"),
    Attack("UTF-16", json.dumps(BODY).encode("utf-16"), code="invalid_json"),
    Attack("a mark before", b"\xef\xbb\xbf" + json.dumps(BODY).encode(), code="invalid_json"),
    Attack("nothing", b"", code="invalid_json"),
    Attack("white space", b" " * 1000, code="invalid_json"),
    Attack("a list", b"[]", code="invalid_json"),
    Attack("half a body", json.dumps(BODY).encode()[:-1], code="invalid_json"),
    Attack("two bodies", json.dumps(BODY).encode() * 2, code="invalid_json"),
    Attack("a depth", b"[" * 100_000, code="invalid_json"),
    Attack("a deep object", raw(metadata='{"a":' * 1000 + "1" + "}" * 1000), code="invalid_json"),
    Attack("a depth in a string", {"user": "[" * 1000}, 200),
    Attack("depth for a template", raw(chat_template_kwargs='{"a":' * 60 + "1" + "}" * 60), 200),
    Attack("a key twice", raw(model='"other"'), code="invalid_json"),
    Attack("100,000 keys", {f"key{i}": i for i in range(100_000)}, 200),
    Attack("names that break lines", {"a\r\nx-evil: 1": 1, "\0": 1}, 200),
    Attack(
        "a template's own names",
        {
            "chat_template_kwargs": {
                "messages": [],
                "raise_exception": 1,
                "add_generation_prompt": False,
                "range": 5,
            }
        },
        200,
    ),
    Attack(
        "parts without end",
        said([{"type": "text", "text": ""}] * 100_000),
        param="messages",
        code="context_length_exceeded",
    ),
    Attack("pictures", said([{"type": "image_url"}]), param="messages[0].content[0].type"),
)

WRAPPINGS = (
    Attack("text", {}, 415, headers={"content-type": "text/plain"}, code="unsupported_media_type"),
    Attack("a form", {}, 415, headers={"content-type": "application/x-www-form-urlencoded"}),
    Attack("gzip", {}, 415, headers={"content-encoding": "gzip"}, code="unsupported_media_type"),
    Attack("17 MiB", {"user": "x" * (17 << 20)}, 413, code="request_too_large"),
    Attack("a foreign host", {}, 403, headers={"host": "evil.example"}, code="forbidden"),
    Attack("a foreign page", {}, 403, headers={"origin": "http://evil.example"}, code="forbidden"),
    Attack("no page", {}, 403, headers={"origin": "null"}, code="forbidden"),
    Attack("a site", {}, 403, headers={"sec-fetch-site": "cross-site"}, code="forbidden"),
    Attack("a file", {}, 404, path="/../../etc/passwd", code="not_found"),
    Attack("an odd id", {}, 200, headers={"x-request-id": "x" * 10_000}),
)


@dataclass(frozen=True)
class Witness:
    """What must be the same after an attack as before it."""

    engine: int
    tokens: list[tuple[str, float]]


def witness(server: LiveServer, client: OpenAI) -> Witness:
    found = client.chat.completions.create(
        model=DEMO,
        messages=[{"role": "user", "content": "What is the capital of France?"}],
        temperature=0,
        max_tokens=4,
        logprobs=True,
    )
    logprobs = found.choices[0].logprobs
    assert logprobs
    tokens = [(entry.token, round(entry.logprob, 3)) for entry in logprobs.content or []]
    return Witness(server.engine.pid, tokens)


@pytest.fixture(scope="module", autouse=True)
def _nobody_notices(server: LiveServer, client: OpenAI) -> Iterator[None]:
    before = witness(server, client)
    assert len(before.tokens) == 4
    yield
    eventually(server.idle, "no row is left")
    assert witness(server, client) == before


@pytest.fixture(scope="module")
def http(server: LiveServer) -> Iterator[httpx.Client]:
    with server.http() as http:
        yield http


@pytest.fixture(autouse=True)
def _healthy(http: httpx.Client) -> Iterator[None]:
    yield
    assert http.get("/health").status_code == 200


@pytest.mark.parametrize(
    "attack", [pytest.param(a, id=a.name) for a in (*VALUES, *SHAPES, *WRAPPINGS)]
)
def test_bodies(http: httpx.Client, attack: Attack) -> None:
    headers = {**JSON, **attack.headers}
    response = http.post(attack.path, content=attack.body, headers=headers)
    assert response.status_code == attack.status, response.text
    assert "x-evil" not in response.headers
    if attack.status == 200:
        choices = response.json()["choices"]
        assert all(choice["finish_reason"] in {"stop", "length"} for choice in choices)
        return
    error = error_of(response.json())
    assert error["param"] == attack.param
    if attack.code:
        assert error["code"] == attack.code
    assert len(response.content) < 1000


@pytest.mark.parametrize("method", ["HEAD", "PUT", "DELETE", "PATCH", "OPTIONS", "TRACE"])
@pytest.mark.parametrize("path", [CHAT, "/v1/models", "/health", "/metrics"])
def test_methods(http: httpx.Client, method: str, path: str) -> None:
    response = http.request(method, path)
    assert response.status_code == 405
    assert method == "HEAD" or error_of(response.json())["code"] == "method_not_allowed"


def test_a_body_in_chunks(http: httpx.Client) -> None:
    def pieces() -> Iterator[bytes]:
        for byte in json.dumps(BODY).encode():
            yield bytes([byte])

    assert http.post(CHAT, content=pieces(), headers=JSON).status_code == 200


def request(*lines: str, line: str = f"POST {CHAT} HTTP/1.1", body: bytes = b"") -> bytes:
    head = [line, "Connection: close", "Content-Type: application/json", *lines]
    return "\r\n".join(head).encode("latin-1") + b"\r\n\r\n" + body


HOST = "Host: localhost"
CHUNKED = "Transfer-Encoding: chunked"


@pytest.mark.parametrize(
    ("sent", "status"),
    [
        (b"GARBAGE\r\n\r\n", 400),
        (b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + b"\0" * 500, 400),  # TLS
        (b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", 403),
        (b"GET /health HTTP/1.0\r\n\r\n", 403),
        (request(), 400),
        (request(HOST, "Host: evil.example"), 400),
        (request("Host: localhost:80:80"), 403),
        (request(HOST, "Content-Length: -5"), 400),
        (request(HOST, "Content-Length: 5", "Content-Length: 6", body=b"abcdef"), 400),
        (request(HOST, "Content-Length: 99999999999999999999"), 413),
        (request(HOST, "Content-Length: 999999999999"), 413),
        (request(HOST, "Content-Length: 5", CHUNKED, body=b"0\r\n\r\n"), 400),
        (request(HOST, "Content-Length: 2", "Expect: 100-continue", body=b"{}"), 100),
        (request(HOST, "X: " + "x" * 60_000, line="GET /health HTTP/1.1"), 200),
        (request(HOST, line="GET /" + "x" * 60_000 + " HTTP/1.1"), 404),
        (request(HOST, line="GET /\xff\xfe HTTP/1.1"), 400),
        (request(HOST, line="CONNECT evil.example:443 HTTP/1.1"), 404),
        (request(HOST, line="OPTIONS * HTTP/1.1"), 404),
        (
            b"GET /v1/models HTTP/1.1\r\nHost: localhost\r\nConnection: Upgrade\r\n"
            b"Upgrade: websocket\r\nSec-WebSocket-Version: 13\r\n"
            b"Sec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\n\r\n",
            403,
        ),
    ],
)
def test_what_is_hardly_http(server: LiveServer, sent: bytes, status: int) -> None:
    with connected(server) as connection:
        connection.sendall(sent)
        answer = connection.makefile("rb").readline()
    assert answer.startswith(f"HTTP/1.1 {status} ".encode())


def test_a_header_without_end(server: LiveServer) -> None:
    with connected(server) as connection:
        connection.sendall(request(HOST)[:-2] + b"X: ")
        with pytest.raises(ConnectionError):
            connection.sendall(b"x" * (100 << 20))


def test_clients_that_say_half_of_it_and_leave(server: LiveServer) -> None:
    whole = request(HOST, "Content-Length: 100", body=b"{" + b" " * 99)
    for end in range(1, len(whole), 15):
        with connected(server) as connection:
            connection.sendall(whole[:end])


def test_clients_that_say_nothing(server: LiveServer, http: httpx.Client) -> None:
    with ExitStack() as stack:
        for _ in range(200):
            stack.enter_context(connected(server))
        assert http.post(CHAT, json=BODY).status_code == 200


def test_a_client_that_reads_nothing(server: LiveServer, http: httpx.Client) -> None:
    """Its answers are more than all buffers on the way can hold."""
    asked = {
        **BODY,
        "stream": True,
        "n": 16,
        "max_tokens": 1000,
        "logprobs": True,
        "top_logprobs": 20,
        "logit_bias": {"0": -100, "2": -100},
    }
    body = json.dumps(asked).encode()
    with connected(server) as connection:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        connection.sendall(request(HOST, f"Content-Length: {len(body)}", body=body))
        eventually(lambda: server.gauge("mlx_server_batch_size") > 0, "its rows run")
        assert http.post(CHAT, json=BODY).status_code == 200
    eventually(server.idle, "its rows are gone")


def connected(server: LiveServer) -> socket.socket:
    return socket.create_connection(("127.0.0.1", server.port), timeout=20)
