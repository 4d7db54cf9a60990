"""What a notation finds becomes events: the arguments once, valid, and as early as certain."""

import json
from typing import Any

import pytest

from mlx_server.events import (
    Event,
    Repaired,
    ToolCallDelta,
    ToolCallFinished,
    ToolCallStarted,
)
from mlx_server.messages import Tool
from mlx_server.repair.malformed import Malformed
from mlx_server.tool_parsers.call_format import parse_calls
from mlx_server.tool_parsers.call_ids import new_id
from mlx_server.tool_parsers.calls import ToolCallEmitter
from mlx_server.tool_parsers.formats import GEMMA4

SCHEMA = {
    "type": "object",
    "properties": {
        "text": {"type": "string"},
        "count": {"type": "integer"},
        "label": {"type": ["string", "null"]},
    },
}
TOOLS = [Tool("write", parameters=SCHEMA), Tool("now"), Tool("get_a"), Tool("GetA")]


class Heard:
    def __init__(self) -> None:
        self.events: list[Event] = []
        self.calls = ToolCallEmitter(3, TOOLS, self.events.append)

    def of(self, kind: type[Any]) -> list[Any]:
        return [event for event in self.events if isinstance(event, kind)]

    def arguments(self, call: int = 0) -> str:
        return "".join(e.arguments for e in self.of(ToolCallDelta) if e.call == call)


@pytest.fixture
def heard() -> Heard:
    return Heard()


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
    assert new_id() != new_id()


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


def test_a_key_given_twice_is_malformed(heard: Heard) -> None:
    call = heard.calls.start("write")
    call.value("count", 1)
    with pytest.raises(Malformed):
        call.value("count", 2)
    with pytest.raises(Malformed):
        call.untyped("count", "1")


@pytest.mark.parametrize(
    "arguments", ['{"count": 1, "count": 1}', '{"x": {"": {}, "": {}}}', '{"x": 1, "\\u0078": 2,}']
)
def test_no_key_of_whole_arguments_is_given_twice(heard: Heard, arguments: str) -> None:
    with pytest.raises(Malformed):
        heard.calls.whole("write", arguments)
    assert heard.events == []


def test_no_parameter_of_gemmas_is_given_twice() -> None:
    with pytest.raises(ValueError, match="twice"):
        parse_calls(GEMMA4, "call:now{a:1,a:1}<tool_call|>", TOOLS)


def test_of_a_key_inside_a_value_the_last_counts() -> None:
    """A grammar can't forbid it where the schema does not name the key."""
    (call,) = parse_calls(GEMMA4, "call:now{a:{b:1,b:2}}<tool_call|>", TOOLS)
    assert call["arguments"] == {"a": {"b": 2}}


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
