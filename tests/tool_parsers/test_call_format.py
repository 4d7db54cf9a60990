"""A block of calls, from after its opening delimiter: read, repaired, or no block."""

from collections.abc import Sequence
from typing import Any

import pytest

from mlx_server.events import Event, ToolCallFinished
from mlx_server.messages import Tool
from mlx_server.repair import RepairPolicy
from mlx_server.repair.model_json import Malformed, UnknownTool
from mlx_server.tool_parsers.call_format import (
    CallFormat,
    finished_calls,
    parse_calls,
    read_block,
)
from mlx_server.tool_parsers.calls import ToolCallEmitter
from mlx_server.tool_parsers.json_calls import call_object
from mlx_server.tool_parsers.source import Source, Steps, complete_source

TOOLS = [Tool("f"), Tool("g")]
CLOSE = "</calls>"
F = '{"name": "f", "arguments": {"a": 1}}'
G = '{"name": "g", "arguments": {}}'
BROKEN = '{"name": "f", "arguments": 5}'

repaired: list[str] = []
"""The texts that were to be repaired."""


def _block(source: Source, calls: ToolCallEmitter) -> Steps[None]:
    while (yield from source.expect("{", CLOSE)) != CLOSE:
        yield from call_object(source, calls)


def _repair(text: str) -> Sequence[tuple[str, dict[str, Any]]]:
    repaired.append(text)
    if "beyond" in text:
        raise Malformed("beyond repair")
    return [("g", {"repaired": True})]


PLAIN = CallFormat(_block, closes=(CLOSE,))
REPAIRED = CallFormat(_block, closes=(CLOSE,), repair=_repair)


@pytest.fixture(autouse=True)
def _nothing_repaired() -> None:
    repaired.clear()


def parsed(call_format: CallFormat, text: str) -> list[tuple[str, Any]]:
    found = parse_calls(call_format, text, TOOLS)
    return [(call["name"], call["arguments"]) for call in found]


def test_calls_are_read_up_to_the_end_of_the_block() -> None:
    assert parsed(PLAIN, CLOSE) == []
    assert parsed(PLAIN, f"{F}{G}{CLOSE} and {G}") == [("f", {"a": 1}), ("g", {})]


def test_of_a_block_that_breaks_the_calls_before_are_kept() -> None:
    assert parsed(PLAIN, f"{F}oops") == [("f", {"a": 1})]
    for text in ("oops", "", BROKEN + CLOSE):
        with pytest.raises(ValueError, match=r"\w"):
            parsed(PLAIN, text)


def test_what_broke_is_repaired_from_the_last_call_that_was_finished() -> None:
    assert parsed(REPAIRED, f"{F}{BROKEN}, and more{CLOSE}") == [
        ("f", {"a": 1}),
        ("g", {"repaired": True}),
    ]
    assert repaired == [f"{BROKEN}, and more"]


def read(text: str, allowed: RepairPolicy | None = None) -> tuple[list[Event], Exception | None]:
    events: list[Event] = []
    try:
        more = [allowed] if allowed else []
        read_block(REPAIRED, complete_source(text), TOOLS, events, *more)
    except Malformed as error:
        return events, error
    return events, None


def test_a_repair_that_fails_reports_the_first_mistake() -> None:
    events, error = read(BROKEN + "beyond" + CLOSE)
    assert repaired
    assert error
    assert "beyond" not in str(error)
    assert not any(isinstance(event, ToolCallFinished) for event in events)


def test_a_call_of_no_tool_is_not_repaired_to_another() -> None:
    events, error = read('{"name": "launch", "arguments": {}}' + CLOSE)
    assert isinstance(error, UnknownTool)
    assert error.name == "launch"
    assert (events, repaired) == ([], [])


def test_names_are_repaired_where_it_is_allowed() -> None:
    text = '{"name": "functions.F", "arguments": {}}' + CLOSE
    events, error = read(text)
    assert error is None
    assert finished_calls(events)[0]["name"] == "f"
    _, error = read(text, RepairPolicy(mistakes=False))
    assert isinstance(error, Malformed)
