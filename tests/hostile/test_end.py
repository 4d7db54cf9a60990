"""However many wait, and for whatever, a server ends when asked to: every client is answered."""

import json
import os
import signal
import socket
import sys
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import httpx
import psutil
import pytest
from websockets.sync.client import ClientConnection, connect

from tests.hostile.wounds import Knife, knife
from tests.live.server import LiveServer, assert_gone, children, eventually, serving

CHAT, RESPONSES = "/v1/chat/completions", "/v1/responses"
DRAIN_SECONDS = 1.0
SECONDS_MORE = 1.0
BUSY_SECONDS = 3.0
"""For a machine that does other things as well. Nobody here would leave before that."""

ENDLESS = {"model": "slow", "messages": [{"role": "user", "content": "Hi"}]}
MUCH = {"model": "slow", "messages": [{"role": "user", "content": "much"}]}
ASKED = {"model": "slow", "input": "Hi"}
WORDY = {"include": ["message.output_text.logprobs"], "top_logprobs": 20}
TOOL = {
    "type": "mcp",
    "server_label": "stubborn",
    "connector_id": "stubborn",
    "require_approval": "never",
}
STUBBORN = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(3600)"

Json = dict[str, Any]


def config(folder: Path, tiny: Path, drain_seconds: float) -> Json:
    (folder / "slow.jsonl").write_text(
        json.dumps({"match": "much", "output": "word " * 100})
        + "\n"
        + json.dumps({"match": "regex:.", "output": "word " * 4000, "delay_ms": 20})
    )
    sources = {"slow": "replay:slow.jsonl", "far": "someone/far-away", "stuck": str(tiny)}
    models: Json = {id: {"source": source} for id, source in sources.items()}
    models["slow"]["family"] = "plain"
    return {
        # an engine that has a disk is given seconds for what it still writes
        "server": {"drain_seconds": drain_seconds, "prompt_cache": {"disk": 0}},
        "models": models,
        "connectors": {"stubborn": {"command": sys.executable, "args": ["-c", STUBBORN]}},
    }


@contextmanager
def silence() -> Iterator[str]:
    """A hub that takes calls and never says a word."""
    with socket.create_server(("127.0.0.1", 0)) as mute:
        yield f"http://127.0.0.1:{mute.getsockname()[1]}"


@contextmanager
def ready_to_end(
    folder: Path, tiny: Path, drain_seconds: float
) -> Iterator[tuple[LiveServer, Knife]]:
    with (
        silence() as hub,
        knife(folder / "knife") as wound,
        patch.dict(os.environ, HF_ENDPOINT=hub, HF_HUB_OFFLINE="0"),
        serving(folder, config(folder, tiny, drain_seconds)) as server,
    ):
        yield server, wound


@pytest.fixture
def clients() -> Iterator[ExitStack]:
    with ExitStack() as clients:
        yield clients


@pytest.fixture
def threads(clients: ExitStack) -> ThreadPoolExecutor:
    return clients.enter_context(ThreadPoolExecutor(8))


def lines(clients: ExitStack, http: httpx.Client, path: str, asked: Json) -> Iterator[str]:
    """Of a stream that has begun to speak."""
    response = clients.enter_context(http.stream("POST", path, json={**asked, "stream": True}))
    assert response.status_code == 200
    found = (line for line in response.iter_lines() if line.startswith("data: "))
    while '"w"' not in next(found):
        pass
    return found


def last_two(stream: Iterator[str]) -> tuple[Json, str]:
    *_, last, done = stream
    return json.loads(last.removeprefix("data: ")), done


def narrow(clients: ExitStack, server: LiveServer) -> socket.socket:
    """So that little is enough to fill all buffers on the way."""
    found = clients.enter_context(socket.socket())
    found.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    found.connect(("127.0.0.1", server.port))
    return found


def socket_asking(clients: ExitStack, server: LiveServer, asked: Json) -> ClientConnection:
    url = server.url.replace("http", "ws", 1) + RESPONSES
    sock = narrow(clients, server)
    made = clients.enter_context(connect(url, sock=sock, close_timeout=0.1, max_queue=1))
    made.send(json.dumps({"type": "response.create", **asked}))
    while "delta" not in made.recv(20):
        pass
    return made


