"""Whatever becomes of the engine: health says so, it serves again, and every answer goes on."""

import json
import re
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any, NamedTuple

import httpx
import pytest
from websockets.sync.client import connect

from tests.hostile.wounds import IGNORED, NO_MEMORY, POISON, Knife, knife
from tests.live.server import PLAIN, LiveServer, eventually, serving
from tests.tiny import tiny_llama
from tests.worker.lora_files import mlx_adapter

CHAT, RESPONSES = "/v1/chat/completions", "/v1/responses"
PATIENCE_SECONDS = 300.0
"""Of clients and tests: on a busy machine, a start of the engine alone takes many seconds."""

MESSAGES = [{"role": "user", "content": "Hi"}]
SAID = "word " * 100
LONG: dict[str, Any] = {"model": "slow", "messages": MESSAGES}
ASKED: dict[str, Any] = {"model": "slow", "input": "Hi"}
TO_LOAD: dict[str, Any] = {"model": "other", "messages": MESSAGES}
TEXT = [{"role": "user", "content": "The sea. " * 150}]
REAL: dict[str, Any] = {
    "model": "real",
    "messages": TEXT,
    "adapter": "x",
    "temperature": 0,
    "max_tokens": 400,
    "logit_bias": {str(id): -100 for id in range(3)},  # so that it does not end early
}
TO_COMPILE: dict[str, Any] = {**TO_LOAD, "guided_regex": "(word )+"}


class Place(NamedTuple):
    server: LiveServer
    knife: Knife


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Place]:
    folder = tmp_path_factory.mktemp("health")
    slow, quick = {"output": SAID, "delay_ms": 10}, {"output": SAID}
    plays = {"slow": slow, "quick": quick, "other": quick}
    for id, played in plays.items():
        (folder / f"{id}.jsonl").write_text(json.dumps(played))
    models: dict[str, Any] = {
        id: {"source": f"replay:{id}.jsonl", "family": "plain"} for id in plays
    }
    path = tiny_llama(folder / "real")
    adapters = {"x": {"path": str(mlx_adapter(folder / "x", path))}}
    models["real"] = {"source": str(path), "adapters": adapters}
    limits = {"concurrency": 2, "prompt_cache": {"memory": 0, "disk": 0}}
    config = {"server": limits, "models": models}
    with (
        knife(folder / "knife") as made,
        serving(folder, config) as server,
        patient(server) as http,
    ):
        assert serves(http)
        yield Place(server, made)


def patient(server: LiveServer) -> httpx.Client:
    return httpx.Client(**PLAIN, base_url=server.url, timeout=PATIENCE_SECONDS)


def serves(http: httpx.Client) -> bool:
    body = {"model": "quick", "messages": MESSAGES}
    return http.post(CHAT, json=body).status_code == 200


@contextmanager
def waiting(server: LiveServer) -> Iterator[list[Future[str]]]:
    """Five clients, each in its way; what each receives at last. Only two are decoded at a time."""
    whole = [(CHAT, LONG), (CHAT, LONG)]
    streams = [(CHAT, LONG), (RESPONSES, {**ASKED, "background": True})]
    with patient(server) as http, ThreadPoolExecutor(5) as threads:
        reported = [threads.submit(streamed, http, path, body) for path, body in streams]
        reported += [threads.submit(text_of, http, path, body) for path, body in whole]
        reported += [threads.submit(over_a_socket, server)]
        with ended(server):
            # and some have a token: the engine is patient with the first steps of a model
            gauges = ("mlx_server_queue", "mlx_server_batch_size")
            wanted = "more wait than decode"
            eventually(lambda: all(server.gauge(g) >= 1 for g in gauges), wanted, PATIENCE_SECONDS)
            yield reported


def text_of(http: httpx.Client, path: str, body: dict[str, Any]) -> str:
    response = http.post(path, json=body)
    assert response.status_code == 200, response.text
    return str(response.json()["choices"][0]["message"]["content"])


def streamed(http: httpx.Client, path: str, body: dict[str, Any]) -> str:
    with http.stream("POST", path, json={**body, "stream": True}) as response:
        lines = [line for line in response.iter_lines() if line.startswith("data: ")]
    return said_in([line.removeprefix("data: ") for line in lines if line != "data: [DONE]"])


def over_a_socket(server: LiveServer) -> str:
    url = server.url.replace("http", "ws", 1) + RESPONSES
    heard: list[str] = []
    with connect(url, open_timeout=PATIENCE_SECONDS, proxy=None) as socket:
        socket.send(json.dumps({"type": "response.create", **ASKED}))
        while not (heard and json.loads(heard[-1])["type"] in ("response.completed", "error")):
            heard.append(str(socket.recv(PATIENCE_SECONDS)))
    return said_in(heard)


def said_in(events: list[str]) -> str:
    text = ""
    for event in map(json.loads, events):
        if event.get("type") == "response.output_text.delta":
            text += event["delta"]
        for choice in event.get("choices", ()):
            text += choice["delta"].get("content") or ""
    return text


@contextmanager
def one(server: LiveServer, body: dict[str, Any]) -> Iterator[list[Future[str]]]:
    with patient(server) as http, ThreadPoolExecutor(1) as thread, ended(server):
        yield [thread.submit(text_of, http, CHAT, body)]


@contextmanager
def ended(server: LiveServer) -> Iterator[None]:
    """With a test that fails, lest its clients wait for ever."""
    try:
        yield
    except BaseException:
        server.process.kill()
        raise


