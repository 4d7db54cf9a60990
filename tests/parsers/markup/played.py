"""Plays text and control tokens to a parser of answers with delimiters."""

import json
from collections.abc import Sequence
from typing import Any

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
from mlx_server.parsers.markup_parser import MarkupLayout, MarkupParser
from mlx_server.parsers.parse_context import ParseContext
from mlx_server.tool_parsers.call_format import CallFormat
from mlx_server.tool_parsers.calls import ToolCallEmitter
from mlx_server.tool_parsers.json_calls import call_object, repaired
from mlx_server.tool_parsers.model_json import Malformed
from mlx_server.tool_parsers.source import Source, Steps

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


def _bare(source: Source, calls: ToolCallEmitter) -> Steps[None]:
    yield from call_object(source, calls)
    if not (yield from source.at_end()):
        raise Malformed("more than a call")


MARKED = CallFormat(_calls, opens=(OPEN,), closes=(CLOSE,), repair=repaired)
LAYOUT = MarkupLayout(call_formats=(MARKED,), dropped=("<gone>",))
BARE = MarkupLayout(call_formats=(CallFormat(_bare, begins=("{",)),))


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
    return events + parser.finish(cut=cut)


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


NOW = '{"name": "now", "arguments": {}}'
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


def continued(
    output: str, ends_with: str = "", *, layout: MarkupLayout = LAYOUT, formatted: bool = False
) -> list[dict[str, Any]]:
    """What is read, however the output is cut."""
    context = ParseContext(tools=TOOLS, ends_with=ends_with, continues=True, formatted=formatted)
    said = (units(output, size, {}) for size in (1, 3, 1000))
    found = [folded(heard(MarkupParser(layout, context), each, cut=False)) for each in said]
    assert found[1:] == found[:-1]
    return found[:1]
