"""Calls whose events are held back: to their end, or while they repeat the call before."""

from mlx_server.events import Event, ToolCallDelta, ToolCallFinished, ToolCallStarted
from mlx_server.tool_parsers.calls import CompleteCall, RepeatedCall

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
