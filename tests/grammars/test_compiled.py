"""Schemas compiled in a process that can be killed, and remembered."""

import subprocess
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any, cast

import pytest

from mlx_server import limits
from mlx_server.errors import CompilerTooSlow, CompilerUnavailable, InvalidGrammar
from mlx_server.generation import constraints
from mlx_server.grammars import compiled as module
from mlx_server.grammars.compiled import PROCESSES, compiled
from mlx_server.grammars.compiler import fault, first_text, in_a_line
from mlx_server.messages import Tool
from tests.tables import cases

SLOW: dict[str, Any] = {
    "type": "object",
    "properties": {f"k{at}": {} for at in range(99)},
    "additionalProperties": False,
    "minProperties": 1,
}
"""llguidance writes out which of the properties comes first."""
TRIES = 9
MANY = {f"a member of a large object, number {n}": {"type": "integer"} for n in range(400)}


@pytest.fixture(autouse=True)
def _nothing_is_known() -> Iterator[None]:
    module._reply_to.cache_clear()
    yield
    module._reply_to.cache_clear()


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
        with pytest.raises(CompilerTooSlow) as error:
            compile_where_the_machine_has_time(SLOW)
    assert (error.value.status, error.value.headers["Retry-After"]) == (503, "1")
    assert compiled(SLOW).grammar.startswith("{")


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


def tool_grammar(tool: Tool) -> Any:
    spec = SimpleNamespace(context=SimpleNamespace(tools=(tool,)))
    request = SimpleNamespace(prompts=[], format=None, tool_choice="auto")
    prepared = SimpleNamespace(transcript=None, spec=SimpleNamespace(constrain_calls=None))
    return constraints._grammar(cast(Any, prepared), cast(Any, request), cast(Any, spec))


def test_calls_of_an_optional_tool_are_unconstrained_if_its_schema_takes_too_long(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(limits, "SCHEMA_SECONDS", 0.02)
    assert tool_grammar(Tool("slow", None, SLOW))[:2] == (None, constraints.NO_TOOL)


TWO_TYPES = {"allOf": [{"type": "string"}, {"type": "integer"}]}


def having(**members: Any) -> dict[str, Any]:
    return {"type": "object", "properties": members, "required": [*members]}


@pytest.mark.parametrize(
    ("schema", "reason"),
    [
        (TWO_TYPES, "incompatible types"),
        (having(a=having(b=TWO_TYPES)), "(#/properties/a/properties/b: incompatible types)"),
        (having(a=False), "(#/properties/a: schema is false)"),
        (
            having(a={"$ref": "#/$defs/b"}) | {"$defs": {"b": TWO_TYPES}},
            "incompatible types while processing #/$defs/b",
        ),
        (
            {"type": "object", "required": ["a"], "additionalProperties": False},
            "required property 'a' is unsatisfiable",
        ),
        (having(**MANY, a=False), "required property 'a' is unsatisfiable"),
    ],
)
def test_a_schema_that_nothing_can_match_is_refused_with_the_reason(
    schema: dict[str, Any], reason: str
) -> None:
    with pytest.raises(InvalidGrammar) as refused:
        compiled(schema)
    assert reason in refused.value.message


def test_a_fault_is_named() -> None:
    assert fault('start: "a"\n') == ""
    assert 'unknown name: "nobody"' in fault("start: nobody\n")
    costly = "start: A\nA: " + " & ".join(f"/(a|b|{n})*a(a|b){{{n}}}/" for n in range(20, 24))
    assert "fuel" in fault(costly)


@cases
def test_a_message_loses_its_listings_and_the_names_of_rules(message: str, line: str) -> None:
    assert in_a_line(message) == line


@cases
def test_it_ends_as_early_as_the_grammar_may(rule: str, text: str) -> None:
    assert first_text(f"start: {rule}\n", ()) == text


def test_what_is_no_grammar_is_refused() -> None:
    with pytest.raises(InvalidGrammar, match="nobody"):
        first_text("start: nobody\n", ())
