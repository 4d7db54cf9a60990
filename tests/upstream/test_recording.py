"""`mlx-server replay record` of a model on another server, as the endpoints give its answers."""

from typing import Any

import pytest

from mlx_server.cli.replay import record_model
from mlx_server.config.settings import ModelSettings, model_spec, validated
from mlx_server.messages import Conversation, Message, Tool
from mlx_server.requests import GenerateRequest
from tests.upstream.playing import KEY, KEY_VARIABLE, USAGE, PlayingServer, delta, says, streamed
from tests.upstream.quirks import CALL_JSON, PARIS


def asked(text: str) -> GenerateRequest:
    chat = Conversation((Message("user", text),), (Tool("get_weather"),))
    return GenerateRequest("up", (chat,))


def test_answers_are_read_and_secrets_are_taken_out(
    upstream: PlayingServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(KEY_VARIABLE, KEY)
    found: dict[str, Any] = {"source": f"openai+{upstream.url}/v1", "api_key_env": KEY_VARIABLE}
    spec = model_spec("up", validated(ModelSettings, {**found, "family": "qwen3"}))
    leaked = f"<think>Paris.</think><tool_call>\n{CALL_JSON}\n</tool_call>"
    upstream.plays(
        says(leaked), streamed(delta("stop"), USAGE), says(f"The key is {KEY}."), says("unused")
    )
    shown: list[Any] = []
    entries = record_model(spec, [asked("Weather?"), asked("And now?")], shown.append)
    assert shown == entries
    assert entries[0] == {"match": "Weather?", "answer": {"reasoning": "Paris.", "calls": [PARIS]}}
    assert KEY not in str(entries)
    assert entries[1]["answer"]["text"].startswith("The key is ")
    assert len(upstream.asked) == 3
