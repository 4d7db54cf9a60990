"""Schemas compiled in a process that can be killed, and remembered."""

import json
import subprocess
from collections.abc import Iterator
from typing import Any

import pytest

from mlx_server import limits
from mlx_server.errors import CompilerUnavailable, InvalidGrammar
from mlx_server.sandbox.parent import WarmProcess
from mlx_server.schemas import compiled as module
from mlx_server.schemas.compiled import PROCESSES, compiled, lark_of
from tests.hostile.lowered import lower

SLOW: dict[str, Any] = {
    "type": "object",
    "properties": {f"k{at}": {} for at in range(99)},
    "additionalProperties": False,
    "minProperties": 1,
}
"""llguidance writes out which of the properties comes first."""


@pytest.fixture(autouse=True)
def _nothing_is_known() -> Iterator[None]:
    module._schemas._found.clear()
    yield
    module._schemas._found.clear()


def test_one_that_takes_too_long_is_refused_and_the_next_is_compiled(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with monkeypatch.context() as patched:
        lower(patched, "SCHEMA_SECONDS", 0.02)
        with pytest.raises(InvalidGrammar, match=r"takes more than 0\.02 s of processor time"):
            compiled(SLOW)
    assert compiled({"type": "null"}).grammar.startswith("%json")


def test_a_busy_machine_is_no_fault_of_the_schema(monkeypatch: pytest.MonkeyPatch) -> None:
    """Time by the clock says nothing about a schema: it may be asked for again."""
    schema = {"type": "integer", "title": "asked for twice"}

    def never(process: WarmProcess, deadline: float) -> bytearray:
        raise TimeoutError

    with monkeypatch.context() as patched:
        patched.setattr(WarmProcess, "_frame", never)
        with pytest.raises(CompilerUnavailable, match="Try again later") as busy:
            compiled(schema)
        with pytest.raises(CompilerUnavailable, match="The grammar could not be compiled in time"):
            lark_of('root ::= "a"')
    assert (busy.value.status, busy.value.headers["Retry-After"]) == (503, "1")
    assert compiled(schema).grammar.startswith("%json")


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


def test_the_longest_unused_is_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    lower(monkeypatch, "COMPILED_SCHEMAS", 2)
    first, second = compiled({"title": "1"}), compiled({"title": "2"})
    assert compiled({"title": "1"}) is first
    compiled({"title": "3"})
    assert compiled({"title": "1"}) is first
    assert compiled({"title": "2"}) is not second


def test_what_it_may_take_is_limited() -> None:
    with PROCESSES.one() as own:
        assert own._program.memory == limits.SCHEMA_MEMORY.value
    assert len(PROCESSES._idle) <= limits.IDLE_SCHEMA_PROCESSES.value
    assert PROCESSES._places._initial_value == limits.SCHEMA_PROCESSES.value  # type: ignore[attr-defined]


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
