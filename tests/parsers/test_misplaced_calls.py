"""Calls that a model writes as JSON: which are made, and what stays text."""

import json
import re
import time
from collections.abc import Sequence
from functools import partial
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mlx_server.events import Event, TextDelta, ToolCallDelta, ToolCallStarted
from mlx_server.families import family_named
from mlx_server.messages import Tool
from mlx_server.parsers.markup_layout import MarkupLayout
from mlx_server.parsers.markup_parser import MarkupParser
from mlx_server.parsers.parse_context import ParseContext
from mlx_server.requests import RepairPolicy
from mlx_server.tool_parsers.call_format import finished_calls
from mlx_server.tool_parsers.formats import BARE_JSON, PLAIN_OBJECT
from tests.calls import calls_of
from tests.slowness import slowness
from tests.tables import cases

TOOLS = (
    Tool("now"),
    Tool(
        "write",
        parameters={
            "type": "object",
            "properties": {"text": {"type": "string"}, "times": {"type": "integer"}},
            "required": ["text"],
        },
    ),
)
HI = {"text": "hi"}
NO_REASONING = MarkupLayout(reasoning=())


def read(
    output: str,
    size: int = 1000,
    *,
    cut: bool = False,
    repair: RepairPolicy | None = None,
    layout: MarkupLayout = NO_REASONING,
) -> tuple[list[Any], str]:
    """The calls, and the text."""
    context = ParseContext(tools=TOOLS, repair=repair or RepairPolicy())
    parser = MarkupParser(layout, context)
    pieces = (output[at : at + size] for at in range(0, len(output), size))
    events = [event for piece in pieces for event in parser.feed(-1, piece)]
    events += parser.finish(cut=cut)
    calls = [(call["name"], call["arguments"]) for call in finished_calls(events)]
    return calls, text_of(events)


def text_of(events: Sequence[Event]) -> str:
    return "".join(event.separated for event in events if isinstance(event, TextDelta))


def call(name: str = "write", arguments: Any = HI) -> str:
    return json.dumps({"name": name, "arguments": arguments})


SHAPES = {
    "alone": call(),
    "indented": json.dumps({"name": "write", "arguments": HI}, indent=4),
    "in a fence": f"```json\n{call()}\n```",
    "in a fence without a language": f"```\n{call()}\n```\n",
    "in an array": f"[{call()}]",
    "in a list of calls": json.dumps({"tool_calls": [{"function": json.loads(call())}]}),
    "under its name": json.dumps({"write": HI}),
    "with a slip": call()[:-1] + ",}",
    "in Python's spelling": "{'name': 'write', 'arguments': {'text': 'hi'}}",
}


@pytest.mark.parametrize("output", SHAPES.values(), ids=SHAPES)
def test_what_is_a_call(output: str) -> None:
    for size in range(1, 9):
        assert read(output, size) == ([("write", HI)], "")
        assert read(f"I write.\n\n{output}", size) == ([("write", HI)], "I write.")
    assert read(output, repair=RepairPolicy(mistakes=False)) == ([], output)
    assert read(output, cut=True) == (([("write", HI)], "") if "```" in output else ([], output))


@cases
def test_what_is_none(output: str) -> None:
    for size in (1, 2, 5, 1000):
        assert read(output, size) == ([], output)
        assert read(f"So:\n{output}", size) == ([], f"So:\n{output}")


def test_an_answer_may_be_a_call_that_begins_with_its_name() -> None:
    for output in ('write(text="hi")', 'write{"text": "hi"}', 'write {"text": "hi"}\n\n'):
        for size in (1, 2, 5, 1000):
            assert read(output, size) == ([("write", HI)], "")
    assert read('now()\nwrite(text="hi")') == ([("now", {}), ("write", HI)], "")
    assert read('write(text="hi")', cut=True)[0] == []


