"""No growth: the short form of `scripts/soak`, with counts that are exact where sizes are noise."""

import asyncio
import ctypes
import gc
import heapq
import json
import logging
import os
import sqlite3
import sys
import threading
from collections import Counter, deque
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import httpx
import psutil
import pytest
from starlette.testclient import TestClient

from mlx_server import limits
from mlx_server.config.settings import Settings, validated
from mlx_server.engine.messages import LoadModel, UnloadModel
from mlx_server.system.sandbox.chat_template import PROCESSES
from mlx_server.worker.engine import Engine
from tests.api import wire
from tests.api.wire import MODEL, ScriptedEngine
from tests.hostile.inside import Inside, serving
from tests.hostile.shapes import CHAT, Client
from tests.hostile.soak import connected, fill, is_unloaded, soaked
from tests.live.server import children, eventually
from tests.worker.engine_runs import drain

QUIET, ROUNDS = 3, 15
LARGE = 1 << 20


class Kept(NamedTuple):
    """In memory: of Python's, and of libraries' in other languages."""

    blocks: int
    bytes: int


REQUESTS = 10
MAY_LEAVE = Kept(20, 4096)
"""What each of so many requests may leave. After few of them there is much that still fills up to
its limit, and a whole request that is kept is several hundred blocks."""

POOLS = ("asyncio_", "AnyIO", "request_", "store", "disk", "ThreadPoolExecutor")
"""They may grow to their limits."""


@pytest.fixture(scope="module", autouse=True)
def _nothing_logged() -> Iterator[None]:
    """pytest keeps every record of a test, once another test of its process has set a level."""
    logging.disable()
    yield
    logging.disable(logging.NOTSET)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Inside]:
    settings = validated(Settings, soaked(tmp_path_factory.mktemp("soak")))
    settings = replace(settings, server=replace(settings.server, port=0))
    with serving(settings) as found:
        yield found


@pytest.fixture(scope="module")
def http(server: Inside) -> Iterator[httpx.Client]:
    with connected(f"http://127.0.0.1:{server.port}") as found:
        fill(found)
        yield found


class _Mallinfo(ctypes.Structure):
    """Of glibc's <malloc.h>."""

    _names = (
        *("arena", "ordblks", "smblks", "hblks", "hblkhd"),
        *("usmblks", "fsmblks", "uordblks", "fordblks", "keepcost"),
    )
    _fields_ = tuple((name, ctypes.c_size_t) for name in _names)


def allocated() -> int:
    """Bytes by malloc; 0 where they are not counted."""
    if sys.platform != "linux":
        return 0
    mallinfo = ctypes.CDLL(None).mallinfo2
    mallinfo.restype = _Mallinfo
    found = mallinfo()
    return int(found.uordblks + found.hblkhd)


@dataclass(frozen=True)
class Open:
    files: int
    children: int
    tasks: int
    threads: Counter[str]

    def is_within(self, before: "Open") -> bool:
        """Before, a connection may have been about to close."""
        return (
            self.files <= before.files
            and self.children <= before.children
            and self.tasks <= before.tasks
            and self.threads <= before.threads
        )


def opened(server: Inside) -> Open:
    both = [psutil.Process(), *children(os.getpid())]
    names = (thread.name for thread in threading.enumerate())
    return Open(
        files=sum(process.num_fds() for process in both),
        children=len(both) - 1,
        tasks=server.within(lambda: len(asyncio.all_tasks())),
        threads=Counter(name for name in names if not name.startswith(POOLS)),
    )


def drop_cancelled_timers() -> None:
    """asyncio keeps them, with all that they refer to, until it has a hundred."""
    loop: Any = asyncio.get_running_loop()
    loop._scheduled = [timer for timer in loop._scheduled if not timer.cancelled()]
    heapq.heapify(loop._scheduled)
    loop._timer_cancelled_count = 0


def kept(server: Inside) -> Kept:
    server.steps.clear()
    server.within(drop_cancelled_timers)
    gc.collect()
    return Kept(sys.getallocatedblocks(), allocated())


def ask(server: Inside, http: httpx.Client) -> None:
    """The same requests each time, which leave the same in memory."""
    for seed in range(REQUESTS):
        Client(http, seed).send()
    eventually(server.is_free, "nothing is asked of it any more")
    eventually(lambda: is_unloaded("b", http), "it is unloaded")


def test_requests_of_all_shapes_leave_nothing_behind(server: Inside, http: httpx.Client) -> None:
    ask(server, http)
    with ExitStack() as renderers:  # as many as may stay are warm from here on
        for _ in range(limits.IDLE_TEMPLATE_PROCESSES):
            renderers.enter_context(PROCESSES.one())
    were_open, seen = opened(server), [kept(server)]
    while len(seen) <= ROUNDS:
        ask(server, http)
        eventually(lambda: opened(server).is_within(were_open), "all is closed again")
        seen.append(kept(server))
        if is_quiet(seen):
            return
    pytest.fail(str([(b.blocks - a.blocks, b.bytes - a.bytes) for a, b in pairwise(seen)]))


def is_quiet(seen: list[Kept]) -> bool:
    """What fills up to a limit ends to do so; a leak goes on."""
    if len(seen) <= QUIET:
        return False
    before, now = seen[-1 - QUIET], seen[-1]
    blocks, bytes = (QUIET * REQUESTS * most for most in MAY_LEAVE)
    return now.blocks - before.blocks < blocks and now.bytes - before.bytes < bytes


