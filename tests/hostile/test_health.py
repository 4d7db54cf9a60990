"""Whatever becomes of the engine: health says so, every client hears it, and it serves again."""

import json
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import httpx
import pytest
from websockets.sync.client import connect

from tests.hostile.wounds import Knife, knife
from tests.live.server import LiveServer, eventually, serving
from tests.slowness import slowness

CHAT, RESPONSES = "/v1/chat/completions", "/v1/responses"
TOLD_SECONDS = 5.0
"""From when health is false until everyone has an answer."""
BACK_SECONDS = 10.0
"""From then until it serves, in addition to the time that its start takes."""

MESSAGES = [{"role": "user", "content": "Hi"}]
ENDLESS: dict[str, Any] = {"model": "slow", "messages": MESSAGES}
ASKED: dict[str, Any] = {"model": "slow", "input": "Hi"}
TO_LOAD: dict[str, Any] = {"model": "other", "messages": MESSAGES}
TO_COMPILE: dict[str, Any] = {**TO_LOAD, "guided_regex": "[ab]+"}


@dataclass(frozen=True)
class Place:
    server: LiveServer
    knife: Knife
    start_seconds: float
    """Of the process and a model."""


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Place]:
    folder = tmp_path_factory.mktemp("health")
    slow, quick = {"output": "word " * 4000, "delay_ms": 20}, {"output": "Hello."}
    plays = {"slow": slow, "quick": quick, "other": quick}
    for id, played in plays.items():
        (folder / f"{id}.jsonl").write_text(json.dumps(played))
    models = {id: {"source": f"replay:{id}.jsonl", "family": "plain"} for id in plays}
    config = {"server": {"concurrency": 2}, "models": models}
    with pytest.MonkeyPatch.context() as patched:
        made, environment = knife(folder / "knife")
        for name, value in environment.items():
            patched.setenv(name, value)
        began = time.monotonic()
        with serving(folder, config) as server, server.http() as http:
            assert serves(http)
            yield Place(server, made, time.monotonic() - began)


def serves(http: httpx.Client) -> bool:
    body = {"model": "quick", "messages": MESSAGES}
    return http.post(CHAT, json=body).status_code == 200


@contextmanager
def waiting(server: LiveServer) -> Iterator[list[Future[str]]]:
    """Five clients, each in its way; what each receives at last. Only two are decoded at a time."""
    whole = [(CHAT, ENDLESS), (CHAT, ENDLESS)]
    streams = [(CHAT, ENDLESS), (RESPONSES, {**ASKED, "background": True})]
    with server.http() as http, ThreadPoolExecutor(5) as threads:
        reported = [threads.submit(streamed, http, path, body) for path, body in streams]
        reported += [threads.submit(code_of, http, path, body) for path, body in whole]
        reported += [threads.submit(over_a_socket, server)]
        with ended(server):
            # and some have a token: the engine is patient with the first steps of a model
            gauges = ("mlx_server_queue", "mlx_server_batch_size")
            eventually(lambda: all(server.gauge(g) >= 1 for g in gauges), "more wait than decode")
            yield reported


def code_of(http: httpx.Client, path: str, body: dict[str, Any]) -> str:
    response = http.post(path, json=body)
    assert response.status_code == 503
    assert response.headers["retry-after"]
    return str(response.json()["error"]["code"])


def streamed(http: httpx.Client, path: str, body: dict[str, Any]) -> str:
    with http.stream("POST", path, json={**body, "stream": True}) as response:
        lines = [line for line in response.iter_lines() if line.startswith("data: ")]
    if response.status_code == 503:  # it still waited to be decoded
        return "engine_died"
    *_, before, last, done = lines
    assert done == "data: [DONE]"
    return told_in([before.removeprefix("data: "), last.removeprefix("data: ")])


def over_a_socket(server: LiveServer) -> str:
    url = server.url.replace("http", "ws", 1) + RESPONSES
    heard: list[str] = []
    with connect(url, open_timeout=20, proxy=None) as socket:
        socket.send(json.dumps({"type": "response.create", **ASKED}))
        while not (heard and json.loads(heard[-1])["type"] in ("response.failed", "error")):
            heard.append(str(socket.recv(60)))
    return told_in(heard[-2:])


def told_in(events: list[str]) -> str:
    """By an error, after which a response may come that has failed."""
    for each in map(json.loads, events):
        if code := each.get("code") or (each.get("error") or {}).get("code"):
            return str(code)
    raise AssertionError(events)


