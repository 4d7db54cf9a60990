"""A model whose keys and values are kept in 8 bits, over HTTP."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.live.common import Models, common_models
from tests.live.server import DEMO, SHALLOW, LiveServer, start
from tests.worker.lora_files import mlx_adapter

CHAT = "/v1/chat/completions"
FULL, HALF, REAL = "kv-full", "kv-half", "kv-real"
WORDS = "the quick brown fox jumps over the lazy dog " * 12

Json = dict[str, Any]


@common_models
def models(folder: Path, checkpoints: Mapping[str, Path]) -> Models:
    shallow = checkpoints[SHALLOW]
    adapter = mlx_adapter(folder / "adapter", shallow, rank=2, scale=40.0)
    model = {"source": str(shallow), "adapters": {"other": {"path": str(adapter)}}}
    real = {"source": str(checkpoints[DEMO]), "kv_bits": 8}
    return {FULL: model, HALF: {**model, "kv_bits": 8}, REAL: real}


def ask(server: LiveServer, model: str, text: str = WORDS, **more: Any) -> Json:
    messages = [{"role": "user", "content": text}]
    body = {"model": model, "messages": messages, "temperature": 0, "max_tokens": 16, **more}
    with server.http() as http:
        return asked(http, body)


def asked(http: httpx.Client, body: Json) -> Json:
    response = http.post(CHAT, json=body)
    assert response.status_code == 200, response.text
    found: Json = response.json()
    return found


def text_of(answer: Json) -> str:
    text: str = answer["choices"][0]["message"]["content"]
    return text


def cached(answer: Json) -> int:
    return int(answer["usage"]["prompt_tokens_details"]["cached_tokens"])


def test_a_real_model_still_knows_a_capital(server: LiveServer) -> None:
    assert "Tokyo" in text_of(ask(server, REAL, "What is the capital of Japan?"))


def test_a_prompt_is_cached_and_the_answer_stays(server: LiveServer) -> None:
    first = ask(server, HALF)
    again = ask(server, HALF)
    assert cached(first) < 50
    assert cached(again) > 100
    assert text_of(again) == text_of(first)


def test_its_answers_are_nearly_those_of_16_bits(server: LiveServer) -> None:
    full, half = (ask(server, model, logprobs=True)["choices"][0] for model in (FULL, HALF))
    first, other = (choice["logprobs"]["content"][0] for choice in (full, half))
    assert first["token"] == other["token"]
    assert first["logprob"] != other["logprob"]
    assert abs(first["logprob"] - other["logprob"]) < 0.5


def test_an_adapter_has_its_own_answer_and_its_own_prompts(server: LiveServer) -> None:
    question = "Which adapter are you? " * 10
    base = ask(server, HALF, question)
    first = ask(server, f"{HALF}:other", question)
    again = ask(server, f"{HALF}:other", question)
    assert (cached(base) < 50, cached(first), cached(again) > 50) == (True, 0, True)
    assert text_of(first) != text_of(base)
    assert text_of(again) == text_of(first)


def test_other_bits_are_refused_at_the_start(tmp_path: Path, demo_path: Path) -> None:
    model = {"source": str(demo_path), "kv_bits": 3}
    with pytest.raises(AssertionError, match="did not start") as caught:
        start(tmp_path, {"models": {HALF: model}})
    assert "kv_bits" in str(caught.value)
