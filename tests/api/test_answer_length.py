"""How long an answer may get where the client sets no limit, and memory holds less than usual."""

from pathlib import Path
from typing import Any

import pytest

from tests.api import wire
from tests.api.wire import MODEL, ScriptedEngine, client

ANSWERS = 300
"""Tokens of the longest answer that shall fit."""

ASKED = {"model": MODEL, "prompt": "Once"}


def fitting(tiny_path: Path, rows: int = 1) -> dict[str, Any]:
    """Settings with a budget for so many rows of some more tokens than that."""
    with client(tiny_path, engine := ScriptedEngine()) as found:
        wire.ok(found.post("/v1/completions", json={**ASKED, "max_tokens": 1}))
        pool = found.app.state.pool  # type: ignore[attr-defined]
        prepared = pool.loaded[0].prepared
        (row,) = engine.taken
        nbytes = prepared.kv.for_tokens(len(row.prompt) + ANSWERS)
        return {"memory_budget": prepared.weights + rows * nbytes}


@pytest.mark.parametrize("n", [1, 3])
def test_it_is_shortened_to_what_fits(tiny_path: Path, n: int) -> None:
    engine = ScriptedEngine()
    with client(tiny_path, engine, **fitting(tiny_path, rows=n)) as found:
        wire.ok(found.post("/v1/completions", json={**ASKED, "n": n}))
    assert [row.max_tokens for row in engine.taken] == [ANSWERS] * n


def test_a_chat_leaves_room_for_what_may_lead_it_on(tiny_path: Path) -> None:
    engine = ScriptedEngine()
    asked: dict[str, Any] = {"model": MODEL, "messages": [{"role": "user", "content": "Once"}]}
    with client(tiny_path, engine, **fitting(tiny_path)) as found:
        wire.ok(found.post("/v1/chat/completions", json=asked))
    (row,) = engine.taken
    assert 0 < row.max_tokens < ANSWERS


def test_a_client_that_asks_for_more_is_refused(tiny_path: Path) -> None:
    engine = ScriptedEngine()
    with client(tiny_path, engine, **fitting(tiny_path)) as found:
        asked = {**ASKED, "max_tokens": ANSWERS + 1}
        message = wire.error(found.post("/v1/completions", json=asked))["message"]
        assert "memory budget" in message
        assert not engine.taken
        wire.ok(found.post("/v1/completions", json={**ASKED, "max_tokens": ANSWERS}))


def test_a_prompt_that_does_not_fit_is_refused(tiny_path: Path) -> None:
    engine = ScriptedEngine()
    with client(tiny_path, engine, **fitting(tiny_path)) as found:
        asked = {"model": MODEL, "prompt": "a" * 1500}
        assert "memory budget" in wire.error(found.post("/v1/completions", json=asked))["message"]
