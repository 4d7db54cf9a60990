"""A machine that sleeps and wakes, and clocks that are set: answers go on, and can be read again.

While a Mac sleeps uvloop's clock goes on, `time.monotonic` stands still, and sockets may die.
"""

import json
import socket
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest

from tests.hostile.inside import request, reset
from tests.hostile.wounds import knife
from tests.live.server import PLAIN, LiveServer, eventually, serving

CHAT = "/v1/chat/completions"
SAID = "word " * 150
HI = [{"role": "user", "content": "Hi"}]
BODY = {"model": "slow", "messages": HI, "stream": True}
WANTED = b"\r\nX-Mlx-Server-Resumable: true\r\n"

CLOCKS = """
import asyncio.base_events, sys, time
from pathlib import Path

if "serve" in sys.orig_argv:
    sys.modules["uvloop"] = None  # its clock can't be set
    loop, wall = (Path(__file__).with_name(name) for name in ("loop", "wall"))
    real = time.time
    time.time = lambda: real() + float(wall.read_text())
    asyncio.base_events.BaseEventLoop.time = lambda _: time.monotonic() + float(loop.read_text())
"""


class Clocks:
    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self.put("loop", 0)
        self.put("wall", 0)

    def put(self, clock: str, seconds: float) -> None:
        (self._folder / "new").write_text(str(seconds))
        (self._folder / "new").rename(self._folder / clock)


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[LiveServer, Clocks]]:
    folder = tmp_path_factory.mktemp("clocks")
    (folder / "slow.jsonl").write_text(json.dumps({"output": SAID, "delay_ms": 10}))
    models = {"slow": {"source": "replay:slow.jsonl", "family": "plain"}}
    config = {"server": {"concurrency": 2}, "models": models}
    with knife(folder / "knife", CLOCKS) as made:
        clocks = Clocks(made.folder)
        with serving(folder, config) as server:
            yield server, clocks


def text_of(stream: str) -> str:
    data = [line.removeprefix("data: ") for line in stream.splitlines() if line[:6] == "data: "]
    choices = [c for line in data if line != "[DONE]" for c in json.loads(line)["choices"]]
    return "".join(choice["delta"].get("content") or "" for choice in choices)


def whole(server: LiveServer) -> str:
    with server.http() as http:
        return text_of(http.post(CHAT, json=BODY, timeout=60).raise_for_status().text)


def begun(server: LiveServer) -> tuple[socket.socket, str, str]:
    """A connection with the first events of a stream, the path of the rest, and these events."""
    connection = socket.create_connection(("127.0.0.1", server.port))
    connection.sendall(request(CHAT, BODY).replace(b"\r\n", WANTED, 1))
    seen = ""
    while seen.count("\nid: ") < 4:
        seen += connection.recv(1 << 12).decode()
    id = next(line for line in seen.lower().splitlines() if "x-mlx-server-stream" in line)
    return connection, f"{CHAT}/{id.partition(': ')[2]}/stream", seen


def rest_of(server: LiveServer, path: str, seen: str) -> str:
    last = seen.count("\nid: ") - 1  # the last one may have been cut
    headers = {"last-event-id": str(last)}
    response = httpx.get(f"{server.url}{path}", **PLAIN, headers=headers, timeout=60)
    return text_of(seen.partition(f"\nid: {last + 1}\n")[0]) + text_of(response.text)


@pytest.mark.parametrize("way", ["stays open", "is reset"])
@pytest.mark.parametrize("seconds", [3600.0, -3600.0])
def test_a_client_that_slept_reads_the_rest_though_its_socket_is_dead(
    place: tuple[LiveServer, Clocks], way: str, seconds: float
) -> None:
    server, clocks = place
    connection, path, seen = begun(server)
    with connection:
        if way == "is reset":
            reset(connection)
        clocks.put("wall", seconds)
        assert rest_of(server, path, seen) == SAID
        assert rest_of(server, path, seen) == SAID, "it is kept for a while"


def test_a_server_that_slept_goes_on_with_all(place: tuple[LiveServer, Clocks]) -> None:
    """An hour, in which nothing ran: what waits, what is read, and what no one reads just now."""
    server, clocks = place
    engine = server.engine.pid
    connection, path, seen = begun(server)
    connection.close()
    with ThreadPoolExecutor(4) as threads:
        answers = [threads.submit(whole, server) for _ in range(4)]
        eventually(lambda: server.gauge("mlx_server_queue") > 0, "some wait")
        clocks.put("loop", 3600.0)
        assert [answer.result() for answer in answers] == 4 * [SAID]
    assert rest_of(server, path, seen) == SAID
    assert server.engine.pid == engine
