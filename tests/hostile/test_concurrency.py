"""Very many clients at once, and such as say little: everybody else is served as ever."""

import json
import re
import resource
import socket
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any

import httpx
import pytest

from mlx_server.models.files import weights_bytes
from tests.hostile.corpus import posted
from tests.live.server import LiveServer, eventually, serving
from tests.tiny import tiny_llama

pytestmark = pytest.mark.alone

CHAT = "/v1/chat/completions"
IDS = ("a", "b")
RECEIVE_SECONDS = 5.0
PATIENCE_SECONDS = 120.0
WAITING = 300
"""Requests of four rows: more than are answered and wait, and fewer than one address may have."""


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveServer]:
    """Two models in room for one."""
    folder = tmp_path_factory.mktemp("crowd")
    pair = {id: tiny_llama(folder / id, seed=at, hidden=256) for at, id in enumerate(IDS)}
    (nbytes,) = {weights_bytes(path, upcast=True) for path in pair.values()}
    config = {
        "server": {"memory_budget": int(1.7 * nbytes), "receive_seconds": RECEIVE_SECONDS},
        "models": {id: {"source": str(path)} for id, path in pair.items()},
    }
    with serving(folder / "served", config) as server:
        yield server
        assert "Traceback" not in server.log
        assert " ERROR " not in server.log


@pytest.fixture
def http(server: LiveServer) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=server.url, trust_env=False, timeout=PATIENCE_SECONDS) as http:
        yield http


@pytest.fixture(autouse=True)
def _nobody_notices(server: LiveServer, http: httpx.Client) -> Iterator[None]:
    before = (server.process.pid, server.engine.pid, said(http, "a"))
    yield
    eventually(server.idle, "no row is left")
    assert (server.process.pid, server.engine.pid, said(http, "a")) == before


def body(model: str, **more: Any) -> dict[str, Any]:
    messages = [{"role": "user", "content": "hi"}]
    return {"model": model, "messages": messages, "temperature": 0, "max_tokens": 2, **more}


def said(http: httpx.Client, model: str) -> str:
    answer = http.post(CHAT, json=body(model))
    assert answer.status_code == 200, answer.text
    text: str = answer.json()["choices"][0]["message"]["content"]
    return text


def connected(server: LiveServer) -> socket.socket:
    return socket.create_connection(("127.0.0.1", server.port), timeout=PATIENCE_SECONDS)


def everything(line: socket.socket) -> bytes:
    return b"".join(iter(lambda: line.recv(1 << 16), b""))


def test_idle_connections(server: LiveServer, http: httpx.Client) -> None:
    """They are let go in the end."""
    most, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    with ExitStack() as stack:
        lines = [stack.enter_context(connected(server)) for _ in range(min(10_000, most - 200))]
        assert said(http, "a")
        assert all(everything(line) == b"" for line in lines)


def test_waiting_requests(server: LiveServer) -> None:
    """Each is answered, or refused because there are too many."""
    with ExitStack() as stack:
        lines = [stack.enter_context(connected(server)) for _ in range(WAITING)]
        for line in lines:
            line.sendall(posted(body("a", n=4), "Connection: close"))
        answers = [everything(line) for line in lines]
    outcomes = Counter(outcome(answer) for answer in answers)
    assert outcomes.keys() == {"200", "503 overloaded"}
    texts = {text for answer in answers for text in re.findall(rb'"content":"(.*?)"', answer)}
    assert len(texts) == 1


def outcome(answer: bytes) -> str:
    head, _, content = answer.partition(b"\r\n\r\n")
    status = head.split()[1].decode()
    return status if status == "200" else f"{status} {json.loads(content)['error']['code']}"
