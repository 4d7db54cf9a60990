"""What the page has on the server: its streams, downloads of models, and the log."""

import logging
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from mlx_server import limits
from mlx_server.api.page import routes
from mlx_server.api.page.routes import ModelFetches, PageStreams
from mlx_server.errors import ModelUnusable, NotFound, Overloaded
from mlx_server.system import logs
from tests.api import wire
from tests.api.wire import ScriptedEngine, error


def test_a_client_has_so_many_streams_and_others_have_theirs() -> None:
    streams, most = PageStreams(), limits.PAGE_STREAMS
    taken = [streams.take("me") for _ in range(most)]
    for place in taken:
        place.__enter__()
    with pytest.raises(Overloaded, match="close some of its tabs"), streams.take("me"):
        pass
    with streams.take("you"):
        pass
    taken[0].__exit__(None, None, None)
    with streams.take("me"):
        pass


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
