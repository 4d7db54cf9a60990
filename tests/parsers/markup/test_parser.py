"""Delimiters of reasoning and calls, in a layout of this file's own: what they mean, and where."""

import json
import re
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mlx_server.events import (
    Event,
    ReasoningDelta,
    TextDelta,
    ToolCallDelta,
    ToolCallFinished,
    ToolCallStarted,
)
from mlx_server.messages import Tool
from mlx_server.parsers.markup.parser import MarkupLayout, MarkupParser
from mlx_server.parsers.parse_context import ParseContext
from mlx_server.repair.malformed import Malformed
from mlx_server.tool_parsers.call_format import CallFormat
from mlx_server.tool_parsers.calls import ToolCallEmitter
from mlx_server.tool_parsers.json_calls import call_object, repaired
from mlx_server.tool_parsers.source import Source, Steps

pytestmark = pytest.mark.tables

OPEN, CLOSE = "<call>", "</call>"
DELIMITERS = ("<think>", "</think>", OPEN, CLOSE, "<gone>")
CONTROL = dict(enumerate([*DELIMITERS, "<|end|>"], start=300))
TOOLS = (
    Tool("now"),
    Tool("write", parameters={"properties": {"text": {"type": "string"}}}),
)


def _calls(source: Source, calls: ToolCallEmitter) -> Steps[None]:
    while True:
        yield from source.space()
        if (yield from source.expect("{", CLOSE)) == CLOSE:
            return
        yield from call_object(source, calls, (CLOSE,))


def _bare(source: Source, calls: ToolCallEmitter) -> Steps[None]:
    yield from call_object(source, calls)
    if not (yield from source.at_end()):
        raise Malformed("more than a call")


MARKED = CallFormat(_calls, opens=(OPEN,), closes=(CLOSE,), repair=repaired)
LAYOUT = MarkupLayout(call_formats=(MARKED,), dropped=("<gone>",))
BARE = MarkupLayout(call_formats=(CallFormat(_bare, begins=("{",)),))

NOW = '{"name": "now", "arguments": {}}'


def call(text: str) -> str:
    return json.dumps({"name": "write", "arguments": {"text": text}})


def units(output: str, size: int, control: dict[int, str]) -> list[tuple[int, str]]:
    found, at = [], 0
    while at < len(output):
        token = next(
            (id for id, delimiter in control.items() if output.startswith(delimiter, at)), -1
        )
        if token >= 0:
            found.append((token, ""))
            at += len(control[token])
            continue
        ends = [end for delimiter in control.values() if (end := output.find(delimiter, at)) >= 0]
        end = min([at + size, len(output), *ends])
        found.append((-1, output[at:end]))
        at = end
    return found


def heard(parser: MarkupParser, said: Sequence[tuple[int, str]], *, cut: bool) -> list[Event]:
    events = [event for token, text in said for event in parser.feed(token, text)]
    return events + parser.finish("", cut=cut)


def reading(
    output: str,
    size: int = 1000,
    *,
    layout: MarkupLayout = LAYOUT,
    cut: bool = False,
    control: dict[int, str] | None = None,
    ends_with: str = "",
    tools: tuple[Tool, ...] = TOOLS,
) -> dict[str, Any]:
    tokens = {} if control is None else control
    parser = MarkupParser(layout, ParseContext(tools=tools, ends_with=ends_with, control=tokens))
    return folded(heard(parser, units(output, size, tokens), cut=cut))


def folded(events: Sequence[Event]) -> dict[str, Any]:
    finished = {e.call for e in events if isinstance(e, ToolCallFinished)}
    arguments = {
        e.call: "".join(
            d.arguments for d in events if isinstance(d, ToolCallDelta) and d.call == e.call
        )
        for e in events
        if isinstance(e, ToolCallStarted)
    }
    found = {
        "reasoning": "".join(e.separated for e in events if isinstance(e, ReasoningDelta)),
        "text": "".join(e.separated for e in events if isinstance(e, TextDelta)),
        "calls": [json.loads(arguments[number]) for number in sorted(finished)],
        "unfinished": len(arguments) - len(finished),
    }
    return {key: value for key, value in found.items() if value}


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


@pytest.mark.parametrize(("output", "wanted"), CASES.values(), ids=CASES)
@pytest.mark.parametrize(
    "control", [{}, CONTROL], ids=["delimiters by text", "delimiters as tokens"]
)
def test_what_it_means(output: str, wanted: dict[str, Any], control: dict[int, str]) -> None:
    for size in range(1, 13):
        assert reading(output, size, control=control) == wanted, size


@pytest.mark.parametrize("size", [1, 2, 5, 100])
def test_a_closing_delimiter_within_a_line_is_text_unless_it_is_a_token(size: int) -> None:
    about = f"A call ends with {CLOSE} and so on."
    assert reading(about, size) == {"text": about}
    assert reading(about, size, control=CONTROL) == {"text": "A call ends with and so on."}


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


def test_a_call_may_end_reasoning() -> None:
    layout = replace(LAYOUT, calls_end_reasoning=True)
    for size in range(1, 12):
        found = reading(f"<think>a {OPEN}{NOW}{CLOSE}b</think>c", size, layout=layout)
        assert found == {"reasoning": "a", "calls": [{}], "text": "bc"}


