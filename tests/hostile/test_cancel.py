"""Whoever leaves, and however, in whatever state: what was held for them is free again."""

import json
import socket
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from pathlib import Path
from typing import Any

import mlx.core as mx
import psutil
import pytest

from mlx_server.config.settings import Settings, validated
from mlx_server.engine.messages import CancelRows, PauseRows, PrefillProgress, StepOutput
from mlx_server.mcp.server import McpConnection
from tests.hostile.inside import Inside, request, reset, serving
from tests.live.server import eventually
from tests.worker.constrained_decoding.grammars import DIGITS, loaded
from tests.worker.constrained_decoding.test_grammar_compiler import gate
from tests.worker.engine_runs import ask, of, tokens_of, until

__all__ = ["gate"]

CHAT, RESPONSES = "/v1/chat/completions", "/v1/responses"
CONCURRENCY = 3
HANGS = (str(Path(__file__).parents[1] / "mcp" / "hostile.py"), "hangs")
TOOL = {"type": "mcp", "server_label": "eye", "connector_id": "hangs", "require_approval": "never"}
CALL = '<tool_call>\n{"name": "look", "arguments": {}}\n</tool_call>'
SAID = [
    {"match": "Look", "output": CALL},
    {"match": "slow", "output": "No end. " * 1000, "delay_ms": 10},
    {"match": "regex:.", "output": "Yes."},
]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Inside]:
    folder = tmp_path_factory.mktemp("cancel")
    said = folder / "said.jsonl"
    said.write_text("\n".join(map(json.dumps, SAID)), "utf-8")
    model = {"source": f"replay:{said}", "family": "qwen3"}
    settings = validated(
        Settings,
        {
            "server": {"port": 0, "concurrency": CONCURRENCY},
            "models": {"warm": {**model, "preload": True}, **dict.fromkeys(COLD, model)},
            "connectors": {"hangs": {"command": sys.executable, "args": HANGS}},
        },
    )
    with serving(settings) as found:
        yield found


COLD = ("reset", "DELETE", "cancel")
"""Models that are loaded for the first time in the test that is named like them."""


def chat(text: str, *, stream: bool = False, model: str = "warm", **more: Any) -> bytes:
    messages = [{"role": "user", "content": text}]
    return request(CHAT, {"model": model, "messages": messages, "stream": stream, **more})


def look(*, stream: bool, **more: Any) -> bytes:
    body = {"model": "warm", "input": "Look", "tools": [TOOL], "stream": stream}
    return request(RESPONSES, {**body, **more})


def answered(server: Inside, sent: bytes) -> Any:
    with server.connect() as connection, connection.makefile("rb") as stream:
        connection.sendall(sent)
        assert b" 200 " in stream.readline()
        headers = dict(line.split(b": ", 1) for line in iter(stream.readline, b"\r\n"))
        return json.loads(stream.read(int(headers[b"content-length"])))


def closed(connection: socket.socket) -> None:
    connection.close()


def half_closed(connection: socket.socket) -> None:
    """It counts as leaving: nothing more is said, and the connection ends."""
    connection.shutdown(socket.SHUT_WR)
    while connection.recv(1 << 16):
        pass
    connection.close()


def closed_behind_another_request(connection: socket.socket) -> None:
    connection.sendall(chat("regex"))
    connection.sendall(chat("regex")[:50])
    connection.close()


Way = Callable[[socket.socket], None]
WAYS: dict[str, Way] = {
    "close": closed,
    "reset": reset,
    "half-close": half_closed,
    "pipelined": closed_behind_another_request,
}


Clients = Iterator[list[socket.socket]]


def asking(server: Inside, *requests: bytes) -> list[socket.socket]:
    clients = [server.connect() for _ in requests]
    for client, sent in zip(clients, requests, strict=True):
        client.sendall(sent)
    return clients


def both(text: str, **more: Any) -> list[bytes]:
    return [chat(text, stream=stream, **more) for stream in (False, True)]


@contextmanager
def decoding(server: Inside, way: str) -> Clients:
    clients = asking(server, *both("slow"))
    eventually(lambda: server.batch == 2, "both are answered")
    yield clients


@contextmanager
def queued(server: Inside, way: str) -> Clients:
    """Behind others that have all the places."""
    others = asking(server, *[chat("slow", stream=True)] * CONCURRENCY)
    eventually(lambda: server.batch == CONCURRENCY, "there is no place left")
    clients = asking(server, *both("slow"))
    eventually(lambda: server.given() == CONCURRENCY + 2, "two more wait")
    yield clients
    eventually(lambda: server.given() == CONCURRENCY, "those are gone, the others are not")
    for other in others:
        other.close()


@contextmanager
def not_yet_taken(server: Inside, way: str) -> Clients:
    """As while a prompt is computed, or a grammar compiled: there is not even a status."""
    with server.frozen():
        clients = asking(server, *both("slow", guided_regex="a+"))
        eventually(lambda: server.given() == 2, "the engine has them before it")
        yield clients
        eventually(server.is_free, "the server has forgotten them")


@contextmanager
def loading(server: Inside, way: str) -> Clients:
    with server.frozen():
        clients = asking(server, *both("slow", model=way))
        eventually(lambda: server.state_of(way) == "loading", "it loads")
        eventually(lambda: server.rows() == 2, "both wait for it")
        yield clients
        eventually(lambda: server.rows() == 0, "nobody waits for it")