def test_nothing_of_large_bodies_is_kept(server: Inside, http: httpx.Client) -> None:
    """Refused, damaged and answered ones."""
    text = "x" * LARGE
    large = {"model": "a", "messages": [{"role": "user", "content": text}]}
    refused = json.dumps(large).encode()
    answered = json.dumps({**large, "messages": [{"role": "user", "content": "Hi"}], "user": text})
    bodies = (refused, refused[:-1], answered.encode())
    statuses = (400, 400, 200)

    def send() -> None:
        for body, status in zip(bodies, statuses, strict=True):
            answer = http.post(CHAT, content=body, headers={"content-type": "application/json"})
            assert answer.status_code == status, answer.text

    send()
    before = kept(server)
    for _ in range(2):
        send()
    # an answer has come before its request is forgotten
    eventually(lambda: kept(server).bytes - before.bytes < LARGE, "no body is kept")


def test_an_engine_keeps_nothing_of_models_that_left(tiny_path: Path) -> None:
    engine, times = Engine(concurrency=2), 10

    def come_and_go() -> int:
        for _ in range(times):
            for command in (LoadModel("tiny", str(tiny_path), [2]), UnloadModel("tiny")):
                engine.handle(command)
                drain(engine)
        gc.collect()
        return allocated()

    gc.freeze()  # each unload would walk all that the tests before have left
    seen = [come_and_go() for _ in range(5)]
    # a vocabulary may still be read when its model is gone
    assert min(b - a for a, b in pairwise(seen)) < 4096 * times, seen


WARM = TIMES = 8
SIZED = (dict, list, set, deque)
HI = [{"role": "user", "content": "Hi"}]
UNREACHABLE = "http://127.0.0.1:1/"


def send_names(client: TestClient, number: int) -> None:
    """One of each, with a name of its own wherever a client may choose one."""
    name = f"name-{number:06}"
    headers = {"x-request-id": name, f"x-{name}": name, "authorization": f"Bearer {name}"}
    tool = {"type": "function", "function": {"name": name, "parameters": {"title": name}}}
    chat: dict[str, Any] = {"model": MODEL, "messages": HI, "max_tokens": 1}
    response: dict[str, Any] = {"model": MODEL, "input": "Hi", "max_output_tokens": 16}
    mcp = {"type": "mcp", "server_label": name, "server_url": UNREACHABLE + name}
    for path, body in (
        ("chat/completions", {**chat, "user": name, name: 1, "metadata": {name: name}}),
        ("chat/completions", {**chat, "stop": [name], "logit_bias": {str(number % 300): 1}}),
        ("chat/completions", {**chat, "tools": [tool]}),
        ("chat/completions", {**chat, "model": name}),
        ("chat/completions", {**chat, "adapter": name}),
        ("chat/completions", {**chat, "response_format": json_schema(name)}),
        ("completions", {"model": MODEL, "prompt": name, "max_tokens": 1}),
        ("responses", {**response, "store": False, "metadata": {name: name}, "user": name}),
        ("responses", {**response, "store": False, "prompt_cache_key": name}),
        ("responses", {**response, "previous_response_id": name}),
        ("responses", {**response, "conversation": name}),
        ("responses", {**response, "store": False, "tools": [mcp]}),
        ("load_lora_adapter", {"lora_name": name, "lora_path": f"/{name}"}),
        ("unload_lora_adapter", {"lora_name": name}),
    ):
        client.post(f"/v1/{path}", json=body, headers=headers)
    for path in (f"/{name}", f"/v1/models/{name}", f"/v1/responses/{name}", f"/v1/{name}/{name}"):
        client.get(path, headers=headers)
    client.request(name.upper(), "/v1/models", headers=headers)


def json_schema(name: str) -> dict[str, Any]:
    schema = {"type": "object", "properties": {name: {"type": "string"}}}
    return {"type": "json_schema", "json_schema": {"name": name, "schema": schema}}


def collections() -> dict[int, Any]:
    """Those too of which the garbage collector keeps no account, as they hold texts alone."""
    gc.unfreeze()  # the app has frozen what was there at its start
    gc.collect()
    known = gc.get_objects()
    found = (*known, *gc.get_referents(*known))
    # there are a million objects, but few types
    sized = {kind for kind in set(map(type, found)) if issubclass(kind, SIZED)}
    return {id(one): one for one in found if type(one) in sized}


def of_databases() -> set[int]:
    """The ids of what a connection refers to: it makes a new list of cursors, without those that
    are gone, when it has made 200."""
    found = (one for one in gc.get_objects() if isinstance(one, sqlite3.Connection))
    return {id(each) for one in found for each in gc.get_referents(one)}


@pytest.mark.alone  # what measures coverage has collections that grow
def test_no_collection_grows_with_the_names_that_clients_send(
    tiny_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = ScriptedEngine()
    monkeypatch.setattr(limits, "COMPILED_SCHEMAS", WARM)  # it is full before the sizes are taken
    with wire.client(tiny_path, engine, adapter_dirs=(tiny_path,)) as client:
        for number in range(WARM):
            send_names(client, number)
        held = collections()  # so that no new one has the id of one that is gone
        known = of_databases()
        before = {id: len(one) for id, one in held.items()}
        for number in range(WARM, WARM + TIMES):
            send_names(client, number)
        engine.taken.clear()
        after = collections()
        assert "name-" not in client.get("/metrics").text, "labels are those of known models"
    grown = [id for id in after.keys() & before if len(after[id]) >= before[id] + TIMES // 2]
    grown = [id for id in grown if getattr(after[id], "maxlen", None) is None]
    grown = [id for id in grown if id not in known | of_databases()]
    shown = [repr(after[id]) for id in grown]
    shown = [text[:300] for text in shown if "_lru_list_elem" not in text]  # caches with a limit
    assert shown == []
