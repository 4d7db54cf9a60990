"""Arguments in the types that a schema asks for; a schema is a client's, and may be anything."""

import json
import math
import time
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mlx_server.repair.calls import coerced, read_as, takes_text
from mlx_server.repair.model_json import ExactFloat
from tests.slowness import slowness

STRING, INTEGER, NUMBER = {"type": "string"}, {"type": "integer"}, {"type": "number"}
BOOLEAN, NULL = {"type": "boolean"}, {"type": "null"}
ARRAY, OBJECT = {"type": "array"}, {"type": "object"}


def of(schema: Any) -> dict[str, Any]:
    return {"type": "object", "properties": {"k": schema}}


def same(found: Any, wanted: Any) -> bool:
    """5, 5.0 and true differ."""
    return json.dumps(found, sort_keys=True) == json.dumps(wanted, sort_keys=True)


@pytest.mark.parametrize(
    ("schema", "value", "wanted"),
    [
        (INTEGER, "5", 5),
        (INTEGER, " -5 ", -5),
        (INTEGER, "5.0", 5),
        (INTEGER, 5.0, 5),
        (INTEGER, 5.5, 5.5),
        (INTEGER, 2.0**53 - 1, 2**53 - 1),
        (INTEGER, -1e23, -1e23),
        (INTEGER, "1e23", "1e23"),
        (INTEGER, "9007199254740993.0", "9007199254740993.0"),
        (INTEGER, "5.5", "5.5"),
        (INTEGER, "five", "five"),
        (INTEGER, "", ""),
        (INTEGER, None, None),
        (INTEGER, True, True),
        (INTEGER, "true", "true"),
        (INTEGER, [5], [5]),
        (INTEGER, "9" * 5000, "9" * 5000),
        (INTEGER, "1e999", "1e999"),
        (INTEGER, "NaN", "NaN"),
        (NUMBER, "2.5", 2.5),
        (NUMBER, "5", 5),
        (NUMBER, 5, 5),
        (NUMBER, "1e999", "1e999"),
        (NUMBER, "Infinity", "Infinity"),
        (BOOLEAN, "true", True),
        (BOOLEAN, "False", False),
        (BOOLEAN, "yes", "yes"),
        (BOOLEAN, 1, 1),
        (BOOLEAN, "TRUE", True),
        (BOOLEAN, " False ", False),
        ({"type": ["boolean", "string"]}, "TRUE", "TRUE"),
        ({"type": ["boolean", "null"]}, "none", "none"),
        ({"type": "str"}, 5, "5"),
        ({"type": "int"}, "7", 7),
        ({"type": "dict"}, '{"a": 1}', {"a": 1}),
        (NULL, "null", None),
        (NULL, "None", None),
        (ARRAY, '["a", 1]', ["a", 1]),
        (ARRAY, "a, b", "a, b"),
        (OBJECT, '{"a": 1}', {"a": 1}),
        (OBJECT, "[1]", "[1]"),
        (OBJECT, '{"a": 1, "a": 2}', '{"a": 1, "a": 2}'),
        (STRING, "5", "5"),
        (STRING, "true", "true"),
        (STRING, 5, "5"),
        (STRING, ExactFloat("3.10"), "3.10"),
        (STRING, ExactFloat("12345678901234567890.12"), "12345678901234567890.12"),
        (STRING, ExactFloat("1e999"), math.inf),
        (STRING, 0.5, 0.5),  # its spelling is lost
        (STRING, True, "true"),
        (STRING, None, None),
        (STRING, 10**400, "1" + "0" * 400),
        (STRING, math.inf, math.inf),
        (INTEGER, math.inf, math.inf),
        (STRING, {"a": 1}, {"a": 1}),
        ({"type": ["string", "null"]}, "null", "null"),
        ({"type": ["string", "null"]}, 7, "7"),
        ({"type": ["integer", "null"]}, "null", None),
        ({"type": ["integer", "null"]}, "7", 7),
        ({"type": ["integer", "string"]}, "7", "7"),
        ({"type": ["integer", "string"]}, 7.0, 7),
        ({"anyOf": [INTEGER, NULL]}, "7", 7),
        ({"oneOf": [INTEGER, BOOLEAN]}, "true", True),
        ({"anyOf": [INTEGER, True]}, "7", "7"),
        ({"allOf": [{"type": ["integer", "string"]}, INTEGER]}, "7", 7),
        ({"allOf": [NUMBER, INTEGER]}, 7.0, 7),
        ({"enum": [1, 2]}, "1", 1),
        ({"enum": ["1", "2"]}, 1, "1"),
        ({"enum": [1, "1"]}, "1", "1"),
        ({"const": 5}, "5", 5),
        ({}, "5", "5"),
        ({}, 5.0, 5.0),
        ({"$ref": "#/$defs/n"}, "5", 5),
        ({"$ref": "#/$defs/a~1b"}, "5", 5),
        ({"$ref": "#/$defs/none"}, "5", "5"),
        ({"$ref": "other.json#/$defs/n"}, "5", "5"),
    ],
)
def test_a_value_in_the_type_that_is_asked_for(schema: Any, value: Any, wanted: Any) -> None:
    root = {**of(schema), "$defs": {"n": INTEGER, "a/b": INTEGER}}
    assert same(coerced(value, root, "k"), wanted)


