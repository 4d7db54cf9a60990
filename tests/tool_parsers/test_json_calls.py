"""One call as a JSON object: its name and arguments by any of their keys."""

import pytest

from tests.tool_parsers.json_parsers import (
    ARRAY,
    BOTH,
    TOOLS,
    F,
    G,
    Parse,
    hermes,
    llama,
    mistral,
    read,
)


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
