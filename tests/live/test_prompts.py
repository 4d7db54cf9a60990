"""What the prompt says, on a real server: tools, schemas, and messages to be continued."""

import json
from typing import Any

import pytest
from openai import BadRequestError, OpenAI

from tests.contract.facts import FACTS
from tests.live.server import DEMO, SHALLOW, LiveServer

IGNORED = "x-mlx-server-ignored"
QUESTION: Any = {"role": "user", "content": "What is the capital of France?"}
BEGUN: Any = {"role": "assistant", "content": "The capital of France is"}
TOOL: Any = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "The weather in a city, now.",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string"}},
            "required": ["city"],
            "additionalProperties": False,
        },
    },
}
SCHEMA = {
    "type": "object",
    "properties": {"country": {"type": "string"}, "capital": {"type": "string"}},
    "required": ["country", "capital"],
    "additionalProperties": False,
}
FORMAT: Any = {
    "type": "json_schema",
    "json_schema": {"name": "a", "schema": SCHEMA, "strict": True},
}


def ask(client: OpenAI, *messages: Any, **more: Any) -> Any:
    asked = {"model": SHALLOW, "temperature": 0, "max_tokens": 60, "messages": messages, **more}
    return client.chat.completions.create(**asked)


def test_tools_are_in_the_prompt_and_nothing_is_ignored(client: OpenAI) -> None:
    without = ask(client, QUESTION, max_tokens=1).usage.prompt_tokens
    raw = client.chat.completions.with_raw_response.create(
        model=SHALLOW, messages=[QUESTION], tools=[TOOL], max_tokens=1
    )
    assert IGNORED not in raw.headers
    assert raw.parse().usage.prompt_tokens > without + 80  # type: ignore[union-attr]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    "choice", ["required", {"type": "function", "function": {"name": "get_weather"}}]
)
def test_a_choice_of_tools_is_kept(client: OpenAI, choice: Any, stream: bool) -> None:
    found = ask(client, QUESTION, tools=[TOOL], tool_choice=choice, stream=stream)
    if stream:
        deltas = [chunk.choices[0].delta for chunk in found]
        pieces = [call.function for delta in deltas for call in delta.tool_calls or ()]
        name, text = pieces[0].name, "".join(piece.arguments or "" for piece in pieces)
    else:
        (call, *_) = found.choices[0].message.tool_calls
        name, text = call.function.name, call.function.arguments
    assert name == "get_weather"
    assert {*json.loads(text)} == {"city"}


def test_a_legacy_client_is_answered_with_a_function_call(client: OpenAI) -> None:
    function = TOOL["function"]
    more: Any = {"functions": [function], "function_call": {"name": "get_weather"}}
    (choice,) = ask(client, QUESTION, **more).choices
    assert choice.finish_reason == "function_call"
    assert {*json.loads(choice.message.function_call.arguments)} == {"city"}
    called = {"role": "assistant", "function_call": choice.message.function_call.model_dump()}
    result = {"role": "function", "name": "get_weather", "content": "It rains."}
    assert (
        ask(client, QUESTION, called, result, functions=[function], max_tokens=4)
        .choices[0]
        .message.content
    )


def test_the_schema_costs_prompt_tokens_once_each_turn(client: OpenAI) -> None:
    plain, described = (
        ask(client, QUESTION, max_tokens=1, **more).usage.prompt_tokens
        for more in ({}, {"response_format": FORMAT})
    )
    assert plain + 20 < described < plain + 120


def continuing(client: OpenAI, begun: Any, **more: Any) -> Any:
    extra = {"continue_final_message": True, "add_generation_prompt": False}
    return ask(client, QUESTION, begun, model=DEMO, extra_body=extra, **more)


def test_a_message_is_continued_streamed_and_not(client: OpenAI) -> None:
    whole = ask(client, QUESTION, model=DEMO).choices[0].message.content
    assert whole.startswith(f"{BEGUN['content']} Paris")
    (choice,) = continuing(client, BEGUN).choices
    assert choice.message.content == whole.removeprefix(BEGUN["content"])
    chunks = continuing(client, BEGUN, stream=True)
    assert "".join(c.choices[0].delta.content or "" for c in chunks) == choice.message.content


def test_json_is_continued_to_its_end(client: OpenAI) -> None:
    begun = '{"country": "Fra'
    (choice,) = continuing(
        client, {"role": "assistant", "content": begun}, response_format=FORMAT
    ).choices
    assert choice.finish_reason == "stop"
    assert {*json.loads(begun + choice.message.content)} == {"country", "capital"}


def test_a_whole_value_is_continued_by_nothing(client: OpenAI) -> None:
    whole = '{"country": "France", "capital": "Paris"}'
    (choice,) = continuing(
        client, {"role": "assistant", "content": whole}, response_format=FORMAT
    ).choices
    assert (choice.message.content.strip(), choice.finish_reason) == ("", "stop")


def test_text_that_begins_no_such_value_is_refused(client: OpenAI) -> None:
    with pytest.raises(BadRequestError, match="not the beginning of such an answer"):
        continuing(client, BEGUN, response_format=FORMAT)


def test_responses_describe_the_schema_too(client: OpenAI) -> None:
    text: Any = {"format": {"type": "json_schema", "name": "a", "schema": SCHEMA, "strict": True}}
    asked: Any = {"model": SHALLOW, "input": QUESTION["content"], "max_output_tokens": 16}
    described = client.responses.create(**asked, text=text)
    plain = client.responses.create(**asked)
    assert described.usage
    assert plain.usage
    assert described.usage.input_tokens > plain.usage.input_tokens + 20


def test_generate_continues_a_message(server: LiveServer, client: OpenAI) -> None:
    body = {
        "model": DEMO,
        "messages": [QUESTION, BEGUN],
        "continue_final_message": True,
        "temperature": 0,
        "max_response_tokens": 60,
    }
    with server.http() as http:
        found = http.post("/generate", json=body).json()
    assert found["response"] == continuing(client, BEGUN).choices[0].message.content


def test_there_are_forty_facts() -> None:
    assert len({fact.question for fact in FACTS}) == 40
    right = [json.dumps(fact.values) for fact in FACTS]
    assert all(fact.right(text) for fact, text in zip(FACTS, right, strict=True))
    assert not any(fact.right(json.dumps(dict.fromkeys(fact.values, "no"))) for fact in FACTS)
