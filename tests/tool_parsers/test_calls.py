"""What a call format finds becomes events: the arguments once, valid, and as early as certain."""

import re
from collections.abc import Callable
from typing import Any

import pytest

from mlx_server.events import Event, ToolCallDelta, ToolCallFinished, ToolCallStarted
from mlx_server.messages import Tool
from mlx_server.tool_parsers.calls import (
    HeldCall,
    ToolCallEmitter,
    argument_errors,
    new_id,
    new_short_id,
)
from mlx_server.tool_parsers.model_json import Malformed
from tests.tables import cases

WRITE = {
    "type": "object",
    "properties": {
        "text": {"type": "string"},
        "count": {"type": "integer"},
        "label": {"type": ["string", "null"]},
    },
}
TOOLS = [Tool("write", parameters=WRITE), Tool("now"), Tool("get_a"), Tool("GetA")]


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


@pytest.mark.parametrize("value", [float("inf"), float("nan"), [float("-inf")]])
def test_what_json_can_not_say_is_malformed(heard: Heard, value: Any) -> None:
    with pytest.raises(Malformed):
        heard.calls.start("now").value("x", value)
    with pytest.raises(Malformed):
        heard.calls.start("now").finish_with({"x": value})
    assert not heard.of(ToolCallDelta)
    assert not heard.of(ToolCallFinished)


SCHEMA: dict[str, Any] = {
    "properties": {
        "n": {"type": "integer"},
        "size": {"type": ["number", "integer", "null"]},
        "word": {"type": "string", "pattern": "^(a+)+$"},
        "any": {},
    },
    "required": ["n"],
}


@cases
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


STARTED, FINISHED = ToolCallStarted(0, 1, "x", "f"), ToolCallFinished(0, 1)


def pieces(*texts: str) -> list[Event]:
    return [ToolCallDelta(0, 1, text) for text in texts]


CALL = [STARTED, *pieces('{"a"', ": 1", "2}"), FINISHED]


@cases
def test_a_call_is_held_until_it_is_another_one_and_complete(
    before: str | None, to_its_end: bool, reported: list[int]
) -> None:
    events: list[Event] = []
    held = HeldCall(events.append, before, to_its_end=to_its_end)
    for event, count in zip(CALL, reported, strict=True):
        held.emit(event)
        assert events == CALL[:count]
        assert held.is_silent is (count == 0)


@pytest.mark.parametrize("to_its_end", [False, True])
def test_arguments_that_nobody_has_seen_can_be_taken_back(to_its_end: bool) -> None:
    events: list[Event] = []
    held = HeldCall(events.append, "{}", to_its_end=to_its_end)
    for event in (STARTED, *pieces("{")):
        held.emit(event)
    assert held.retract()
    for event in (*pieces("{", "}"), FINISHED):
        held.emit(event)
    assert (events, held.is_silent) == ([], True), "it is the call before once more"
    held = HeldCall(events.append, "[]", to_its_end=to_its_end)
    for event in CALL[:2]:
        held.emit(event)
    assert held.retract() is to_its_end
