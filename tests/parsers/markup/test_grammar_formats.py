"""What a grammar allows of an answer in a format, of difficult schemas and of names."""

import json

import jsonschema
import pytest

from mlx_server.messages import Tool
from mlx_server.parsers.parse_context import OutputSpec
from mlx_server.requests import ChoiceFormat, Format, GrammarFormat, JsonFormat, RegexFormat
from mlx_server.tool_parsers.call_format import UncallableTool
from tests.contract.pairs import KINDS
from tests.families.goldens import tools
from tests.families.walks import Way
from tests.parsers.markup.ways import (
    PERSON,
    WAYS,
    assert_valid,
    called,
    calls_of,
    every_way,
    in_tokens,
    text_of,
    walked,
)

PEOPLE = jsonschema.Draft202012Validator(PERSON)


def ends_of(way: Way) -> list[str]:
    """Of prompts: some open a thought, if the family has any."""
    return ["", *way.family.thinking_delimiters()[0][:1]]


ENDS = [pytest.param(way, end, id=f"{called(way)}-{end}") for way in WAYS for end in ends_of(way)]


@pytest.mark.slow
@pytest.mark.parametrize(("way", "end"), ENDS)
def test_text_follows_its_schema_also_behind_reasoning(way: Way, end: str) -> None:
    wanted = OutputSpec(way.reading((), end), format=JsonFormat(PERSON), thinks=True)
    for said, events in walked(way, wanted, 4):
        assert not calls_of(events)
        assert PEOPLE.is_valid(json.loads(text_of(events))), said


BLANK = (" yes", "\n\nno", "\n", "perhaps ")


FORMATS: dict[str, Format] = {
    "choice": ChoiceFormat(BLANK),
    "regex": RegexFormat(r" yes|\n\nno|\n|perhaps "),
    "grammar": GrammarFormat('start: " yes" | "\\n\\nno" | "\\n" | "perhaps "'),
}
IN_FORMATS = [
    pytest.param(way, end, format, id=f"{called(way)}-{end}-{name}")
    for way in WAYS
    for end in ends_of(way)
    for name, format in FORMATS.items()
    # what stands before and after an answer is the family's, and its text the format's: one
    # format goes with every family, the others with one of each kind
    if name == "choice" or (way.control and way.family.name in KINDS)
]


@pytest.mark.slow
@pytest.mark.parametrize(("way", "end", "format"), IN_FORMATS)
def test_text_keeps_the_white_space_of_its_format(way: Way, end: str, format: Format) -> None:
    wanted = OutputSpec(way.reading((), end), format=format, thinks=True)
    for said, events in walked(way, wanted, 4):
        assert text_of(events) in BLANK, said


@pytest.mark.slow
@in_tokens
def test_calls_or_text_of_a_format(way: Way) -> None:
    wanted = OutputSpec(way.reading(tools()), "auto", JsonFormat(PERSON))
    both = set()
    for said, events in walked(way, wanted, 8):
        calls, text = calls_of(events), text_of(events)
        assert bool(calls) is not bool(text.strip()), said
        assert_valid(calls, tools())
        if text.strip():
            jsonschema.validate(json.loads(text), PERSON)
        both.add(bool(calls))
    assert both


def nasty(way: Way) -> list[Tool]:
    marks = [*way.family.layout_with(tools()).calls, *way.family.thinking_delimiters()[1]]
    keys = [f"key_{n}" for n in range(40)]
    return [
        Tool("empty", "", {}),
        Tool(
            "enums",
            "",
            {
                "type": "object",
                "properties": {"mark": {"enum": [*marks, "a]", '"', "</x>", "ü🙂"]}},
                "required": ["mark"],
                "additionalProperties": False,
            },
        ),
        Tool(
            "many",
            "",
            {
                "type": "object",
                "properties": {key: {"type": "integer"} for key in keys},
                "required": keys[:2],
                "additionalProperties": False,
            },
        ),
        Tool(
            "nested",
            "",
            {
                "type": "object",
                "properties": {"tree": {"$ref": "#/$defs/node"}},
                "required": ["tree"],
                "additionalProperties": False,
                "$defs": {
                    "node": {
                        "type": "object",
                        "properties": {
                            "value": {"type": "boolean"},
                            "next": {"$ref": "#/$defs/node"},
                        },
                        "required": ["value"],
                        "additionalProperties": False,
                    }
                },
            },
        ),
    ]


@pytest.mark.slow
@every_way
def test_difficult_schemas(way: Way) -> None:
    offered = nasty(way)
    wanted = OutputSpec(way.reading(offered), "required")
    for said, events in walked(way, wanted, 3):
        calls = calls_of(events)
        assert calls, said
        assert not text_of(events), said
        assert_valid(calls, offered)


NAMES = ('a"b', "x]<tool_call>", "ü 🙂", "back\\slash/{}\n")

KEYS = {
    'a"b': {"type": "string"},
    "</tool_call>": {"type": "integer"},
    "ü🙂": {"type": "boolean"},
    "": {"type": "null"},
    "[x]": {"type": "number"},
}


@pytest.mark.slow
@every_way
def test_difficult_names_are_written_or_refused_by_name(way: Way) -> None:
    for name in NAMES:
        offered = [Tool(name, "", {"type": "object", "properties": KEYS, "required": ['a"b']})]
        wanted = OutputSpec(way.reading(offered), "required")
        try:
            grammar = way.family.grammar(wanted)
        except UncallableTool:
            continue
        if grammar is None:  # functionary's names end with their line
            assert "\n" in name
            continue
        said = way.walk(way.matcher(wanted), seed=1)
        events = way.read(wanted.context, said)
        assert calls_of(events), way.spelled(said)
        assert not text_of(events), way.spelled(said)
        assert_valid(calls_of(events), offered)


@pytest.mark.slow
@in_tokens
def test_many_tools_compile(way: Way) -> None:
    parameters = tools()[5].parameters
    offered = [Tool(f"tool_{n}", "", parameters) for n in range(128)]
    # other choices make other rules around the same calls: the same in all families of a kind
    for choice in ("auto", "required", "none") if way.family.name in KINDS else ("auto",):
        way.matcher(OutputSpec(way.reading(offered), choice))
