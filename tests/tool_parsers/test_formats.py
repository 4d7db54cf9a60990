"""Our parsers of call formats and mlx-lm's, where it has one: where they differ, and why.

Each input in mlx_lm.yaml is the text between a call's delimiters. Without a reason both have to
read the same, and with one they have to differ: what a new mlx-lm changes shows here.

Calls in another family's format are made if they name a known tool; else they are text.
"""

import importlib
import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import yaml

import mlx_server
from mlx_server.events import Repaired, TextDelta, ToolCallStarted, Violation
from mlx_server.families import FAMILIES
from mlx_server.families.base import ModelFamily
from mlx_server.families.markup import MarkupFamily
from mlx_server.messages import Tool
from mlx_server.tool_parsers import formats, tag_formats
from mlx_server.tool_parsers.call_format import CallFormat, finished_calls
from mlx_server.tool_parsers.elements import KIMI_K3
from mlx_server.tool_parsers.formats import FOREIGN_FORMATS
from mlx_server.tool_parsers.keyed_calls import GLM
from tests.families.goldens import FOLDER, Golden, goldens_of, tools
from tests.tool_parsers import parse_calls

OURS: dict[str, CallFormat] = {
    "function_gemma": formats.FUNCTION_GEMMA,
    "gemma4": formats.GEMMA4,
    "glm47": GLM,
    "json_tools": formats.HERMES,
    "kimi_k2": formats.KIMI_K2,
    "kimi_k3": KIMI_K3,
    "minimax_m2": tag_formats.MINIMAX_M2,
    "mistral": formats.MISTRAL,
    "pythonic": formats.LFM2,
    "qwen3_coder": tag_formats.QWEN3_CODER,
}


INPUTS = yaml.load(Path(__file__).with_name("mlx_lm.yaml").read_text("utf-8"), yaml.CSafeLoader)
TABLE = [
    (parser, text, reason)
    for parser, inputs in INPUTS.items()
    for text, reason in [*([text, ""] for text in inputs["same"]), *inputs["other"]]
]


def calls_of(parse: Callable[..., Any], text: str, offered: Any) -> str | None:
    """Names and arguments of the calls as JSON, where 1 and 1.0 differ; None where it refuses."""
    try:
        found = parse(text, offered)
    except Exception:  # mlx-lm's raise whatever comes
        return None
    calls = found if isinstance(found, list) else [found]
    return json.dumps([[call["name"], call.get("arguments")] for call in calls], sort_keys=True)


@pytest.mark.slow
@pytest.mark.parametrize(("parser", "text", "reason"), TABLE)
def test_every_difference_has_a_reason(parser: str, text: str, reason: str) -> None:
    theirs = importlib.import_module(f"mlx_lm.tool_parsers.{parser}").parse_tool_call
    offered = yaml.load((FOLDER / "tools.yaml").read_text("utf-8"), yaml.CSafeLoader)
    our_calls = calls_of(partial(parse_calls, OURS[parser]), text, tools())
    their_calls = calls_of(theirs, text, offered)
    assert (our_calls != their_calls) == bool(reason), f"{our_calls} | {their_calls}: {reason}"


TOOLS = [Tool("look_up", parameters={"properties": {"q": {"type": "string"}}})]
FAMILY = "gigachat"
"""A family whose own calls have another format."""

OBJECT = '{"name": "look_up", "arguments": {"q": "a"}}'
FUNCTION = "<function=look_up>\n<parameter=q>\na\n</parameter>\n</function>"
INVOKED = '<invoke name="look_up">\n<parameter name="q">a</parameter>\n</invoke>'
CALLS = {f"<{tag}>": f"<{tag}>\n{OBJECT}\n</{tag}>" for tag in formats.UNTAUGHT_TAGS} | {
    "<tool_call>": f"<tool_call>\n{OBJECT}\n</tool_call>",
    "<function=": FUNCTION,
    "<invoke name=": INVOKED,
    "<function name=": '<function name="look_up"><parameter name="q">a</parameter></function>',
    "<use_mcp_tool>": "<use_mcp_tool>\n<server_name>s</server_name>\n"
    '<tool_name>look_up</tool_name>\n<arguments>{"q": "a"}</arguments>\n</use_mcp_tool>',
    "[TOOL_CALLS]": f"[TOOL_CALLS][{OBJECT}]",
    "functools[": f"functools[{OBJECT}]",
}
"""A call in each format, by the format's opening delimiter."""

