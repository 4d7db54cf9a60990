"""How long an answer may get where the client sets no limit, and memory holds less than usual."""

from pathlib import Path
from typing import Any

import pytest

from tests.api import wire
from tests.api.wire import MODEL, ScriptedEngine, client

ANSWERS = 300
"""Tokens of the longest answer that shall fit."""

LEADS_ON = 32
"""Tokens, more than any family puts after an answer that has stopped too early."""

ASKED: dict[str, Any] = {"model": MODEL, "messages": [{"role": "user", "content": "Once"}]}
CHAT = "/v1/chat/completions"


def fitting(tiny_path: Path, rows: int = 1) -> dict[str, Any]:
    """Settings with a budget for so many rows of some more tokens than that."""
    with client(tiny_path, engine := ScriptedEngine()) as found:
        wire.ok(found.post(CHAT, json={**ASKED, "max_tokens": 1}))
        pool = found.app.state.pool  # type: ignore[attr-defined]
        prepared = pool.models.loaded[0].prepared
        (row,) = engine.taken
        nbytes = prepared.kv.for_tokens(len(row.prompt) + LEADS_ON + ANSWERS)
        return {"memory_budget": prepared.weights + rows * nbytes}


@pytest.mark.parametrize("n", [1, 3])
def test_it_is_shortened_to_what_fits(tiny_path: Path, n: int) -> None:
    engine = ScriptedEngine()
    with client(tiny_path, engine, **fitting(tiny_path, rows=n)) as found:
        wire.ok(found.post(CHAT, json={**ASKED, "n": n}))
    assert len(engine.taken) == n
    assert all(ANSWERS <= row.max_tokens <= ANSWERS + LEADS_ON for row in engine.taken)


def test_a_client_that_asks_for_more_is_refused(tiny_path: Path) -> None:
    engine = ScriptedEngine()
    with client(tiny_path, engine, **fitting(tiny_path)) as found:
        asked = {**ASKED, "max_tokens": ANSWERS + LEADS_ON + 1}
        message = wire.error(found.post(CHAT, json=asked))["message"]
        assert "memory budget" in message
        assert not engine.taken
        wire.ok(found.post(CHAT, json={**ASKED, "max_tokens": ANSWERS}))


def test_a_limit_that_every_client_has_to_set_is_shortened(tiny_path: Path) -> None:
    """Claude Code asks for 32000 tokens whatever the model is."""
    engine = ScriptedEngine()
    with client(tiny_path, engine, **fitting(tiny_path)) as found:
        wire.ok(found.post("/v1/messages", json={**ASKED, "max_tokens": 32_000}))
    (row,) = engine.taken
    assert ANSWERS <= row.max_tokens <= ANSWERS + LEADS_ON


def test_a_prompt_that_does_not_fit_is_refused(tiny_path: Path) -> None:
    engine = ScriptedEngine()
    with client(tiny_path, engine, **fitting(tiny_path)) as found:
        asked = {"model": MODEL, "messages": [{"role": "user", "content": "a" * 1500}]}
        assert "memory budget" in wire.error(found.post(CHAT, json=asked))["message"]
