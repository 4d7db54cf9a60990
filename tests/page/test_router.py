"""The page's stream: what changes in it, how many there are, and how they end."""

import json
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from mlx_server import limits
from tests.live.server import LiveServer, eventually, serving

pytestmark = pytest.mark.slow

Json = dict[str, Any]
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


def test_a_server_that_stops_waits_for_no_page(tmp_path: Path, tiny_path: Path) -> None:
    models = {"tiny": {"source": str(tiny_path)}}
    with (
        ExitStack() as opened,
        serving(tmp_path, {"models": models, "server": {"drain_seconds": 600}}) as server,
    ):
        found = opened.enter_context(states(server))
        next(found)
        opened.enter_context(unread(server))
        assert state_of(next(found, {"models": [{"id": "tiny", "state": "unloaded"}]}), "tiny")


@contextmanager
def unread(server: LiveServer) -> Iterator[None]:
    """A stream of which nothing is read."""
    with httpx.stream("GET", server.url + EVENTS, trust_env=False, timeout=30):
        yield
