from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from starlette.testclient import TestClient

from mlx_server import limits
from mlx_server.api.tokenize import (
    TokenizeBody,
    chat_request,
    chat_tokens,
)
from mlx_server.api.tokenize import text_of as spelled
from mlx_server.models.tokenizer import Tokenizer
from mlx_server.pool.prepare import ModelSpec, prepare
from tests.api import wire
from tests.api.wire import Json, ScriptedEngine, error, ok
from tests.tables import cases

IGNORED = "x-mlx-server-ignored"
HI: Json = {"role": "user", "content": "Salü"}
RENDERED = "<|im_start|>user\nSalü<|im_end|>\n<|im_start|>assistant\n"
TOOL: Json = {"type": "function", "function": {"name": "f", "parameters": {}}}


@pytest.fixture(scope="module")
def shown(tiny_path: Path) -> Iterator[TestClient]:
    """A server whose engine loads no model."""
    engine = ScriptedEngine()
    with wire.client(tiny_path, engine) as client:
        yield client
    assert not engine.taken


@pytest.fixture(scope="module")
def tokenizer(tiny_path: Path) -> Tokenizer:
    return Tokenizer(tiny_path / "tokenizer.json")


def tokenize(client: TestClient, **asked: Any) -> Json:
    return ok(client.post("/tokenize", json={"model": wire.MODEL, **asked}))


def refused(client: TestClient, asked: Json, path: str = "/tokenize", status: int = 400) -> Json:
    return error(client.post(path, json={"model": wire.MODEL, **asked}), status)


def text_of(client: TestClient, tokens: list[int]) -> str:
    answer = ok(client.post("/detokenize", json={"model": wire.MODEL, "tokens": tokens}))
    assert answer == {"prompt": answer["prompt"], "content": answer["prompt"]}
    text: str = answer["prompt"]
    return text


def test_a_text(client: TestClient, tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode("a b<|im_end|>")
    whole = {"count": len(ids), "max_model_len": 2048, "tokens": ids, "token_strs": None}
    assert tokenize(client, prompt="a b<|im_end|>") == whole
    found = tokenize(client, prompt="a b<|im_end|>", return_token_strs=True)
    assert found["token_strs"] == ["a", "Ġ", "b", "<|im_end|>"]


@pytest.mark.parametrize("text", ["", "Salü 🙂", "<|im_start|>user\nhi<|im_end|>", "\u0000\u202e"])
def test_there_and_back(client: TestClient, text: str) -> None:
    assert text_of(client, tokenize(client, prompt=text)["tokens"]) == text


def test_part_of_a_character_has_a_text_too(client: TestClient, tokenizer: Tokenizer) -> None:
    assert text_of(client, tokenizer.encode("🙂")[:2]) == "�"


def test_without_a_model_it_is_the_first(client: TestClient) -> None:
    tokens = ok(client.post("/tokenize", json={"prompt": "ab"}))["tokens"]
    assert ok(client.post("/detokenize", json={"tokens": tokens}))["content"] == "ab"


def test_messages_are_counted_as_they_are_answered(
    client: TestClient, engine: ScriptedEngine
) -> None:
    counted = tokenize(client, messages=[HI])
    body = {"model": wire.MODEL, "messages": [HI], "max_tokens": 1}
    answered = ok(client.post("/v1/chat/completions", json=body))
    assert counted["count"] == answered["usage"]["prompt_tokens"] == len(engine.taken[-1].prompt)
    assert counted["tokens"] == list(engine.taken[-1].prompt)
    assert text_of(client, counted["tokens"]) == RENDERED
    strings = tokenize(client, messages=[HI], return_token_strs=True)["token_strs"]
    assert strings[:3] == ["<|im_start|>", "u", "s"]


@cases
def test_where_the_prompt_ends(shown: TestClient, asked: Json, text: str) -> None:
    tokens = tokenize(shown, **{"messages": [HI], **asked})["tokens"]
    assert text_of(shown, tokens) == text


def test_text_is_never_control(shown: TestClient) -> None:
    tokens = tokenize(shown, messages=[{"role": "user", "content": "<|im_end|>"}])["tokens"]
    assert tokens.count(2) == 1, "the template's own"


def test_fields_without_effect_are_listed(client: TestClient) -> None:
    body = {"model": wire.MODEL, "prompt": "x", "tools": [TOOL], "add_generation_prompt": False}
    answer = client.post("/tokenize", json={**body, "frobnicate": 1})
    assert answer.headers[IGNORED] == "frobnicate, tools, add_generation_prompt"


@pytest.mark.parametrize("kind", ["prompt", "messages"])
def test_a_text_of_too_many_tokens(
    client: TestClient, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(limits, "TOKENIZED", limits.ANSWERS)  # 16
    assert tokenize(client, prompt="x" * 16)["count"] == 16
    long: Json = {"prompt": "x" * 17, "messages": [HI]}
    assert refused(client, {kind: long[kind]})["param"] == kind


def test_kwargs_of_the_template(tiny_path: Path) -> None:
    template = "{{ color }}{% for message in messages %}{{ message.content }}{% endfor %}"
    spec = ModelSpec("m", str(tiny_path), chat_template=template)
    prepared = prepare(spec, lambda *progress: None, upcast=True)
    red = chat_request(
        TokenizeBody.model_validate({"messages": [HI], "chat_template_kwargs": {"color": "red"}}),
        "m",
    )
    found = chat_tokens(prepared, red, add_special_tokens=False)
    assert spelled(prepared, found) == "redSalü"
    assert found[:3] == prepared.checkpoint.tokenizer.encode("red")
