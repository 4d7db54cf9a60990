"""How much of a prompt is computed, for clients that ask for it."""

import itertools
import json
import re
from typing import Any

import pytest
from openai import OpenAI
from starlette.testclient import TestClient

from mlx_server.engine.messages import Prefilled, PrefillProgress
from tests.api import wire
from tests.api.wire import MODEL, ScriptedEngine

BODIES: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "hi"}]},
    "/v1/completions": {"prompt": "hi there"},
}
ASKED: list[dict[str, Any]] = [
    {"stream_options": {"include_progress": True}},
    {"return_progress": True},
]


@pytest.fixture
def _pieces(engine: ScriptedEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    said = engine.said

    def in_pieces(row: Any) -> Any:
        yield Prefilled(row.row, 1)
        yield from (PrefillProgress(row.row, computed) for computed in (2, 5))
        yield from said(row)

    monkeypatch.setattr(engine, "said", in_pieces)


@pytest.mark.usefixtures("_pieces")
@pytest.mark.parametrize("path", BODIES)
@pytest.mark.parametrize("asked", ASKED)
def test_chunks_tell_who_asked_how_much_is_computed(
    client: TestClient, engine: ScriptedEngine, path: str, asked: dict[str, Any]
) -> None:
    body = {"model": MODEL, **BODIES[path], "stream": True}
    chunks = wire.events(client.post(path, json={**body, **asked}))
    reported = [chunk["prompt_progress"] for chunk in chunks if "prompt_progress" in chunk]
    assert all(progress.pop("time_ms") >= 0 for progress in reported)
    total = len(engine.taken[-1].prompt)
    assert reported == [{"total": total, "cache": 1, "processed": done} for done in (2, 5)]
    texts = [chunk for chunk in chunks if "prompt_progress" not in chunk]
    assert len(texts) == len(wire.events(client.post(path, json=body)))


@pytest.mark.parametrize("path", [*BODIES, "/v1/responses"])
def test_a_prompt_that_is_in_the_cache_has_its_progress_once(
    client: TestClient, engine: ScriptedEngine, monkeypatch: pytest.MonkeyPatch, path: str
) -> None:
    said = engine.said

    def known(row: Any) -> Any:
        yield from [Prefilled(row.row, len(row.prompt) - 1)] * 2
        yield from said(row)

    monkeypatch.setattr(engine, "said", known)
    body = {"model": MODEL, **BODIES.get(path, {"input": "hi"}), "stream": True}
    reported = re.findall(
        '"prompt_progress": ?({.*?})', client.post(path, json=body | ASKED[0]).text
    )
    total = len(engine.taken[-1].prompt)
    (progress,) = map(json.loads, reported)
    assert progress.pop("time_ms") >= 0
    assert progress == {"total": total, "cache": total - 1, "processed": total - 1}


@pytest.mark.usefixtures("_pieces")
@pytest.mark.parametrize("path", [*BODIES, "/v1/responses"])
def test_a_clock_that_is_set_back_takes_no_time_away(
    client: TestClient, monkeypatch: pytest.MonkeyPatch, path: str
) -> None:
    hours = itertools.count(10**9, -3600)
    monkeypatch.setattr("time.time", lambda: float(next(hours)))
    body = {"model": MODEL, **BODIES.get(path, {"input": "hi"}), "stream": True, **ASKED[0]}
    took = re.findall(r'"time_ms": ?(-?[0-9]+)', client.post(path, json=body).text)
    assert len(took) == 2
    assert all(0 <= int(milliseconds) < 60_000 for milliseconds in took)


@pytest.mark.usefixtures("_pieces")
@pytest.mark.parametrize("path", [*BODIES, "/v1/responses"])
@pytest.mark.parametrize(
    "asked", [{"stream": True}, {"return_progress": True}, {**ASKED[0], "background": True}]
)
def test_others_are_told_nothing_of_it(
    client: TestClient, path: str, asked: dict[str, Any]
) -> None:
    body = {"model": MODEL, **BODIES.get(path, {"input": "hi"}), **asked}
    if "stream_options" in body:
        body["stream"] = True
    if path == "/v1/responses" or "background" not in body:
        response = client.post(path, json=body)
        assert response.status_code == 200
        assert "prompt_progress" not in response.text


RESPONSE: dict[str, Any] = {"model": MODEL, "input": "hi"}


@pytest.mark.slow
@pytest.mark.usefixtures("_pieces")
def test_a_response_says_how_much_is_computed(client: TestClient, engine: ScriptedEngine) -> None:
    """It is in progress, once more; OpenAI's client makes the same response of that."""
    sdk = OpenAI(base_url="http://localhost/v1", api_key="none", http_client=client)
    asked: Any = {"include_progress": True}
    with sdk.responses.stream(**RESPONSE, stream_options=asked) as stream:
        events = list(stream)
        final = stream.get_final_response()
    kinds = [event.type for event in events]
    assert kinds[:4] == ["response.created", *["response.in_progress"] * 3]
    assert [event.sequence_number for event in events] == list(range(len(events)))
    reported = [event.model_extra["prompt_progress"] for event in events[2:4] if event.model_extra]
    assert all(progress.pop("time_ms") >= 0 for progress in reported)
    total = len(engine.taken[-1].prompt)
    assert reported == [{"total": total, "cache": 1, "processed": done} for done in (2, 5)]
    assert (final.status, final.output_text) == ("completed", wire.TEXT)
