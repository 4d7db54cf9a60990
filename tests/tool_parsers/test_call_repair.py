"""The call that a model meant: its tool, its form, its arguments' types. Nothing is guessed."""

import json
import math
import time
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from mlx_server.generation.review import CheckFailed, schema_errors
from mlx_server.tool_parsers.call_repair import (
    FoundCall,
    coerced,
    match_tool_name,
    read_arguments,
    read_as,
    read_calls,
    takes_text,
    unwrapped,
)
from mlx_server.tool_parsers.model_json import ExactFloat, Malformed
from tests.slowness import slowness
from tests.tables import cases

TABLES = yaml.load(
    Path(__file__).with_name("call_repair.yaml").read_text("utf-8"), yaml.CSafeLoader
)
NAMES = ("get_weather", "search", "functions.odd", "add", "Add", "fetch-url", "docs__find", "___")


@pytest.mark.parametrize(("written", "meant"), TABLES["meant"])
def test_the_tool_that_was_meant(written: str, meant: str) -> None:
    assert match_tool_name(written, NAMES) == meant


@pytest.mark.parametrize("written", TABLES["no tool"])
def test_no_tool_is_guessed(written: str) -> None:
    assert match_tool_name(written, NAMES) is None


TOOLS = {"f", "arguments"}
CALL = FoundCall("f", {"a": 1})
ARGUMENTS = {"a": 1}


def found(value: Any, *, repairs: bool = True) -> list[FoundCall]:
    text = value if isinstance(value, str) else json.dumps(value)
    return read_calls(text, TOOLS, repairs=repairs)


@pytest.mark.parametrize("value", TABLES["calls"], ids=str)
def test_forms_of_a_call(value: Any) -> None:
    assert found(value, repairs=False) == [CALL]


@pytest.mark.parametrize("value", TABLES["no call"], ids=str)
def test_what_would_lose_a_word_or_has_no_call_is_none(value: Any) -> None:
    with pytest.raises(Malformed):
        found(value)


@cases
def test_the_id_is_the_nearest_text(value: Any, id: str | None) -> None:
    assert [call.id for call in found(value)] == [id]


def test_mistakes_are_noted_for_the_calls_that_had_them_and_read_only_if_allowed() -> None:
    broken = '{"name": "f", "arguments": {"a": 1,}}'
    assert [call.has_mistakes for call in found(broken)] == [True]
    inside = {"calls": [{"name": "f", "args": '{"a": 1,}'}, {"name": "f", "args": '{"a": 1}'}]}
    assert [call.has_mistakes for call in found(inside)] == [True, False]
    for each in (broken, inside):
        with pytest.raises(Malformed):
            found(each, repairs=False)


@pytest.mark.parametrize("depth", [300, 450, 10_000])
@pytest.mark.parametrize("begin", ['{"calls":[', '{"function":', '{"function":{"tool_calls":['])
def test_calls_within_calls_are_read_or_are_text(begin: str, depth: int) -> None:
    end = "".join({"{": "}", "[": "]"}.get(sign, "") for sign in reversed(begin))
    whole = begin * depth + '{"name":"f","arguments":{}}' + end * depth
    try:
        calls = found(whole)
    except Malformed:
        return
    assert calls == [FoundCall("f", {})]


def test_arguments_are_an_object() -> None:
    assert read_arguments('{"a": 1,}', repairs=True) == (ARGUMENTS, True)
    for text, repairs in (('{"a": 1,}', False), ("[1]", True), ("{", True)):
        with pytest.raises(Malformed):
            read_arguments(text, repairs=repairs)


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
        *TABLES["coerced"],
        (INTEGER, -1e23, -1e23),
        (INTEGER, "9" * 5000, "9" * 5000),
        (STRING, ExactFloat("3.10"), "3.10"),
        (STRING, ExactFloat("12345678901234567890.12"), "12345678901234567890.12"),
        (STRING, 10**400, "1" + "0" * 400),
        (STRING, math.inf, math.inf),
        (INTEGER, math.inf, math.inf),
    ],
)
def test_a_value_in_the_type_that_is_asked_for(schema: Any, value: Any, wanted: Any) -> None:
    root = {**of(schema), "$defs": {"n": INTEGER, "a/b": INTEGER}}
    assert same(coerced(value, root, "k"), wanted)


@pytest.mark.parametrize(("schema", "text", "wanted"), TABLES["bare"])
def test_bare_text_is_read_by_the_schema(schema: Any, text: str, wanted: Any) -> None:
    assert same(read_as(text, of(schema), "k"), wanted)


@pytest.mark.parametrize(("schema", "streams"), TABLES["streams"])
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


@pytest.mark.slow
@given(st.dictionaries(words, absurd), json_values)
def test_no_schema_is_too_absurd(schema: dict[str, Any], value: Any) -> None:
    once = coerced(value, schema, "k")
    takes_text(schema, "k")
    read_as(json.dumps(value), schema, "k")
    if isinstance(value, float) and not math.isfinite(value):
        return
    assert repr(coerced(once, schema, "k")) == repr(once), "there is nothing left to be done"


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


PERSON = {
    "type": "object",
    "properties": {"name": {"type": "string"}, "tags": {"items": {"enum": ["a", "b"]}}},
    "required": ["name"],
}


@cases
def test_what_is_wrong_is_named(value: Any, schema: Any, wrong: list[str]) -> None:
    found = schema_errors(value, schema)
    assert all(error.startswith(begin) for error, begin in zip(found, wrong, strict=True)), found


DOUBLING = {f"a{i}": {"allOf": [{"$ref": f"#/$defs/a{i + 1}"}] * 2} for i in range(40)}


@pytest.mark.slow
@pytest.mark.parametrize(
    "schema",
    [
        {"pattern": "^(a+)+$"},
        {"$ref": "#"},
        {"$ref": "#/$defs/a0", "$defs": {**DOUBLING, "a40": {}}},
        {"$ref": "http://127.0.0.1:9/schema.json"},
        {"$ref": "file:///etc/hostname"},
        {"$ref": "#/$defs/nowhere"},
        {"type": 5},
        {"pattern": "("},
    ],
    ids=lambda schema: str(schema)[:40],
)
def test_what_can_not_be_found_out_is_said_to_be_so(schema: Any) -> None:
    with pytest.raises(CheckFailed):
        schema_errors("a" * 40 + "!", schema, seconds=1)


KNOWN = ("city", "unit")


@cases
def test_what_is_inside(key: str, value: Any, inside: Any) -> None:
    assert unwrapped(key, value, KNOWN) == inside
