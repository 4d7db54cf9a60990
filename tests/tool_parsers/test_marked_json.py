"""Calls as JSON, in the frames of Llama, Mistral and those that put delimiters around it."""

from typing import Any

import pytest

from tests.tool_parsers.json_parsers import (
    ARRAY,
    BOTH,
    TOOLS,
    F,
    Parse,
    hermes,
    llama,
    mistral,
    read,
)


@pytest.mark.parametrize("parse", [hermes, mistral])
def test_an_array_of_none(parse: Parse) -> None:
    assert read(parse, " [ ]") == []


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


def test_mistrals_ids_are_kept() -> None:
    (call,) = mistral("g[CALL_ID]a1B2c3D4e[ARGS]{}", TOOLS)
    assert call["id"] == "a1B2c3D4e"


@pytest.mark.parametrize("text", ["f()", "f[ARGS]1", "[ARGS]{}", "[CALL_ID]1[ARGS]{}"])
def test_what_is_no_call_of_mistrals(text: str) -> None:
    with pytest.raises(ValueError, match=r"\w"):
        mistral(text, TOOLS)


def test_a_builtin_of_llama_is_called_as_python() -> None:
    assert read(llama, 'f.call(a="1")') == BOTH[:1]
