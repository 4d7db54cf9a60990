"""Calls in JSON that a model wrote in the forms of other APIs: found whole, or not at all."""

import json
from typing import Any

import pytest

from mlx_server.repair.calls import FoundCall, read_arguments, read_calls
from mlx_server.repair.model_json import Malformed

TOOLS = {"f", "arguments"}
CALL = FoundCall("f", {"a": 1})
ARGUMENTS = {"a": 1}


def found(value: Any, *, repairs: bool = True) -> list[FoundCall]:
    text = value if isinstance(value, str) else json.dumps(value)
    return read_calls(text, TOOLS, repairs=repairs)


@pytest.mark.parametrize(
    "value",
    [
        {"name": "f", "arguments": ARGUMENTS},
        {"tool": "f", "args": '{"a": 1}'},
        {"recipient_name": "f", "parameters": ARGUMENTS},
        {"action": "f", "action_input": ARGUMENTS, "thought": "", "content": None},
        {"type": "function", "function": {"name": "f", "arguments": ARGUMENTS}},
        {"function": "f", "parameters": ARGUMENTS, "role": "assistant"},
        {"tool_calls": [{"function": {"name": "f", "arguments": '{"a": 1}'}}]},
        {"f": ARGUMENTS},
        [{"name": "f", "arguments": ARGUMENTS}],
    ],
    ids=str,
)
def test_forms_of_a_call(value: Any) -> None:
    assert found(value, repairs=False) == [CALL]


@pytest.mark.parametrize(
    "value",
    [
        {"name": "f"},
        {"name": "f", "arguments": ARGUMENTS, "comment": "I do it"},
        {"name": "f", "arguments": ARGUMENTS, "content": "I do it"},
        {"name": "f", "tool": "g", "arguments": ARGUMENTS},
        {"name": "f", "arguments": ARGUMENTS, "parameters": ARGUMENTS},
        {"name": "", "arguments": {}},
        {"name": 5, "arguments": {}},
        {"name": "f", "arguments": [1]},
        {"name": "f", "arguments": "go"},
        {"f": {}},
        {"g": ARGUMENTS},
        {"tool_calls": {"name": "f", "arguments": {}}},
        [{"name": "f", "arguments": {}}, "and more"],
        [],
        {},
        {"calls": []},
        "5",
        '{"name": "f", "name": "g", "arguments": {}}',
    ],
    ids=str,
)
def test_what_would_lose_a_word_or_has_no_call_is_none(value: Any) -> None:
    with pytest.raises(Malformed):
        found(value)


def test_a_tool_may_have_the_name_of_a_key() -> None:
    assert found({"arguments": ARGUMENTS}) == [FoundCall("arguments", {"a": 1})]
    assert found({"name": "f", "arguments": ARGUMENTS}) == [CALL]


@pytest.mark.parametrize(
    ("value", "id"),
    [
        ({"id": "x", "name": "f", "arguments": {}}, "x"),
        ({"call_id": "x", "tool_calls": [{"name": "f", "arguments": {}}]}, "x"),
        ({"id": "out", "tool_calls": [{"id": "x", "name": "f", "arguments": {}}]}, "x"),
        ({"id": "", "name": "f", "arguments": {}}, None),
        ({"id": 7, "name": "f", "arguments": {}}, None),
    ],
)
def test_the_id_is_the_nearest_text(value: Any, id: str | None) -> None:
    assert [call.id for call in found(value)] == [id]


def test_mistakes_are_noted_for_the_calls_that_had_them_and_read_only_if_allowed() -> None:
    broken = '{"name": "f", "arguments": {"a": 1,}}'
    assert [call.has_mistakes for call in found(broken)] == [True]
    inside = {"calls": [{"name": "f", "args": '{"a": 1,}'}, {"name": "f", "args": '{"a": 1}'}]}
    assert [call.has_mistakes for call in found(inside)] == [True, False]
    for each in (broken, inside):
        with pytest.raises(Malformed):
            found(each, repairs=False)


@pytest.mark.parametrize("depth", [300, 450, 10_000])
@pytest.mark.parametrize("begin", ['{"calls":[', '{"function":', '{"function":{"tool_calls":['])
def test_calls_within_calls_are_read_or_are_text(begin: str, depth: int) -> None:
    end = "".join({"{": "}", "[": "]"}.get(sign, "") for sign in reversed(begin))
    whole = begin * depth + '{"name":"f","arguments":{}}' + end * depth
    try:
        calls = found(whole)
    except Malformed:
        return
    assert calls == [FoundCall("f", {})]


def test_arguments_are_an_object() -> None:
    assert read_arguments('{"a": 1,}', repairs=True) == ARGUMENTS
    for text, repairs in (('{"a": 1,}', False), ("[1]", True), ("{", True)):
        with pytest.raises(Malformed):
            read_arguments(text, repairs=repairs)
