"""What models write, and how it is read: what is at a limit is read, one more is not."""

import json
from typing import Any

import pytest

from mlx_server import limits
from mlx_server.generation import review
from mlx_server.grammars.lark import Lark
from mlx_server.repair.conforming import schema_errors
from mlx_server.repair.json_text import _is_json
from mlx_server.repair.malformed import Malformed
from mlx_server.schemas import lenient
from mlx_server.schemas.types import resolved
from mlx_server.schemas.typescript import SchemaReducer
from mlx_server.schemas.values import ValueSchema
from mlx_server.schemas.view import View
from mlx_server.tool_parsers import source, values
from mlx_server.tool_parsers.bare_text import text_of
from mlx_server.tool_parsers.json_rule import NEVER
from mlx_server.tool_parsers.source import Source, Steps
from mlx_server.tool_parsers.syntaxes import JSON, gemma_syntax, python_syntax
from tests.limits.boundaries import Boundary

Json = dict[str, Any]


def is_read(steps: Steps[Any]) -> bool:
    try:
        for _ in steps:
            pass
    except Malformed:
        return False
    return True


def nested(depth: int) -> Source:
    return source.complete_source("[" * depth + "]" * depth + " ")


def json_depth(depth: int) -> bool:
    return is_read(values.value(nested(depth), JSON))


def python_depth(depth: int) -> bool:
    return is_read(values.value(nested(depth), python_syntax()))


def gemma_depth(depth: int) -> bool:
    return is_read(values.value(nested(depth), gemma_syntax('"')))


def read_json(characters: int) -> bool:
    return _is_json(f'"{"x" * (characters - 2)}"')


def coerced_depth(levels: int) -> bool:
    root: Json = {str(at): {"$ref": f"#/{at + 1}"} for at in range(levels - 1)}
    root[str(levels - 1)] = {"type": "string"}
    return resolved(root["0"], View(root)) == {"type": "string"}


def coerced_parts(count: int) -> bool:
    schema: Json = {"allOf": [{"title": str(at)} for at in range(count - 1)]}
    return len(lenient.parts_of(schema, View(schema))) == count


def text_depth(depth: int) -> bool:
    schema: Any = {"type": "string"}
    for _ in range(depth - 1):
        schema = {"type": "string", "allOf": [schema]}
    lark = Lark()
    text_of(ValueSchema(schema, schema), lark)
    return not any(NEVER in terminal for terminal in lark._names)


def harmony_depth(levels: int) -> bool:
    schema: Any = {"type": "string"}
    for _ in range(levels):
        schema = {"type": "array", "items": schema}
    return "string" in json.dumps(SchemaReducer(schema).plain(schema))


def harmony_references(count: int) -> bool:
    root = {
        "properties": {str(at): {"$ref": "#/$defs/a"} for at in range(count)},
        "$defs": {"a": {"type": "string"}},
    }
    found = SchemaReducer(root).plain(root)["properties"]
    return all(found.values())


@pytest.mark.parametrize(
    "case",
    [
        Boundary("CALL_DEPTH", json_depth),
        Boundary("CALL_DEPTH", python_depth),
        Boundary("CALL_DEPTH", gemma_depth),
        Boundary("READ_JSON_CHARACTERS", read_json),
        Boundary("COERCED_DEPTH", coerced_depth),
        Boundary("COERCED_PARTS", coerced_parts),
        Boundary("TEXT_SCHEMA_DEPTH", text_depth),
        Boundary("HARMONY_DEPTH", harmony_depth),
        Boundary("HARMONY_REFERENCES", harmony_references),
    ],
    ids=str,
)
def test_one_past_it(case: Boundary, monkeypatch: pytest.MonkeyPatch) -> None:
    case.check(monkeypatch)


def test_patterns_of_marks_are_kept_for_so_many_sets() -> None:
    for kept in (source._any_of, source._beginnings):
        for at in range(limits.CACHED_DELIMITER_SETS.value + 1):
            kept((f"<{at}>",))
        assert kept.cache_info().currsize == limits.CACHED_DELIMITER_SETS.value


def test_so_many_answers_of_a_client_are_checked_at_a_time() -> None:
    turns = review.turns_to_check("a")
    assert turns._value == limits.CHECK_PROCESSES.value
    assert review.turns_to_check("a") is turns
    assert review.turns_to_check("b") is not turns
    assert schema_errors(1, {"type": "integer"}, seconds=limits.CHECK_SECONDS.value) == []