def test_space_may_be_the_texts_own() -> None:
    output = f"<think>\na\n</think>\nb\n{OPEN}{NOW}{CLOSE}\nc"
    for size in range(1, 12):
        found = reading(output, size, layout=replace(LAYOUT, trims=False))
        assert found == {"reasoning": "\na\n", "text": "\nb\n\nc", "calls": [{}]}
        found = reading(output, size, layout=replace(LAYOUT, trims_text=False))
        assert found == {"reasoning": "a", "text": "\nb\n\nc", "calls": [{}]}


def test_a_call_without_delimiters_stands_anywhere_if_its_tool_is_known() -> None:
    for size in range(1, 12):
        assert reading(NOW, size, layout=BARE) == {"calls": [{}]}
        assert reading(f"<think>a</think>\n{NOW}", size, layout=BARE)["calls"] == [{}]
        assert reading(f"Like {NOW}", size, layout=BARE) == {"text": "Like", "calls": [{}]}
        unknown = NOW.replace("now", "then")
        assert reading(f"Like {unknown}", size, layout=BARE) == {"text": f"Like {unknown}"}
        assert reading('{"a": 1}', size, layout=BARE) == {"text": '{"a": 1}'}


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


def test_delimiters_of_the_vocabulary_are_no_text_and_text_is_no_delimiter() -> None:
    output = f"a <think>b</think> {OPEN}{NOW}{CLOSE}"
    parser = MarkupParser(LAYOUT, ParseContext(tools=TOOLS, control=CONTROL))
    assert folded(heard(parser, [(-1, c) for c in output], cut=False)) == {"text": output}


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


def test_text_and_arguments_come_as_they_are_written() -> None:
    parser = MarkupParser(LAYOUT, ParseContext(tools=TOOLS))
    events = [list(parser.feed(-1, c)) for c in f"ab{OPEN}{call('xy')}{CLOSE}"]
    assert events[:2] == [[TextDelta(0, "a")], [TextDelta(0, "b")]]
    deltas = [e.arguments for step in events for e in step if isinstance(e, ToolCallDelta)]
    assert deltas == ['{"text": "', "x", "y", '"', "}"]


PIECES = (
    *(
        *DELIMITERS,
        NOW,
        call("x"),
        "{",
        "}",
        '"',
        ",",
        "a",
        " ",
        "\n",
        "<",
        "</",
        "<thi",
        "nk>",
        "'",
    ),
    *('{"name": "now"', '"arguments": ', '{"name": "write", "arguments": {"text": "'),
)
noise = st.lists(st.sampled_from(PIECES), max_size=12).map("".join)


@given(noise, st.integers(1, 7), st.booleans(), st.sampled_from([{}, CONTROL]))
def test_noise_reads_the_same_however_it_is_cut(
    output: str, size: int, cut: bool, control: dict[int, str]
) -> None:
    for layout in (LAYOUT, replace(LAYOUT, calls_end_reasoning=True), BARE):
        wanted = reading(output, 1, layout=layout, cut=cut, control=control)
        assert reading(output, size, layout=layout, cut=cut, control=control) == wanted


@given(noise, st.integers(1, 7))
def test_only_delimiters_are_lost(output: str, size: int) -> None:
    """Where there are no calls; and white space next to them."""
    found = reading(output, size, layout=MarkupLayout(), tools=())
    said = found.get("reasoning", "") + found.get("text", "")
    assert without_tags(said) == without_tags(output)


def without_tags(text: str) -> str:
    """The characters of a text in any order: reasoning may stand after text."""
    return "".join(sorted(re.sub(r"</?think>|\s", "", text)))


WORDS = st.lists(
    st.sampled_from(["The", "a", "tag", "<think>", "</think>", "<thinking>", "`<think>`", "ends,"]),
    max_size=8,
).map(" ".join)


@given(WORDS, st.integers(1, 7), st.sampled_from([{}, CONTROL]))
def test_a_text_may_be_about_tags(words: str, size: int, control: dict[int, str]) -> None:
    text = f"Look: {words}"
    found = reading(text, size, layout=MarkupLayout(), control=control)
    assert "reasoning" not in found
    if "</think>" not in text.partition("<think>")[0]:
        assert found["text"].split()[:2] == text.split()[:2]
        assert found["text"].count("<think>") == text.count("<think>")


@given(st.sampled_from(["", "\n", "a", "a ", f"{OPEN}{NOW}{CLOSE}", f"a{OPEN}{NOW}{CLOSE}\n"]))
def test_where_reasoning_may_open(before: str) -> None:
    found = reading(f"{before}<think>b</think>c")
    opens = before.endswith((CLOSE, f"{CLOSE}\n", "\n")) or not before
    assert found.get("reasoning") == ("b" if opens else None)
    assert found["text"].endswith("c" if opens else "<think>b</think>c")


# Answers that continue a message


def continued(
    output: str,
    ends_with: str = "",
    *,
    layout: MarkupLayout = LAYOUT,
    formatted: bool = False,
) -> list[dict[str, Any]]:
    """What is read, however the output is cut."""
    context = ParseContext(tools=TOOLS, ends_with=ends_with, continues=True, formatted=formatted)
    said = (units(output, size, {}) for size in (1, 3, 1000))
    found = [folded(heard(MarkupParser(layout, context), each, cut=False)) for each in said]
    assert found[1:] == found[:-1]
    return found[:1]


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


def test_what_would_be_a_call_at_the_beginning_is_text_within_one() -> None:
    assert continued(NOW, layout=BARE) == [{"text": NOW}]
    assert reading(NOW, layout=BARE) == {"calls": [{}]}


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
