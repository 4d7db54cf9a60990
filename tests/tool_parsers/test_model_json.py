"""JSON of a model is read without losing a digit or a key, or it is not read."""

import contextlib
import json
import re
import time
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from mlx_server import limits
from mlx_server.tool_parsers.model_json import (
    ExactFloat,
    Malformed,
    UnknownTool,
    json_text,
    loads,
    loads_exactly,
    text_around_json,
)
from tests.slowness import slowness

TABLES = yaml.load(Path(__file__).with_name("json.yaml").read_text("utf-8"), yaml.CSafeLoader)


@pytest.mark.parametrize(
    "text", ["3.10", "-0.0", "1e5", "12345678901234567890.12", "0.30000000000000004000"]
)
def test_a_float_keeps_its_text(text: str) -> None:
    (number,) = loads_exactly(f"[{text}]")
    assert isinstance(number, ExactFloat)
    assert (number, number.text) == (float(text), text)
    assert json.dumps(number) == json.dumps(float(text)), "it is a float like any other"


@pytest.mark.parametrize(
    "text",
    ['{"a": 1, "a": 1}', '[{"b": {"": 1, "": 2}}]', '{"x": 1, "\\u0078": 2}', '{"a": {}, "a": {}}'],
)
def test_a_key_given_twice_is_an_error_at_any_depth(text: str) -> None:
    with pytest.raises(ValueError, match="twice"):
        loads_exactly(text)


@pytest.mark.parametrize("name", ["launch", "", "a b", "it's", "\x1b[31m\n"])
def test_the_name_is_kept_and_quoted_on_one_line(name: str) -> None:
    with pytest.raises(Malformed) as raised:
        raise UnknownTool(name)
    assert isinstance(raised.value, UnknownTool)
    assert raised.value.name == name
    assert str(raised.value) == f"there is no tool {name!r}"
    assert str(raised.value).isprintable()


@pytest.mark.parametrize(("text", "found", "mended"), TABLES["found"])
def test_the_one_value_is_found(text: str, found: str, mended: list[str]) -> None:
    assert json_text(text) == (found, tuple(mended))


@pytest.mark.parametrize(
    "text",
    [*TABLES["guessed"], "[" * 100_000 + "]" * 100_000, "[" * 1_000_000, "]" * 1_000_000],
    ids=lambda text: text[:24],
)
def test_what_would_have_to_be_guessed_is_not(text: str) -> None:
    assert json_text(text) is None


def test_what_stands_around() -> None:
    assert text_around_json('<think>Paris.</think>\n```json\n{"a": 1}\n```') == "Paris."
    assert text_around_json('{"a": 1}') == ""


scalars = st.none() | st.booleans() | st.integers() | st.text("ab \"'\\,:é", max_size=6)
values = st.recursive(
    scalars,
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text("ab", max_size=2), inner, max_size=3)
    ),
    max_leaves=6,
).filter(lambda value: isinstance(value, dict | list))
SLIPS = st.sampled_from([",", '"', "'", "{", "}", "[", "]", ":", "True", " ", "1", "\\", "x", ""])
PROSE = st.text("ab .,`\n\"'", max_size=8)


def leaves(value: Any) -> list[Any]:
    match value:
        case dict():
            return [leaf for key, item in value.items() for leaf in (key, *leaves(item))]
        case list():
            return [leaf for item in value for leaf in leaves(item)]
    return [value]


def is_written(leaf: Any, text: str) -> bool:
    """As it is, or in another spelling."""
    match leaf:
        case None:
            return bool(re.search("null|none", text, re.IGNORECASE))
        case bool():
            return bool(re.search(str(leaf), text, re.IGNORECASE))
        case int() | float():
            numbers = re.findall(r"-?\d[\d_]*(?:\.\d+)?(?:[eE][-+]?\d+)?", text)
            return any(float(number) == float(leaf) for number in numbers)
    return leaf.replace("\\", "") in ESCAPE.sub(read, text)


SIGNS = {"b": "\b", "f": "\f", "n": "\n", "r": "\r", "t": "\t", "\\": ""}
ESCAPE = re.compile(r"\\(?:u([0-9a-f]{4})|(.))")


def read(escape: re.Match[str]) -> str:
    """Also what only looks like one, of which the backslash may stay."""
    unit, sign = escape.groups()
    return chr(int(unit, 16)) if unit else SIGNS.get(sign, sign)


