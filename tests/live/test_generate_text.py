"""Texts of thinking models, as the model wrote them."""

import json
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.live.common import Models, common_models, transcript

COMPLETIONS = "/v1/completions"

WRITTEN = {
    "qwen3": "<think>Hm.</think>Hello.",
    "mistral": "[THINK]Hm.[/THINK]Hello.",
    "gpt_oss": "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant"
    "<|channel|>final<|message|>Hello.",
}
"""What each family writes, delimiters included."""


@common_models
def models(folder: Path, _: object) -> Models:
    for name, text in WRITTEN.items():
        transcript(folder / f"{name}.jsonl", [{"output": text}])
    return {
        f"writes-{name}": {"source": f"replay:{name}.jsonl", "family": name} for name in WRITTEN
    }


@pytest.mark.parametrize("family", WRITTEN)
def test_special_tokens_are_part_of_a_text_that_wants_them(http: httpx.Client, family: str) -> None:
    asked: Any = {"model": f"writes-{family}", "prompt": "Say hello.", "max_tokens": 200}
    plain = http.post(COMPLETIONS, json=asked).json()["choices"][0]["text"]
    same = http.post(COMPLETIONS, json={**asked, "skip_special_tokens": True}).json()
    assert same["choices"][0]["text"] == plain != WRITTEN[family]
    wanted: Any = {**asked, "skip_special_tokens": False, "logprobs": 0}
    response = http.post(COMPLETIONS, json=wanted)
    assert "x-mlx-server-ignored" not in response.headers
    (choice,) = response.json()["choices"]
    assert choice["text"] == WRITTEN[family]
    assert "".join(choice["logprobs"]["tokens"]) == WRITTEN[family]
    stream = http.post(COMPLETIONS, json={**wanted, "stream": True}).text
    chunks = [json.loads(line[6:]) for line in stream.split("\n\n") if line.startswith("data: {")]
    assert "".join(each["choices"][0]["text"] for each in chunks) == WRITTEN[family]