@pytest.mark.parametrize(
    "schema",
    [
        of({"type": "object", "properties": {"n": INTEGER, "s": STRING}}),
        of({"anyOf": [{"type": "object", "properties": {"n": INTEGER, "s": STRING}}, NULL]}),
        of({"allOf": [{"properties": {"n": INTEGER}}, {"properties": {"s": STRING}}]}),
        {**of({"anyOf": [{"$ref": "#/$defs/f"}, NULL]})}
        | {"$defs": {"f": {"properties": {"n": INTEGER, "s": STRING}}}},
        {"properties": {"k": {"additionalProperties": INTEGER, "properties": {"s": STRING}}}},
        {"additionalProperties": {"properties": {"n": INTEGER, "s": STRING}}},
    ],
    ids=["object", "anyOf", "allOf", "optional reference", "additional", "unnamed"],
)
def test_objects_are_followed(schema: Any) -> None:
    found = coerced({"n": "1", "s": 2, "n2": None}, schema, "k")
    assert same(found, {"n": 1, "s": "2", "n2": None})


def test_lists_are_followed_also_in_text() -> None:
    schema = of({"type": "array", "items": {"properties": {"n": INTEGER}}})
    assert same(coerced('[{"n": "1"}, {"n": 2.0}, 3]', schema, "k"), [{"n": 1}, {"n": 2}, 3])


def test_a_schema_that_contains_itself() -> None:
    schema = {"properties": {"n": INTEGER, "k": {"$ref": "#"}}}
    assert same(
        coerced({"n": "1", "k": {"n": "2", "k": {"n": "3"}}}, schema, "k"),
        {"n": 1, "k": {"n": 2, "k": {"n": 3}}},
    )


@pytest.mark.parametrize(
    ("schema", "text", "wanted"),
    [
        (STRING, '"5"', '"5"'),
        (STRING, " x\n", " x\n"),
        (INTEGER, "5", 5),
        (BOOLEAN, "True", True),
        ({"type": ["string", "null"]}, "7", "7"),
        ({"type": ["string", "null"]}, "null", None),
        ({"type": ["string", "integer"]}, "7", 7),
        (ARRAY, "[1, 2]", [1, 2]),
        (OBJECT, '{"a": "b"}', {"a": "b"}),
        ({}, "5", 5),
        ({}, "word", "word"),
        ({}, "1e999", "1e999"),
        (INTEGER, "word", "word"),
    ],
)
def test_bare_text_is_read_by_the_schema(schema: Any, text: str, wanted: Any) -> None:
    assert same(read_as(text, of(schema), "k"), wanted)


@pytest.mark.parametrize(
    ("schema", "streams"),
    [
        (STRING, True),
        ({"type": ["string"]}, True),
        ({"enum": ["a", "b"]}, True),
        ({"type": "string", "enum": ["a"]}, True),
        ({"anyOf": [STRING, {"const": "x"}]}, True),
        ({"allOf": [{"type": ["string", "null"]}, STRING]}, True),
        ({"type": ["string", "null"]}, False),
        ({"anyOf": [STRING, {}]}, False),
        ({"anyOf": [STRING, True]}, False),
        ({"enum": ["a", 1]}, False),
        ({}, False),
        (INTEGER, False),
    ],
)
def test_only_what_can_be_nothing_else_is_text(schema: Any, streams: bool) -> None:
    assert takes_text(of(schema), "k") is streams


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=6,
)
words = st.sampled_from(
    [
        "type",
        "properties",
        "items",
        "anyOf",
        "oneOf",
        "allOf",
        "enum",
        "const",
        "$ref",
        "$defs",
        "additionalProperties",
        "k",
    ]
)
absurd = st.recursive(
    json_values | st.sampled_from(["string", "integer", "#", "#/$defs", "#/properties/k", "#//"]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(words, inner, max_size=4),
    max_leaves=20,
)


@given(st.dictionaries(words, absurd), json_values)
def test_no_schema_is_too_absurd(schema: dict[str, Any], value: Any) -> None:
    once = coerced(value, schema, "k")
    takes_text(schema, "k")
    read_as(json.dumps(value), schema, "k")
    if isinstance(value, float) and not math.isfinite(value):
        return
    assert repr(coerced(once, schema, "k")) == repr(once), "there is nothing left to be done"


@given(json_values)
def test_without_a_schema_a_value_stays_as_it_is(value: Any) -> None:
    assert repr(coerced(value, {}, "k")) == repr(value)


def chain(length: int) -> dict[str, Any]:
    links = {str(i): {"anyOf": [{"$ref": f"#/$defs/{i + 1}"}, NULL]} for i in range(length)}
    return {"properties": {"k": {"$ref": "#/$defs/0"}}, "$defs": {**links, str(length): INTEGER}}


@pytest.mark.parametrize(
    "schema",
    [
        {"properties": {"k": {"$ref": "#/properties/k"}}},
        {"$ref": "#"},
        {"anyOf": [{"$ref": "#"}] * 50, "properties": {"k": {"$ref": "#"}}},
        {"properties": {"k": {"allOf": [{"$ref": "#/properties/k"}] * 50}}},
        {"properties": {"k": {"anyOf": [{"anyOf": [INTEGER] * 500}] * 500}}},
        chain(5000),
    ],
    ids=["itself", "root", "many roots", "many selves", "wide", "chain"],
)
def test_schemas_without_end_take_no_time(schema: dict[str, Any]) -> None:
    began = time.thread_time()
    coerced([{"k": "5"}] * 100, schema, "k")
    takes_text(schema, "k")
    assert time.thread_time() - began < 3 * slowness()
