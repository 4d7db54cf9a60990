"""Transcripts begin again, are recorded while clients get their answers, and are kept for tests."""

import json
import threading
from collections.abc import AsyncGenerator, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from starlette.testclient import TestClient

from mlx_server import limits
from mlx_server.api.replay import RecordedRequests, TranscriptRecorder
from mlx_server.app import create_app
from mlx_server.config.settings import ModelSettings, Settings
from mlx_server.events import Event, Finished, TextDelta, TokenCounts
from mlx_server.families import family_named
from mlx_server.messages import Conversation, Message
from mlx_server.requests import GenerateRequest
from mlx_server.sources.transcript import read_transcript
from tests.api.wire import error, ok
from tests.families.goldens import tokenizer_of
from tests.mcp.playing import Playing
from tests.upstream.playing import (
    CALL_JSON,
    KEY,
    KEY_VARIABLE,
    PARIS,
    WEATHER,
    PlayingServer,
    as_message,
    as_response,
    delta,
    gateway,
    in_chunks,
    in_one,
    says,
    streamed,
)

RESET = "/v1/replay/reset"


@pytest.fixture(scope="module")
def replays(tmp_path_factory: pytest.TempPathFactory, tiny_path: Path) -> Iterator[TestClient]:
    said = tmp_path_factory.mktemp("said") / "said.jsonl"
    said.write_text("\n".join(json.dumps({"output": word}) for word in ("one", "two")))
    replayed = ModelSettings(source=f"replay:{said}", family="plain")
    models = {"a": replayed, "b": replayed, "tiny": ModelSettings(source=str(tiny_path))}
    app = create_app(Settings(models=models))
    app.state.pool.make_engine = lambda **_: Playing()
    with TestClient(app, base_url="http://localhost", raise_server_exceptions=False) as client:
        yield client


def text(client: TestClient, model: str) -> Any:
    body = {"model": model, "messages": [{"role": "user", "content": "?"}]}
    return ok(client.post("/v1/chat/completions", json=body))["choices"][0]["message"]["content"]


@pytest.mark.parametrize(
    ("body", "models"), [({}, ["a", "b"]), ({"model": None}, ["a", "b"]), ({"model": "a"}, ["a"])]
)
def test_only_what_is_named_begins_again(
    replays: TestClient, body: dict[str, Any], models: list[str]
) -> None:
    ok(replays.post(RESET, json={}))
    assert [text(replays, model) for model in "ab"] == ["one", "one"]
    found = ok(replays.post(RESET, json=body))
    assert found == {"object": "replay.reset", "models": models}
    for model in "ab":
        assert text(replays, model) == ("one" if model in models else "two")


@pytest.mark.parametrize(
    ("content", "status"),
    [
        (b"", 400),
        (b"[]", 400),
        (b'{"model": ""}', 400),
        (b'{"model": 5}', 400),
        (b'{"model": ["a", "b"]}', 400),
        (b'{"model": "tiny"}', 400),
        (b'{"model": "Sal\xc3\xbc"}', 404),
    ],
)
def test_a_body_that_names_no_replay_model_resets_nothing(
    replays: TestClient, content: bytes, status: int
) -> None:
    ok(replays.post(RESET, json={}))
    text(replays, "a")
    headers = {"content-type": "application/json"}
    error(replays.post(RESET, content=content, headers=headers), status=status)
    assert text(replays, "a") == "two"


def test_what_has_no_effect_is_reported(replays: TestClient) -> None:
    found = replays.post(RESET, json={"entry": 3})
    assert found.headers["x-mlx-server-ignored"] == "entry"


def test_the_oldest_requests_are_dropped() -> None:
    recorded = RecordedRequests()
    piece = bytes(limits.RECORDED_REQUEST_BYTES // 4)
    for number in range(5):
        recorded.add(f"/{number}", piece)
    assert [each["path"] for each in recorded.shown()] == ["/1", "/2", "/3", "/4"]
    recorded.add("/5", b"")
    recorded.clear()
    assert recorded.shown() == []
    recorded.add("/6", b"\xff")
    assert recorded.shown() == [{"path": "/6", "body": "\ufffd"}]


ASKED = [{"role": "user", "content": "hi"}]


@pytest.fixture(scope="module")
def upstream() -> Iterator[PlayingServer]:
    with PlayingServer() as server:
        yield server


def test_answers_are_recorded_while_clients_get_them(
    upstream: PlayingServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(KEY_VARIABLE, KEY)
    file = tmp_path / "said.yaml"
    upstream.plays(
        says(f"<think>Paris.</think>{CALL_JSON}"),
        says(f"The key is {KEY}."),
        says("Three."),
        says("Four."),
        streamed(delta(content="Fi"), done=False),
    )
    models = {"up": {"family": "qwen3", "api_key_env": KEY_VARIABLE}}
    with gateway(upstream.url, models, TranscriptRecorder(file, [KEY])) as client:
        found = [told(client, {"tools": [WEATHER]}) for told in (in_chunks, in_one)]
        found += [told(client, {}) for told in (as_response, as_message)]
        cut = client.post("/v1/chat/completions", json={"model": "up", "messages": ASKED})
    assert cut.status_code == 502
    assert [each["text"] for each in found] == ["", f"The key is {KEY}.", "Three.", "Four."]
    entries = yaml.safe_load(file.read_text())
    assert [each["match"] for each in entries] == ["hi"] * 4
    assert [each["answer"] for each in entries] == [
        {"reasoning": "Paris.", "calls": [PARIS]},
        {"text": "The key is [removed]."},
        {"text": "Three."},
        {"text": "Four."},
    ]
    played = read_transcript(file, vocabulary=1)
    first = played.pick(Conversation((Message("user", "hi"),))).entry
    tokenizer = tokenizer_of("llama4")
    assert str(PARIS["name"]) in tokenizer.raw(first.tokens(tokenizer, family_named("llama4")))


@pytest.mark.anyio
async def test_an_answer_is_written_outside_of_the_event_loop(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """To write one of a megabyte as YAML takes seconds."""
    threads = []
    dump = yaml.safe_dump

    def noting(*values: Any, **options: Any) -> Any:
        threads.append(threading.get_ident())
        return dump(*values, **options)

    async def events() -> AsyncGenerator[Event]:
        yield TextDelta(0, "Yes")
        yield Finished(0, "stop", TokenCounts(1))

    monkeypatch.setattr(yaml, "safe_dump", noting)
    request = GenerateRequest("m", (Conversation((Message("user", "hi"),)),))
    recorder = TranscriptRecorder(tmp_path / "said.yaml")
    assert len([event async for event in recorder.recorded(request, events())]) == 2
    assert len(threads) == 1
    assert threading.get_ident() not in threads


def test_an_answer_that_can_not_be_recorded_reaches_its_client(
    upstream: PlayingServer, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    upstream.plays(says("Yes"))
    with gateway(upstream.url, {"up": {}}, TranscriptRecorder(tmp_path)) as client:
        assert in_one(client, {})["text"] == "Yes"
    assert "an answer of up was not recorded" in caplog.text
