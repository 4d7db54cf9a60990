"""No connection leaves this machine, unless somebody asked for a model or a server of tools.

tests/conftest.py holds the whole suite to it, by a hook that is in every process. Here the hook is
seen at work: it sees what was asked for, in the processes that are said to do nothing else.
"""

import json
import os
import subprocess
import sys
from collections.abc import Generator, Iterator
from pathlib import Path

import httpx
import psutil
import pytest

from tests import conftest
from tests.hostile.outbound import sitecustomize as outbound
from tests.live.server import TINY, LiveServer, eventually, serving

NOBODY = "192.0.2.1"
"""An address that belongs to none."""

CONNECT = f"import socket; socket.create_connection(('{NOBODY}', 9), 1)"
LOOK_UP = "import socket; socket.getaddrinfo('nobody.invalid', 80)"
SEND = f"import socket; socket.socket(type=socket.SOCK_DGRAM).sendto(b'x', ('{NOBODY}', 9))"
HERE = """
import asyncio, socket
with socket.create_server(("127.0.0.1", 0)) as server:
    port = server.getsockname()[1]
    socket.create_connection(("localhost", port)).close()
    asyncio.run(asyncio.open_connection("127.0.0.1", port))
"""


@pytest.mark.parametrize(
    ("program", "whom"), [(CONNECT, NOBODY), (LOOK_UP, "nobody.invalid"), (SEND, NOBODY)]
)
def test_children_are_seen_and_kept_back(program: str, whom: str) -> None:
    run = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert "Outbound: no connection leaves the tests" in run.stderr
    (attempt,) = outbound.attempts()
    assert whom in attempt


def test_what_stays_here_is_let_through() -> None:
    subprocess.run([sys.executable, "-c", HERE], check=True)
    assert not outbound.attempts()


def test_what_is_allowed_is_let_through() -> None:
    with outbound.allowed():
        run = subprocess.run([sys.executable, "-c", LOOK_UP], capture_output=True, text=True)
    assert "gaierror" in run.stderr
    assert not outbound.attempts()


def test_a_test_that_connects_has_failed(request: pytest.FixtureRequest) -> None:
    with pytest.raises(OSError, match="no connection leaves"):
        exec(CONNECT)

    def rest_of_the_test() -> Generator[None]:
        yield from conftest.pytest_runtest_call(request.node)

    around = rest_of_the_test()
    next(around)
    with pytest.raises(AssertionError, match=NOBODY):
        next(around)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory, tiny_path: Path) -> Iterator[LiveServer]:
    models = {
        TINY: {"source": str(tiny_path), "preload": True},
        "far": {"source": "nobody/nothing"},
    }
    config = {"models": models, "server": {"allow_private_urls": True}}
    with serving(tmp_path_factory.mktemp("outbound"), config) as server:
        yield server


@pytest.fixture
def http(server: LiveServer) -> Iterator[httpx.Client]:
    with server.http() as http:
        yield http


def test_the_hook_is_in_the_engine_too(server: LiveServer) -> None:
    environment = server.engine.environ()
    assert environment[outbound.VARIABLE] == os.environ[outbound.VARIABLE]
    folder = str(Path(outbound.__file__).parent)
    assert environment["PYTHONPATH"].split(os.pathsep)[0] == folder


def test_a_server_at_work_connects_to_nobody(server: LiveServer, http: httpx.Client) -> None:
    asked = {"model": TINY, "input": "Salü", "max_output_tokens": 2}
    assert http.post("/v1/responses", json=asked).status_code == 200
    for path in ("/v1/models", "/v1/pool", "/metrics", "/health"):
        assert http.get(path).status_code == 200
    eventually(lambda: server.idle(), "nothing runs")
    assert not outbound.attempts()
    for process in (psutil.Process(server.process.pid), server.engine):
        addresses = [line.raddr.ip for line in process.net_connections("inet") if line.raddr]
        assert set(addresses) <= {"127.0.0.1"}


def test_a_model_is_fetched_when_it_is_asked_for(http: httpx.Client) -> None:
    refusal = http.post("/v1/completions", json={"model": "far", "prompt": "a"})
    assert refusal.json()["error"]["code"] == "model_unusable"
    assert all("huggingface.co" in attempt for attempt in outbound.attempts() or [""])


def test_tools_are_looked_for_where_a_request_says(http: httpx.Client) -> None:
    tools = {"type": "mcp", "server_label": "x", "server_url": f"http://{NOBODY}:9/mcp"}
    asked = {"model": TINY, "input": "a", "max_output_tokens": 2, "tools": [tools]}
    found = http.post("/v1/responses", json=asked)
    assert "can't be reached" in json.dumps(found.json())
    attempts = outbound.attempts()
    assert attempts
    assert all(NOBODY in attempt for attempt in attempts)