@contextmanager
def in_a_tool(server: Inside, way: str) -> Clients:
    running = []

    async def noted(self: McpConnection, *given: Any) -> Any:
        running.append(self)
        try:
            return await call(self, *given)
        finally:
            running.remove(self)

    call = McpConnection.call
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(McpConnection, "call", noted)
        clients = asking(server, look(stream=False), look(stream=True))
        eventually(lambda: len(running) == 2, "both wait for their tools")
        yield clients
        eventually(lambda: not running, "nobody waits for a tool")
    eventually(lambda: not tools(), "no tool is left")


def tools() -> list[psutil.Process]:
    found = []
    for process in psutil.Process().children(recursive=True):
        with suppress(psutil.NoSuchProcess):  # it has ended meanwhile
            found += [process] if "hangs" in process.cmdline() else []
    return found


@pytest.mark.parametrize(
    ("state", "way"),
    [
        *((state, "reset") for state in (decoding, queued, not_yet_taken, loading, in_a_tool)),
        *((decoding, way) for way in WAYS if way != "reset"),
    ],
)
def test_a_client_that_leaves(
    server: Inside,
    state: Callable[[Inside, str], AbstractContextManager[list[socket.socket]]],
    way: str,
) -> None:
    """One that wants a stream, and one that does not."""
    with state(server, way) as clients:
        for client in clients:
            WAYS[way](client)
    eventually(server.is_free, "nothing is held for them")
    assert_serves(server)


def assert_serves(server: Inside) -> None:
    """One request, for which the engine works alone."""
    server.steps.clear()
    assert answered(server, chat("regex"))["choices"][0]["message"]["content"] == "Yes."
    reported = [{token.row for token in step.tokens} for step in server.steps if step.tokens]
    last = reported[-1]
    assert len(last) == 1
    assert reported[reported.index(last) :] == [last] * reported.count(last), (
        "others are reported before it"
    )
    assert max(step.waiting for step in server.steps) <= 1


def created(server: Inside, **body: Any) -> str:
    asked = {"background": True, **body}
    id: str = answered(server, request(RESPONSES, asked))["id"]
    return id


BACKGROUND: dict[str, Any] = {
    "decoding": {"model": "warm", "input": "slow"},
    "in a tool": {"model": "warm", "input": "Look", "tools": [TOOL]},
}


@pytest.mark.parametrize("method", ["DELETE", "cancel"])
@pytest.mark.parametrize("state", BACKGROUND)
def test_a_response_in_the_background(server: Inside, state: str, method: str) -> None:
    id = created(server, **BACKGROUND[state])
    ready = (lambda: server.batch == 1) if state == "decoding" else (lambda: bool(tools()))
    eventually(ready, "it runs")
    path = f"{RESPONSES}/{id}"
    if method == "DELETE":
        assert answered(server, request(path, method="DELETE"))["deleted"]
    else:
        assert answered(server, request(f"{path}/cancel"))["status"] == "cancelled"
    assert server.is_free(), "before it is answered"
    eventually(lambda: not tools(), "no tool is left")
    assert_serves(server)


@pytest.mark.parametrize("method", ["DELETE", "cancel"])
def test_a_response_in_the_background_whose_model_loads(server: Inside, method: str) -> None:
    with server.frozen():
        id = created(server, model=method, input="slow")
        eventually(lambda: server.state_of(method) == "loading", "it loads")
        path = f"{RESPONSES}/{id}"
        verb, suffix = ("DELETE", "") if method == "DELETE" else ("POST", "/cancel")
        answered(server, request(path + suffix, method=verb))
        assert server.rows() == 0
    eventually(server.is_free, "nothing is held for it")
    assert_serves(server)


ROW, OTHER, PROMPT = 1, 2, 800
KV_BYTES = PROMPT * 2 * 2 * 2 * 16 * 4
"""Of its prompt: layers, keys and values, heads, their width, and float32."""
SLACK = KV_BYTES * 256 // PROMPT
"""The room in a cache of a row that decodes all the time: mlx-lm's grow by 256 tokens."""
ROWS: dict[str, dict[str, Any]] = {
    "waits": {},
    "has a grammar that is compiled": {"grammar": DIGITS},
    "is scored": {"prompt_logprobs": True},
    "is prefilled": {},
    "decodes": {},
    "is paused": {},
}


@pytest.mark.usefixtures("gate")
@pytest.mark.parametrize("state", ROWS)
def test_a_cancelled_rows_memory_is_back_when_the_next_step_is_done(
    tiny_path: Path, state: str
) -> None:
    engine = loaded(tiny_path, concurrency=2)

    def begin(row: int, prompt: int, tokens: int, **more: Any) -> None:
        """Until it has a few tokens, if any are wanted."""
        engine.handle(ask(row, prompt=prompt, tokens=2000, **more))
        until(engine, lambda reports: len(tokens_of(row, reports)) >= tokens)

    begin(0, 40, 3)
    before = used()
    if state == "waits":
        begin(OTHER, 40, 1)
    begin(ROW, PROMPT, 3 if state in ("decodes", "is paused") else 0, **ROWS[state])
    if state == "is prefilled":
        until(engine, lambda reports: bool(of(PrefillProgress, reports)))
    elif state == "is paused":
        engine.handle(PauseRows([ROW]))
    if state not in ("is prefilled", "decodes"):
        engine.step()
    during = mx.get_active_memory()
    engine.handle(CancelRows([ROW, OTHER]))
    engine.step()
    assert used() - before < SLACK
    if state in ("is prefilled", "decodes", "is paused"):
        assert during - mx.get_active_memory() > KV_BYTES // 4
    following = [report for _ in range(5) for report in engine.step()]
    assert {token.row for step in of(StepOutput, following) for token in step.tokens} == {0}


def used() -> int:
    mx.synchronize()
    return mx.get_active_memory()
