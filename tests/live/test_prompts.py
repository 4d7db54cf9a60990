"""What the prompt says, on a real server: tools, schemas, and messages to be continued."""

import json
from typing import Any

import pytest
from openai import BadRequestError, OpenAI

from tests.live.server import DEMO, SHALLOW

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
