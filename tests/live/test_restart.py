"""A server that is replaced by another process while it answers, and one that can't be."""

import json
import signal
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Event
from typing import Any

import httpx
import psutil
import pytest
import yaml
from typer.testing import CliRunner, Result

from mlx_server.cli import app
from mlx_server.errors import ServerError
from mlx_server.system import handover
from mlx_server.system.servers import FOLDER
from tests.live.server import (
    PLAIN,
    STOP_SECONDS,
    TINY,
    LiveServer,
    assert_gone,
    children,
    eventually,
    serving,
)

CHAT = "/v1/chat/completions"
LONG: dict[str, Any] = {
    "model": TINY,
    "messages": [{"role": "user", "content": "Tell me a story."}],
    "temperature": 0,
    "max_tokens": 120,
    "stream": True,
    "logit_bias": {str(id): -100 for id in range(3)},  # so that it does not end early
}


ENDED = {"completed", "incomplete"}


@pytest.fixture
def server(tmp_path: Path, tiny_path: Path) -> Iterator[LiveServer]:
    config = {"models": {TINY: {"source": str(tiny_path), "preload": True}}}
    with serving(tmp_path, config) as server:
        eventually(lambda: f"{TINY} is ready" in server.log, "the model is loaded", 60)
        yield server


def restarted(server: LiveServer, *flags: str) -> Result:
    """What `mlx-server restart` prints."""
    data = str(server.log_file.parent / "data")
    return CliRunner().invoke(app, ["restart", *flags], env={"MLX_SERVER_DATA": data})


def ask(server: LiveServer) -> str:
    return handover.ask(server.log_file.parent / "data" / FOLDER, server.process.pid)


def servers(server: LiveServer) -> list[psutil.Process]:
    """Those that the first process has started."""
    found = []
    for child in psutil.Process(server.process.pid).children():
        if child.status() != psutil.STATUS_ZOMBIE and "serve" in child.cmdline():
            found.append(child)
    return found


def answer(server: LiveServer) -> str:
    with server.http() as http, http.stream("POST", CHAT, json=LONG, timeout=120) as response:
        assert response.status_code == 200
        stream = "".join(response.iter_text())
    assert stream.endswith("data: [DONE]\n\n")
    data = (line.removeprefix("data: ") for line in stream.splitlines() if line)
    chunks = [json.loads(line) for line in data if line != "[DONE]"]
    return "".join(c["delta"].get("content") or "" for chunk in chunks for c in chunk["choices"])


def test_no_stream_ends_and_no_connection_is_refused(server: LiveServer) -> None:
    expected, over = answer(server), Event()
    kept = httpx.Client(**PLAIN, base_url=server.url, timeout=120)
    made: list[str] = []

    def stream() -> None:
        assert answer(server) == expected

    def knock() -> None:
        kept.get("/health").raise_for_status()
        httpx.get(f"{server.url}/health", **PLAIN, timeout=120).raise_for_status()

    def run_in_background() -> None:
        body = {"model": TINY, "input": "A story.", "background": True, "max_output_tokens": 300}
        response = kept.post("/v1/responses", json=body)
        made.append(response.raise_for_status().json()["id"])
        eventually(lambda: bool(status(made[-1]) in ENDED or over.wait(0.2)), "its end", 60)

    def status(id: str) -> str:
        """Whichever server has it."""
        told: str = kept.get(f"/v1/responses/{id}").raise_for_status().json()["status"]
        return told

    def again_and_again(work: Callable[[], None]) -> None:
        while not over.is_set():
            work()
            time.sleep(0.02)

    with kept, ThreadPoolExecutor(4) as threads:
        works = [stream, stream, knock, run_in_background]
        running = [threads.submit(again_and_again, work) for work in works]
        try:
            done = restarted(server)
            assert (done.exit_code, done.exception) == (0, None), done
            (new,) = servers(server)
            assert f"process {new.pid}" in done.output
            # once its answers have ended, the first process holds sockets and nothing else
            first = psutil.Process(server.process.pid)
            eventually(lambda: handover.__name__ in first.cmdline(), "it executes another", 60)
            assert f"process {new.pid}" not in ask(server)
            eventually(lambda: new not in servers(server), "the one before ends", 60)
        finally:
            over.set()
        for each in running:
            each.result()
        assert len(made) > 1
        eventually(lambda: {status(id) for id in made} <= ENDED, "their end", 60)
    (new,) = servers(server)
    left = children(server.process.pid)
    server.process.send_signal(signal.SIGTERM)
    assert server.process.wait(STOP_SECONDS) == 0
    assert new in left
    assert_gone(left)


def test_one_that_can_not_start_changes_nothing(server: LiveServer) -> None:
    file = server.log_file.parent / "models.yaml"
    good = file.read_text()
    file.write_text("server: {prot: 1}\n")
    wrong = restarted(server)
    assert isinstance(wrong.exception, ServerError)
    assert "goes on" in wrong.exception.message
    assert "server.prot" in wrong.exception.message
    file.write_text(yaml.safe_dump({**yaml.safe_load(good), "server": {"host": "localhost"}}))
    with pytest.raises(ServerError, match="keeps the address"):
        ask(server)
    file.write_text(good)
    with ThreadPoolExecutor(1) as thread:
        asked = thread.submit(ask, server)
        eventually(lambda: bool(servers(server)), "a new one starts")
        with pytest.raises(ServerError, match="restarted already"):
            ask(server)
        servers(server)[0].kill()
        with pytest.raises(ServerError, match="exit code 137"):
            asked.result()
    assert not servers(server)
    with server.http() as http:
        assert http.post("/v1/completions", json={"model": TINY, "prompt": "a"}).is_success
    unknown = restarted(server, "--port", "1")
    assert isinstance(unknown.exception, ServerError)
    assert server.url in unknown.exception.message
    # what has replaced a server does not outlive the first process
    ask(server)
    assert "takes the requests from now on" in server.log
    left = children(server.process.pid)
    server.process.kill()
    server.process.wait()
    assert_gone(left)
