"""What is a value in JSON, Python's literals and Gemma's syntax, and what is none."""

import json

import pytest

from mlx_server.tool_parsers import values as reader
from mlx_server.tool_parsers.model_json import Malformed
from mlx_server.tool_parsers.source import complete_source
from mlx_server.tool_parsers.values import JSON, Syntax, gemma_syntax
from tests.tool_parsers.values import PYTHON, arguments, read


@pytest.mark.parametrize(
    "text",
    [
        '{"a":' + "1" * 5000 + "}",
        '{"a":' + "[" * 65 + "]" * 65 + "}",
        '{"a":' + "[" * 100_000,
        '{"a":' + '{"a":' * 100_000,
    ],
    ids=lambda text: text[:24],
)
@pytest.mark.parametrize("size", [1, 3, 1 << 20])
def test_these_are_malformed(text: str, size: int) -> None:
    with pytest.raises(Malformed):
        read([text[i : i + size] for i in range(0, len(text), size)])


@pytest.mark.parametrize(
    ("syntax", "text"),
    [
        (JSON, '{"a": [1, {"b": "x"}], "c": null}'),
        (PYTHON, "{'a': (1, {'b': {'x'}},), 'c': None}"),
        (gemma_syntax("~"), '{a:[1,{b:~x~}],"c":None}'),
    ],
    ids=["json", "python", "gemma"],
)
def test_a_value_is_whole_or_malformed_wherever_it_ends(syntax: Syntax, text: str) -> None:
    for size in range(len(text)):
        with pytest.raises(Malformed):
            next(reader.value(complete_source(text[:size]), syntax))
    with pytest.raises(StopIteration) as found:
        next(reader.value(complete_source(text), syntax))
    inside = found.value.value["a"][1]["b"]
    assert found.value.value == {"a": [1, {"b": inside}], "c": None}
    assert inside in ("x", ["x"])


@pytest.mark.parametrize("character", ["\n", "\t", "\r", "\0", "\x1f", "\x7f", "\u2028"])
def test_line_breaks_and_control_characters_in_strings_are_let_pass(character: str) -> None:
    for key in ("s", "other"):
        events = read([f'{{"{key}": "a{character}b"}}'])
        assert json.loads(arguments(events)) == {key: f"a{character}b"}
