"""Delimiters of reasoning and calls, in a layout of this file's own: what they mean, and where."""

import json
from collections.abc import Sequence
from itertools import cycle
from pathlib import Path
from typing import Any

import pytest
import yaml

import mlx_server
from mlx_server.events import (
    Event,
    ReasoningDelta,
    TextDelta,
    ToolCallDelta,
    ToolCallFinished,
    ToolCallStarted,
)
from mlx_server.families import FAMILIES
from mlx_server.families.markup import MarkupFamily
from mlx_server.messages import Tool
from mlx_server.parsers.markup_layout import TURN_HEADERS, MarkupLayout
from mlx_server.parsers.markup_parser import MarkupParser
from mlx_server.parsers.parse_context import ParseContext
from mlx_server.tool_parsers.call_format import CallFormat
from mlx_server.tool_parsers.calls import ToolCallEmitter
from mlx_server.tool_parsers.json_calls import call_object, repaired
from mlx_server.tool_parsers.source import Source, Steps
from tests.families.prompts import GOLDEN

OPEN, CLOSE = "<call>", "</call>"
DELIMITERS = ("<think>", "</think>", OPEN, CLOSE, "<gone>")
CONTROL = dict(enumerate([*DELIMITERS, "<|end|>"], start=300))
TOOLS = (Tool("now"), Tool("write", parameters={"properties": {"text": {"type": "string"}}}))


def _calls(source: Source, calls: ToolCallEmitter) -> Steps[None]:
    while True:
        yield from source.space()
        if (yield from source.expect("{", CLOSE)) == CLOSE:
            return
        yield from call_object(source, calls, (CLOSE,))


MARKED = CallFormat(_calls, opens=(OPEN,), closes=(CLOSE,), repair=repaired)
LAYOUT = MarkupLayout(call_formats=(MARKED,), dropped=("<gone>",))


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


def reading(
    output: str, size: int, control: dict[int, str] | None = None, **context: Any
) -> dict[str, Any]:
    tokens = control or {}
    parser = MarkupParser(LAYOUT, ParseContext(tools=TOOLS, control=tokens, **context))
    said = units(output, size, tokens)
    events = [event for token, text in said for event in parser.feed(token, text)]
    return folded([*events, *parser.finish(cut=False)])


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


NOW = '{"name": "now", "arguments": {}}'


SIZES = (1, 3, 1000)
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
        assert reading(output, size, control) == wanted, size


@pytest.mark.parametrize("size", [1, 3, 1000])
def test_text_that_a_grammar_holds_has_no_delimiters(size: int) -> None:
    text = f'{{"a": "<think>so</think> {OPEN}{NOW}{CLOSE} <gone>"}}'
    for output in (text, f"<think>Hm.</think>\n{text}", f"<gone>{text}"):
        reasoning = {"reasoning": "Hm."} if "Hm." in output else {}
        assert reading(output, size, formatted=True) == {"text": text, **reasoning}
    called = reading(f"{OPEN}{NOW}{CLOSE}", size, formatted=True)
    assert called["calls"], "instead of the text"


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
    for size in SIZES:
        assert reading(output, size, continues=True) == expected


@pytest.mark.parametrize(
    ("output", "expected"),
    [
        (" so on.</think>\n\nHi.", {"reasoning": " so on.", "text": "Hi."}),
        (f" on.</think>{OPEN}{NOW}{CLOSE}", {"reasoning": " on.", "calls": [{}]}),
        (" on", {"reasoning": " on"}),
    ],
)
def test_reasoning_goes_on_with_its_own_white_space(output: str, expected: dict[str, Any]) -> None:
    for size in SIZES:
        assert reading(output, size, continues=True, ends_with="<think>") == expected


WITHOUT_GOLDEN_PROMPT = {"<role>ASSISTANT</role>"}
"""The header of Ling and Ring, which have no family of their own."""

REASONING_CHARACTERS = 40
"""The most that stands after the header in a prompt: an opening delimiter of reasoning."""

MARKUP = [family.name for family in FAMILIES if isinstance(family, MarkupFamily)]


def text_of(answer: str, family: str, *, size: int) -> str:
    reader = mlx_server.OutputReader(family)
    pieces = [reader.feed(answer[at : at + size]) for at in range(0, len(answer), size)]
    events = [event for piece in [*pieces, reader.finish()] for event in piece]
    return "".join(event.separated for event in events if isinstance(event, TextDelta))


def test_each_header_ends_the_prompt_of_a_known_family() -> None:
    prompts = [path.read_text("utf-8") for path in sorted(GOLDEN.glob("*/without_thinking.txt"))]
    assert len(prompts) > 40
    ends = [prompt.partition("\n(ignored: ")[0] for prompt in prompts]
    unknown = {
        header
        for header in TURN_HEADERS
        if not any(header in end[-len(header) - REASONING_CHARACTERS :] for end in ends)
    }
    assert unknown == WITHOUT_GOLDEN_PROMPT


@pytest.mark.parametrize(("family", "header"), [*zip(cycle(MARKUP), [*TURN_HEADERS] * 4)])
def test_the_header_of_an_answer_is_no_text(family: str, header: str) -> None:
    assert text_of(f"{header}\n\nHello.", family, size=1) == "Hello."


@pytest.mark.parametrize("header", TURN_HEADERS)
@pytest.mark.parametrize("space", ["", "\n", " "])
def test_space_around_the_header_is_no_text_either(header: str, space: str) -> None:
    assert text_of(f"{space}{header}{space}Hello.", "plain", size=100) == "Hello."


@pytest.mark.parametrize("header", TURN_HEADERS)
def test_a_header_after_the_first_word_is_text(header: str) -> None:
    assert header in text_of(f"It begins with {header} there.", "gigachat", size=3)


@pytest.mark.parametrize("header", TURN_HEADERS)
def test_an_answer_that_only_begins_like_a_header_is_text(header: str) -> None:
    begun = header[:-1] + "X and more"
    assert text_of(begun, "gigachat", size=1) == begun
