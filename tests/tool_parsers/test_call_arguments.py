"""Calls as Python: values, strings as models quote them, and what is none."""

from contextlib import suppress

import pytest

from mlx_server.events import Event, ToolCallDelta
from mlx_server.tool_parsers.call_format import parse_calls
from mlx_server.tool_parsers.calls import ToolCallEmitter
from mlx_server.tool_parsers.formats import BARE_PYTHON, LFM2
from mlx_server.tool_parsers.source import Source
from tests.tool_parsers.python_calls import TOOLS


@pytest.mark.parametrize(
    "text",
    [
        "",
        "[f]",
        "[f(]",
        "[f(1)]",
        "[f(n=1]",
        "[f(n=1 text='a')]",
        "[f(text='a)]",
        "[f(text=b'a')]",
        "[f(n={1: 2, 3})]",
        "[f(n=1e999)]",
        "[f(n=nan)]",
        r"[f(text='\ud83d')]",
        r"[f(text='\U00110000')]",
        r"[f(text='\xg0')]",
        "[f(n=" + "[" * 1000,
        "[h(n=1)]",
    ],
)
def test_what_is_no_call(text: str) -> None:
    with suppress(ValueError):
        assert parse_calls(LFM2, text, TOOLS) == []


@pytest.mark.parametrize(
    "text",
    [
        "[f(text='a'), g()]",
        "[f(text='a'),g(),]<|tool_call_end|>",
        " [ f( text = 'a' ) , g( ) ] <|tool_call_end|> ",
        "f(text='a')\ng()\n<|tool_call_end|>",
        "f(text='a'); g()",
        "functions.f(text='a')\ng.call()",
        '[{"name": "f", "arguments": {"text": "a"}}, {"name": "g", "arguments": {}}]',
    ],
)
def test_two_calls_in_any_arrangement(text: str) -> None:
    found = [(call["name"], call["arguments"]) for call in parse_calls(LFM2, text, TOOLS)]
    assert found == [("f", {"text": "a"}), ("g", {})]


@pytest.mark.parametrize(
    ("text", "arguments"),
    [
        ("[f(n=, text='a')]", {"text": "a"}),
        ("[f(text=, n=1)]", {"text": "", "n": 1}),
        ("[f(text=word)]", {"text": "word"}),
        ("[f(text=New York, n=1)]", {"text": "New York", "n": 1}),
        ("[f(text=True)]", {"text": "true"}),
        ("[f({'n': 1, 'text': 'a'})]", {"n": 1, "text": "a"}),
        ("[f( **{'n': 1})]", {"n": 1}),
        ("[f({'n': 1}, text='a')]", {"n": 1, "text": "a"}),
    ],
)
def test_arguments_with_slips(text: str, arguments: dict[str, object]) -> None:
    (call,) = parse_calls(LFM2, text, TOOLS)
    assert call["arguments"] == arguments


@pytest.mark.parametrize("twice", ["text='a', text='b'", "n=1, n=2"])
def test_of_a_key_that_is_given_twice_the_last_value_counts(twice: str) -> None:
    (call,) = parse_calls(LFM2, f"[f({twice})]", TOOLS)
    assert call["arguments"] in ({"text": "b"}, {"n": 2})


def test_a_string_streams_and_a_value_comes_whole() -> None:
    events: list[Event] = []
    source = Source()
    steps = BARE_PYTHON.read(source, ToolCallEmitter(0, TOOLS, events.append))

    def written(text: str) -> str:
        events.clear()
        source.feed(text)
        next(steps)
        return "".join(e.arguments for e in events if isinstance(e, ToolCallDelta))

    assert written("f(text='on") == '{"text": "on'
    assert written("e\\") == "e"
    assert written("n'") == "\\n"
    assert written(", n") == "", "the quote may be the string's own"
    assert written("=12") == '"'
    assert written("3), ") == ', "n": 123}'
