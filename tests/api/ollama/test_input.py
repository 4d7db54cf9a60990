from typing import Any

import pytest

from mlx_server.api.ollama.input import GenerateBody, OllamaChatBody, chat_request, generate_request
from mlx_server.messages import Conversation, Message, Tool, ToolCall
from mlx_server.requests import GenerateRequest, JsonFormat

CALLS = [
    {"function": {"name": "f", "arguments": {"a": "ü"}}},
    {"function": {"name": "g", "arguments": {}}},
]


def chat(*messages: Any, **more: Any) -> GenerateRequest:
    return chat_request(OllamaChatBody(model="m", messages=list(messages), **more), "m")


def generate(**more: Any) -> GenerateRequest:
    return generate_request(GenerateBody(model="m", **more), "m")


def conversation(request: GenerateRequest) -> Conversation:
    (prompt,) = request.prompts
    assert isinstance(prompt, Conversation)
    return prompt


def results(*given: dict[str, str]) -> list[Message]:
    tool = [{"role": "tool", "content": "x", **each} for each in given]
    asked = chat(
        {"role": "user", "content": "?"}, {"role": "assistant", "tool_calls": CALLS}, *tool
    )
    return list(conversation(asked).messages[2:])


def test_calls_of_earlier_turns() -> None:
    turn = {"role": "assistant", "content": None, "thinking": "Hm.", "tool_calls": CALLS}
    (message,) = conversation(chat(turn)).messages
    assert message == Message(
        "assistant",
        reasoning="Hm.",
        tool_calls=(ToolCall("call_0_0", "f", '{"a": "ü"}'), ToolCall("call_0_1", "g", "{}")),
    )


@pytest.mark.parametrize(
    ("given", "ids"),
    [
        ([{}, {}], ["call_1_0", "call_1_1"]),
        ([{"tool_name": "g"}, {"tool_name": "f"}], ["call_1_1", "call_1_0"]),
        ([{"tool_name": "f"}, {"tool_name": "f"}], ["call_1_0", None]),
        ([{"tool_name": "other"}], [None]),
        ([{"tool_call_id": "mine", "tool_name": "f"}], ["mine"]),
        ([{}, {}, {}], ["call_1_0", "call_1_1", None]),
    ],
)
def test_results_answer_the_calls_before_them(
    given: list[dict[str, str]], ids: list[str | None]
) -> None:
    found = results(*given)
    assert [message.tool_call_id for message in found] == ids
    assert [message.name for message in found] == [each.get("tool_name") for each in given]


@pytest.mark.slow
@pytest.mark.parametrize("names", [("f",), ("f", "g")])
def test_thousands_of_results_find_their_calls(names: tuple[str, ...]) -> None:
    """Without looking through all calls for each result, which would take minutes."""
    many = 20_000
    calls = [{"function": {"name": names[n % len(names)]}} for n in range(many)]
    turns = [{"role": "tool", "tool_name": names[-1]} for _ in range(many)]
    turns += [{"role": "tool"}] * many
    asked = chat({"role": "assistant", "tool_calls": calls}, *turns)
    ids = [message.tool_call_id for message in conversation(asked).messages[1:]]
    named = [f"call_0_{n}" for n in range(len(names) - 1, many, len(names))]
    others = [f"call_0_{n}" for n in range(0, many, 2)] if len(names) > 1 else []
    assert ids == [*named, *[None] * (many - len(named)), *others, *[None] * (many - len(others))]


def test_tools() -> None:
    function = {"name": "f", "description": "Does f.", "parameters": {"type": "object"}}
    asked = chat({"role": "user"}, tools=[{"type": "function", "function": function}])
    assert conversation(asked).tools == (Tool("f", "Does f.", {"type": "object"}),)


@pytest.mark.parametrize(
    ("think", "effort"),
    [(True, "medium"), (False, "none"), ("low", "low"), ("high", "high"), ("max", "xhigh")],
)
def test_thinking_is_an_effort(think: bool | str, effort: str) -> None:
    for asked in (chat({"role": "user"}, think=think), generate(prompt="x", think=think)):
        assert conversation(asked).template_kwargs == {"reasoning_effort": effort}
    assert conversation(chat({"role": "user"})).template_kwargs == {}


def test_a_format_is_held_and_described() -> None:
    schema = {"type": "object", "properties": {"a": {"type": "string"}}}
    asked = generate(prompt="x", format=schema)
    assert asked.format == JsonFormat(schema, strict=False)
    described = conversation(asked).response_format
    assert described
    assert described["schema"] == schema
    assert generate(prompt="x", format="json").format == JsonFormat()
    assert generate(prompt="x", format="").format is None


def test_an_answer_is_streamed_unless_it_is_refused() -> None:
    assert not generate(prompt="x").buffered
    assert not generate(prompt="x", stream=True).buffered
    assert generate(prompt="x", stream=False).buffered
