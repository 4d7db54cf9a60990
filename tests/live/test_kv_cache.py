"""A model whose keys and values are kept in 8 bits, over HTTP."""

from collections.abc import Mapping
from pathlib import Path

import httpx

from tests.live.common import Models, common_models
from tests.live.server import DEMO, SHALLOW

FULL, HALF, REAL = "kv-full", "kv-half", "kv-real"


@common_models
def models(_: Path, checkpoints: Mapping[str, Path]) -> Models:
    shallow, real = (str(checkpoints[name]) for name in (SHALLOW, DEMO))
    half = {"source": shallow, "kv_bits": 8}
    return {FULL: {"source": shallow}, HALF: half, REAL: {"source": real, "kv_bits": 8}}


def test_its_answers_are_nearly_those_of_16_bits(http: httpx.Client) -> None:
    words = [{"role": "user", "content": "the quick brown fox jumps over the lazy dog " * 12}]
    asked = {"messages": words, "temperature": 0, "max_tokens": 1, "logprobs": True}
    answers = [
        http.post("/v1/chat/completions", json={"model": model, **asked}).json()
        for model in (FULL, HALF)
    ]
    first, other = (answer["choices"][0]["logprobs"]["content"][0] for answer in answers)
    assert first["token"] == other["token"]
    assert 0 < abs(first["logprob"] - other["logprob"]) < 0.5


def test_a_real_model_still_knows_a_capital(http: httpx.Client) -> None:
    asked = [{"role": "user", "content": "What is the capital of Japan?"}]
    body = {"model": REAL, "messages": asked, "temperature": 0, "max_tokens": 16}
    assert "Tokyo" in http.post("/v1/chat/completions", json=body).text
