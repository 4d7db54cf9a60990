"""What a parser of an answer with delimiters has found so far."""

import pytest

from mlx_server.events import (
    ReasoningDelta,
    Repaired,
    TextDelta,
    ToolCallFinished,
    ToolCallStarted,
)
from mlx_server.parsers.markup_calls import MarkupOutput
from mlx_server.parsers.markup_layout import MarkupLayout

STARTED, FINISHED = ToolCallStarted(2, 0, "id", "f"), ToolCallFinished(2, 0)


@pytest.fixture
def output() -> MarkupOutput:
    return MarkupOutput(MarkupLayout(), 2)


def texts(output: MarkupOutput) -> list[str]:
    return [each.separated for each in output.take() if isinstance(each, TextDelta)]


def test_events_have_the_answers_index_and_are_taken_once(output: MarkupOutput) -> None:
    output.add("a")
    output.add_reasoning("b")
    taken = output.take()
    assert taken == [TextDelta(2, "a"), ReasoningDelta(2, "b")]
    assert output.take() == []
    output.put_back(taken)
    assert output.take() == taken


@pytest.mark.parametrize(
    ("pieces", "begun"),
    [
        ([""], False),
        ([" "], False),
        (["a"], True),
        (["a", " "], True),
        (["a", "\n"], False),
        (["a\n", " ", "b"], True),
        (["a\nb"], True),
        (["a\n", "\n"], False),
        ([" ", "\t"], False),
    ],
)
def test_a_line_has_begun_once_there_is_more_than_white_space(
    output: MarkupOutput, pieces: list[str], begun: bool
) -> None:
    for piece in pieces:
        output.add(piece)
    assert output.line_begun is begun


def test_white_space_alone_is_neither_text_nor_an_answer(output: MarkupOutput) -> None:
    for text, is_text in ((" \n", False), ("a", True), (" ", True)):
        output.add_text(text)
        assert (output.in_text, output.answered) == (is_text, is_text)


def test_reasoning_alone_is_no_answer_and_a_call_is_one(output: MarkupOutput) -> None:
    output.add_reasoning("Hm.")
    assert not output.answered
    output.emit(STARTED)
    assert output.answered


def test_after_a_call_a_thought_may_open_again(output: MarkupOutput) -> None:
    output.add_text("a")
    output.emit(STARTED)
    assert output.in_text, "the call may still turn out to be none"
    output.emit(FINISHED)
    assert not output.in_text


@pytest.mark.parametrize(
    ("space", "after", "found"),
    [
        ("", "b", ["a", "\nb"]),
        (" ", "b", ["a", " b"]),
        ("\n\n", "b", ["a", "\n\nb"]),
        ("\n\n", " b", ["a", " b"]),
    ],
)
def test_texts_around_a_call_are_never_glued(
    output: MarkupOutput, space: str, after: str, found: list[str]
) -> None:
    output.add_text("a")
    output.space_before_call = space
    for event in (STARTED, FINISHED):
        output.emit(event)
    output.add_text(after)
    assert texts(output) == found


@pytest.mark.parametrize(("space", "found"), [("", ["a", "\nb"]), ("\n\n", ["a", "\n\nb"])])
def test_messages_are_separated_by_the_white_space_at_their_ends(
    output: MarkupOutput, space: str, found: list[str]
) -> None:
    output.add_text("a")
    output.end_message(space)
    output.add_text("b")
    assert texts(output) == found


def test_thoughts_are_separated_apart_from_texts(output: MarkupOutput) -> None:
    output.add_reasoning("one")
    output.add_text("a")
    output.begin_thought()
    output.add_reasoning("two")
    output.add_text("b")
    assert output.reasoning == "one\ntwo"
    assert texts(output) == ["a", "\nb"]


def test_a_repair_is_reported_once_a_kind(output: MarkupOutput) -> None:
    output.add_repair("format")
    output.add_repair("reasoning")
    output.add_repair("format")
    expected = [Repaired(2, "format", "content"), Repaired(2, "reasoning", "content")]
    assert output.take() == expected
    output.add_repair("format")
    assert output.take() == []


def test_a_block_of_code_that_is_open_is_known(output: MarkupOutput) -> None:
    for text, inside in (("```py\n", True), ("x\n", True), ("``", True), ("`\n", False)):
        output.add_text(text)
        assert output.in_code is inside
    output.add_reasoning("```\n")
    assert not output.in_code, "reasoning is no text"


@pytest.mark.parametrize(("trims", "trims_text"), [(True, True), (True, False), (False, True)])
def test_white_space_waits_for_what_follows_if_it_may_be_trimmed(
    trims: bool, trims_text: bool
) -> None:
    output = MarkupOutput(MarkupLayout(trims=trims, trims_text=trims_text), 0)
    output.add("a \n")
    waits = trims and trims_text
    assert texts(output) == (["a"] if waits else ["a \n"])
    output.add("b")
    assert texts(output) == ([" \nb"] if waits else ["b"])
