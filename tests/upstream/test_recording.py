"""`mlx-server replay record` of a model on another server, as the endpoints give its answers."""

from pathlib import Path
from typing import Any

import pytest
import yaml

from mlx_server.api.transcript_recorder import TranscriptRecorder
from mlx_server.cli.live_recording import recorded_settings, secrets_of
from mlx_server.cli.recording import record
from mlx_server.config.settings import ModelSettings
from mlx_server.config.specs import model_spec
from mlx_server.families import family_named
from mlx_server.messages import Conversation, Message, Tool
from mlx_server.requests import GenerateRequest
from mlx_server.sources.transcript import read_transcript
from tests.families.goldens import tokenizer_of
from tests.upstream.playing import (
    KEY,
    KEY_VARIABLE,
    USAGE,
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
from tests.upstream.quirks import CALL_JSON, PARIS, WEATHER

ASKED = [{"role": "user", "content": "hi"}]


def asked(text: str) -> GenerateRequest:
    chat = Conversation((Message("user", text),), (Tool("get_weather"),))
    return GenerateRequest("up", (chat,))


def test_answers_are_read_and_secrets_are_taken_out(
    upstream: PlayingServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(KEY_VARIABLE, KEY)
    found: dict[str, Any] = {"source": f"openai+{upstream.url}/v1", "api_key_env": KEY_VARIABLE}
    spec = model_spec("up", ModelSettings.model_validate({**found, "family": "qwen3"}))
    leaked = f"<think>Paris.</think><tool_call>\n{CALL_JSON}\n</tool_call>"
    upstream.plays(
        says(leaked), streamed(delta("stop"), USAGE), says(f"The key is {KEY}."), says("unused")
    )
    shown: list[Any] = []
    entries = record(spec, [asked("Weather?"), asked("And now?")], shown.append)
    assert shown == entries
    assert entries[0] == {"match": "Weather?", "answer": {"reasoning": "Paris.", "calls": [PARIS]}}
    assert KEY not in str(entries)
    assert entries[1]["answer"]["text"].startswith("The key is ")
    assert len(upstream.asked) == 3


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


def test_an_answer_that_can_not_be_recorded_reaches_its_client(
    upstream: PlayingServer, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    upstream.plays(says("Yes"))
    with gateway(upstream.url, {"up": {}}, TranscriptRecorder(tmp_path)) as client:
        assert in_one(client, {})["text"] == "Yes"
    assert "an answer of up was not recorded" in caplog.text


def test_a_server_that_records_has_the_one_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(KEY_VARIABLE, KEY)
    config = tmp_path / "models.yaml"
    listed = {"source": "openai+http://127.0.0.1:1/v1", "upstream_model": "theirs"}
    models = {"mine": {**listed, "aliases": ["own"], "api_key_env": KEY_VARIABLE}, "other": listed}
    config.write_text(yaml.safe_dump({"models": models, "server": {"port": 1234}}))
    settings = recorded_settings("own", config, None, None, None)
    assert (list(settings.models), settings.server.port) == (["mine"], 1234)
    assert secrets_of(settings) == [KEY]
    given = recorded_settings("a/b", config, "http://127.0.0.1:2/v1/", KEY_VARIABLE, 99)
    assert list(given.models) == ["a/b"]
    assert given.models["a/b"].source == "openai+http://127.0.0.1:2/v1"
    assert (given.models["a/b"].upstream_model, given.server.port) == ("a/b", 99)
    assert list(recorded_settings(str(tmp_path), config, None, None, None).models) == [
        tmp_path.name
    ]
