"""Calls that are not written as JSON: what a strict tool's schema says holds, or is refused."""

from typing import Any

import jsonschema
import pytest

from mlx_server.errors import InvalidGrammar
from mlx_server.grammars.formats import usable_tools
from mlx_server.messages import Tool
from mlx_server.parsers.parse_context import OutputSpec
from tests.families.walks import Way
from tests.parsers.markup.ways import WITH_CALLS, calls_of

CHECKED = jsonschema.FormatChecker(["uuid", "ipv4", "ipv6"])

DEFINITIONS = {
    "any": {},
    "over 40": {"type": "integer", "minimum": 40},
    "long": {"type": "string", "minLength": 2},
    "further": {"$ref": "#/$defs/long", "maxLength": 3},
    "whole": {"$ref": "#/$defs/any", "type": "integer"},
}
COUNTS = {
    "type": "object",
    "patternProperties": {"^[a-z]{1,3}$": {"type": "integer"}},
    "additionalProperties": False,
    "minProperties": 1,
    "maxProperties": 1,
}
"""Only one: a walk might say a name twice, or tags of the notation in it."""

VALUES: dict[str, dict[str, Any]] = {
    "format": {"type": "string", "format": "uuid"},
    "format beside a number": {"type": ["string", "integer"], "format": "ipv4"},
    "pattern": {"type": "string", "pattern": "^[a-c]{2}$"},
    "pattern anywhere": {"type": "string", "pattern": "[)a]"},
    "pattern of nothing": {"type": "string", "pattern": ""},
    "pattern with anchors inside": {"type": "string", "pattern": "(^a$|^b$)"},
    "lengths": {"type": "string", "minLength": 3, "maxLength": 4},
    "length beside null": {"type": ["string", "null"], "maxLength": 2},
    "const": {"const": "k"},
    "enum": {"enum": ["x y", "z"]},
    "enum of types": {"enum": [1, 2, "1"]},
    "enum and type": {"type": ["string", "integer"], "enum": [1, 2, "x", None]},
    "enum and length": {"enum": ["a", "bb"], "minLength": 2},
    "enum and minimum": {"enum": [1, 5, "x"], "minimum": 3},
    "enum and reference": {"$ref": "#/$defs/any", "enum": ["abc", 5]},
    "multipleOf": {"type": "integer", "multipleOf": 7},
    "limits": {"type": "number", "exclusiveMinimum": 0, "maximum": 1},
    "boolean": {"type": "boolean"},
    "allOf of text": {"allOf": [{"type": "string"}, {"minLength": 3}]},
    "allOf of numbers": {"allOf": [{"type": "integer"}, {"minimum": 300}]},
    "allOf of both": {"allOf": [{"type": ["string", "integer"]}, {"format": "ipv4", "minimum": 5}]},
    "anyOf": {"anyOf": [{"type": "integer", "minimum": 5}, {"type": "string", "pattern": "^q$"}]},
    "anyOf and type": {"type": "string", "anyOf": [{"type": ["integer", "string"]}, {"const": 1}]},
    "oneOf": {"oneOf": [{"type": "integer"}, {"type": "null"}]},
    "reference": {"$ref": "#/$defs/over 40"},
    "reference and length": {"$ref": "#/$defs/long", "maxLength": 2},
    "reference to such": {"$ref": "#/$defs/further"},
    "reference and type": {"$ref": "#/$defs/any", "type": "string"},
    "reference and another type": {"$ref": "#/$defs/whole"},
    "list": {"type": "array", "items": {"minimum": 5, "type": "integer"}, "minItems": 2},
    "list of text": {"type": "array", "items": {"type": "string", "format": "ipv4"}, "minItems": 1},
    "tuple": {
        "type": "array",
        "prefixItems": [{"type": "integer"}, {"type": "string", "maxLength": 3}],
        "items": False,
        "minItems": 2,
    },
    "object": {
        "type": "object",
        "properties": {"u": {"type": "integer"}, "s": {"type": "string", "format": "ipv4"}},
        "required": ["u", "s"],
        "additionalProperties": False,
    },
    "object of counts": COUNTS,
    "object of counts or text": {"anyOf": [COUNTS, {"type": "string", "maxLength": 4}]},
    "object of counts or nothing": {**COUNTS, "type": ["object", "null"]},
    "required among others": {
        "type": "object",
        "properties": {"u": {"type": "integer"}},
        "required": ["u", "w"],
        "additionalProperties": {"type": "integer"},
        "maxProperties": 2,
    },
}

AB: dict[str, Any] = {
    "type": "object",
    "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}},
    "additionalProperties": False,
}


def just(**properties: dict[str, Any]) -> dict[str, Any]:
    return {"properties": properties, "required": [*properties], "additionalProperties": False}


