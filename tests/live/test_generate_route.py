"""`POST /generate` on a real server: thinking, text and calls apart, in two notations."""

import json
from collections.abc import Iterator
from typing import Any

import pytest

from tests.live.server import LiveServer, serving

QWEN, HARMONY = "qwen3", "gpt-oss"
TOOL = {
    "name": "look",
    "description": "Looks at a place.",
    "parameters": {"type": "object", "properties": {"at": {"type": "string"}}},
}


def call(at: str) -> str:
    return json.dumps({"name": "look", "arguments": {"at": at}})


def block(*calls: str) -> str:
    return "<tool_call>\n" + "\n".join(calls) + "\n</tool_call>"


THOUGHT = "<think>\nSo be it.\n</think>\n\n"
QWEN_ENTRIES: list[dict[str, Any]] = [
    {"match": "answer", "output": f"{THOUGHT}It is so."},
    {"match": "call", "output": f"{THOUGHT}I look. {block(call('a'))}"},
    {"match": "blocks", "output": f"{THOUGHT}{block(call('a'))}\n{block(call('b'))}"},
    {"match": "one block", "output": f"{THOUGHT}{block(call('a'), call('b'))}"},
    {
        "match": "cut",
        "output": f"{THOUGHT}{block(call('a'))}<tool_call>\n" + call("b")[:-4],
        "finish": "length",
    },
    {"match": "unclosed", "output": f"{THOUGHT}<tool_call>\n" + call("b")[:-4]},
    {"match": "format", "output": f'{THOUGHT}{{"at": "a"}}'},
    {"match": "no end", "output": f"{THOUGHT}I look. <tool_call>\n{call('b')}"},
]
HARMONY_CALL = "<|start|>assistant<|channel|>commentary to=functions.look <|constrain|>json"
HARMONY_THOUGHT = "<|channel|>analysis<|message|>So be it.<|end|>"
HARMONY_ENTRIES = [
    {
        "match": "answer",
        "output": f"{HARMONY_THOUGHT}<|start|>assistant<|channel|>final<|message|>It is so.",
    },
    {
        "match": "call",
        "output": f"{HARMONY_THOUGHT}<|start|>assistant<|channel|>commentary<|message|>I look."
        f'<|end|>{HARMONY_CALL}<|message|>{{"at": "a"}}<|call|>',
    },
]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveServer]:
    folder = tmp_path_factory.mktemp("generate")
    for name, entries in {"qwen": QWEN_ENTRIES, "harmony": HARMONY_ENTRIES}.items():
        (folder / f"{name}.jsonl").write_text("\n".join(map(json.dumps, entries)), "utf-8")
    models = {
        QWEN: {"source": "replay:qwen.jsonl", "family": "qwen3"},
        HARMONY: {"source": "replay:harmony.jsonl", "family": "gpt_oss"},
    }
    with serving(folder, {"models": models}) as server:
        yield server
        assert "Traceback" not in server.log


def answer(server: LiveServer, text: str, **more: Any) -> dict[str, Any]:
    messages = [{"role": "user", "content": text}]
    body = {"model": QWEN, "messages": messages, "tools": [TOOL], **more}
    with server.http() as http:
        response = http.post("/generate", json=body)
    assert response.status_code == 200, response.text
    found: dict[str, Any] = response.json()
    return found


def places(body: dict[str, Any]) -> list[str]:
    assert all(call["name"] == "look" and call["id"] for call in body["tool_calls"])
    return [call["arguments"]["at"] for call in body["tool_calls"]]


@pytest.mark.parametrize("model", [QWEN, HARMONY])
def test_an_answer(server: LiveServer, model: str) -> None:
    body = answer(server, "answer", model=model)
    assert (body["thinking"], body["response"]) == ("So be it.", "It is so.")
    assert (body["tool_calls"], body["pre_tool_text"]) == ([], None)
    assert (body["model"], body["finish_reason"]) == (model, "stop")
    usage = body["usage"]
    thinking = usage["completion_tokens_details"]["reasoning_tokens"]
    assert 0 < thinking < usage["completion_tokens"]


@pytest.mark.parametrize("model", [QWEN, HARMONY])
def test_a_call_behind_text(server: LiveServer, model: str) -> None:
    body = answer(server, "call", model=model)
    assert body["thinking"] == "So be it."
    assert body["pre_tool_text"].strip() == body["response"].strip() == "I look."
    assert (places(body), body["finish_reason"]) == (["a"], "tool_calls")
