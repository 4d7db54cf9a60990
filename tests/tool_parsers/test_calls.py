"""What a call format finds becomes events: the arguments once, valid, and as early as certain."""

from typing import Any

import pytest

from mlx_server.events import Event, ToolCallDelta, ToolCallFinished, ToolCallStarted
from mlx_server.messages import Tool
from mlx_server.tool_parsers.calls import (
    HeldCall,
    ToolCallEmitter,
    argument_errors,
)

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


STARTED, FINISHED = ToolCallStarted(0, 1, "x", "f"), ToolCallFinished(0, 1)


def pieces(*texts: str) -> list[Event]:
    return [ToolCallDelta(0, 1, text) for text in texts]


CALL = [STARTED, *pieces('{"a"', ": 1", "2}"), FINISHED]


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