def test_an_object_with_other_keys_begins_an_answer_of_a_family_of_bare_json() -> None:
    layout = MarkupLayout(reasoning=(), call_formats=(PLAIN_OBJECT,))
    for output in ('{"tool": "write", "args": {"text": "hi"}}', '{"write": {"text": "hi"}}'):
        assert read(output, layout=layout) == ([("write", HI)], "")


def test_a_fence_of_calls_stands_anywhere_in_a_text() -> None:
    fence = f"```json\n{call()}\n```"
    for size in range(1, 9):
        found = read(f"I write.\n\n{fence}\n\nThen I wait.\n{fence}\nSo.", size)
        assert found == ([("write", HI)] * 2, "I write.\n\nThen I wait.\nSo.")
    unknown = f"```json\n{call('fly')}\n```"
    assert read(f"{unknown}\n{fence}\nor") == ([("write", HI)], f"{unknown}\nor")


def test_bare_json_stands_anywhere_where_it_is_the_familys_own_format() -> None:
    layout = MarkupLayout(reasoning=(), call_formats=(BARE_JSON,))
    for size in range(1, 9):
        found = read(
            f"I write: {call()} and {{wait}}, {call('now', {})}; then", size, layout=layout
        )
        assert found == ([("write", HI), ("now", {})], "I write:\nand {wait},\nthen")
    for none in ('Of {"name": "Ada"} and', f"So {call('fly')} or", f"So {call()[:-1]}"):
        assert read(none, layout=layout) == ([], none)


@cases
def test_text_is_held_only_while_it_may_be_a_call(text: str, is_held: bool) -> None:
    parser = MarkupParser(MarkupLayout(reasoning=()), ParseContext(tools=TOOLS))
    assert text_of(parser.feed(-1, text)) == ("" if is_held else text.rstrip())


def test_a_call_is_shown_at_once_or_not_at_all() -> None:
    parser = MarkupParser(MarkupLayout(reasoning=()), ParseContext(tools=TOOLS))
    assert not [e for c in call() for e in parser.feed(-1, c) if not isinstance(e, TextDelta)]
    found = [type(event) for event in parser.finish(cut=False)]
    assert ToolCallStarted in found
    assert ToolCallDelta in found


PIECES = (
    *("```", "json", "\n", "{", "}", "[", "]", '"', "'", ",", " ", "So", "\\"),
    *(call(), "{'name'"),
)
noise = st.lists(st.sampled_from(PIECES), max_size=10).map("".join)


@given(noise, st.integers(1, 7), st.booleans())
def test_noise_reads_the_same_however_it_is_cut(output: str, size: int, cut: bool) -> None:
    assert read(output, size, cut=cut) == read(output, 1, cut=cut)


@given(noise)
def test_no_text_is_lost(output: str) -> None:
    calls, text = read(output)
    if calls:
        rest = iter(output)
        assert all(character in rest for character in text if not character.isspace())
    else:
        assert text == output


@pytest.mark.slow
@pytest.mark.parametrize(
    "line", ['{"name": "write", "arguments": {\n', "```json\n", "[[[[\n", '{"name": "', "{'\n"]
)
def test_many_beginnings_take_no_long_time(line: str) -> None:
    begun = time.thread_time()
    text = line * 10_000
    assert read(text, 50) == ([], text)
    assert time.thread_time() - begun < 6 * slowness()


@pytest.mark.parametrize("family", ["qwen3", "llama3", "gemma4", "glm4_5", "mistral"])
def test_a_normal_answer_pays_little_for_repairs(family: str) -> None:
    pieces = re.findall(r" ?\w{1,6}|\s+|[^\w\s]", f"{__doc__} Some `code` here.\n\n" * 20)

    def read_with(policy: RepairPolicy) -> None:
        parser = family_named(family).make_parser(ParseContext(tools=TOOLS, repair=policy))
        for piece in pieces:
            parser.feed(-1, piece)
        parser.finish(cut=False)

    read_with(RepairPolicy())
    plain, repairing = (
        calls_of(partial(read_with, RepairPolicy(mistakes=m))) for m in (False, True)
    )
    assert repairing < plain + len(pieces), "some 0.1 ms for 300 tokens"
