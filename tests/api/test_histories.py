"""What agents send again with every turn: a history is answered, and the header names what was left
out."""

import json
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from starlette.testclient import TestClient

from mlx_server.checkpoints.tokenizer import Tokenizer
from tests.api import wire
from tests.api.wire import MODEL, Json, ScriptedEngine

IGNORED = "x-mlx-server-ignored"

pytestmark = pytest.mark.usefixtures("_as_before")


@pytest.fixture(scope="module")
def client(tiny_path: Path, engine: ScriptedEngine) -> Iterator[TestClient]:
    with wire.client(tiny_path, engine, show_prompts=True) as client:
        yield client


@pytest.fixture(scope="module")
def tokenizer(tiny_path: Path) -> Tokenizer:
    return Tokenizer(tiny_path / "tokenizer.json")


def user(content: Any) -> list[Json]:
    return [{"role": "user", "content": content}]


TEXT_PLACES: dict[str, Any] = {
    "/v1/chat/completions": lambda text: {"messages": user(text)},
    "/v1/chat/completions/render": lambda text: {"messages": user(text)},
    "/apply-template": lambda text: {"messages": user(text)},
    "/v1/completions": lambda text: {"prompt": text},
    "/v1/messages": lambda text: {"messages": user(text), "max_tokens": 4},
    "/v1/messages/count_tokens": lambda text: {"messages": user(text)},
    "/v1/responses": lambda text: {"input": user(text)},
    "/v1/responses/input_tokens": lambda text: {"input": user(text)},
    "/v1/conversations": lambda text: {"items": user(text)},
    "/api/chat": lambda text: {"messages": user(text), "stream": False},
    "/api/generate": lambda text: {"prompt": text, "stream": False},
    "/generate": lambda text: {"messages": user(text)},
    "/tokenize": lambda text: {"messages": user(text)},
}


@pytest.mark.parametrize("path", TEXT_PLACES)
@pytest.mark.parametrize("half", ["x\ud83d", "\ude00x", "\ude00\ud83d", '{"a": "\ud83d"}'])
def test_half_of_a_surrogate_pair_is_replaced(client: TestClient, path: str, half: str) -> None:
    body = {} if path == "/v1/conversations" else {"model": MODEL}
    answer = client.post(path, content=json.dumps(body | TEXT_PLACES[path](half)))
    assert answer.status_code == 200, answer.text
    assert "lone_surrogates" in answer.headers[IGNORED]
    whole = client.post(path, json=body | TEXT_PLACES[path]("x🙂"))
    assert whole.status_code == 200
    assert "lone_surrogates" not in whole.headers.get(IGNORED, "")


def test_the_prompt_has_a_replacement_character(
    client: TestClient, engine: ScriptedEngine, tokenizer: Tokenizer
) -> None:
    arguments = {"\udfffz": "x\ud83dy"}
    call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": arguments}}
    talk = [*user("\ud83d\ude42\ud83d"), {"role": "assistant", "tool_calls": [call]}]
    body = {"model": MODEL, "messages": talk}
    assert client.post("/v1/chat/completions", content=json.dumps(body)).status_code == 200
    prompt = tokenizer.raw(engine.taken[-1].prompt)
    assert "\n🙂\ufffd<" in prompt
    assert '{"\ufffdz": "x\ufffdy"}' in prompt


def test_half_of_a_pair_over_a_web_socket(client: TestClient) -> None:
    with suppress(*wire.CANCELLED), client.websocket_connect("ws://localhost/v1/responses") as line:
        asked = {"type": "response.create", "model": MODEL, "input": "x\ud83d"}
        line.send_text(json.dumps(asked))
        while (event := line.receive_json())["type"] not in ("response.completed", "error"):
            pass
    assert event["type"] == "response.completed", event
    assert event["response"]["mlx_server"]["ignored"] == ["lone_surrogates"]
