"""Replay models of two families, on a real server, as OpenAI's own client sees them."""

import re
from pathlib import Path
from typing import Any

import openai
import pytest
from openai import OpenAI

from tests.live.common import Models, common_models, folder_of, transcript
from tests.live.server import LiveServer, eventually

CHAT, PLAIN = "fake-smollm2", "fake-plain"
FAMILIES = {CHAT: "smollm2", PLAIN: "plain"}
CHANGING = ("broken", "good")
LONG = "No end. " * 400
POEM = "Grüezi, 世界! 🙂 1. <b>Un</b> 2. Deux\n\n3. Trois."
"""A character of several tokens, lines, and text that looks like markup."""

ENTRIES: list[dict[str, Any]] = [
    {"match": "poem", "output": POEM},
    {"match": "regex:^long", "output": LONG},
    {"match": "slow", "output": LONG, "delay_ms": 20},
    {"match": "special", "output": "before<|im_end|>never"},
    {"output": "one"},
    {"output": "two"},
    {"output": "three"},
]


@common_models
def models(folder: Path, _: object) -> Models:
    transcript(folder / "said.jsonl", ENTRIES)
    for name in CHANGING:
        (folder / f"{name}.yaml").write_text("- output: fine\n")
    said = {
        id: {"source": "replay:said.jsonl", "family": family} for id, family in FAMILIES.items()
    }
    changing = {name: {"source": f"replay:{name}.yaml", "family": "plain"} for name in CHANGING}
    return {**said, **changing}


BOTH = pytest.mark.parametrize("model", FAMILIES)


def asked(client: OpenAI, model: str, text: str, **more: Any) -> Any:
    messages = [{"role": "user", "content": text}]
    return client.chat.completions.create(
        **{"model": model, "messages": messages, "temperature": 0, **more}
    )


def said(completion: Any) -> list[tuple[str, str]]:
    return [(choice.message.content, choice.finish_reason) for choice in completion.choices]


@BOTH
@pytest.mark.parametrize("temperature", [0, 1, 2])
def test_the_script_is_said_at_any_temperature(
    client: OpenAI, model: str, temperature: float
) -> None:
    assert said(asked(client, model, "poem", temperature=temperature)) == [(POEM, "stop")]


def test_a_special_token_in_the_output_is_one_token(client: OpenAI) -> None:
    assert said(asked(client, CHAT, "special")) == [("before", "stop")]
    # which to the other family is text like any other
    assert said(asked(client, PLAIN, "special")) == [("before<|im_end|>never", "stop")]


def completion_tokens(server: LiveServer, model: str) -> int:
    return int(server.counted("mlx_server_completion_tokens_total", model))


@pytest.mark.parametrize("path", ["chat/completions", "responses", "messages"])
def test_tokens_of_an_abandoned_answer_are_counted(server: LiveServer, path: str) -> None:
    begin, before = len(server.log), completion_tokens(server, PLAIN)
    is_response = path == "responses"
    limit = "max_output_tokens" if is_response else "max_tokens"
    slow = [{"role": "user", "content": "slow"}]
    body: dict[str, Any] = {"model": PLAIN, "stream": True, limit: 1000}
    body["input" if is_response else "messages"] = slow
    deltas = 0
    with server.http() as http, http.stream("POST", f"/v1/{path}", json=body) as answer:
        for line in answer.iter_lines():
            deltas += '"delta"' in line
            if deltas > 10:
                break
    eventually(lambda: completion_tokens(server, PLAIN) > before, "the tokens are counted")
    used = completion_tokens(server, PLAIN) - before
    assert 5 <= used < len(LONG)
    left = rf"POST /v1/{path} gone \S+ \d+\+{used} tokens, {PLAIN}"
    eventually(lambda: bool(re.search(left, server.log[begin:])), "the log has them too")


def test_a_transcript_that_becomes_wrong_fails_alone(server: LiveServer, client: OpenAI) -> None:
    broken = folder_of(server, __name__) / "broken.yaml"
    broken.write_text("- output: fine\n- outptu: x\n")
    with pytest.raises(openai.BadRequestError, match=r"broken\.yaml:2: entry 2") as caught:
        asked(client, "broken", "Hi")
    assert caught.value.code == "transcript_broken"
    assert said(asked(client, "good", "Hi")) == [("fine", "stop")]
    broken.write_text("- output: repaired\n")
    assert said(asked(client, "broken", "Hi")) == [("repaired", "stop")]
