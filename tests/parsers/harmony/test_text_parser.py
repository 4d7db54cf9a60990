"""Harmony that came as text: with control tokens, with some of them, and without any."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mlx_server.events import Event
from mlx_server.messages import Tool
from mlx_server.parsers.harmony_text import DELIMITERS, LONGEST_HEADER, HarmonyTextParser
from mlx_server.parsers.parse_context import ParseContext
from mlx_server.prompts.harmony.vocabulary import encoding
from tests.parsers.harmony.played import PIECES, TOOLS, content_of

TEXTS = PIECES | st.sampled_from([*DELIMITERS, "<|", "assistantfinal", "assistantcommentary", ":"])


def parser(tools: tuple[Tool, ...] = TOOLS) -> HarmonyTextParser:
    return HarmonyTextParser(encoding(), ParseContext(tools=tools))


def events(text: str, size: int = 10_000, *, cut: bool = False) -> list[Event]:
    reading = parser()
    pieces = (text[at : at + size] for at in range(0, len(text), size))
    found = [event for piece in pieces for event in reading.feed(-1, piece)]
    return found + reading.finish(cut=cut)


def read(text: str, *, cut: bool = False) -> list[Any]:
    return content_of(events(text, cut=cut))


THOUGHT, ANSWER, CALL = ["reasoning", "Hm."], ["text", "Yes."], ["call", "note", {"n": 1}]
HARMONY = (
    "<|channel|>analysis<|message|>Hm.<|end|>"
    "<|start|>assistant<|channel|>final<|message|>Yes.<|return|>"
)


@pytest.mark.parametrize(
    "text",
    [
        HARMONY,
        f"<|start|>assistant{HARMONY}",
        f" \n{HARMONY}",
        HARMONY.removeprefix("<|channel|>"),
        HARMONY.removesuffix("<|return|>"),
        "analysisHm.assistantfinalYes.",
        "assistantanalysisHm.assistantfinalYes.",
        "analysisHm.<|end|><|start|>assistant<|channel|>final<|message|>Yes.",
    ],
)
def test_a_thought_and_an_answer(text: str) -> None:
    assert read(text) == [THOUGHT, ANSWER]


@pytest.mark.parametrize(
    "text",
    [
        '<|channel|>commentary to=functions.note <|constrain|>json<|message|>{"n": 1}<|call|>',
        'commentary to=functions.note <|constrain|>json<|message|>{"n": 1}<|call|>',
        'to=functions.note<|channel|>commentary<|message|>{"n": 1}',
        'assistantcommentary to=functions.note json{"n": 1}',
        'commentary to=functions.note code{"n": 1}',
        'commentary to=functions.notejson{"n": 1}',
        'commentary to=functions.note{"n": 1}',
    ],
)
def test_a_call(text: str) -> None:
    assert read(text) == [CALL]


@pytest.mark.parametrize(
    ("written", "name"),
    [("tojson json", "tojson"), ("tojson", "tojson"), ("tojsonjson", "tojson"), ("tocode", "to")],
)
def test_a_tool_whose_name_ends_like_a_type_is_that_tool(written: str, name: str) -> None:
    reading = parser((Tool("tojson"), Tool("to")))
    found = reading.feed(-1, f'commentary to=functions.{written}{{"a": 1}}')
    assert content_of(found + reading.finish(cut=False)) == [["call", name, {"a": 1}]]


@pytest.mark.parametrize(
    "text",
    [
        *("Hello", "  \n Hello", "", " ", "assistant", "analysis", "final", "commentary"),
        *("final answer is 5", "finally", "final\nYes.", "analysis of it", "Analysis: none"),
        *("final: 5", "analysis: none", "commentary: none", "assistant: no", "assistant\n\nHi"),
        *("I say assistantfinal to you", "to=functions.note json{}", "to the end"),
        *("a < b", "<|", "<|chan", "<channel>final", "assistants"),
        "final" + "x" * LONGEST_HEADER + "<|message|>",
    ],
)
def test_an_answer_that_begins_as_neither_is_text_to_the_last_character(text: str) -> None:
    kept = text.removesuffix("<|message|>")
    assert read(text) == ([["text", kept]] if kept else [])


@given(text=st.lists(TEXTS, max_size=8).map("".join), size=st.integers(1, 7), cut=st.booleans())
def test_it_does_not_matter_how_the_text_is_cut(text: str, size: int, cut: bool) -> None:
    try:
        whole = read(text, cut=cut)
    except ValueError:  # a call that is not closed has no JSON
        return
    assert content_of(events(text, size, cut=cut)) == whole
    assert not any(mark in part for part in whole if part[0] == "text" for mark in DELIMITERS)
