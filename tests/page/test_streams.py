"""What the page has on the server: its streams, downloads of models, and the log."""

import json
import logging
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest

from mlx_server import limits
from mlx_server.api.page import routes
from mlx_server.api.page.routes import ModelFetches, PageStreams
from mlx_server.errors import ModelUnusable, NotFound, Overloaded
from mlx_server.system import logs
from tests.api import wire
from tests.api.wire import Json, ScriptedEngine, error
from tests.live.server import LiveServer, eventually, serving

EVENTS = "/page/events"


@contextmanager
def states(server: LiveServer) -> Iterator[Iterator[Json]]:
    with server.http() as http, http.stream("GET", EVENTS) as response:
        assert response.status_code == 200
        assert response.headers["content-type"].startswith("text/event-stream")
        yield (json.loads(line[6:]) for line in response.iter_lines() if line.startswith("data: "))


def state_of(state: Json, id: str) -> str:
    [found] = [str(model["state"]) for model in state["models"] if model["id"] == id]
    return found


def ask(server: LiveServer, model: str, **more: object) -> None:
    with server.http() as http:
        body = {"model": model, "stream": False, **more}
        http.post("/api/generate", json=body).raise_for_status()


@pytest.mark.slow
def test_a_state_comes_at_once_and_again_when_a_model_is_loaded(server: LiveServer) -> None:
    ask(server, "tiny", keep_alive=0)
    with server.http() as http:
        eventually(lambda: state_of(http.get("/v1/pool").json(), "tiny") == "unloaded", "unloaded")
    with states(server) as found:
        before = next(found)
        assert (before["healthy"], state_of(before, "tiny")) == (True, "unloaded")
        ask(server, "tiny")
        after = next(state for state in found if state_of(state, "tiny") == "ready")
        assert after["memory"]["used"] > before["memory"]["used"]
        ask(server, "tiny", prompt="a", options={"num_predict": 3})
        ended = before["totals"]["ended"] + 1
        assert next(state for state in found if state["totals"]["ended"] == ended)


@pytest.mark.slow
def test_a_client_has_so_many_streams_and_a_place_again_when_one_has_left(
    server: LiveServer,
) -> None:
    most = limits.PAGE_STREAMS

    def refusal() -> str:
        """Empty if a stream begins, which is left at once."""
        with server.http() as http, http.stream("GET", EVENTS) as response:
            if response.status_code == 200:
                return ""
            assert response.status_code == 503
            return str(json.loads(response.read())["error"]["message"])

    with server.http() as http, ExitStack() as opened:
        streams = [opened.enter_context(states(server)) for _ in range(most)]
        for stream in streams:
            next(stream)
        assert all("close some of its tabs" in refusal() for _ in range(3 * most))
        assert http.get("/page/history").status_code == 200
        opened.close()
        eventually(lambda: not refusal(), "a place is free again")


def test_other_clients_have_streams_of_their_own() -> None:
    streams = PageStreams()
    with ExitStack() as taken:
        for _ in range(limits.PAGE_STREAMS):
            taken.enter_context(streams.take("me"))
        taken.enter_context(streams.take("you"))


@pytest.mark.slow
def test_a_server_that_stops_waits_for_no_page(tmp_path: Path, tiny_path: Path) -> None:
    models = {"tiny": {"source": str(tiny_path)}}
    with (
        ExitStack() as opened,
        serving(tmp_path, {"models": models, "server": {"drain_seconds": 600}}) as server,
    ):
        found = opened.enter_context(states(server))
        next(found)
        opened.enter_context(states(server))  # of which nothing is read
        assert state_of(next(found, {"models": [{"id": "tiny", "state": "unloaded"}]}), "tiny")


SMALL = "mlx-community/Qwen3-0.6B-4bit"
BUDGET = 1 << 34


def test_a_suggested_model_is_fetched_cancelled_and_fetched_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    steps = [threading.Event() for _ in range(4)]
    reported, ended = threading.Event(), threading.Event()
    ends: list[Callable[[], Path]] = []

    def resolve(source: str, progress: Any, *, budget: int) -> Path:
        assert (source, budget) == (SMALL, BUDGET)
        try:
            progress("downloading", 5, 9)
            reported.set()
            assert steps[len(ends)].wait(20)
            progress("downloading", 7, 9)
            return ends[-1]()
        finally:
            ended.set()

    def fail() -> Path:
        raise ModelUnusable("The disk is full.")

    monkeypatch.setattr(routes, "resolve", resolve)
    fetches = ModelFetches()
    for unknown in ("evil/model", "../x", ""):
        with pytest.raises(NotFound):
            fetches.start(unknown, BUDGET)
    with pytest.raises(NotFound):
        fetches.start(SMALL, 1000)
    with pytest.raises(NotFound):
        fetches.cancel(SMALL)

    def fetched(step: int) -> dict[str, Any]:
        reported.clear()
        ended.clear()
        fetch = fetches.start(SMALL, BUDGET)
        assert reported.wait(20)
        with pytest.raises(Overloaded, match="being fetched"):
            fetches.start(SMALL, BUDGET)
        running = {"id": SMALL, "state": "running", "done": 5, "total": 9, "problem": ""}
        assert fetches.shown() == [running]
        if step == 0:
            fetches.cancel(SMALL)
        steps[step].set()
        assert ended.wait(20)
        fetch.join()
        [shown] = fetches.shown()
        return shown

    cancelled = fetched(0)
    assert (cancelled["state"], "is kept" in cancelled["problem"]) == ("cancelled", True)
    ends.append(fail)
    assert fetched(1).items() >= {"state": "failed", "problem": "The disk is full."}.items()
    ends.append(lambda: next(iter(())))  # a bug, which keeps no later download from running
    assert fetched(2)["state"] == "failed"
    ends.append(lambda: Path("x"))
    assert fetched(3)["state"] == "fetched"


def test_the_log_is_for_the_only_client(tiny_path: Path) -> None:
    handler = logs.RecentLines()
    for number in range(limits.LISTED_LOG_LINES + 1):
        text = f"line {number} of /home/owner/models/x"
        handler.emit(logging.LogRecord("mlx_server", logging.WARNING, "", 1, text, (), None))
    keys = wire.key("one-key"), wire.key("another-key")
    with wire.client(tiny_path, ScriptedEngine()) as client:
        lines = client.get("/page/log").json()["lines"]
        assert len(lines) == limits.LISTED_LOG_LINES
        last = [line for line in lines if line["level"] == "warning"][-1]
        assert last["message"].startswith("line 500")
        assert "owner" not in last["message"]
    with wire.client(tiny_path, ScriptedEngine(), api_keys=keys) as client:
        answer = client.get("/page/log", headers={"authorization": "Bearer one-key"})
        assert "all clients" in error(answer, status=403)["message"]
