"""What a call format finds becomes events: the arguments once, valid, and as early as certain."""

import json
import re
from collections.abc import Callable
from typing import Any

import pytest

from mlx_server.events import Event, Repaired, ToolCallDelta, ToolCallFinished, ToolCallStarted
from mlx_server.repair import RepairPolicy
from mlx_server.repair.model_json import Malformed
from mlx_server.tool_parsers.call_format import parse_calls
from mlx_server.tool_parsers.calls import (
    CompleteCall,
    RepeatedCall,
    argument_errors,
    new_id,
    new_short_id,
)
from mlx_server.tool_parsers.formats import GEMMA4
from tests.tool_parsers.heard import TOOLS, Heard


def test_a_call_is_told_from_its_start_to_its_end(heard: Heard) -> None:
    call = heard.calls.start("write", "x1")
    call.text("text", "a")
    call.text("text", "\n")
    call.end_text("text")
    call.value("count", "5")
    call.finish()
    assert heard.events == [
        ToolCallStarted(3, 0, "x1", "write"),
        *(ToolCallDelta(3, 0, a) for a in ('{"text": "', "a", "\\n", '"', ', "count": 5', "}")),
        Repaired(3, "type", "tool_calls[0].function.arguments.count"),
        ToolCallFinished(3, 0),
    ]
    assert heard.calls.finished == 1


def test_a_call_without_arguments_has_an_empty_object(heard: Heard) -> None:
    heard.calls.start("now").finish()
    assert heard.arguments() == "{}"


def test_calls_are_counted_and_their_ids_differ(heard: Heard) -> None:
    for id in ("a", "a", None, ""):
        heard.calls.start("now", id).finish()
    started = heard.of(ToolCallStarted)
    assert [e.call for e in started] == [0, 1, 2, 3]
    assert started[0].id == "a"
    assert len({e.id for e in started}) == 4
    assert all(e.id.startswith("call_") and len(e.id) > 20 for e in started[1:])


def test_an_unknown_tool_is_malformed_and_nothing_is_told(heard: Heard) -> None:
    assert not heard.calls.knows("launch")
    assert not heard.calls.knows("geta"), "it may be either"
    for name in ("launch", "geta", ""):
        with pytest.raises(Malformed):
            heard.calls.start(name)
    assert heard.events == []


def test_a_call_has_the_name_of_the_tool_that_was_meant(heard: Heard) -> None:
    heard.calls.start("functions.Write").finish()
    assert heard.of(ToolCallStarted)[0].name == "write"


def test_only_text_that_stays_text_streams(heard: Heard) -> None:
    call = heard.calls.start("write")
    assert [call.streams(key) for key in ("text", "count", "label", "unknown")] == [
        True,
        *[False] * 3,
    ]
    call.value("text", "x")
    assert not call.streams("text"), "it was given already"


def test_an_empty_text_is_a_text(heard: Heard) -> None:
    call = heard.calls.start("write")
    call.end_text("text")
    call.finish()
    assert heard.arguments() == '{"text": ""}'


@pytest.mark.parametrize("held", [False, True])
def test_of_a_key_that_is_given_twice_the_last_value_counts(heard: Heard, *, held: bool) -> None:
    heard.calls.holds_calls = held
    call = heard.calls.start("write")
    call.text("text", "a")
    call.end_text("text")
    call.value("count", 1)
    call.value("text", "b")
    call.untyped("count", "2")
    call.finish()
    last = '{"text": "b", "count": 2}'
    first = '{"text": "a", "count": 1, "text": "b", "count": 2}'
    assert heard.arguments() == (last if held else first)
    assert heard.of(Repaired) == [Repaired(3, "json", "tool_calls[0].function.arguments")]


def test_a_key_is_not_given_twice_where_nothing_is_repaired(heard: Heard) -> None:
    heard.calls.allowed = RepairPolicy(mistakes=False)
    call = heard.calls.start("write")
    call.value("count", 1)
    with pytest.raises(Malformed):
        call.value("count", 2)


def test_of_a_key_in_arguments_that_come_as_text_the_last_value_counts(heard: Heard) -> None:
    heard.calls.whole("write", '{"count": 1, "count": 2}')
    assert heard.arguments() == '{"count": 2}'
    assert [each.what for each in heard.of(Repaired)] == ["json"]
    with pytest.raises(Malformed):
        heard.calls.whole("write", '{"x": 1, "\\u0078": 2,}')


def test_of_a_key_inside_a_value_the_last_counts() -> None:
    """A grammar can't forbid it where the schema does not name the key."""
    (call,) = parse_calls(GEMMA4, "call:now{a:{b:1,b:2}}<tool_call|>", TOOLS)
    assert call["arguments"] == {"a": {"b": 2}}


def test_all_at_once(heard: Heard) -> None:
    heard.calls.start("write").finish_with({"count": "5", "label": 7})
    assert json.loads(heard.arguments()) == {"count": 5, "label": "7"}
    heard.calls.start("now").finish_with({})
    assert heard.arguments(1) == "{}"


def test_a_repair_goes_on_where_the_call_was_broken(heard: Heard) -> None:
    call = heard.calls.start("write")
    call.text("text", "half a t")
    heard.calls.add_repaired([("write", {"text": "half a text", "count": 1}), ("now", {})])
    assert heard.arguments() == '{"text": "half a text", "count": 1}'
    assert [e.name for e in heard.of(ToolCallStarted)] == ["write", "now"]
    assert heard.calls.finished == 2


