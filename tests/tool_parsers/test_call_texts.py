"""The calls in a text, by call format: the table is calls.yaml."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import yaml

from mlx_server.events import Event
from mlx_server.grammars.lark import Lark
from mlx_server.messages import Tool
from mlx_server.tool_parsers import elements, formats, keyed_calls, tag_formats
from mlx_server.tool_parsers.call_format import (
    CallFormat,
    UncallableTool,
    finished_calls,
)
from mlx_server.tool_parsers.calls import ToolCallEmitter
from mlx_server.tool_parsers.model_json import Malformed
from mlx_server.tool_parsers.source import Source
from tests.tool_parsers import parse_calls

ALONE = keyed_calls.keyed_calls(
    before_name="<c>",
    key_opens="<k>",
    key_closes="</k>",
    type_opens="<t>",
    type_closes="</t>",
    value_opens="<v>",
    value_closes="</v>",
    closes_call="</c>",
).call_format()
SECTION = keyed_calls.keyed_calls(
    opens="<s>",
    before_name="<c>",
    after_name="<n>",
    key_opens="<k>",
    key_closes="<v>",
    value_closes="</v>",
    closes_call="</c>",
    closes="</s>",
).call_format()
FORMATS: Mapping[str, CallFormat] = {
    "ALONE": ALONE,
    "SECTION": SECTION,
    "elements.KIMI_K3": elements.KIMI_K3,
    "elements.MINIMAX_M3": elements.MINIMAX_M3,
    "keyed_calls.GLM": keyed_calls.GLM,
    **{f"formats.{name}": value for name, value in vars(formats).items()},
    **{f"tag_formats.{name}": value for name, value in vars(tag_formats).items()},
    **{f"tag_formats.DSML_FORMATS[{at}]": f for at, f in enumerate(tag_formats.DSML_FORMATS)},
}
# The last four groups are of formats in tags.
TABLE: list[dict[str, Any]] = yaml.load(
    Path(__file__).with_name("calls.yaml").read_text("utf-8"), yaml.CSafeLoader
)


@pytest.mark.slow
@pytest.mark.parametrize("group", TABLE, ids=lambda group: group["format"])
def test_a_text_has_these_calls(group: dict[str, Any]) -> None:
    call_format = FORMATS[group["format"]]
    tools = [Tool(name, None, {"properties": p}) for name, p in group["tools"].items()]
    for text, *calls in group.get("calls", ()):
        read = [[call["name"], call["arguments"]] for call in parse_calls(call_format, text, tools)]
        assert json.dumps(read) == json.dumps(calls), f"{text}: 1 and 1.0 are not the same"
    for text in group.get("none", ()):
        with pytest.raises(ValueError, match=r"\w"):
            raise AssertionError(text, parse_calls(call_format, text, tools))
    for text in [*(text for text, *_ in group.get("calls", ())), *group.get("none", ())]:
        whole = read_in_pieces(call_format, tools, text, len(text) + 1)
        for size in (1, 3):
            assert read_in_pieces(call_format, tools, text, size) == whole, text


def read_in_pieces(
    call_format: CallFormat, tools: Sequence[Tool], text: str, size: int
) -> tuple[list[Any], bool]:
    """Returns the calls that were finished, and whether all of the text was read."""
    events: list[Event] = []
    source = Source()
    steps = call_format.read(source, ToolCallEmitter(0, tools, events.append))
    try:
        for at in range(0, len(text), size):
            source.feed(text[at : at + size])
            next(steps)
        source.close(cut=False)
        next(steps)
    except StopIteration:
        is_read = True
    except Malformed:
        is_read = False
    calls = [(call["name"], call["arguments"]) for call in finished_calls(events)]
    return calls, is_read


@pytest.mark.parametrize("call_format", [formats.HERMES, formats.LLAMA_TAGGED, formats.MISTRAL])
def test_no_depth_is_too_much(call_format: CallFormat) -> None:
    with pytest.raises(ValueError, match=r"\w"):
        parse_calls(call_format, '{"function": ' * 5000, [Tool("f")])


@pytest.mark.parametrize(
    "tool",
    [
        Tool(" f", "", {}),
        Tool("a<b", "", {}),
        Tool("f", "", {"properties": {"a</k>": {}}, "required": ["a</k>"]}),
    ],
)
def test_a_name_or_key_that_its_delimiters_would_cut_is_refused(tool: Tool) -> None:
    with pytest.raises(UncallableTool):
        ALONE.blocks[0].call(Lark(), tool)


def test_line_breaks_that_a_strict_schema_may_ask_for_are_the_values() -> None:
    schema = {"properties": {"path": {"type": "string", "minLength": 4}}, "required": ["path"]}
    text = '\n<invoke name="write">\n<parameter name="path">\nab\n</parameter>\n</invoke>\n'
    for strict, path in ((True, "\nab\n"), (False, "ab")):
        tools = [Tool("write", None, schema, strict=strict)]
        (call,) = parse_calls(tag_formats.MINIMAX_M2, f"{text}</minimax:tool_call>", tools)
        assert call["arguments"] == {"path": path}
