"""What a notation finds becomes events: the arguments once, valid, and as early as certain."""

import json
from typing import Any

import pytest

from mlx_server.events import Repaired, ToolCallDelta, ToolCallFinished, ToolCallStarted
from mlx_server.repair import RepairPolicy
from mlx_server.repair.model_json import Malformed
from mlx_server.tool_parsers.call_format import parse_calls
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
