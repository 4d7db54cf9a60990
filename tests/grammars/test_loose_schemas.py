"""Tools whose schemas are not quite JSON Schema: what can be read of them is held, and the rest is
reported."""

from typing import Any

import pytest

from mlx_server.errors import InvalidGrammar
from mlx_server.grammars.formats import usable_tools
from mlx_server.messages import Tool

Json = dict[str, Any]
TEXT: Json = {"type": "string"}
NOTHING: Json = {"type": "object"}


def of(properties: Any, **more: Any) -> Json:
    return {"type": "object", "properties": properties, **more}


def member(**schema: Any) -> Json:
    return of({"a": schema})


def deep(levels: int) -> Json:
    return of({"a": deep(levels - 1)}) if levels else {}


LOOSE: dict[str, tuple[Json, Json, tuple[str, ...]]] = {
    "a list of no properties": (of([]), NOTHING, ("properties at #",)),
    "a list of properties": (of([{"name": "a"}]), NOTHING, ("properties at #",)),
    "required null": (of({}, required=None), of({}), ()),
    "required true": (
        member(type="string", required=True),
        member(**TEXT),
        ("required at #/properties/a",),
    ),
    "a required text": (of({"a": TEXT}, required="a"), of({"a": TEXT}), ("required at #",)),
    "required numbers": (of({"a": TEXT}, required=[1]), of({"a": TEXT}), ("required at #",)),
    "any type": (member(type="any"), member(), ("type at #/properties/a",)),
    "a type of Gemini": ({"type": "OBJECT", "properties": {}}, of({}), ()),
    "Python's types": (of({"a": {"type": "dict"}, "b": {"type": "Str"}}),
                       of({"a": NOTHING, "b": TEXT}), ()),
    "no types": (member(type=[]), member(), ("type at #/properties/a",)),
    "a null among types": (member(type=["string", None]), member(type=["string", "null"]), ()),
    "an odd one among types": (
        member(type=["string", "any"]),
        member(),
        ("type at #/properties/a",),
    ),
    "a property of null": (of({"a": None, "b": TEXT}), of({"a": {}, "b": TEXT}),
                           ("a at #/properties",)),
    "items null": (member(type="array", items=None), member(type="array"), ()),
    "an empty enum": (member(type="string", enum=[]), member(**TEXT), ("enum at #/properties/a",)),
    "a text for enum": (member(enum="x"), member(), ("enum at #/properties/a",)),
    "a text for a number": (
        member(type="integer", minimum="1"),
        member(type="integer"),
        ("minimum at #/properties/a",),
    ),
    "a text for false": (
        of({"a": TEXT}, additionalProperties="false"),
        of({"a": TEXT}),
        ("additionalProperties at #",),
    ),
    "a reference to nothing": (
        member(**{"$ref": "#/$defs/x"}),
        member(),
        ("$ref at #/properties/a",),
    ),
    "a reference out of it": (
        member(**{"$ref": "https://x/y"}),
        member(),
        ("$ref at #/properties/a",),
    ),
    "a reference that is none": (member(**{"$ref": 5}), member(), ("$ref at #/properties/a",)),
    "a reference to itself": (member(**{"$ref": "#/properties/a"}), NOTHING, ("parameters",)),
    "no options": (member(anyOf=[]), member(), ("anyOf at #/properties/a",)),
    "an option of null": (
        member(anyOf=[None, TEXT]),
        member(anyOf=[{}, TEXT]),
        ("0 at #/properties/a/anyOf",),
    ),
    "an object of options": (member(oneOf={}), member(), ("oneOf at #/properties/a",)),
    "a pattern that is none": (
        member(type="string", pattern=5),
        member(**TEXT),
        ("pattern at #/properties/a",),
    ),
    "a length below zero": (
        member(type="string", minLength=-1),
        member(**TEXT),
        ("minLength at #/properties/a",),
    ),
    "a million items": (
        member(type="array", minItems=10**6),
        member(type="array"),
        ("minItems at #/properties/a",),
    ),
    "multiples of zero": (
        member(type="number", multipleOf=0),
        member(type="number"),
        ("multipleOf at #/properties/a",),
    ),
    "uniqueItems of a text": (
        member(type="array", uniqueItems="yes"),
        member(type="array"),
        ("uniqueItems at #/properties/a",),
    ),
    "a list of definitions": (
        {**of({"a": TEXT}), "$defs": []},
        of({"a": TEXT}),
        ("$defs at #",),
    ),
    "a condition of a text": (member(**{"if": "x"}), member(), ("if at #/properties/a",)),
    "no value at all": (
        member(allOf=[TEXT, {"type": "integer"}]) | {"required": ["a"]},
        NOTHING,
        ("parameters",),
    ),
    "a character that can't be written": (member(const="\x01"), NOTHING, ("parameters",)),
    "a depth": (deep(300), NOTHING, ("parameters",)),
}  # fmt: skip


@pytest.mark.parametrize("name", LOOSE)
def test_what_can_be_read_is_held(name: str) -> None:
    given, held, lost = LOOSE[name]
    (tool,) = usable_tools([Tool("f", None, given, unenforced=("x",))])
    assert tool == Tool("f", None, held, unenforced=("x", *lost))
    strict = Tool("f", None, given, strict=True)
    with pytest.raises(InvalidGrammar) as caught:
        usable_tools([Tool("g"), strict])
    assert caught.value.param == "tools[1].function.parameters"


@pytest.mark.parametrize(
    "parameters", [{}, of({"a": TEXT}, required=["a"]), member(type="string", nullable=True)]
)
def test_a_schema_is_left_as_it_is(parameters: Json) -> None:
    tool = Tool("f", None, parameters)
    assert usable_tools([tool])[0] is tool
