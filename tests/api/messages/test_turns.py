"""Blocks and messages become turns, in which results follow their calls."""

from typing import Any

import pytest

from mlx_server.messages import Message, ToolCall
from tests.api.messages.bodies import (
    CACHED,
    HI,
    assistant,
    messages,
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


def test_a_result_without_a_call_comes_last() -> None:
    given = user(text("a"), result("2"), result("1"))
    found = messages(HI, assistant(use("1")), given)[2:]
    assert [(each.role, each.tool_call_id) for each in found] == [
        ("tool", "1"),
        ("tool", "2"),
        ("user", None),
    ]


@pytest.mark.parametrize(
    ("message", "roles"),
    [
        (assistant(text("a"), result("1"), text("b")), ["assistant", "tool", "assistant"]),
        (user(text("a"), use("2"), text("b")), ["user", "assistant", "user"]),
        (user(thinking("Hm."), text("a")), ["assistant", "user"]),
        ({"role": "system", "content": [use("2")]}, ["assistant"]),
    ],
)
def test_a_block_in_a_message_of_another_role_is_a_turn(message: Json, roles: list[str]) -> None:
    found = messages(HI, assistant(use("1")), user(result("1")), message)[3:]
    assert [each.role for each in found] == roles


def test_thoughts_between_texts() -> None:
    given = assistant(thinking("A"), text("a"), thinking("B"), thinking("C"), text("b"))
    assert messages(HI, given)[1:] == (
        Message("assistant", "a", reasoning="A"),
        Message("assistant", "b", reasoning="B\n\nC"),
    )
    called = assistant(thinking("A"), text("a"), use("1"), thinking("B"), text("b"))
    (_, found) = messages(HI, called)
    assert (found.content, found.reasoning) == ("a\n\nb", "A\n\nB")
