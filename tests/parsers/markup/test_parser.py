"""Delimiters of reasoning and calls, in a layout of this file's own: what they mean, and where."""

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

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

CASES = {
    "brackets end an answer after a call": (
        f"{OPEN}{NOW}{CLOSE}\n]}}",
        {"calls": [{}]},
    ),
    "brackets begin a text after a call": (
        f"{OPEN}{NOW}{CLOSE}]}} is a smile.",
        {"calls": [{}], "text": "]} is a smile."},
    ),
    "text": ("Hi.\n", {"text": "Hi.\n"}),
    "reasoning": ("<think>\nHm.\n</think>\n\nHi.", {"reasoning": "Hm.", "text": "Hi."}),
    "reasoning without an end": ("<think>Hm.\n", {"reasoning": "Hm.\n"}),
    "reasoning again": ("<think>a</think>\n<think>b</think>c", {"reasoning": "a\nb", "text": "c"}),
    "reasoning that follows at once": (
        "<think>a</think><think>b</think>c",
        {"reasoning": "a\nb", "text": "c"},
    ),
    "reasoning in a text": (
        "<think>a</think>b<think>c</think>d",
        {"reasoning": "a", "text": "b<think>c</think>d"},
    ),
    "a text about tags": (
        "Write `<think>` and </think>, or '</think>' alone.",
        {"text": "Write `<think>` and </think>, or '</think>' alone."},
    ),
    "a tag that is opened twice": ("<think>\n<think>a</think>b", {"reasoning": "a", "text": "b"}),
    "a tag that is closed twice": (
        "<think>a</think>\n</think>\nb",
        {"reasoning": "a", "text": "b"},
    ),
    "a thought in a thought": (
        "<think>a<think>b</think>c</think>d",
        {"reasoning": "a<think>b</think>c", "text": "d"},
    ),
    "a thought that mentions a tag": (
        "<think>a `<think>` tag</think>b </think> c",
        {"reasoning": "a `<think>` tag", "text": "b </think> c"},
    ),
    "a thought with an open tag, and a call": (
        f"<think>a<think>b</think>{OPEN}{NOW}{CLOSE}c",
        {"reasoning": "a<think>b", "calls": [{}], "text": "c"},
    ),
    "reasoning after a call": (
        f"{OPEN}{NOW}{CLOSE}\n<think>a</think>\nb",
        {"reasoning": "a", "calls": [{}], "text": "b"},
    ),
    "a tag of other families": ("\n<thinking>a</thinking>\nb", {"reasoning": "a", "text": "b"}),
    "a tag of other families, closed by the own": (
        "<reasoning>a<think>b</think>c</think>d",
        {"reasoning": "a<think>b</think>c", "text": "d"},
    ),
    "a tag of other families that is not closed": ("<thought>a\n", {"reasoning": "a\n"}),
    "a tag of other families in a text": (
        "a <thinking>b</thinking>",
        {"text": "a <thinking>b</thinking>"},
    ),
    "an end without reasoning": ("a\n</think>\nb", {"text": "a\nb"}),
    "an end without reasoning, in a line": ("a </think> b", {"text": "a </think> b"}),
    "two ends in a row": ("<think>a</think></think>b", {"reasoning": "a", "text": "b"}),
    "an end after a line of text": (
        "<think>a</think>b</think>",
        {"reasoning": "a", "text": "b</think>"},
    ),
    "a call": (f"a\n{OPEN}{NOW}{CLOSE}\nb", {"text": "a\n\nb", "calls": [{}]}),
    "a call next to the text": (f"a{OPEN}{NOW}{CLOSE}b", {"text": "a\nb", "calls": [{}]}),
    "calls in one": (f"{OPEN}{NOW} {call('x')}{CLOSE}", {"calls": [{}, {"text": "x"}]}),
    "a call in reasoning": (
        f"<think>{OPEN}{NOW}{CLOSE}</think>b",
        {"reasoning": f"{OPEN}{NOW}{CLOSE}", "text": "b"},
    ),
    "a dropped delimiter": ("a <gone> b", {"text": "a b"}),
    "a stray end": (f"a {CLOSE}\nb", {"text": "a\nb"}),
    "a stray end after a text": (f"a {CLOSE} ", {"text": "a "}),
    "no call": (f"a {OPEN} b {CLOSE} c", {"text": f"a {OPEN} b {CLOSE} c"}),
    "no call, and its end alone": (
        f"{OPEN}b{CLOSE}c{CLOSE}\nd",
        {"text": f"{OPEN}b{CLOSE}c\nd"},
    ),
    "no call without an end": (f"a {OPEN} b", {"text": f"a {OPEN} b"}),
    "an unknown tool": (
        OPEN + '{"name": "fly", "arguments": {}}' + CLOSE,
        {"text": OPEN + '{"name": "fly", "arguments": {}}' + CLOSE},
    ),
    "a call and then none": (
        f"{OPEN}{NOW} hm {CLOSE} b",
        {"calls": [{}], "text": " hm b"},
    ),
    "a slip": (OPEN + '{"name": "now", "arguments": {},}' + CLOSE, {"calls": [{}]}),
    "a slip behind a call": (
        OPEN + NOW + call(f"{OPEN}{{x}}").replace('"}}', '",}}') + CLOSE,
        {"calls": [{}, {"text": f"{OPEN}{{x}}"}]},
    ),
    "a slip in what was begun": (
        OPEN + call("a long text").replace('"}}', '",}}') + CLOSE + "b",
        {"calls": [{"text": "a long text"}], "text": "b"},
    ),
    "a call in a frame": (
        OPEN + '{"id": "1", "type": "function", "function": ' + NOW + ', "index": 0}' + CLOSE,
        {"calls": [{}]},
    ),
    "a frame without a call": (
        OPEN + '{"id": "1", "type": "function"}' + CLOSE,
        {"text": OPEN + '{"id": "1", "type": "function"}' + CLOSE},
    ),
    "frames in frames": (
        OPEN + '{"function": ' * 2000 + CLOSE,
        {"text": OPEN + '{"function": ' * 2000 + CLOSE},
    ),
    "delimiters in a text": (
        OPEN + call(f"{CLOSE}<think>{OPEN}") + CLOSE,
        {"calls": [{"text": f"{CLOSE}<think>{OPEN}"}]},
    ),
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


def test_what_the_prompt_began() -> None:
    for size in range(1, 6):
        found = reading("Hm.</think>Hi.", size, ends_with="x<think>\n")
        assert found == {"reasoning": "Hm.", "text": "Hi."}


def test_space_may_be_the_texts_own() -> None:
    output = f"<think>\na\n</think>\nb\n{OPEN}{NOW}{CLOSE}\nc"
    for size in range(1, 12):
        found = reading(output, size, layout=replace(LAYOUT, trims=False))
        assert found == {"reasoning": "\na\n", "text": "\nb\n\nc", "calls": [{}]}
        found = reading(output, size, layout=replace(LAYOUT, trims_text=False))
        assert found == {"reasoning": "a", "text": "\nb\n\nc", "calls": [{}]}


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


@given(st.sampled_from(["", "\n", "a", "a ", f"{OPEN}{NOW}{CLOSE}", f"a{OPEN}{NOW}{CLOSE}\n"]))
def test_where_reasoning_may_open(before: str) -> None:
    found = reading(f"{before}<think>b</think>c")
    opens = before.endswith((CLOSE, f"{CLOSE}\n", "\n")) or not before
    assert found.get("reasoning") == ("b" if opens else None)
    assert found["text"].endswith("c" if opens else "<think>b</think>c")


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


@pytest.mark.parametrize("output", ['<think>"}', f'{OPEN}"}}', ' </think> "}', "}"])
def test_formatted_text_goes_on_without_delimiters(output: str) -> None:
    assert continued(output, formatted=True) == [{"text": output}]


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
