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
    DEMO_MODEL,
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


class Events:
    """What a stream says, read as it comes."""

    def __init__(self, response: httpx.Response) -> None:
        assert response.status_code == 200
        self._lines = (line for line in response.iter_lines() if line)

    def next(self) -> Any:
        return json.loads(self._data())

    def last(self) -> Any:
        """The last one, having made sure that the stream ends as it should."""
        found, following = self._data(), self._data()
        while following != "[DONE]":
            found, following = following, self._data()
        assert list(self._lines) == []
        return json.loads(found)

    def _data(self) -> str:
        line = next(self._lines)
        assert line.startswith("data: "), "a stream that should go on, or end, rests"
        return line.removeprefix("data: ")


@contextmanager
def streaming(http: httpx.Client, **asked: Any) -> Iterator[Events]:
    with http.stream("POST", CHAT, json={**ENDLESS, "stream": True, **asked}) as response:
        events = Events(response)
        while not events.next()["choices"][0]["delta"]["content"]:
            pass
        yield events


@contextmanager
def waiting(http: httpx.Client) -> Iterator[Future[httpx.Response]]:
    """A request for an answer that is not streamed, and never ends by itself."""
    with ThreadPoolExecutor(1) as thread:
        yield thread.submit(http.post, CHAT, json=ENDLESS)


def demo(drain_seconds: float) -> dict[str, Any]:
    return {"server": {"drain_seconds": drain_seconds}, "models": {DEMO: DEMO_MODEL}}


def batch_of(server: LiveServer, size: int) -> bool:
    return server.gauge("mlx_server_batch_size") == size


@pytest.mark.usefixtures("demo_path")
def test_answers_that_outlast_the_drain_time_end_with_an_error(tmp_path: Path) -> None:
    with serving(tmp_path, demo(drain_seconds=0.3)) as server, server.http() as http:
        left = children(server.process.pid)
        with streaming(http) as events, waiting(http) as response:
            eventually(lambda: batch_of(server, 2), "both are answered")
            server.process.send_signal(signal.SIGTERM)
            error = events.last()["error"]
            assert (error["type"], error["code"]) == ("server_error", "shutting_down")
            refused = response.result()
            assert refused.status_code == 503
            assert refused.json()["error"]["code"] == "shutting_down"
        assert server.process.wait(STOP_SECONDS) == 0
        assert_gone(left)
        assert "Traceback" not in server.log


@pytest.mark.usefixtures("demo_path")
def test_answers_that_end_within_the_drain_time_are_complete(tmp_path: Path) -> None:
    with serving(tmp_path, demo(drain_seconds=60)) as server, server.http() as http:
        with streaming(http, max_tokens=30) as events:
            server.process.send_signal(signal.SIGTERM)
            eventually(lambda: not listens(server.port), "nobody new is let in")
            assert events.last()["choices"][0]["finish_reason"] == "length"
        assert server.process.wait(STOP_SECONDS) == 0
        assert "Traceback" not in server.log


@pytest.mark.usefixtures("demo_path")
def test_an_engine_that_is_killed(tmp_path: Path) -> None:
    with serving(tmp_path, demo(drain_seconds=0)) as server, server.http() as http:
        with streaming(http) as events, waiting(http) as response:
            eventually(lambda: batch_of(server, 2), "both are answered")
            server.engine.kill()
            error = events.last()["error"]
            assert (error["type"], error["code"]) == ("server_error", "engine_died")
            dead(response.result())
        dead(http.post(CHAT, json=ENDLESS))
        dead(http.post(CHAT, json={**ENDLESS, "stream": True}))
        health = http.get("/health")
        assert (health.status_code, health.json()) == (503, {"status": "engine_died"})
        assert http.get("/v1/models").status_code == 200
        assert "Traceback" not in server.log


def dead(response: httpx.Response) -> None:
    assert response.status_code == 503
    assert response.json()["error"]["code"] == "engine_died"
    assert response.headers["retry-after"]


def listens(port: int) -> bool:
    with socket.socket() as knocking:
        return knocking.connect_ex(("127.0.0.1", port)) == 0


def test_the_engine_goes_with_a_server_that_is_killed(tmp_path: Path, tiny_path: Path) -> None:
    with serving(tmp_path, {"models": {TINY: {"source": str(tiny_path)}}}) as server:
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


def test_a_model_that_is_ready_is_announced_with_what_to_try(
    tmp_path: Path, tiny_path: Path
) -> None:
    config = {"models": {TINY: {"source": str(tiny_path), "preload": True}}}
    with serving(tmp_path, config) as server:
        assert server.process.stdout
        said = server.process.stdout.readline()
    expected = f"{TINY} is ready at {server.url}/v1; try: mlx-server chat {TINY} --url {server.url}"
    assert said == expected + "\n"


def test_a_model_that_can_not_be_loaded_fails_alone(tmp_path: Path, tiny_path: Path) -> None:
    config = {
        "models": {
            "broken": {"source": str(tmp_path / "nothing"), "preload": True},
            TINY: {"source": str(tiny_path)},
        }
    }
    with serving(tmp_path, config) as server, server.http() as http:
        for stream in (True, False):
            response = http.post(CHAT, json={**ENDLESS, "model": "broken", "stream": stream})
            assert response.status_code == 500
            assert response.json()["error"]["code"] == "model_unusable"
        assert http.get("/health").status_code == 200
        fine = http.post("/v1/completions", json={"model": TINY, "prompt": "a"})
        assert fine.status_code == 200
        assert "Traceback" not in server.log


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