@given(values, PROSE, PROSE, st.data())
def test_nothing_is_invented(value: Any, before: str, behind: str, data: st.DataObject) -> None:
    whole = json.dumps(value, ensure_ascii=data.draw(st.booleans()))
    at = data.draw(st.integers(0, len(whole)))
    broken = whole[:at] + data.draw(SLIPS) + whole[at + data.draw(st.integers(0, 1)) :]
    text = before + broken + behind
    if found := json_text(text):
        for leaf in leaves(json.loads(found[0])):
            assert is_written(leaf, text), (text, found[0])


@given(values, st.data())
def test_what_was_cut_off_is_never_completed(value: Any, data: st.DataObject) -> None:
    text = json.dumps(value)
    cut = text[: data.draw(st.integers(0, len(text) - 1))]
    assert json_text(cut) is None


@pytest.mark.parametrize(("text", "wanted"), TABLES["repaired"])
def test_a_slip_is_mended(text: str, wanted: Any) -> None:
    assert loads(text) == wanted


@pytest.mark.parametrize(
    "text",
    [
        *TABLES["malformed"],
        '{"a": ' + "1" * 5000 + ",}",
        "[" * 100_000 + "]" * 100_000,
        '{"a": "' + "x" * limits.REPAIRED_JSON_CHARACTERS + '",}',
    ],
    ids=lambda text: text[:24],
)
def test_what_would_have_to_be_guessed_is_malformed(text: str) -> None:
    with pytest.raises(Malformed):
        loads(text)


@pytest.mark.parametrize(
    ("text", "wanted"), [('{"a": {"b": 1}', {"a": {"b": 1}}), ('[{"a": 1}', [{"a": 1}])]
)
def test_a_bracket_that_may_be_missing(text: str, wanted: Any) -> None:
    assert loads(text, missing=1) == wanted
    with pytest.raises(Malformed):
        loads(text)


loose_scalars = st.none() | st.booleans() | st.integers() | st.text(max_size=6)
objects = st.dictionaries(
    st.text(max_size=4),
    st.recursive(
        loose_scalars,
        lambda inner: (
            st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3)
        ),
        max_leaves=6,
    ),
    min_size=1,
    max_size=3,
)


def strings(value: Any) -> list[str]:
    match value:
        case str():
            return [value]
        case dict():
            return [s for k, v in value.items() for s in (k, *strings(v))]
        case list():
            return [s for v in value for s in strings(v)]
    return []


def numbers(value: Any) -> list[int]:
    match value:
        case bool():
            return []
        case int():
            return [value]
        case dict():
            return [n for v in value.values() for n in numbers(v)]
        case list():
            return [n for v in value for n in numbers(v)]
    return []


LOOSE_SIGNS = st.sampled_from(
    [",", '"', "'", "{", "}", "[", "]", ":", "//x\n", "True", " ", "1", "\\"]
)


@given(objects, st.data())
def test_nothing_is_made_up_and_nothing_lost(value: Any, data: st.DataObject) -> None:
    text = json.dumps(value, ensure_ascii=False)
    at = data.draw(st.integers(0, len(text)))
    broken = text[:at] + data.draw(LOOSE_SIGNS) + text[at + data.draw(st.integers(0, 1)) :]
    try:
        found = loads(broken)
    except Malformed:
        return
    plain = re.sub(r"\\(.)", lambda m: {"n": "\n", "t": "\t"}.get(m[1], m[1]), broken)
    for string in strings(found):
        assert string in broken or string in plain or "\\" in broken, (broken, found)
    written = re.findall(r"\d+", broken)
    for number in numbers(found):
        assert any(abs(number) == int(digits) for digits in written), (broken, found)


@pytest.mark.slow
@pytest.mark.parametrize(
    "text",
    [
        '{"a": "' + '\\"' * 60_000 + "}",
        "{" + '"' * 60_001 + "}",
        '{"a":' * 20_000 + "}" * 20_000,
        "{" + "//a\n" * 30_000 + '"a": 1,}',
        "{'a': '" + "b'" * 40_000 + "'}",
        '{"a": 1,' + "/*" * 50_000 + "}",
        '{"a": 1,' + "/**" * 30_000 + "}",
        "{" + "a " * 50_000 + "}",
        '{"a": 1' + "," * 60_000 + "}",
        '{"a": "' + "\\" * 60_000 + '"}',
        '{"a": [' + '"x",' * 30_000 + "]}",
        '{"a": ' + "x y " * 30_000 + "}",
        '{"a": ["' + '{"b":1},' * 8_000 + '"]}',
        '{"a": [' + './a" ' * 8_000 + '"]}',
        "{'a': '" + "}a[" * 8_000 + "'}",
    ],
    ids=lambda text: text[:16],
)
def test_no_text_takes_long(text: str) -> None:
    began = time.thread_time()
    with contextlib.suppress(Malformed):
        loads(text)
    assert time.thread_time() - began < 5 * slowness()
