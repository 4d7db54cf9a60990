"""Messages in the forms that upstreams know."""

from dataclasses import replace
from typing import Any

import pytest

from mlx_server.messages import Conversation, Message, Tool, ToolCall
from mlx_server.requests import NamedTool, ToolChoice
from mlx_server.upstream.request import NO_RESULT, messages_of, with_system_prompt
from mlx_server.upstream.spec import UpstreamCapabilities

CAN = UpstreamCapabilities()
SYSTEM, USER = {"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi"}
CALLED = Message("assistant", tool_calls=(ToolCall("c", "look", "{}"),))


def sent(
    *messages: Message, can: UpstreamCapabilities = CAN, choice: ToolChoice = "auto", **more: Any
) -> list[Any]:
    conversation = Conversation(messages, **more)
    return messages_of(conversation, can, choice, tells_format=False)


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ([USER], [{"role": "system", "content": "More."}, USER]),
        ([SYSTEM, USER], [{"role": "system", "content": "Be brief.\n\nMore."}, USER]),
        ([SYSTEM], [{"role": "system", "content": "Be brief.\n\nMore."}]),
        ([{"role": "system", "content": ""}, USER], [{"role": "system", "content": "More."}, USER]),
    ],
)
def test_the_leading_system_prompt_gets_a_paragraph(before: list[Any], after: list[Any]) -> None:
    assert with_system_prompt(before, ["More", "."]) == after


@pytest.mark.parametrize(
    ("choice", "sentence"),
    [
        ("required", "Call one of the functions now."),
        (NamedTool("look"), "Call the function look now."),
    ],
)
def test_a_required_call_is_demanded_where_tools_can_not_be_sent(
    choice: ToolChoice, sentence: str
) -> None:
    can = replace(CAN, tools=False)
    system, _ = sent(Message("user", "Hi"), tools=(Tool("look"),), can=can, choice=choice)
    assert system["content"].endswith(sentence)


def test_calls_and_results_are_in_pairs() -> None:
    """OpenAI's API, and most others, refuse every other history."""
    late, stray = Message("tool", "x", tool_call_id="c"), Message("tool", "y", tool_call_id="z")
    found = sent(Message("user", "Hi"), CALLED, stray, Message("user", "Stop."), late)
    assert [each["role"] for each in found] == ["user", "assistant", "tool", "user", "user", "user"]
    assert (found[2]["tool_call_id"], found[2]["content"]) == ("c", NO_RESULT)
    assert ["y" in found[3]["content"], "x" in found[5]["content"]] == [True, True]
    twice = sent(CALLED, late, late)
    assert [each["role"] for each in twice] == ["assistant", "tool", "user"]
    assert [each["role"] for each in sent(Message("user", "Hi"), CALLED)] == ["user", "assistant"]
