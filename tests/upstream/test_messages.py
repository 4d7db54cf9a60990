"""Messages in the forms that upstreams know."""

import json
from dataclasses import replace
from typing import Any

import pytest

from mlx_server.messages import Conversation, Message, Tool, ToolCall
from mlx_server.upstream.messages import messages_of, with_system_prompt
from mlx_server.upstream.spec import UpstreamCapabilities

CAN = UpstreamCapabilities()
SYSTEM, USER = {"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi"}
THOUGHT = Message("assistant", "Yes", reasoning="Hm.")
CALLED = Message("assistant", tool_calls=(ToolCall("c", "look", "{}"),))


def sent(*messages: Message, can: UpstreamCapabilities = CAN, **more: Any) -> list[Any]:
    conversation = Conversation(messages, **more)
    return messages_of(conversation, can, "auto", tells_format=False)


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


@pytest.mark.parametrize(("which", "fields"), [(False, []), ("tool_rounds", [2]), (True, [0, 2])])
def test_which_reasoning_is_sent_back(which: Any, fields: list[int]) -> None:
    can = replace(CAN, reasoning_messages=which)
    found = sent(THOUGHT, Message("user", "And?"), THOUGHT, can=can)
    assert [at for at, each in enumerate(found) if "reasoning_content" in each] == fields


def test_calls_and_results_are_text_where_there_are_no_tools() -> None:
    result = Message("tool", "Rain", tool_call_id="c")
    found = sent(CALLED, result, can=replace(CAN, tool_messages=False))
    assert [each["role"] for each in found] == ["assistant", "user"]
    assert not any({"tool_calls", "tool_call_id"} & each.keys() for each in found)
    call = found[0]["content"].removeprefix("<tool_call>").removesuffix("</tool_call>")
    assert json.loads(call) == {"name": "look", "arguments": {}}
    assert "Rain" in found[1]["content"]


def test_tools_are_described_where_they_can_not_be_sent() -> None:
    tools = (Tool("look"),)
    hi = Message("user", "Hi")
    assert [each["role"] for each in sent(hi, tools=tools)] == ["user"]
    system, _ = sent(hi, tools=tools, can=replace(CAN, tools=False))
    assert system["role"] == "system"
    assert "look" in system["content"]
