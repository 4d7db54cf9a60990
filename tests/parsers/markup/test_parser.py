"""Delimiters of reasoning and calls, in a layout of this file's own: what they mean, and where."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from mlx_server.events import TextDelta, ToolCallDelta
from mlx_server.parsers.markup_parser import MarkupParser
from mlx_server.parsers.parse_context import ParseContext
from tests.parsers.markup.played import (
    BARE,
    CLOSE,
    CONTROL,
    LAYOUT,
    NOW,
    OPEN,
    TOOLS,
    call,
    continued,
    folded,
    heard,
    noise,
    reading,
    units,
)

DEEP = OPEN + '{"function": ' * 2000 + CLOSE
WRITTEN = Path(__file__).with_name("answers.yaml").read_text("utf-8")
CASES: dict[str, Any] = {
    **yaml.load(WRITTEN.replace("«NOW»", json.dumps(NOW)[1:-1]), yaml.CSafeLoader),
    "frames in frames": (DEEP, {"text": DEEP}),
}


@pytest.mark.slow
@pytest.mark.parametrize(("output", "wanted"), CASES.values(), ids=CASES)
@pytest.mark.parametrize(
    "control", [{}, CONTROL], ids=["delimiters by text", "delimiters as tokens"]
)
def test_what_it_means(output: str, wanted: dict[str, Any], control: dict[int, str]) -> None:
    for size in (1, 2, 3, 7, 12):
        assert reading(output, size, control=control) == wanted, size


@pytest.mark.parametrize(
    ("output", "wanted"),
    [
        (f"a {OPEN}" + '{"name": "wri', {"text": "a"}),
        (f"a {OPEN}" + '{"name": "write", "arguments": {"te', {"text": "a", "unfinished": 1}),
        (OPEN + call("half")[:-4], {"unfinished": 1}),
        (f"a {OPEN}{NOW}", {"text": "a", "calls": [{}]}),
        (f"{OPEN}{NOW}{call('x')[:20]}", {"calls": [{}]}),
        ("<think>a", {"reasoning": "a"}),
        ("a <thi", {"text": "a <thi"}),
        (f"{OPEN}no{CLOSE}", {"text": f"{OPEN}no{CLOSE}"}),
    ],
)
def test_what_is_left_of_an_answer_that_was_cut(output: str, wanted: dict[str, Any]) -> None:
    for size in range(1, 13):
        assert reading(output, size, cut=True) == wanted, size


@pytest.mark.parametrize("size", [1, 3, 1000])
def test_text_that_a_grammar_holds_has_no_delimiters(size: int) -> None:
    text = f'{{"a": "<think>so</think> {OPEN}{NOW}{CLOSE} <gone>"}}'
    for output in (text, f"<think>Hm.</think>\n{text}", f"<gone>{text}"):
        parser = MarkupParser(LAYOUT, ParseContext(tools=TOOLS, formatted=True))
        found = folded(heard(parser, units(output, size, {}), cut=False))
        assert found == {"text": text, **({"reasoning": "Hm."} if "Hm." in output else {})}
    parser = MarkupParser(LAYOUT, ParseContext(tools=TOOLS, formatted=True))
    called = folded(heard(parser, units(f"{OPEN}{NOW}{CLOSE}", size, {}), cut=False))
    assert called["calls"], "instead of the text"


def test_places() -> None:
    parser = MarkupParser(LAYOUT, ParseContext(tools=TOOLS, control=CONTROL))
    ids = {delimiter: id for id, delimiter in CONTROL.items()}
    places = [parser.section]
    for token, text in [
        (ids["<think>"], ""),
        (-1, "a"),
        (ids["</think>"], ""),
        (-1, "b"),
        (ids[OPEN], ""),
        (-1, NOW),
        (ids[CLOSE], ""),
        (-1, "c"),
    ]:
        parser.feed(token, text)
        places.append(parser.section)
    text, reasoning, inside = "text", "reasoning", "call"
    assert places == [text, reasoning, reasoning, text, text, inside, inside, text, text]


@pytest.mark.slow
@given(noise, st.integers(1, 7), st.booleans(), st.sampled_from([{}, CONTROL]))
def test_noise_reads_the_same_however_it_is_cut(
    output: str, size: int, cut: bool, control: dict[int, str]
) -> None:
    for layout in (LAYOUT, replace(LAYOUT, calls_end_reasoning=True), BARE):
        wanted = reading(output, 1, layout=layout, cut=cut, control=control)
        assert reading(output, size, layout=layout, cut=cut, control=control) == wanted


# Answers that continue a message


@pytest.mark.parametrize(
    ("output", "expected"),
    [
        (" world.", {"text": " world."}),
        ("\n\nAnd so on.\n", {"text": "\n\nAnd so on.\n"}),
        (f" I look. {OPEN}{NOW}{CLOSE}", {"text": " I look.", "calls": [{}]}),
        ("", {}),
    ],
)
def test_a_text_goes_on_with_its_own_white_space(output: str, expected: dict[str, Any]) -> None:
    assert continued(output) == [expected]


@pytest.mark.parametrize(
    ("output", "expected"),
    [
        (" so on.</think>\n\nHi.", {"reasoning": " so on.", "text": "Hi."}),
        (f" on.</think>{OPEN}{NOW}{CLOSE}", {"reasoning": " on.", "calls": [{}]}),
        (" on", {"reasoning": " on"}),
    ],
)
def test_reasoning_goes_on_with_its_own_white_space(output: str, expected: dict[str, Any]) -> None:
    assert continued(output, "<think>") == [expected]


def test_a_call_without_delimiters_stands_anywhere_if_its_tool_is_known() -> None:
    for size in range(1, 12):
        assert reading(NOW, size, layout=BARE) == {"calls": [{}]}
        assert reading(f"<think>a</think>\n{NOW}", size, layout=BARE)["calls"] == [{}]
        assert reading(f"Like {NOW}", size, layout=BARE) == {"text": "Like", "calls": [{}]}
        unknown = NOW.replace("now", "then")
        assert reading(f"Like {unknown}", size, layout=BARE) == {"text": f"Like {unknown}"}
        assert reading('{"a": 1}', size, layout=BARE) == {"text": '{"a": 1}'}


def test_text_and_arguments_come_as_they_are_written() -> None:
    parser = MarkupParser(LAYOUT, ParseContext(tools=TOOLS))
    events = [list(parser.feed(-1, c)) for c in f"ab{OPEN}{call('xy')}{CLOSE}"]
    assert events[:2] == [[TextDelta(0, "a")], [TextDelta(0, "b")]]
    deltas = [e.arguments for step in events for e in step if isinstance(e, ToolCallDelta)]
    assert deltas == ['{"text": "', "x", "y", '"', "}"]


STOP = "<|stop|>"
STOPS = replace(LAYOUT, stops=(STOP,))


@pytest.mark.parametrize("size", [1, 3, 8, 100])
def test_a_stop_token_that_is_spelled_out_is_no_text_at_the_end(size: int) -> None:
    for output in (f"Done.{STOP}", f"<think>Hm.</think>Done.{STOP}\n"):
        assert reading(output, size, layout=STOPS)["text"].strip() == "Done."
    assert reading(f"{OPEN}{NOW}{CLOSE}{STOP}", size, layout=STOPS) == {"calls": [{}]}


@pytest.mark.parametrize("size", [1, 3, 8, 100])
def test_a_stop_token_is_text_within_a_text_and_where_the_vocabulary_has_it(size: int) -> None:
    about = f"It ends with {STOP} as a rule."
    assert reading(about, size, layout=STOPS) == {"text": about}
    ending = f"It ends with {STOP}"
    parser = MarkupParser(STOPS, ParseContext(control={9: STOP}))
    said = units(ending, size, {})
    assert folded(heard(parser, said, cut=False)) == {"text": ending}


@pytest.mark.parametrize("size", [1, 2, 5, 100])
def test_a_closing_delimiter_within_a_line_is_text_unless_it_is_a_token(size: int) -> None:
    about = f"A call ends with {CLOSE} and so on."
    assert reading(about, size) == {"text": about}
    assert reading(about, size, control=CONTROL) == {"text": "A call ends with and so on."}
