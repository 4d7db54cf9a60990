"""Any JSON object, written in any way and cut anywhere, is read as json.loads reads it."""

import json
import time
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mlx_server import limits
from mlx_server.events import ToolCallFinished, ToolCallStarted
from mlx_server.tool_parsers import values as reader
from mlx_server.tool_parsers.model_json import Malformed
from mlx_server.tool_parsers.source import complete_source
from mlx_server.tool_parsers.values import JSON, Syntax, gemma_syntax
from tests.slowness import slowness
from tests.tool_parsers.values import PYTHON, TYPED, arguments, read

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