@pytest.mark.parametrize(
    "found",
    [
        [],
        [("write", {"text": "another"})],
        [("now", {})],
        [("write", {"text": "half a text"}), ("launch", {})],
        [("write", {"text": "half a text"}), ("now", {"x": float("inf")})],
    ],
)
def test_a_repair_is_made_of_all_calls_or_none(heard: Heard, found: Any) -> None:
    heard.calls.start("write").text("text", "half a t")
    reported = list(heard.events)
    with pytest.raises(Malformed):
        heard.calls.add_repaired(found)
    assert heard.events == reported


def test_a_number_that_becomes_text_keeps_its_digits(heard: Heard) -> None:
    heard.calls.whole("write", '{"text": 3.10, "count": 2.0}')
    assert heard.arguments() == '{"text": "3.10", "count": 2}'


@pytest.mark.parametrize("value", ["\ud800", ["\udc00"], {"\udbffx": "é"}])
def test_half_of_a_surrogate_pair_stays_as_it_was_written(heard: Heard, value: Any) -> None:
    call = heard.calls.start("now")
    call.value("x", value)
    call.finish()
    assert heard.arguments().encode()
    assert json.loads(heard.arguments()) == {"x": value}


@pytest.mark.parametrize("value", [float("inf"), float("nan"), [float("-inf")]])
def test_what_json_can_not_say_is_malformed(heard: Heard, value: Any) -> None:
    with pytest.raises(Malformed):
        heard.calls.start("now").value("x", value)
    with pytest.raises(Malformed):
        heard.calls.start("now").finish_with({"x": value})
    assert not heard.of(ToolCallDelta)
    assert not heard.of(ToolCallFinished)


def test_what_is_too_deep_for_json_is_malformed(heard: Heard) -> None:
    deep: list[Any] = []
    for _ in range(100_000):
        deep = [deep]
    with pytest.raises(Malformed):
        heard.calls.start("now").value("x", deep)


SCHEMA: dict[str, Any] = {
    "properties": {
        "n": {"type": "integer"},
        "size": {"type": ["number", "integer", "null"]},
        "word": {"type": "string", "pattern": "^(a+)+$"},
        "any": {},
    },
    "required": ["n"],
}


@pytest.mark.parametrize(
    ("arguments", "errors"),
    [
        ({"n": 1, "size": 0.5, "word": "a", "any": [1], "other": {}}, {}),
        ({"n": 2.0, "size": None}, {}),
        ({}, {"n": "it is required"}),
        ({"n": "1"}, {"n": "it should be of type integer"}),
        ({"n": True}, {"n": "it should be of type integer"}),
        ({"n": 1, "size": "x"}, {"size": "it should be of type null or number"}),
        ({"n": 1, "word": "b" * 99}, {}),
    ],
)
def test_required_arguments_and_types_are_checked_and_no_pattern(
    arguments: dict[str, Any], errors: dict[str, str]
) -> None:
    assert dict(argument_errors(arguments, SCHEMA)) == errors


@pytest.mark.parametrize(
    ("make", "form"), [(new_id, r"call_[0-9a-f]{24}"), (new_short_id, r"[a-zA-Z0-9]{9}")]
)
def test_ids_have_the_form_that_templates_accept_and_none_comes_twice(
    make: Callable[[], str], form: str
) -> None:
    made = [make() for _ in range(300)]
    assert [id for id in made if not re.fullmatch(form, id, re.ASCII)] == []
    assert len(set(made)) == len(made)


def test_short_ids_use_all_letters_and_digits() -> None:
    assert len(set("".join(new_short_id() for _ in range(2000)))) == 62


STARTED, FINISHED = ToolCallStarted(0, 1, "x", "f"), ToolCallFinished(0, 1)


def pieces(*texts: str) -> list[Event]:
    return [ToolCallDelta(0, 1, text) for text in texts]


def test_a_call_is_reported_once_it_is_complete() -> None:
    reported: list[Event] = []
    held = CompleteCall(reported.append)
    for event in (STARTED, *pieces("{", "}")):
        held.emit(event)
    assert (reported, held.is_silent) == ([], True)
    held.emit(FINISHED)
    assert (reported, held.is_silent) == ([STARTED, *pieces("{", "}"), FINISHED], False)


def test_a_call_is_reported_from_where_it_differs_from_the_one_before() -> None:
    reported: list[Event] = []
    held = RepeatedCall('{"a": 12}', reported.append)
    begun = [STARTED, *pieces('{"a"', ": 1")]
    for event in begun:
        held.emit(event)
    assert (reported, held.is_silent) == ([], True)
    for event in pieces("3", "}"):
        held.emit(event)
        begun.append(event)
        assert (reported, held.is_silent) == (begun, False)


def test_the_same_call_again_is_never_reported() -> None:
    reported: list[Event] = []
    held = RepeatedCall('{"a": 12}', reported.append)
    for event in (STARTED, *pieces('{"a": ', "12}"), FINISHED):
        held.emit(event)
    assert (reported, held.is_silent) == ([], True)


def test_a_call_that_ends_earlier_than_the_one_before_is_another() -> None:
    reported: list[Event] = []
    held = RepeatedCall('{"a": 12}', reported.append)
    for event in (STARTED, *pieces("{"), FINISHED):
        held.emit(event)
    assert reported == [STARTED, *pieces("{"), FINISHED]


def test_one_that_differs_may_still_be_held_to_its_end() -> None:
    reported: list[Event] = []
    held = RepeatedCall("{}", reported.append, CompleteCall(reported.append))
    for event in (STARTED, *pieces('{"a": 1}')):
        held.emit(event)
    assert (reported, held.is_silent) == ([], True)
    held.emit(FINISHED)
    assert (len(reported), held.is_silent) == (3, False)