OPENINGS = [opening for each in FOREIGN_FORMATS for opening in each.opens]


def read(text: str) -> tuple[str, list[Any], list[str]]:
    """The text, the calls with their arguments, and the repairs."""
    events = mlx_server.read(text, FAMILY, TOOLS)
    shown = "".join(event.separated for event in events if isinstance(event, TextDelta))
    calls = [(call["name"], call["arguments"]) for call in finished_calls(events)]
    return shown, calls, [event.what for event in events if isinstance(event, Repaired)]


def test_every_format_is_tried_here_and_opens_with_a_delimiter_of_its_own() -> None:
    assert sorted(OPENINGS) == sorted(CALLS)
    assert all(each.opens for each in FOREIGN_FORMATS)


@pytest.mark.parametrize("opening", CALLS)
def test_a_call_is_made_and_reported_as_one_of_another_format(opening: str) -> None:
    shown, calls, repairs = read(CALLS[opening])
    assert (shown, calls) == ("", [("look_up", {"q": "a"})])
    assert "format" in repairs


@pytest.mark.parametrize("tag", formats.UNTAUGHT_TAGS)
@pytest.mark.parametrize("call", [FUNCTION, INVOKED])
def test_a_made_up_tag_may_hold_a_call_in_tags(tag: str, call: str) -> None:
    shown, calls, _ = read(f"I look.\n\n<{tag}>\n{call}\n</{tag}>")
    assert (shown, calls) == ("I look.", [("look_up", {"q": "a"})])


@pytest.mark.parametrize("opening", CALLS)
def test_a_call_of_an_unknown_tool_is_text(opening: str) -> None:
    text = CALLS[opening].replace("look_up", "format_disk")
    assert read(text) == (text, [], [])


@pytest.mark.parametrize("opening", OPENINGS)
def test_a_text_that_mentions_a_delimiter_goes_on_at_once(opening: str) -> None:
    reader = mlx_server.OutputReader(FAMILY, TOOLS)
    pieces = ("Models write ", opening, " for calls, as documents say that explain them.\n\nThus")
    fed = [event for piece in pieces for event in reader.feed(piece)]
    shown = "".join(event.text for event in fed if isinstance(event, TextDelta))
    assert opening in shown, "before the answer ends"


PYTHON = ("minicpm",)
"""Families in which a string that ends before an unknown call has an end that is in doubt."""


def with_several_calls(family: ModelFamily) -> list[Golden]:
    """Cases without slips, in marks: an unknown name in a bare list is no call at all."""
    marks = tuple(mark for each in family.layout_with(tools()).call_formats for mark in each.opens)
    return [
        case
        for case in goldens_of(family)
        if len({call.name for call in case.reads.calls}) > 1
        and not (case.cut or case.reads.repairs or case.reads.unmet)
        and any(mark in case.output for mark in marks)
    ]


CASES = [
    (family, case)
    for family in FAMILIES
    if isinstance(family, MarkupFamily)
    for case in with_several_calls(family)
]
every_case = pytest.mark.parametrize(
    ("family", "case"), CASES, ids=[f"{family.name}: {case.name}" for family, case in CASES]
)


@pytest.mark.slow
@every_case
def test_the_known_ones_are_called(family: ModelFamily, case: Golden) -> None:
    names = [call.name for call in case.reads.calls]
    for gone in names[:1] if family.name in PYTHON else (names[0], names[-1]):
        offered = [tool for tool in tools() if tool.name != gone]
        events = mlx_server.read(case.output, family.name, offered, prompt_end=case.prompt_end)
        called = [event.name for event in events if isinstance(event, ToolCallStarted)]
        text = "".join(event.text for event in events if isinstance(event, TextDelta))
        reports = [event.what for event in events if isinstance(event, Violation)]
        assert called == [name for name in names if name != gone]
        assert gone in text or any(repr(gone) in report for report in reports)
