"""How servers begin and end, and what their clients receive then."""

import json
import signal
import socket
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from mlx_server.http import sse
from tests.api import wire
from tests.live.server import (
    DEMO,
    STOP_SECONDS,
    TINY,
    LiveServer,
    assert_gone,
    children,
    end,
    eventually,
    launch,
    serving,
)

CHAT = "/v1/chat/completions"
ENDLESS: dict[str, Any] = {
    "model": DEMO,
    "messages": [{"role": "user", "content": "Tell me a story."}],
    "logit_bias": {"0": -100, "2": -100},  # neither of the end tokens can come
}


@contextmanager
def waiting(http: httpx.Client) -> Iterator[Future[httpx.Response]]:
    """A request for an answer that is not streamed, and never ends by itself."""
    with ThreadPoolExecutor(1) as thread:
        yield thread.submit(http.post, CHAT, json=ENDLESS)


def test_a_server_without_preload_says_what_to_try_and_its_engine_goes_when_it_is_killed(
    tmp_path: Path, tiny_path: Path
) -> None:
    with serving(tmp_path, {"models": {TINY: {"source": str(tiny_path)}}}) as server:
        to_try = f'curl {server.url}/v1/chat/completions --json \'{{"model": "{TINY}"'
        eventually(lambda: any(to_try in line for line in server.printed), "it is said")
        left = children(server.process.pid)
        assert left
        server.process.kill()
        server.process.wait()
        assert_gone(left)


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 0), (signal.SIGINT, 130)])
def test_a_server_that_is_stopped_while_it_starts(
    tmp_path: Path, tiny_path: Path, number: signal.Signals, code: int
) -> None:
    config = {"models": {TINY: {"source": str(tiny_path), "preload": True}}}
    process, log = launch(tmp_path, config)
    try:
        eventually(lambda: bool(children(process.pid)), "the engine starts")
        left = children(process.pid)
        process.send_signal(number)
        assert process.wait(STOP_SECONDS) == code
        assert_gone(left)
        assert "Traceback" not in log.read_text("utf-8")
    finally:
        end(process)


def test_a_port_that_is_taken(tmp_path: Path, tiny_path: Path) -> None:
    config = {"models": {TINY: {"source": str(tiny_path)}}}
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        process, log = launch(tmp_path, config, "--port", str(port))
        try:
            assert process.wait(STOP_SECONDS) == 2
            assert process.stdout
            assert process.stdout.read() == ""
        finally:
            end(process)
    said = log.read_text("utf-8")
    assert said.startswith(f"Port {port} is in use")
    assert f"--port {port + 1}" in said
    assert said.count("\n") == 1


def test_a_model_that_is_ready_is_announced_with_what_to_try(server: LiveServer) -> None:
    with server.http() as http:
        http.post("/v1/completions", json={"model": TINY, "prompt": "a", "max_tokens": 1})
    expected = f"{TINY} is ready at {server.url}/v1; try: mlx-server chat {TINY} --url {server.url}"
    eventually(lambda: f"{expected}\n" in server.printed, "it is announced")


def test_a_long_wait_is_filled_with_comments_and_for_responses_with_events(
    tiny_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sse, "KEEP_ALIVE_SECONDS", 0.01)
    engine = wire.ScriptedEngine()
    engine.silent = True
    body = {"model": wire.MODEL, "messages": [{"role": "user", "content": "hi"}], "stream": True}
    with wire.client(tiny_path, engine) as client, client.stream("POST", CHAT, json=body) as found:
        lines = (line for line in found.iter_lines() if line)
        assert next(lines).startswith("data: ")
        assert [next(lines), next(lines)] == [": keep-alive"] * 2
    asked = {"model": wire.MODEL, "input": "hi", "stream": True}
    waiting = "response.in_progress"
    foreground = _numbered(tiny_path, engine, asked)
    assert foreground == [("response.created", 0), (waiting, 1), (waiting, 2), (waiting, 3)]
    # an event of the background may be read again by its number; one that fills a wait has the last
    background = _numbered(tiny_path, engine, {**asked, "background": True})
    assert {("response.created", 0), ("response.queued", 1)} < {*background}
    assert [number for kind, number in background if kind == waiting] == [2, 2, 2]
    assert engine.taken
    assert not engine.running


def _numbered(model: Path, engine: wire.ScriptedEngine, body: wire.Json) -> list[tuple[str, int]]:
    """The first events of a response and their numbers, up to the third of one that waits."""
    found: list[tuple[str, int]] = []
    path = "/v1/responses"
    with wire.client(model, engine) as client, client.stream("POST", path, json=body) as response:
        data = (line for line in response.iter_lines() if line.startswith("data: "))
        while [kind for kind, _ in found].count("response.in_progress") < 3:
            event = json.loads(next(data).removeprefix("data: "))
            found.append((event["type"], event["sequence_number"]))
    return found
