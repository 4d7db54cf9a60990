"""The process that compiles schemas builds no lexer that may take long."""

import json
from typing import Any

import llguidance
import pytest

from mlx_server.grammars import child, compiler
from mlx_server.grammars.compiled import Compile, Compiled
from tests.grammars.large import MANY


@pytest.mark.parametrize(
    ("schema", "builds"),
    [
        ({"properties": MANY}, False),
        (
            {
                "properties": MANY,
                "required": ["a member of a large object, number 7"],
                "format": "date",
            },
            False,
        ),
        ({"properties": {**MANY, "a": {"type": "string", "pattern": "^a{9}$"}}}, False),
        ({"properties": {"a": {"type": "string", "pattern": "^(a{90}b){50}$"}}}, True),
        ({"patternProperties": {"^(a{90}b){50}$": {"type": "string"}}}, True),
        ({"properties": {**MANY, "a": {"type": "string", "maxLength": 9}}}, False),
        ({"properties": {"a": {"type": "string", "maxLength": 5000}}}, True),
        (
            {"properties": {"a": {"pattern": "^[ab]{100}$", "type": "string", "minLength": 90}}},
            True,
        ),
        ({"properties": {"a": {"type": "integer"}}}, False),
        ({"properties": {"a": {"type": "integer", "multipleOf": 3}}}, True),
    ],
)
def test_a_lexer_of_small_expressions_is_built_by_the_engine_alone(
    schema: Any, builds: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    built = []
    init = llguidance.LLMatcher

    class Counted:
        validate_grammar = staticmethod(init.validate_grammar)

        def __new__(cls, *args: Any, **options: Any) -> Any:
            built.append(args[1])
            return init(*args, **options)

    monkeypatch.setattr(compiler, "LLMatcher", Counted)
    object_schema = {"type": "object", "additionalProperties": False, **schema}
    assert isinstance(child.reply_to(Compile(json.dumps(object_schema), 60)), Compiled)
    assert bool(built) == builds
