"""Any JSON object, written in any way and cut anywhere, is read as json.loads reads it."""

import json
import time
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mlx_server.events import Event, ToolCallDelta, ToolCallFinished, ToolCallStarted
from mlx_server.messages import Tool
from mlx_server.repair.malformed import Malformed
from mlx_server.tool_parsers import values as reader
from mlx_server.tool_parsers.calls import ToolCallEmitter
from mlx_server.tool_parsers.source import Source, Steps, complete_source
from mlx_server.tool_parsers.syntaxes import JSON, gemma_syntax, python_syntax
from mlx_server.tool_parsers.values import Syntax
from tests.slowness import slowness

pytestmark = pytest.mark.tables

TYPED = {"type": "object", "properties": {"s": {"type": "string"}, "t": {"type": "string"}}}
"""Values of `s` and `t` stream."""

scalars = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.floats(allow_nan=False, allow_infinity=False),
    st.text(),
)
values = st.recursive(
    scalars,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)
keys = st.sampled_from(["s", "t"]) | st.text()
objects = st.dictionaries(keys, values, max_size=4).map(
    lambda found: {k: str(v) if k in TYPED["properties"] else v for k, v in found.items()}
)
spaces = st.text(alphabet=" \n\t\r", max_size=2)


def spelled(value: Any, draw: Any) -> str:
    """As JSON, with any white space and any escapes."""

    def space() -> str:
        return str(draw(spaces))

    match value:
        case dict():
            items = [
                f"{space()}{spelled(k, draw)}{space()}:{space()}{spelled(v, draw)}{space()}"
                for k, v in value.items()
            ]
            return "{" + (",".join(items) or space()) + "}"
        case list():
            return (
                "["
                + (",".join(f"{space()}{spelled(v, draw)}{space()}" for v in value) or space())
                + "]"
            )
        case str():
            return '"' + "".join(draw(st.sampled_from(ways(c))) for c in value) + '"'
    return json.dumps(value)


def ways(character: str) -> list[str]:
    escaped = json.dumps(character)[1:-1]
    units = character.encode("utf-16-be")
    numbers = "".join(f"\\u{units[i] << 8 | units[i + 1]:04x}" for i in range(0, len(units), 2))
    written = [escaped, numbers, numbers.upper().replace("\\U", "\\u")]
    slash = ["\\/"] if character == "/" else []
    plain = [] if character in '"\\' or character < " " else [character]
    return [*written, *slash, *plain]


PYTHON = python_syntax()


@st.composite
def written_objects(draw: Any) -> tuple[dict[str, Any], str]:
    value = draw(objects)
    return value, spelled(value, draw)


@st.composite
def cuts(draw: Any, text: str) -> list[str]:
    places = draw(st.lists(st.integers(0, len(text)), max_size=6))
    size = draw(st.sampled_from([1, 2, 3, 7, len(text) + 1]))
    ends = sorted({0, len(text), *places, *range(0, len(text), size)})
    return [text[a:b] for a, b in pairwise(ends)]


def read(pieces: list[str], schema: Any = TYPED) -> list[Event]:
    """The arguments of one call, from the opening brace on."""
    events: list[Event] = []
    calls = ToolCallEmitter(0, [Tool("f", parameters=schema)], events.append)
    source = Source()

    def steps() -> Steps[None]:
        call = calls.start("f")
        yield from source.space()
        yield from source.expect("{")
        yield from reader.arguments(source, JSON, lambda: call)
        call.finish()
        assert not (yield from source.space()).strip()
        if not (yield from source.at_end()):
            raise Malformed("more than an object")

    reading = steps()
    for piece in pieces:
        source.feed(piece)
        next(reading, None)
    source.close(cut=False)
    for _ in reading:
        pytest.fail("a closed source has nothing to wait for")
    return events


def arguments(events: list[Event]) -> str:
    return "".join(e.arguments for e in events if isinstance(e, ToolCallDelta))


@given(st.data())
def test_any_object_in_any_spelling_cut_anywhere(data: st.DataObject) -> None:
    value, text = data.draw(written_objects())
    assert json.loads(text) == value
    events = read(data.draw(cuts(text)))
    assert isinstance(events[0], ToolCallStarted)
    assert isinstance(events[-1], ToolCallFinished)
    assert arguments(events) == json.dumps(value, ensure_ascii=False)


