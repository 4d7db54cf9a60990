"""What vLLM's and llama.cpp's servers answer besides OpenAI's fields, if a client asks for it."""

import json
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from tests.live.server import TINY, LiveServer

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
HI = {"role": "user", "content": "Salü"}
TOKENS = 8
A = 67
"""The id of `a` in the vocabulary of the one with random weights."""
SHORT: dict[str, Any] = {"model": TINY, "max_tokens": TOKENS, "temperature": 0}

Json = dict[str, Any]


@pytest.fixture(scope="module")
def http(server: LiveServer) -> Iterator[httpx.Client]:
    with server.http() as http:
        yield http


def post(http: httpx.Client, path: str, **asked: Any) -> Json:
    response = http.post(path, json={**SHORT, **asked})
    assert response.status_code == 200, response.text
    found: Json = response.json()
    return found


def streamed(http: httpx.Client, path: str, **asked: Any) -> list[Json]:
    response = http.post(path, json={**SHORT, **asked, "stream": True})
    assert response.status_code == 200, response.text
    lines = [line.removeprefix("data: ") for line in response.text.split("\n\n")]
    return [json.loads(line) for line in lines if line not in ("", "[DONE]")]


def test_the_ids_of_prompt_and_answer(http: httpx.Client) -> None:
    a = {"logit_bias": {str(A): 100}}
    found = post(http, CHAT, messages=[HI], return_token_ids=True, **a)
    tokenized = http.post("/tokenize", json={"model": TINY, "messages": [HI]}).json()
    assert found["prompt_token_ids"] == tokenized["tokens"]
    (choice,) = found["choices"]
    assert choice["token_ids"] == [A] * TOKENS
    assert choice["message"]["content"] == "a" * TOKENS


def test_the_ids_of_each_text_and_each_of_its_answers(http: httpx.Client) -> None:
    asked: Json = {"prompt": ["a", "bc"], "n": 2, "return_token_ids": True}
    whole = post(http, COMPLETIONS, **asked)["choices"]
    prompts = [choice["prompt_token_ids"] for choice in whole]
    assert prompts[0] == prompts[1] != prompts[2] == prompts[3]
    ids: dict[int, list[int]] = {}
    begun = []
    for chunk in streamed(http, COMPLETIONS, **asked):
        (choice,) = chunk["choices"]
        ids.setdefault(choice["index"], []).extend(choice["token_ids"])
        if "prompt_token_ids" in choice:
            begun.append((choice["index"], choice["prompt_token_ids"]))
    assert sorted(begun) == list(enumerate(prompts))
    assert [ids[i] for i in range(4)] == [choice["token_ids"] for choice in whole]


def test_log_probabilities_of_a_prompt_are_those_of_an_echo(http: httpx.Client) -> None:
    asked: Json = {"prompt_logprobs": 2, "return_token_ids": True, "n": 2}
    chat = post(http, CHAT, messages=[HI], **asked)
    ids, scored = chat["prompt_token_ids"], chat["prompt_logprobs"]
    assert scored[0] is None
    assert len(scored) == len(ids)
    echo = post(http, COMPLETIONS, prompt=ids, echo=True, logprobs=2)["choices"][0]["logprobs"]
    for at in range(1, len(ids)):
        own = scored[at][str(ids[at])]
        assert own["logprob"] == pytest.approx(echo["token_logprobs"][at], abs=1e-4)
        assert own["decoded_token"] == echo["tokens"][at]
        ranks = {each["rank"] for each in scored[at].values()}
        assert {1, 2} <= ranks <= {1, 2, None}
        assert len(scored[at]) == (2 if own["rank"] else 3)
    text = post(http, COMPLETIONS, prompt=[ids, ids[:3]], **asked)["choices"]
    assert [len(choice["prompt_logprobs"]) for choice in text] == [len(ids)] * 2 + [3] * 2
