"""Schemas compiled in a process that can be killed, and remembered."""

import json
import subprocess
from collections.abc import Iterator
from typing import Any

import pytest

from mlx_server import limits
from mlx_server.errors import CompilerTooSlow, CompilerUnavailable, InvalidGrammar
from mlx_server.grammars import compiled as module
from mlx_server.grammars.compiled import PROCESSES, compiled
from mlx_server.grammars.grammar import Disjointness, unsupported_keywords
from mlx_server.grammars.view import View
from tests.grammars.large import MANY

SLOW: dict[str, Any] = {
    "type": "object",
    "properties": {f"k{at}": {} for at in range(99)},
    "additionalProperties": False,
    "minProperties": 1,
}
"""llguidance writes out which of the properties comes first."""
TRIES = 9


@pytest.fixture(autouse=True)
def _nothing_is_known() -> Iterator[None]:
    module._schemas._found.clear()
    yield
    module._schemas._found.clear()


def compile_where_the_machine_has_time(schema: dict[str, Any]) -> None:
    for _ in range(TRIES):
        try:
            compiled(schema)
        except CompilerTooSlow:
            raise
        except CompilerUnavailable:  # others took the processor: it may be sent again
            continue


def test_one_that_takes_too_long_may_be_sent_again(monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patched:
        patched.setattr(limits, "SCHEMA_SECONDS", 0.02)
        with pytest.raises(CompilerTooSlow, match=r"takes more than 0\.02 s of processor time"):
            compile_where_the_machine_has_time(SLOW)
    assert compiled(SLOW).grammar.startswith("{")
    assert compiled({"type": "null"}).grammar.startswith("{")


def test_all_one_of_share_the_work_of_their_comparisons(monkeypatch: pytest.MonkeyPatch) -> None:
    """While each had its own limit, 300 of them took 11 s of the processor."""
    nullable = {"oneOf": [{"enum": [1, 2]}, {"type": "null"}]}  # two schemas and two values
    view = View({"properties": dict.fromkeys("abc", nullable)})
    monkeypatch.setattr(limits, "SCHEMA_COMPARISONS", 8)
    found = unsupported_keywords(view, Disjointness(view).holds)
    assert [gap.path for gap in found] == [("properties", "c")]
    assert not unsupported_keywords(view, lambda options: Disjointness(view).holds(options))


def test_a_schema_is_compiled_once(monkeypatch: pytest.MonkeyPatch) -> None:
    found = compiled({"type": "integer", "title": "a"})
    with pytest.raises(InvalidGrammar) as refused:
        compiled({"type": "strange"})
    PROCESSES.close()

    def refuse(*args: object, **options: object) -> None:
        raise BlockingIOError(11, "Resource temporarily unavailable")

    monkeypatch.setattr(subprocess, "Popen", refuse)
    assert compiled({"type": "integer", "title": "a"}) is found
    with pytest.raises(InvalidGrammar) as again:
        compiled({"type": "strange"})
    assert again.value.message == refused.value.message
    with pytest.raises(CompilerUnavailable, match="can't be started: Resource temporarily"):
        compiled({"type": "integer", "title": "b"})


def test_a_large_schema_that_nothing_can_match_is_refused() -> None:
    wrong = {"type": "object", "properties": MANY | {"a": False}, "required": ["a"]}
    with pytest.raises(InvalidGrammar, match="#/properties/a can't be met by any value"):
        compiled(wrong)


def test_the_longest_unused_is_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "COMPILED_SCHEMAS", 2)
    first, second = compiled({"title": "1"}), compiled({"title": "2"})
    assert compiled({"title": "1"}) is first
    compiled({"title": "3"})
    assert compiled({"title": "1"}) is first
    assert compiled({"title": "2"}) is not second


def test_what_it_may_take_is_limited() -> None:
    with PROCESSES.one() as own:
        assert own._program.memory == limits.SCHEMA_MEMORY
    assert len(PROCESSES._idle) <= limits.IDLE_SCHEMA_PROCESSES
    assert PROCESSES._most == limits.SCHEMA_PROCESSES
    assert PROCESSES._most_each == limits.CLIENT_SCHEMA_PROCESSES


TAGGED = {
    "type": "object",
    "properties": {"kind": {"const": 1}},
    "required": ["kind"],
}


@pytest.mark.parametrize(
    ("options", "is_disjoint"),
    [
        ([{"type": "integer"}, {"type": "string"}], True),
        ([{"type": "integer"}, {"type": "number"}], False),
        ([{"type": "integer"}, {"const": 1.0}], False),
        ([{"const": 1}, {"enum": [2, 3.5]}, {"type": "null"}], True),
        ([{"const": 1}, {"enum": [2, 1.0]}], False),
        ([{"const": "1"}, {"const": 1}], True),
        ([TAGGED, {"$ref": "#/$defs/two"}], True),
        ([TAGGED, {"$ref": "#/$defs/one"}], False),
        ([{"$ref": "#/$defs/two"}, {"allOf": [{"$ref": "#/$defs/one"}]}], True),
        ([TAGGED, {"type": "object"}], False),
        ([{"required": ["a"]}, {"required": ["b"]}], False),
        (
            [
                {"type": "object", "required": ["a"], "properties": {"a": {}},
                 "additionalProperties": False},
                {"type": "object", "required": ["b"]},
            ],
            True,
        ),
        (
            [
                {"type": "object", "required": ["a"], "properties": {"a": {}},
                 "patternProperties": {"b": {}}, "additionalProperties": False},
                {"type": "object", "required": ["b"]},
            ],
            False,
        ),
        ([{"type": "array"}, {"const": [1]}], False),
        ([{"type": "object"}, {"const": {"=": "1.0", "#": "number"}}], False),
        ([{"type": "object", "required": [""], "properties": {"": {"const": "1.0"}}}, {"const": 1}],
         True),
        ([{"not": {}}, {"minLength": 2}], False),
        ([True, {"type": "null"}], False),
    ],
    ids=lambda value: json.dumps(value)[:60],
)  # fmt: skip
def test_one_of_is_any_of_where_no_value_follows_two(options: Any, is_disjoint: bool) -> None:
    two = {**TAGGED, "properties": {"kind": {"const": 2}}}
    schema = {"oneOf": options, "$defs": {"one": TAGGED, "two": two}}
    gaps = [gap for gap in compiled(schema).unenforced if gap.startswith("oneOf")]
    assert gaps == ([] if is_disjoint else ["oneOf at #"])
