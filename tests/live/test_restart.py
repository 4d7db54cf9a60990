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
from tests.hostile.wounds import knife
from tests.live.server import (
    PLAIN,
    STOP_SECONDS,
    TINY,
    LiveServer,
    assert_gone,
    children,
    eventually,
    is_engine,
    serving,
)
from tests.tiny import tiny_llama
from tests.worker.lora_files import mlx_adapter

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


def answer(server: LiveServer, body: dict[str, Any] = LONG) -> str:
    with server.http() as http, http.stream("POST", CHAT, json=body, timeout=120) as response:
        assert response.status_code == 200
        stream = "".join(response.iter_text())
    assert stream.endswith("data: [DONE]\n\n")
    lines = (line for line in stream.splitlines() if line.startswith("data: "))
    data = (line.removeprefix("data: ") for line in lines)
    chunks = [json.loads(line) for line in data if line != "[DONE]"]
    choices = [choice for chunk in chunks for choice in chunk["choices"]]
    choices.sort(key=lambda choice: choice["index"])
    return "".join(choice["delta"].get("content") or "" for choice in choices)


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


SMALL_MACHINE = """
import psutil
memory = psutil.virtual_memory()._replace(total=90_000_000)
psutil.virtual_memory = lambda: memory
"""


@pytest.mark.slow
def test_where_memory_holds_no_second_model_the_new_engine_goes_on_with_the_rows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tiny_llama(tmp_path / "m", vocabulary=5000, hidden=256)
    adapter = mlx_adapter(tmp_path / "x", path)
    model = {"source": str(path), "preload": True, "adapters": {"x": {"path": str(adapter)}}}
    config = {"models": {TINY: model}}
    drawn = {**LONG, "max_tokens": 700, "temperature": 1, "seed": 4}
    letters = {"structured_outputs": {"regex": "[a-z ]{900}"}, "logit_bias": {}}
    asked: list[dict[str, Any]] = [
        {**drawn, "adapter": "x"},
        {**drawn, **letters},
        {**drawn, "n": 2, "frequency_penalty": 0.5},
    ]
    wounding, environment = knife(tmp_path / "knife")
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    with (wounding.folder / "sitecustomize.py").open("a") as file:
        file.write(SMALL_MACHINE)
    with serving(tmp_path, config) as server, ThreadPoolExecutor(3) as threads:
        expected = [answer(server, body) for body in asked]
        wounding.strike("step", "slow")
        streams = [threads.submit(answer, server, body) for body in asked]
        eventually(lambda: server.gauge("mlx_server_batch_size") == 4, "all have a token")
        ask(server)
        while "goes on with its answers" not in server.log:  # the old one may take one more
            new = httpx.post(
                f"{server.url}/v1/completions",
                **PLAIN,
                json={"model": TINY, "prompt": "a", "max_tokens": 4},
                timeout=120,
            )
            assert new.is_success, new.text
        eventually(lambda: server.gauge("mlx_server_batch_size") > 0, "some go on")
        (engine,) = filter(is_engine, children(server.process.pid))
        engine.kill()
        assert not any(stream.done() for stream in streams)
        wounding.heal()
        assert [stream.result(120) for stream in streams] == expected
        assert server.log.count("goes on with its answers") == 1
