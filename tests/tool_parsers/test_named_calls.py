"""A format that is nothing but a record is read, and its grammar allows what is read."""

from dataclasses import replace

import pytest

from mlx_server.grammars.lark import Lark
from mlx_server.messages import Tool
from mlx_server.tool_parsers.call_format import CallFormat, block_rule, parse_calls
from mlx_server.tool_parsers.named_calls import JSON, PYTHON, NamedCallFormat, gemma_arguments
from tests.walks import accepts

TOOLS = (
    Tool("f", "", {"type": "object", "properties": {"a": {"type": "string"}}, "required": ["a"]}),
    Tool("now", "", {"type": "object", "properties": {}}),
)

SECTION = NamedCallFormat(
    opens="<calls>", before_name="<call ", closes_call="</call>", between="", closes="</calls>"
)
FORMATS = {
    "json": (
        replace(SECTION, after_name=">", arguments=JSON, between="\n"),
        '<call f>{"a": "</call>"}</call>\n<call now>{}</call></calls>',
    ),
    "python": (
        replace(SECTION, after_name="(", arguments=PYTHON),
        "<call f(a='</call>')</call><call now()</call></calls>",
    ),
    "marked strings": (
        replace(SECTION, after_name="{", arguments=gemma_arguments("~")),
        "<call f{a:~</call>~}</call><call now{}</call></calls>",
    ),
}
every_format = pytest.mark.parametrize(("record", "text"), FORMATS.values(), ids=[*FORMATS])


def grammar_of(notation: CallFormat) -> str:
    lark = Lark()
    (block,) = notation.blocks
    return lark.source(
        f"{lark.text('<calls>')} {block_rule(block, lark, TOOLS, several=True)}"
    ).source


@every_format
def test_a_record_is_read(record: NamedCallFormat, text: str) -> None:
    calls = parse_calls(record.call_format(), text, TOOLS)
    assert [(call["name"], call["arguments"]) for call in calls] == [
        ("f", {"a": "</call>"}),
        ("now", {}),
    ]


@every_format
def test_its_grammar_allows_no_other_tool(record: NamedCallFormat, text: str) -> None:
    grammar = grammar_of(record.call_format())
    assert accepts("plain", grammar, "<calls>" + text)
    assert not accepts("plain", grammar, "<calls>" + text.replace("now", "fly"))
    assert not accepts("plain", grammar, "<calls>" + text.replace("</call>", "", 1)[:-8])


@every_format
def test_what_stops_before_its_end_is_no_call(record: NamedCallFormat, text: str) -> None:
    first = text.index("</call>", text.index("</call>") + 1)
    for size in range(first - 1):
        with pytest.raises(ValueError, match=r"\w"):
            parse_calls(record.call_format(), text[:size], TOOLS)