def never_reading(clients: ExitStack, server: LiveServer) -> socket.socket:
    found = narrow(clients, server)
    body = json.dumps(
        {**MUCH, "stream": True, "n": 4, "logprobs": True, "top_logprobs": 20}
    ).encode()
    head = f"POST {CHAT} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    found.sendall(f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body)
    return found


def loads(http: httpx.Client, id: str, states: tuple[str, ...]) -> bool:
    models = http.get("/v1/pool").json()["models"]
    return any(model["id"] == id and model["state"] in states for model in models)


def runs_tool(server: LiveServer) -> bool:
    """Whether the tool's own process runs; the process that guards it names the same command."""
    commands = [each.cmdline() for each in children(server.process.pid)]
    return any(command[1:] == ["-c", STUBBORN] for command in commands)


@pytest.mark.alone
def test_everyone_is_answered_and_nothing_is_left(
    tmp_path: Path, tiny_path: Path, clients: ExitStack, threads: ThreadPoolExecutor
) -> None:
    with ready_to_end(tmp_path, tiny_path, DRAIN_SECONDS) as (server, knife):
        http = clients.enter_context(server.http())
        socket_asking(clients, server, {**ASKED, "input": "much", **WORDY})
        never_reading(clients, server)
        list(lines(clients, http, CHAT, MUCH))  # by then the others have been sent as much
        chat = lines(clients, http, CHAT, ENDLESS)
        responses = lines(clients, http, RESPONSES, ASKED)
        background = lines(clients, http, RESPONSES, {**ASKED, "background": True})
        line = socket_asking(clients, server, ASKED)
        waiting: dict[str, Future[httpx.Response]] = {
            name: threads.submit(http.post, path, json=asked)
            for name, path, asked in [
                ("whole", CHAT, ENDLESS),
                ("tool", RESPONSES, {**ASKED, "tools": [TOOL]}),
                ("download", CHAT, {**ENDLESS, "model": "far"}),
            ]
        }
        eventually(lambda: loads(http, "far", ("preparing",)), "it is fetched")
        eventually(lambda: runs_tool(server), "the tool's server runs")
        knife.strike("load", "block")
        waiting["load"] = threads.submit(http.post, CHAT, json={**ENDLESS, "model": "stuck"})
        eventually(lambda: loads(http, "stuck", ("loading",)), "it is loaded")

        left = children(server.process.pid)
        server.process.send_signal(signal.SIGTERM)
        began = time.monotonic()
        error, done = last_two(chat)
        assert error["error"]["code"] == "shutting_down"
        assert done == "data: [DONE]"
        for stream in (responses, background):
            failed, _ = last_two(stream)
            assert failed["type"] == "response.failed"
        *_, said = line
        assert json.loads(said)["type"] == "response.failed"
        assert line.close_code == 1001
        for name, refused in waiting.items():
            response = refused.result()
            assert (name, response.status_code) == (name, 503)
            assert response.json()["error"]["code"] == "shutting_down"
        assert server.process.wait(20) == 0
        assert time.monotonic() - began < DRAIN_SECONDS + SECONDS_MORE + BUSY_SECONDS
        assert_gone(left)
        assert "Traceback" not in server.log


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 0), (signal.SIGINT, 130)])
def test_a_second_signal_ends_it_at_once(
    tmp_path: Path,
    tiny_path: Path,
    clients: ExitStack,
    threads: ThreadPoolExecutor,
    number: signal.Signals,
    code: int,
) -> None:
    """Also with an engine that hears nothing any more."""
    with ready_to_end(tmp_path, tiny_path, drain_seconds=3600) as (server, _):
        http = clients.enter_context(server.http())
        stream = lines(clients, http, CHAT, ENDLESS)
        threads.submit(http.post, RESPONSES, json={**ASKED, "tools": [TOOL]})
        eventually(lambda: runs_tool(server), "the tool's server runs")
        left = children(server.process.pid)
        server.process.send_signal(signal.SIGTERM)
        eventually(lambda: not listens(server.port), "it drains")
        next(stream)
        engine_of(left).suspend()
        server.process.send_signal(number)
        assert server.process.wait(20) == code
        with pytest.raises(httpx.RemoteProtocolError):
            list(stream)
        assert_gone(left)


def engine_of(processes: list[psutil.Process]) -> psutil.Process:
    (engine,) = [each for each in processes if "mlx_server.worker.process" in each.cmdline()]
    return engine


def listens(port: int) -> bool:
    with socket.socket() as knocking:
        return knocking.connect_ex(("127.0.0.1", port)) == 0