@given(st.data())
def test_what_is_cut_off_or_garbled_is_malformed_and_nothing_else(data: st.DataObject) -> None:
    _, text = data.draw(written_objects())
    at = data.draw(st.integers(0, len(text)))
    noise = data.draw(st.text(max_size=3) | st.sampled_from(list('{}[]",:\\u')))
    broken = text[:at] + noise + text[at + data.draw(st.integers(0, 3)) :]
    try:
        events = read(data.draw(cuts(broken)))
    except Malformed:
        return
    assert isinstance(json.loads(arguments(events)), dict)


@given(st.text(alphabet='{}[]",:\\u0aetrfnl-. \n', max_size=20), st.integers(1, 5))
def test_noise_is_malformed_wherever_it_is_cut(noise: str, size: int) -> None:
    def outcome(size: int) -> str:
        pieces = [noise[i : i + size] for i in range(0, len(noise), size)]
        try:
            return arguments(read(["{", *pieces]))
        except Malformed:
            return "malformed"

    assert outcome(size) == outcome(len(noise) + 1)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "{",
        '{"a"',
        '{"a":',
        '{"a":}',
        '{"a":1',
        '{"a":1,}',
        '{"a":[1,]}',
        '{"a":"x}',
        '{"a":"\\',
        '{"a":"\\u12"}',
        '{"a":"\\uZZZZ"}',
        '{"a":"\\x"}',
        '{"a":"\\ud83d"}',
        '{"a":"\\ude42"}',
        '{"a":"\\ud83d\\n"}',
        '{"a":"\\ud83d\\u0041"}',
        '{"\\ud83d":1}',
        '{"a":tru}',
        '{"a":True}',
        '{"a":NaN}',
        '{"a":-Infinity}',
        '{"a":1e999}',
        '{"a":[-1e999]}',
        '{"a":01}',
        '{"a":1.}',
        '{"a":' + "1" * 5000 + "}",
        '{"a":' + "[" * 65 + "]" * 65 + "}",
        '{"a":' + "[" * 100_000,
        '{"a":' + '{"a":' * 100_000,
        "{'a':1}",
        "{a:1}",
        '{"a":1}}',
        '{"a":1} x',
        '{"s":"1","s":"2"}',
        '{"a":1,"a":1}',
        "[1]",
    ],
    ids=lambda text: text[:24],
)
@pytest.mark.parametrize("size", [1, 3, 1 << 20])
def test_these_are_malformed(text: str, size: int) -> None:
    with pytest.raises(Malformed):
        read([text[i : i + size] for i in range(0, len(text), size)])


@pytest.mark.parametrize("text", ["NaN", "Infinity", "[-Infinity]", "True", "none", "01", ""])
def test_no_value_of_json(text: str) -> None:
    source = Source()
    source.feed(text)
    source.close(cut=False)
    with pytest.raises(Malformed):
        next(reader.value(source, JSON))


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


def test_as_deep_as_it_may_be() -> None:
    deep = "[" * 63 + "1" + "]" * 63
    assert arguments(read([f'{{"a": {deep}}}'])) == f'{{"a": {deep}}}'


def test_text_that_stays_text_streams_and_other_values_come_whole() -> None:
    deltas = [
        e.arguments
        for e in read(list('{"s": "ab\\nc", "n": [1, 2]}'))
        if isinstance(e, ToolCallDelta)
    ]
    assert deltas == ['{"s": "', "a", "b", "\\n", "c", '"', ', "n": [1, 2]', "}"]


@pytest.mark.parametrize("written", ["x", "\\n", '\\"', "\\u00e9", "é", "🙂"])
@pytest.mark.parametrize("key", ["s", "other"])
@pytest.mark.parametrize("size", [4, 1 << 20], ids=["tokens", "whole"])
def test_a_long_string_takes_time_by_its_length(written: str, key: str, size: int) -> None:
    """Far under a second; a minute, if each piece were added to all that came before."""
    text = f'{{"{key}": "{written * (200_000 // len(written))}"}}'
    began = time.thread_time()
    events = read([text[at : at + size] for at in range(0, len(text), size)])
    assert time.thread_time() - began < 4 * slowness()
    assert json.loads(arguments(events)) == json.loads(text)
