"""JSON is found where there is no doubt what it is; what had to be guessed is not there."""

import json
import re
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mlx_server.repair.model_json import json_text, text_around_json


@pytest.mark.parametrize(
    ("text", "found", "mended"),
    [
        ('{"a": 1}', '{"a": 1}', ()),
        (" [1]\n", " [1]\n", ()),
        ('"x"', '"x"', ()),
        ("5", "5", ()),
        ('```json\n{"a": 1}\n```', '{"a": 1}', ("fences",)),
        ('```\n{"a": 1}', '{"a": 1}', ("fences",)),
        ('Sure! {"a": "b} {c"} Done.', '{"a": "b} {c"}', ("fences",)),
        ('<think>x</think>\n{"a": 1}', '{"a": 1}', ("fences",)),
        ('{"a": 1,}', '{"a": 1}', ("json",)),
        ("Here: {'a': 'x',} ok", '{"a": "x"}', ("fences", "json")),
    ],
)
def test_the_one_value_is_found(text: str, found: str, mended: tuple[str, ...]) -> None:
    assert json_text(text) == (found, mended)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "no JSON",
        "it is 5",
        '{"a": 1} and {"b": 2}',
        '{"a": 1}\n{"a": 1}',
        "[1], [2]",
        'for {x}: {"a": 1}',
        'see [1]: {"a": 1}',
        '{"a": 1',
        '{"a": "x}',
        '{"a": "x',
        'So: {"a": {"b": 1}',
        '{"a": }',
        '{"a": 1, "b"}',
        '{"a": [1, 2}',
        '{"a": NaN}',
        '{"a": 1, "a": 1}',
        'So: {"a": [{"b": 1, "b": 2}]}',
        '{"a": 1e400,}',
        "}{",
        "[" * 100_000 + "]" * 100_000,
        "[" * 1_000_000,
        "]" * 1_000_000,
    ],
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


@given(values, PROSE, PROSE)
def test_what_stands_around_changes_nothing(value: Any, before: str, behind: str) -> None:
    found = json_text(f"So {before}{json.dumps(value)}{behind}")
    assert found
    assert json.loads(found[0]) == value
    assert found[1] == ("fences",)
