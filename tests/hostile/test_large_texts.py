"""Large text in any field: what it costs, and whom it keeps waiting."""

import json
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import cycle
from pathlib import Path

import httpx
import psutil
import pytest

from tests.hostile.inside import request, reset
from tests.hostile.test_loop import CHAT, HI, MESSAGES, Body, called, tool
from tests.live.server import TINY, LiveServer, serving

pytestmark = pytest.mark.alone

LONG = 7 << 20
PATTERN = "<<‹"
TEXT = PATTERN * (LONG // len(PATTERN.encode()))
ASTRAL = "a<" * (LONG // 2) + "\U0001f600"
"""One wide character makes each of the others take four bytes in memory."""

WIDE = ASTRAL[-5 << 20 :]
"""It fits the context of ROOMY."""

ROOMY = "roomy"
"""A model with so large a context that nothing is refused for its length before it is tokenised."""

TIMES = 10
"""The size of a body that it may cost."""

WIDE_TIMES = 4 * TIMES
"""For a text whose characters take four bytes instead of one."""

FITS = "a wide text that fits"

FIELDS: dict[str, Callable[[], Body]] = {
    "arguments": lambda: {"messages": called(in_json(TEXT))},
    "arguments of many lists": lambda: {"messages": called(f"[{'[],' * (LONG // 3)}[]]")},
    "a tool's description": lambda: {**MESSAGES, "tools": tool(description=TEXT)},
    "an enum": lambda: {
        **MESSAGES,
        "tools": tool(parameters={"properties": {"a": {"enum": [TEXT]}}}),
    },
    "reasoning": lambda: {
        "messages": [HI, {"role": "assistant", "content": "hi", "reasoning_content": TEXT}, HI]
    },
    "a name": lambda: {"messages": [{**HI, "name": TEXT}]},
    "content": lambda: {"messages": [{**HI, "content": TEXT}]},
    "a wide character in content": lambda: {"messages": [{**HI, "content": ASTRAL}]},
    "a wide character in arguments": lambda: {"messages": called(in_json(ASTRAL))},
    FITS: lambda: {"messages": called(in_json(WIDE))},
    "the template's options": lambda: {**MESSAGES, "chat_template_kwargs": {"a": TEXT}},
}


def in_json(text: str) -> str:
    return json.dumps({"a": text}, ensure_ascii=False)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory, tiny_path: Path) -> Iterator[LiveServer]:
    tiny = {"source": str(tiny_path), "preload": True}
    models = {TINY: tiny, ROOMY: {**tiny, "context_length": 1 << 20}}
    with serving(tmp_path_factory.mktemp("large"), {"models": models}) as server:
        for model in (TINY, ROOMY):
            first_token(server, model)
        yield server


def memory(server: LiveServer) -> int:
    """Of the server and of the processes that render, the engine's aside."""
    own = psutil.Process(server.process.pid)
    engine = server.engine.pid
    found = 0
    for process in (own, *own.children(recursive=True)):
        try:
            found += process.memory_info().rss if process.pid != engine else 0
        except psutil.NoSuchProcess:
            continue
    return found


@contextmanager
def watched(server: LiveServer) -> Iterator[list[int]]:
    """The most memory there was, as the only item."""
    over, most = threading.Event(), [memory(server)]

    def look() -> None:
        while not over.wait(0.02):
            most[0] = max(most[0], memory(server))

    thread = threading.Thread(target=look)
    thread.start()
    try:
        yield most
    finally:
        over.set()
        thread.join()


def first_token(server: LiveServer, model: str) -> float:
    began = time.monotonic()
    asked = {"model": model, **MESSAGES, "max_tokens": 1, "temperature": 0}
    with server.http() as http:
        assert http.post(CHAT, json=asked).status_code == 200
    return time.monotonic() - began


@pytest.mark.parametrize(("field", "model"), [*zip(FIELDS, cycle([TINY, ROOMY]))])
def test_a_body_costs_less_than_ten_times_its_size(
    server: LiveServer, field: str, model: str
) -> None:
    sent = json.dumps({"model": model, "max_tokens": 1, **FIELDS[field]()}, ensure_ascii=False)
    body = sent.encode()
    del sent
    most_times = WIDE_TIMES if field == FITS else TIMES
    before = memory(server)
    with watched(server) as most, httpx.Client(base_url=server.url, timeout=60) as http:
        reported = http.post(CHAT, content=body, headers={"content-type": "application/json"})
    assert reported.status_code in (200, 400), reported.text[:200]
    assert most[0] - before < most_times * len(body), reported.text[:200]


def test_six_that_hang_up_keep_no_newcomer_waiting(server: LiveServer) -> None:
    fields = list(FIELDS)[:6]
    bodies = [request(CHAT, {"model": ROOMY, **FIELDS[field]()}) for field in fields]
    before = memory(server)
    with watched(server) as most:
        hostile = []
        for body in bodies:
            hostile.append(socket.create_connection(("127.0.0.1", server.port)))
            hostile[-1].sendall(body)
        time.sleep(1.0)
        for each in hostile:
            reset(each)
        for model in (TINY, ROOMY):
            assert first_token(server, model) < 2.0
    assert most[0] - before < TIMES * sum(map(len, bodies))
