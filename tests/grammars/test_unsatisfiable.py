from typing import Any

import pytest

from mlx_server.errors import InvalidGrammar
from mlx_server.grammars.check import written
from mlx_server.grammars.child import MOST_STEPS, refusal_of, reply_to
from mlx_server.grammars.compiled import Compile, Compiled, SchemaRefused
from mlx_server.grammars.compiler import fault
from mlx_server.grammars.view import View

TWO_TYPES = {"allOf": [{"type": "string"}, {"type": "integer"}]}
BOUNDS = {"type": "integer", "minimum": 5, "maximum": 3}


def having(**members: Any) -> dict[str, Any]:
    return {"type": "object", "properties": members, "required": [*members]}


def nested(depth: int) -> dict[str, Any]:
    return having(a=nested(depth - 1)) if depth else TWO_TYPES


CASES: dict[str, tuple[dict[str, Any], str]] = {
    "the whole": (TWO_TYPES, "# can't be met by any value: incompatible types."),
    "a member of a member": (having(a=having(b=TWO_TYPES)), "#/properties/a/properties/b can't"),
    "a name that is escaped": (having(**{"a/b'": TWO_TYPES}), "#/properties/a~1b' can't"),
    "false": (having(a=False), "#/properties/a can't be met by any value: schema is false."),
    "a name that is not allowed": (
        {"type": "object", "required": ["a"], "additionalProperties": False},
        "# can't be met by any value: required property 'a' is unsatisfiable.",
    ),
    "an item": (
        {"type": "array", "items": having(a=TWO_TYPES), "minItems": 1},
        "#/items/properties/a can't",
    ),
    "an item in its place": (
        {"type": "array", "prefixItems": [{}, TWO_TYPES], "minItems": 2},
        "#/prefixItems/1 can't be met by any value: incompatible types.",
    ),
    "a definition": (
        having(a={"$ref": "#/$defs/b"}) | {"$defs": {"b": having(c=TWO_TYPES)}},
        "#/$defs/b/properties/c can't",
    ),
    "a definition that is required itself": (
        {
            "$ref": "#/$defs/a%20b",
            "$defs": {"a b": {"type": "integer", "minimum": 5, "maximum": 3}},
        },
        "#/$defs/a b can't be met by any value: minimum (5) is greater than maximum (3).",
    ),
    "two schemas that are joined": (
        {"allOf": [having(a={"type": "null"}), having(a={"type": "string"})]},
        "properties/a can't be met by any value: required property 'a' is unsatisfiable.",
    ),
    "a pattern with a length": (
        having(a={"type": "string", "pattern": "^a{3}$", "maxLength": 2}),
        "#/properties/a can't be met by any value: no text has its pattern, format and length.",
    ),
    "deeper than is looked": (nested(MOST_STEPS + 3), "/properties/a can't"),
}


@pytest.mark.parametrize("name", CASES)
def test_the_innermost_part_is_named(name: str) -> None:
    schema, wanted = CASES[name]
    reply = reply_to(Compile(written(schema), 60))
    assert isinstance(reply, SchemaRefused)
    assert wanted in reply.message


def test_the_message_names_no_part_that_can_be_met() -> None:
    """An option that nothing can meet is no fault where there is another one."""
    choice = {"anyOf": [TWO_TYPES, {"type": "null"}]}
    reply = reply_to(Compile(written(having(a=choice, b=TWO_TYPES)), 60))
    assert isinstance(reply, SchemaRefused)
    assert "#/properties/b can't" in reply.message
    assert isinstance(reply_to(Compile(written(having(a=choice)), 60)), Compiled)


def test_other_faults_are_left_to_others() -> None:
    assert refusal_of(fault("start: nowhere"), View(TWO_TYPES)) is None
    assert isinstance(refusal_of("Unsatisfiable schema: x", View(TWO_TYPES)), InvalidGrammar)
