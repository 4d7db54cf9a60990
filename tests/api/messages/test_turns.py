"""Blocks and messages become turns, in which results follow their calls."""

from typing import Any

import pytest

from mlx_server.messages import Message, ToolCall
from tests.api.messages.bodies import (
    CACHED,
    HI,
    assistant,
    messages,
    refused,
    result,
    text,
    thinking,
    use,
    user,
)
from tests.api.wire import Json

# Turns


@pytest.mark.parametrize(
    "given",
    [
        [{"role": "user", "content": "a\nb"}],
        [user(text("a", **CACHED), text("b"))],
        [user(text("a")), user(text("b"))],
        [{"role": "user", "content": "a"}, user(text("b"))],
    ],
)
def test_blocks_and_messages_of_one_role_are_one_turn(given: list[Json]) -> None:
    assert messages(*given) == (Message("user", "a\nb"),)


def test_calls_and_results() -> None:
    assert messages(
        HI,
        assistant(thinking("Hm."), text("I look."), use("1", a=1), use("2", b="ü")),
        user(result("1"), result("2", [text("x"), text("y")])),
    ) == (
        Message("user", "hi"),
        Message(
            "assistant",
            "I look.",
            reasoning="Hm.",
            tool_calls=(ToolCall("1", "f", '{"a": 1}'), ToolCall("2", "f", '{"b": "ü"}')),
        ),
        Message("tool", "done", tool_call_id="1"),
        Message("tool", "x\ny", tool_call_id="2"),
    )


def test_results_have_the_order_of_their_calls_and_come_before_text() -> None:
    """Many templates have no place for ids, and Claude Code sorts the results by their time."""
    found = messages(
        assistant(use("1"), use("2")),
        user(text("Go on."), result("2"), result("1")),
    )
    assert [(each.role, each.tool_call_id) for each in found[1:]] == [
        ("tool", "1"),
        ("tool", "2"),
        ("user", None),
    ]


@pytest.mark.parametrize(
    ("more", "content"),
    [
        ({}, "no such file"),
        ({"is_error": False}, "no such file"),
        ({"is_error": True}, "Error: no such file"),
    ],
)
def test_a_result_that_is_an_error(more: Json, content: str) -> None:
    found = messages(assistant(use("1")), user(result("1", "no such file", **more)))
    assert found[1].content == content


@pytest.mark.parametrize("content", [None, "", []])
def test_an_empty_result(content: Any) -> None:
    assert messages(assistant(use("1")), user(result("1", content)))[1].content == ""


def test_a_call_without_a_result() -> None:
    """As after an abort."""
    found = messages(HI, assistant(use("1")), user(text("Stop.")))
    assert found[1:] == (
        Message("assistant", tool_calls=(ToolCall("1", "f", "{}"),)),
        Message("user", "Stop."),
    )


def test_a_result_without_a_call_is_refused() -> None:
    found = refused(messages=[HI, assistant(use("1")), user(text("a"), result("2"))])
    assert found.param == "messages[2].content[1].tool_use_id"
    assert "'2'" in found.message


@pytest.mark.parametrize(
    ("message", "role"),
    [
        (assistant(result("1")), "user"),
        (user(use("1")), "assistant"),
        (user(thinking("Hm.")), "assistant"),
        ({"role": "system", "content": [use("1")]}, "assistant"),
    ],
)
def test_a_block_in_a_message_of_another_role(message: Json, role: str) -> None:
    found = refused(messages=[assistant(use("1")), message])
    assert found.param == "messages[1].content[0]"
    assert f"belongs in one of the role `{role}`" in found.message


def test_thoughts_between_texts() -> None:
    given = assistant(thinking("A"), text("a"), thinking("B"), thinking("C"), text("b"))
    assert messages(HI, given)[1:] == (
        Message("assistant", "a", reasoning="A"),
        Message("assistant", "b", reasoning="B\n\nC"),
    )
    called = assistant(thinking("A"), text("a"), use("1"), thinking("B"), text("b"))
    (_, found) = messages(HI, called)
    assert (found.content, found.reasoning) == ("a\n\nb", "A\n\nB")