@contextmanager
def one(server: LiveServer, body: dict[str, Any]) -> Iterator[list[Future[str]]]:
    with server.http() as http, ThreadPoolExecutor(1) as thread, ended(server):
        yield [thread.submit(code_of, http, CHAT, body)]


@contextmanager
def ended(server: LiveServer) -> Iterator[None]:
    """With a test that fails, lest its clients wait for ever."""
    try:
        yield
    except BaseException:
        server.process.kill()
        raise


def lost_at(http: httpx.Client) -> float:
    """When health has become false."""
    eventually(seldom(lambda: http.get("/health").status_code == 503), "it is noticed", seconds=30)
    return time.monotonic()


def seldom(look: Callable[[], bool]) -> Callable[[], bool]:
    """The server needs its time for other things than to be asked."""

    def looked() -> bool:
        time.sleep(0.1)
        return look()

    return looked


def is_told_and_serves_again(place: Place, reported: list[Future[str]]) -> None:
    with place.server.http() as http:
        lost = lost_at(http)
        assert {each.result(30) for each in reported} == {"engine_died"}
        assert time.monotonic() - lost < TOLD_SECONDS * slowness()
        eventually(seldom(lambda: serves(http)), "it serves again", seconds=60)
        assert time.monotonic() - lost < (place.start_seconds + BACK_SECONDS) * slowness()
        assert http.get("/health").status_code == 200


def test_an_engine_that_is_killed(place: Place) -> None:
    with waiting(place.server) as reported:
        place.server.engine.kill()
        is_told_and_serves_again(place, reported)


@pytest.mark.parametrize("how", ["raise", "block"])
def test_a_step_that_fails_or_does_not_end(place: Place, how: str) -> None:
    with waiting(place.server) as reported:
        place.knife.strike("step", how)
        is_told_and_serves_again(place, reported)


@pytest.mark.parametrize(("where", "body"), [("load", TO_LOAD), ("compile", TO_COMPILE)])
def test_a_deadlock_while_something_is_prepared(
    place: Place, where: str, body: dict[str, Any]
) -> None:
    place.knife.strike(where, "hold")
    with one(place.server, body) as reported:
        is_told_and_serves_again(place, reported)


IGNORED = (
    "[METAL] Command buffer execution failed: Ignored (for causing prior/excessive GPU errors) "
    "(00000004:kIOGPUCommandBufferCallbackErrorSubmissionsIgnored)"
)
NO_MEMORY = (
    "[METAL] Command buffer execution failed: Insufficient Memory "
    "(00000008:kIOGPUCommandBufferCallbackErrorOutOfMemory)"
)


def test_a_gpu_that_takes_no_more_work(place: Place) -> None:
    """Only another process helps: clients of other models get the error as well."""
    before = engine_pid(place)
    with waiting(place.server) as reported:
        place.knife.strike("compute", IGNORED)
        with place.server.http() as http:
            lost_at(http)
            assert {each.result(30) for each in reported} == {"engine_died"}
            eventually(seldom(lambda: serves(http)), "it serves again", seconds=60)
    assert engine_pid(place) != before


def test_memory_that_runs_out_again_and_again(place: Place) -> None:
    """Once it costs the rows that were there; in a row, the process and half of the room."""
    with place.server.http() as http:
        serves(http)
        budget = memory(http)["budget"]
        first = engine_pid(place)
        place.knife.strike("compute", NO_MEMORY)
        failed = http.post(CHAT, json={"model": "quick", "messages": MESSAGES})
        assert failed.status_code == 500
        assert "memory ran out" in failed.json()["error"]["message"]
        assert engine_pid(place) == first
        assert memory(http)["budget"] == budget
        place.knife.strike("compute", NO_MEMORY)
        reported = http.post(CHAT, json={"model": "quick", "messages": MESSAGES})
        assert reported.status_code == 503
        assert reported.json()["error"]["code"] == "engine_died"
        eventually(seldom(lambda: serves(http)), "it serves again", seconds=60)
        assert engine_pid(place) != first
        lowered = memory(http)
        assert lowered["budget"] + lowered["lowered"] == budget
        assert 0.4 * budget < lowered["budget"] < 0.6 * budget
    assert "memory ran out 2 times in a row" in place.server.log


def memory(http: httpx.Client) -> dict[str, int]:
    found: dict[str, int] = http.get("/v1/pool").json()["memory"]
    return found


def engine_pid(place: Place) -> int:
    return place.server.engine.pid
