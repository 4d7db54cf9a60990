"""Any JSON object, written in any way and cut anywhere, is read as json.loads reads it."""

import json
import time
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mlx_server import limits
from mlx_server.events import Event, ToolCallDelta, ToolCallFinished, ToolCallStarted
from mlx_server.messages import Tool
from mlx_server.tool_parsers import keyed_calls
from mlx_server.tool_parsers import values as reader
from mlx_server.tool_parsers.call_format import CallFormat
from mlx_server.tool_parsers.calls import ToolCallEmitter
from mlx_server.tool_parsers.model_json import Malformed
from mlx_server.tool_parsers.source import Source, Steps, complete_source
from mlx_server.tool_parsers.tag_formats import QWEN3_CODER, SEED_OSS
from mlx_server.tool_parsers.values import JSON, Syntax, gemma_syntax, python_syntax, read_json
from tests.slowness import slowness
from tests.tool_parsers import parse_calls

TYPED = {"type": "object", "properties": {"s": {"type": "string"}, "t": {"type": "string"}}}
"""Values of `s` and `t` stream."""

PYTHON = python_syntax()


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
        if (yield from source.peek()):
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


@pytest.mark.slow
@given(st.data())
def test_any_object_in_any_spelling_cut_anywhere(data: st.DataObject) -> None:
    value, text = data.draw(written_objects())
    assert json.loads(text) == value
    events = read(data.draw(cuts(text)))
    assert isinstance(events[0], ToolCallStarted)
    assert isinstance(events[-1], ToolCallFinished)
    assert arguments(events) == json.dumps(value, ensure_ascii=False)


LONG_STRINGS = [
    pytest.param(size, key, written, id=f"{name}-{key}-{written}")
    for name, size in (("tokens", 4), ("whole", 1 << 20))
    for key, written in (("s", "x"), ("s", '\\"'), ("s", "\\u00e9"), ("other", "🙂"))
]


@pytest.mark.slow
@pytest.mark.parametrize(("size", "key", "written"), LONG_STRINGS)
def test_a_long_string_takes_time_by_its_length(written: str, key: str, size: int) -> None:
    """Far under a second; a minute, if each piece were added to all that came before."""
    text = f'{{"{key}": "{written * (200_000 // len(written))}"}}'
    began = time.thread_time()
    events = read([text[at : at + size] for at in range(0, len(text), size)])
    assert time.thread_time() - began < 4 * slowness()
    assert json.loads(arguments(events)) == json.loads(text)


@pytest.mark.parametrize("item", ["[]", "0", '""', '{"a": 1}'])
def test_a_value_of_too_many_parts_is_malformed(item: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "JSON_STRINGS", 100)
    assert json.loads(arguments(read([f'{{"a": [{item}{f", {item}" * 10}]}}'])))
    with pytest.raises(Malformed, match="too many values"):
        read([f'{{"a": [{item}{f", {item}" * 100}]}}'])


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


TOOL = Tool("keep", parameters={"type": "object", "properties": {"it": {"type": "object"}}})
ENDS = ("</parameter>", "</function>", "</tool_call>", "</seed:tool_call>", "\n", "'", "}", '"')
DELIMITERS = st.lists(
    st.sampled_from(
        (*ENDS, "</arg_value>", "<arg_key>", "<tool_call>", "<function=keep>", "a", "\\")
    ),
    max_size=6,
).map("".join)
VALUES = st.dictionaries(
    DELIMITERS, st.recursive(DELIMITERS, st.lists, max_leaves=4), min_size=1, max_size=3
)


def read_ahead(text: str) -> tuple[str, str]:
    """What is read_ahead, and what is left."""
    source = complete_source(text)
    with pytest.raises(StopIteration) as end:
        next(read_json(source))
    return end.value.value, source.ahead()


def test_only_whole_json_is_read() -> None:
    assert read_ahead('{"a": "</x>"}</x>') == ('{"a": "</x>"}', "</x>")
    assert read_ahead('[1, "]"], 2') == ('[1, "]"]', ", 2")
    assert read_ahead(" \n{} ") == (" \n{}", " ")
    for none in ("", "a", '"a"', "{", '{"a": 1', "{'a': 1}</x>", '{"a": "</x>"', "[1,]"):
        assert read_ahead(none) == ("", none)


def called(call_format: CallFormat, text: str) -> Any:
    ((call),) = parse_calls(call_format, text, [TOOL])
    return call["arguments"]


@pytest.mark.slow
@given(VALUES)
def test_strings_of_a_value_may_spell_every_delimiter(value: dict[str, Any]) -> None:
    written = json.dumps(value)
    tags = f"<function=keep>\n<parameter=it>\n{written}\n</parameter>\n</function>\n"
    assert called(QWEN3_CODER, f"{tags}</tool_call>") == {"it": value}
    assert called(SEED_OSS, f"{tags}</seed:tool_call>") == {"it": value}
    pairs = f"keep\n<arg_key>it</arg_key>\n<arg_value>{written}</arg_value>\n</tool_call>"
    assert called(keyed_calls.GLM, pairs) == {"it": value}