def is_lost(http: httpx.Client) -> bool:
    time.sleep(0.1)  # the server needs its time for other things than to be asked
    return http.get("/health").status_code == 503


def goes_on_and_serves_again(place: Place, reported: list[Future[str]]) -> None:
    with patient(place.server) as http:
        eventually(lambda: is_lost(http), "it is noticed", PATIENCE_SECONDS)
        eventually(lambda: serves(http), "it serves again", PATIENCE_SECONDS)
        assert http.get("/health").status_code == 200
    assert {each.result(PATIENCE_SECONDS) for each in reported} == {SAID}


def test_an_engine_that_is_killed(place: Place) -> None:
    counted = place.server.gauge("mlx_server_resumed_requests")
    with waiting(place.server) as reported:
        place.server.engine.kill()
        goes_on_and_serves_again(place, reported)
    line = r"process died\. Another one \(process \d+\) goes on after \d+\.\d s\. Requests: [1-5]"
    assert re.search(line, place.server.log)
    assert place.server.gauge("mlx_server_resumed_requests") > counted
    assert place.server.gauge("mlx_server_engine_restarts") > 0


@pytest.mark.parametrize("how", ["raise", "block"])
def test_a_step_that_fails_or_does_not_end(place: Place, how: str) -> None:
    with waiting(place.server) as reported:
        place.knife.strike("step", how)
        goes_on_and_serves_again(place, reported)


@pytest.mark.parametrize(("where", "body"), [("load", TO_LOAD), ("compile", TO_COMPILE)])
def test_a_deadlock_while_something_is_prepared(
    place: Place, where: str, body: dict[str, Any]
) -> None:
    place.knife.strike(where, "hold")
    with one(place.server, body) as reported:
        goes_on_and_serves_again(place, reported)


def test_a_gpu_that_takes_no_more_work(place: Place) -> None:
    """Only another process helps."""
    before = engine_pid(place)
    with waiting(place.server) as reported:
        place.knife.strike("compute", IGNORED)
        goes_on_and_serves_again(place, reported)
    assert engine_pid(place) != before


def test_memory_that_runs_out_again_and_again(place: Place) -> None:
    """Once the answers begin again; in a row, it costs the process and half of the room."""
    with patient(place.server) as http:
        assert serves(http)
        budget = memory(http)["budget"]
        first = engine_pid(place)
        place.knife.strike("compute", NO_MEMORY)
        assert serves(http)
        assert engine_pid(place) == first
        assert memory(http)["budget"] == budget
        place.knife.strike("compute", NO_MEMORY)
        assert serves(http)
        assert engine_pid(place) != first
        lowered = memory(http)
        assert lowered["budget"] + lowered["lowered"] == budget
        assert 0.4 * budget < lowered["budget"] < 0.6 * budget
    assert "memory ran out 2 times in a row" in place.server.log


def test_a_request_that_ends_each_engine_fails_alone(place: Place) -> None:
    """Its eight neighbours are answered."""
    poisoned = {**LONG, "max_tokens": POISON}
    with (
        patient(place.server) as http,
        ThreadPoolExecutor(3) as more,
        waiting(place.server) as reported,
    ):
        reported += [more.submit(text_of, http, CHAT, LONG) for _ in range(3)]
        failed = http.post(CHAT, json=poisoned)
        assert failed.status_code == 500
        assert failed.json()["error"]["code"] == "request_ends_engine"
        assert failed.headers["x-should-retry"] == "false"
        assert {each.result(PATIENCE_SECONDS) for each in reported} == {SAID}
        pid = engine_pid(place)
        assert http.post(CHAT, json=poisoned).json()["error"]["code"] == "request_ends_engine"
        assert engine_pid(place) == pid, "it is not tried again"


def test_a_prompt_that_is_half_computed(place: Place) -> None:
    asked = {
        **REAL,
        "messages": [{"role": "user", "content": "The hill. " * 170}],
    }
    place.knife.strike("step", "slow 0.3")
    with one(place.server, asked) as reported, patient(place.server) as http:
        eventually(lambda: is_in_prefill(http), "a piece is computed", PATIENCE_SECONDS)
        place.server.engine.kill()
        place.knife.heal()
        assert reported[0].result(PATIENCE_SECONDS) == text_of(http, CHAT, asked)


def is_in_prefill(http: httpx.Client) -> bool:
    models = http.get("/v1/pool").json()["models"]
    return any(row["computed_tokens"] for each in models for row in each["prefilling"])


@pytest.mark.parametrize(
    ("file", "code"),
    [("x/adapter_config.json", "adapter_invalid"), ("real/config.json", "model_replaced")],
)
def test_what_changed_meanwhile(place: Place, file: str, code: str) -> None:
    place.knife.strike("step", "slow 0.05")
    path = place.server.log_file.parent / file
    with (
        ended(place.server),
        patient(place.server) as http,
        http.stream("POST", CHAT, json={**REAL, "stream": True}) as response,
    ):
        pieces = response.iter_text()
        while "content" not in next(pieces):
            pass
        path.write_text(json.dumps({**json.loads(path.read_text()), "note": "another"}))
        place.server.engine.kill()
        place.knife.heal()
        assert f'"{code}"' in "".join(pieces)
        again = http.post(CHAT, json={**REAL, "max_tokens": 4})
        assert again.is_success, again.text


def memory(http: httpx.Client) -> dict[str, int]:
    found: dict[str, int] = http.get("/v1/pool").json()["memory"]
    return found


def engine_pid(place: Place) -> int:
    return place.server.engine.pid