ARGUMENTS: dict[str, dict[str, Any]] = {
    "one at least": {**AB, "minProperties": 1},
    "two at least": {**AB, "minProperties": 2},
    "one at most": {**AB, "maxProperties": 1},
    "one at least of any": {"type": "object", "minProperties": 1},
    "either": {**AB, "anyOf": [{"required": ["a"]}, {"required": ["b"]}]},
    "other members": {
        "type": "object",
        "anyOf": [
            just(k={"const": "a"}, v={"type": "integer"}),
            just(k={"const": "b"}, v={"type": "string"}),
            {"type": "null"},
        ],
    },
    "only one of them": {"type": "object", "oneOf": [just(a={"const": 1}), just(b={"const": 2})]},
    "additionalProperties": {"additionalProperties": {"type": "integer"}, "required": ["a"]},
    "patternProperties": {"patternProperties": {"^a": {"type": "integer"}}, "required": ["ab"]},
    "properties and patternProperties": {
        "properties": {"ab": {"type": "string"}},
        "patternProperties": {"^a": {"minLength": 3}},
        "required": ["ab"],
    },
    "reference": {"$ref": "#/$defs/r", "$defs": {"r": just(a={"type": "integer", "minimum": 7})}},
    "allOf": {
        "allOf": [
            {"properties": {"a": {"type": "string"}}, "required": ["a"]},
            {"properties": {"a": {"minLength": 2}}},
        ]
    },
    "forbidden": {"properties": {"a": {"type": "integer"}, "b": False}, "required": ["a"]},
}

SCHEMAS = {
    **{
        name: {"type": "object", **just(v=schema), "$defs": DEFINITIONS}
        for name, schema in VALUES.items()
    },
    **{f"arguments: {name}": schema for name, schema in ARGUMENTS.items()},
}

REFUSED = {
    "pattern with anchors inside": "#/properties/v/pattern",
    "arguments: two at least": "#/minProperties",
    "arguments: one at most": "#/maxProperties",
    "arguments: one at least of any": "#/minProperties",
    "arguments: only one of them": "#/oneOf",
    "arguments: patternProperties": "#/patternProperties",
    "arguments: properties and patternProperties": "#/patternProperties",
}
"""By name of the keyword, where a notation has no way to say it."""

SAME_SYNTAX = {"qwen3_5", "nemotron3", "muse"}
"""But for the marks around it, their calls are written as qwen3_coder's and dots' are."""

NOTATED = [
    family
    for family in WITH_CALLS
    if family.name not in SAME_SYNTAX
    and any(
        block.unsupported(Tool("f", "", {"minProperties": 1}))
        for notation in family.layout_with().call_formats
        for block in notation.blocks
    )
]


QUOTING = {"llama3", "llama4", "lfm2", "minicpm", "olmo3", "gemma4", "functiongemma"}
"""They may write a text as JSON, which any pattern can be said of."""


def test_these_families_have_notations_of_their_own() -> None:
    bare = {"qwen3_coder", "seed_oss", "glm4_5", "minimax_m2", "deepseek_v32", "kimi_k3"}
    assert {family.name for family in NOTATED} >= QUOTING | bare


@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "schema"),
    [
        pytest.param(family, schema, id=f"{family.name}-{schema}")
        for i, family in enumerate(NOTATED)
        for j, schema in enumerate(SCHEMAS)
        if i % 3 == j % 3  # each schema in a third of the families
    ],
)
def test_what_a_strict_tool_says_holds_or_is_refused(family: Any, schema: str) -> None:
    way, parameters = Way(family, True), SCHEMAS[schema]
    tool = Tool("f", "", parameters, strict=True)
    wanted = OutputSpec(way.reading([tool]), "required")
    try:
        usable_tools([tool])
        matcher = way.matcher(wanted)
    except InvalidGrammar as error:
        if REFUSED.get(schema, "nothing") in str(error):
            return
        raise
    valid = jsonschema.Draft202012Validator(parameters, format_checker=CHECKED)
    # two dozen families have few notations: each is walked often, by another seed each time
    said = way.walk(matcher, NOTATED.index(family))
    calls = calls_of(way.read(wanted.context, said))
    assert calls, way.spelled(said)
    for _, arguments in calls:
        assert valid.is_valid(arguments), way.spelled(said)


@pytest.mark.parametrize(
    ("parameters", "reported"),
    [
        ({"properties": {"a": {"pattern": "(^a$|^b$)"}}}, ["pattern at #/properties/a"]),
        ({**AB, "maxProperties": 1}, ["maxProperties at #"]),
        ({**AB, "minProperties": 2}, ["minProperties at #"]),
        ({"patternProperties": {"^\\p{Lu}": {}}}, ["patternProperties at #"]),
        # no name is looked at for it: that would take longer than anybody waits
        (
            {"properties": {"a" * 60 + "!": {}}, "patternProperties": {"^(a+)+$": {}}},
            ["patternProperties at #"],
        ),
        ({**AB, "minProperties": 1, "not": {}}, ["not at #"]),
        (
            {"properties": {"a": {"type": "string", "format": "colour"}}},
            ["format at #/properties/a"],
        ),
    ],
)
def test_what_does_not_hold_is_told(parameters: dict[str, Any], reported: list[str]) -> None:
    for family in NOTATED:
        tool = Tool("f", "", parameters)
        expected = (
            ()
            if family.name in QUOTING and reported[0].startswith("pattern at")
            else tuple(reported)
        )
        assert family.unsupported_keywords(tool) == expected, family.name
