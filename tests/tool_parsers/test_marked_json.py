"""Calls as JSON, in the frames of Llama, Mistral and those that put delimiters around it."""

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest

from mlx_server.messages import Tool
from mlx_server.tool_parsers.call_format import parse_calls
from mlx_server.tool_parsers.call_ids import new_short_id
from mlx_server.tool_parsers.formats import HERMES, LLAMA_TAGGED, MISTRAL

TOOLS = [Tool("f", None, {"properties": {"a": {"type": "integer"}}}), Tool("g")]

Parse = Callable[..., list[dict[str, Any]]]

hermes, llama, mistral = (partial(parse_calls, form) for form in (HERMES, LLAMA_TAGGED, MISTRAL))

F, G = '{"name": "f", "arguments": {"a": 1}}', '{"name": "g", "arguments": {}}'
ARRAY = f"[{F}, {G}]"
BOTH = [("f", {"a": 1}), ("g", {})]


def read(parse: Parse, text: str) -> list[tuple[str, Any]]:
    return [(call["name"], call["arguments"]) for call in parse(text, TOOLS)]


@pytest.mark.parametrize("parse", [hermes, llama])
@pytest.mark.parametrize(
    "text",
    [
        ARRAY,
        f" {F}\n{G}",
        f"{F}; {G}",
        f"{F}, {G}",
        '[{"parameters": {"a": "1"}, "name": "f"}, {"function": {"name": "g", "parameters": {}}}]',
        '[{"type": "function", "name": "f", "id": "x", "args": {"a": 1.0}},' + G + "]",
        F + '{"name": "g", "arguments": "{}"}',
    ],
)
def test_two_calls_in_any_arrangement(parse: Parse, text: str) -> None:
    assert read(parse, text) == BOTH


@pytest.mark.parametrize("parse", [hermes, llama, mistral])
@pytest.mark.parametrize(
    "text",
    [
        "",
        "{}",
        "{]",
        '{"type": "function"}',
        '{"arguments": {"a": 1}}',
        '{"name": "h", "arguments": {}}',
        '{"name": "f", "arguments": [1]}',
        '{"name": "f", "arguments": {"a": 1, "a": 2}}',
        '{"name": "f", "arguments": "{\\"a\\": 1, \\"a\\": 2}"}',
        '{"arguments": {"a": 1}, "name": "f", "name": "g"}',
        '{"arguments": {"a": 1}, "arguments": {"a": 2}, "name": "f"}',
        '{"arguments": {"a": 1}, "parameters": {"a": 2}, "name": "f"}',
        '{"name": ["f"], "arguments": {}}',
        '{"function": {"function": {"function": {"function": {}}}}}',
        '{"function": ' * 5000,
    ],
)
def test_what_is_no_call(parse: Parse, text: str) -> None:
    with pytest.raises(ValueError, match=r"\w"):
        parse(text, TOOLS)


def test_a_name_between_delimiters_is_a_call_of_a_tool_that_needs_no_arguments() -> None:
    (made,) = hermes('{"name": "f"}', TOOLS)
    assert (made["name"], made["arguments"]) == ("f", {})
    for parse in (llama, mistral):  # nothing delimiters the end
        with pytest.raises(ValueError, match=r"\w"):
            parse('{"name": "f"}', TOOLS)


@pytest.mark.parametrize("parse", [hermes, mistral])
def test_an_array_of_none(parse: Parse) -> None:
    assert read(parse, " [ ]") == []


@pytest.mark.parametrize(
    "text",
    [
        '{"name": "f", "arguments": {"a": 1,}}',
        '{"name": "f", "arguments": {"a": 1}',
        "{'name': 'f', 'arguments': {'a': 1}}",
        '{"name": "f", "arguments": {a: 1}}',
    ],
)
def test_a_slip_is_repaired(text: str) -> None:
    assert read(llama, text) == BOTH[:1]


@pytest.mark.parametrize(
    ("text", "calls"),
    [
        ('f[ARGS]{"a": 1}', BOTH[:1]),
        ('f{"a": 1}', BOTH[:1]),
        ('f[CALL_ID]123456789[ARGS] {"a": "1"}', BOTH[:1]),
        ('f[ARGS]{"a": 1,}', BOTH[:1]),
        ("f[CALL_ID]123456789[ARGS]{'a': 1}", BOTH[:1]),
        ("g[ARGS]{}", BOTH[1:]),
        ("g[ARGS]", BOTH[1:]),
        ('g[ARGS]{"name": "f", "arguments": 1}', [("g", {"name": "f", "arguments": 1})]),
        (f" {ARRAY}", BOTH),
        (F, BOTH[:1]),
    ],
)
def test_mistral(text: str, calls: list[tuple[str, Any]]) -> None:
    assert read(mistral, text) == calls


def test_mistrals_ids_are_kept_and_made_of_nine_characters() -> None:
    (call,) = mistral("g[CALL_ID]a1B2c3D4e[ARGS]{}", TOOLS)
    assert call["id"] == "a1B2c3D4e"
    made = {new_short_id() for _ in range(100)}
    assert len(made) == 100
    assert all(len(id) == 9 and id.isalnum() and id.isascii() for id in made)


@pytest.mark.parametrize("text", ["f()", "f[ARGS]1", "[ARGS]{}", "[CALL_ID]1[ARGS]{}"])
def test_what_is_no_call_of_mistrals(text: str) -> None:
    with pytest.raises(ValueError, match=r"\w"):
        mistral(text, TOOLS)


def test_a_builtin_of_llama_is_called_as_python() -> None:
    assert read(llama, 'f.call(a="1")') == BOTH[:1]
