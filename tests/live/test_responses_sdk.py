"""Replay models on a real server, as OpenAI's own client sees them through Responses."""

import json
from collections.abc import Iterator
from typing import Any

import pytest
from openai import OpenAI
from pydantic import BaseModel

from tests.live.server import LiveServer, serving

Json = dict[str, Any]

GPT_OSS, QWEN = "gpt-oss", "qwen3"

CALL = '<|channel|>commentary to=functions.add <|constrain|>json<|message|>{"a":1,"b":2}<|call|>'
HARMONY = [
    {
        "match": "think",
        "output": "<|channel|>analysis<|message|>Let me see.<|end|><|start|>assistant"
        "<|channel|>final<|message|>Grüezi, 世界! 🙂<|return|>",
    },
    {
        "match": "add",
        "output": "<|channel|>analysis<|message|>I need a tool.<|end|><|start|>assistant" + CALL,
    },
    {"last": "3", "output": "<|channel|>final<|message|>3.<|return|>"},
    {
        "match": "cut",
        "output": "<|channel|>analysis<|message|>Let me",
        "finish": "length",
    },
]
TAGS = [
    {"match": "think", "output": "<think>\nLet me see.\n</think>\n\nGrüezi, 世界! 🙂"},
    {
        "match": "add",
        "output": "<think>\nI need a tool.\n</think>\n\n"
        '<tool_call>\n{"name": "add", "arguments": {"a": 1, "b": 2}}\n</tool_call>\n'
        '<tool_call>\n{"name": "add", "arguments": {"a": 3, "b": 4}}\n</tool_call>',
    },
    {"match": "json", "output": '<think>\n\n</think>\n\n{"sum": 3}'},
    {"match": "slow", "output": "No end. " * 400, "delay_ms": 20},
    {"match": "cut", "output": "<think>\n\n</think>\n\nIt was cut he", "finish": "length"},
]

ADD: Any = {
    "type": "function",
    "name": "add",
    "description": "Adds",
    "parameters": {
        "type": "object",
        "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}},
        "required": ["a", "b"],
    },
    "strict": False,
}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveServer]:
    folder = tmp_path_factory.mktemp("responses")
    for name, entries in (("harmony", HARMONY), ("tags", TAGS)):
        lines = "\n".join(json.dumps(entry) for entry in entries)
        (folder / f"{name}.jsonl").write_text(lines, "utf-8")
    models = {
        GPT_OSS: {"source": "replay:harmony.jsonl", "family": "gpt_oss"},
        QWEN: {
            "source": "replay:tags.jsonl",
            "family": "qwen3",
            "defaults": {"temperature": 0.3},
        },
    }
    with serving(folder, {"models": models}) as server:
        yield server
        assert "Traceback" not in server.log
        assert " ERROR " not in server.log


BOTH = pytest.mark.parametrize("model", [GPT_OSS, QWEN])


@BOTH
def test_the_sdks_own_stream_likes_it(client: OpenAI, model: str) -> None:
    with client.responses.stream(model=model, input="think") as stream:
        kinds = [event.type for event in stream]
        final = stream.get_final_response()
    assert final.output_text == "Grüezi, 世界! 🙂"
    assert kinds[-1] == "response.completed"
    assert "response.reasoning_text.delta" in kinds


@BOTH
def test_a_tool_round(client: OpenAI, model: str) -> None:
    """Everything that came goes back as it is, which is what most clients do."""
    with client.responses.stream(model=model, input="add", tools=[ADD]) as stream:
        first = stream.get_final_response()
    calls = [item for item in first.output if item.type == "function_call"]
    assert json.loads(calls[0].arguments) == {"a": 1, "b": 2}
    results: list[Json] = [
        {"type": "function_call_output", "call_id": call.call_id, "output": "3"} for call in calls
    ]
    said: Any = [
        {"role": "user", "content": "add"},
        *(item.model_dump() for item in first.output),
        *results,
        {"role": "user", "content": "think"},
    ]
    assert client.responses.create(model=model, input=said).output_text == "Grüezi, 世界! 🙂"


def test_reasoning_that_only_the_server_can_read_comes_back(client: OpenAI) -> None:
    first = client.responses.create(
        model=GPT_OSS, input="add", tools=[ADD], include=["reasoning.encrypted_content"]
    )
    reasoning, call = first.output
    assert reasoning.type == "reasoning"
    assert call.type == "function_call"
    results: list[Any] = [{"type": "function_call_output", "call_id": call.call_id, "output": "3"}]

    def prompt_tokens(**more: Any) -> int:
        items: list[Any] = [{"role": "user", "content": "add"}]
        items += [{**reasoning.model_dump(), **more}, call.model_dump(), *results]
        response = client.responses.create(model=GPT_OSS, input=items, tools=[ADD])
        assert response.usage
        return response.usage.input_tokens

    read, unread = prompt_tokens(), prompt_tokens(content=None, encrypted_content=None)
    assert prompt_tokens(content=None) == read > unread


def test_the_owners_choice_is_told(client: OpenAI) -> None:
    assert client.responses.create(model=QWEN, input="cut").temperature == 0.3
    assert client.responses.create(model=QWEN, input="cut", temperature=0).temperature == 0


class Sum(BaseModel):
    sum: int


def test_answers_of_a_class(client: OpenAI) -> None:
    response = client.responses.parse(model=QWEN, input="json", text_format=Sum)
    assert response.output_parsed == Sum(sum=3)
    with client.responses.stream(model=QWEN, input="json", text_format=Sum) as stream:
        assert stream.get_final_response().output_parsed == Sum(sum=3)


def test_an_answer_that_was_cut(client: OpenAI) -> None:
    response = client.responses.create(model=QWEN, input="cut")
    assert (response.status, response.output_text) == ("incomplete", "It was cut he")
    assert response.incomplete_details
    assert response.incomplete_details.reason == "max_output_tokens"
    short = client.responses.create(model=QWEN, input="slow", max_output_tokens=3)
    assert short.status == "incomplete"
