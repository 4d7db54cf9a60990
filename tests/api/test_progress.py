"""How much of a prompt is computed, for clients that ask for it."""

from typing import Any

import pytest
from starlette.testclient import TestClient

from mlx_server.engine.messages import Prefilled, PrefillProgress
from tests.api import wire
from tests.api.wire import MODEL, ScriptedEngine

BODIES: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "hi"}]},
    "/v1/completions": {"prompt": "hi"},
}
ASKED = [{"stream_options": {"include_progress": True}}, {"return_progress": True}]


@pytest.fixture
def _pieces(engine: ScriptedEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    said = engine._said

    def in_pieces(row: Any) -> Any:
        yield Prefilled(row.row, 1)
        yield from (PrefillProgress(row.row, computed) for computed in (2, 5))
        yield from said(row)

    monkeypatch.setattr(engine, "_said", in_pieces)


@pytest.mark.usefixtures("_pieces")
@pytest.mark.parametrize("path", BODIES)
@pytest.mark.parametrize("asked", ASKED)
def test_chunks_tell_who_asked_how_much_is_computed(
    client: TestClient, engine: ScriptedEngine, path: str, asked: dict[str, Any]
) -> None:
    body = {"model": MODEL, **BODIES[path], "stream": True}
    chunks = wire.events(client.post(path, json={**body, **asked}))
    told = [chunk["prompt_progress"] for chunk in chunks if "prompt_progress" in chunk]
    assert all(progress.pop("time_ms") >= 0 for progress in told)
    total = len(engine.taken[-1].prompt)
    assert told == [{"total": total, "cache": 1, "processed": done} for done in (2, 5)]
    texts = [chunk for chunk in chunks if "prompt_progress" not in chunk]
    assert len(texts) == len(wire.events(client.post(path, json=body)))


@pytest.mark.usefixtures("_pieces")
@pytest.mark.parametrize("path", BODIES)
def test_others_are_told_nothing_of_it(client: TestClient, path: str) -> None:
    plain = {"model": MODEL, **BODIES[path]}
    streamed = client.post(path, json={**plain, "stream": True})
    whole = client.post(path, json={**plain, "return_progress": True})
    assert "prompt_progress" not in streamed.text + whole.text
    assert whole.status_code == 200
