"""Slips are mended; nothing is made up, nothing lost, and no text takes long."""

import contextlib
import json
import re
import time
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mlx_server import limits
from mlx_server.repair.model_json import Malformed, loads
from tests.slowness import slowness

NO_VALUES = (
    *("−5", "+5", "<5", "$5", "50%", "~5", "5-", "_5", "5_", "\\5", "05", "0_5", "[1,000]"),
    *("!true", "-true", "true!", "[1, 2, ...]", "[1, …]", '"x"!', "C#\n"),
    *("nil", "undefined", "[NaN,]", "Infinity,", "[nil]"),
)


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        ('{"a": 1}', {"a": 1}),
        ('{"a": 1,}', {"a": 1}),
        ('{"a": [1, 2,],}', {"a": [1, 2]}),
        ('{"a": [1,, 2]}', {"a": [1, 2]}),
        ('{"a": 1 "b": 2}', {"a": 1, "b": 2}),
        ('{"a": ["x" "y"]}', {"a": ["x", "y"]}),
        ("{'a': 'x'}", {"a": "x"}),
        ("{'a': \"it's\"}", {"a": "it's"}),
        ("{'a': 'say \\'hi\\''}", {"a": "say 'hi'"}),
        ("{“a”: “x”}", {"a": "x"}),
        ("{a: 1}", {"a": 1}),
        ('{"a": Paris}', {"a": "Paris"}),
        ('{"a": True, "b": False, "c": None}', {"a": True, "b": False, "c": None}),
        ('{"a": 1, // one\n "b": 2}', {"a": 1, "b": 2}),
        ('{"a": 1, # one\n "b": 2}', {"a": 1, "b": 2}),
        ('{"a": /* one */ 1}', {"a": 1}),
        ('{"a": "http://x.y/#z",}', {"a": "http://x.y/#z"}),
        ('{"a": "say "hi" now"}', {"a": 'say "hi" now'}),
        ('{"a": "two\nlines"}', {"a": "two\nlines"}),
        ('{"a": "C:\\dir"}', {"a": "C:\\dir"}),
        ('{"a": "\\ud83d\\ude42\\u00e9\\/",}', {"a": "🙂é/"}),
        ('{"a": "", "b": [""],}', {"a": "", "b": [""]}),
        ('{"a": " x ",}', {"a": " x "}),
        ('{"a": "x\\n\\ty\\n\\n", "\\n": "\\n",}', {"a": "x\n\ty\n\n", "\n": "\n"}),
        ('{"a": "x\\\\n",}', {"a": "x\\n"}),
        ('{"a": 1.10, "b": 1e5, "c": -0.50,}', {"a": 1.1, "b": 100000.0, "c": -0.5}),
        ('{"a": 123456789012345678901234567890,}', {"a": 123456789012345678901234567890}),
        ('[{"a": 1}, {"b": 2},]', [{"a": 1}, {"b": 2}]),
        ('[{"a": 1,}]\n', [{"a": 1}]),
        ('{"a": (1, 2); "b": 3;}', {"a": [1, 2], "b": 3}),
        ("{“a”: “http://x.y/#z”}", {"a": "http://x.y/#z"}),
        ('{"a": 1, // it\'s\n "b": 3,}', {"a": 1, "b": 3}),
        ('{"a": "100%", \'b\': "−5 $"}', {"a": "100%", "b": "−5 $"}),
        ('{"a": 1_000, "b": -.5, "c": "05",}', {"a": 1000, "b": -0.5, "c": "05"}),
    ],
)
def test_a_slip_is_mended(text: str, wanted: Any) -> None:
    assert loads(text) == wanted


@pytest.mark.parametrize(
    "text",
    [
        "",
        "x",
        "5",
        '{"a": 1',
        '{"a": "x',
        '{"a": "x}',
        '{"a": {"b": 1}',
        '{"a": [1, 2}',
        '{"a"}',
        '{"a": }',
        '{"a": , "b": 1}',
        '{"a" 1}',
        '{"a": 1}}',
        '{"a": 1}{"b": 2}',
        '{"a": 1} and {"b": 2}',
        '{"a": 1 2}',
        '{"a": "x" "y"}',
        '{"a": "b""c"}',
        '{"a": 5 apples}',
        '{"a": true false}',
        '{"a": "x", "b"}',
        '{"a": 1, "a": 2,}',
        '{"a": 1, "a": 2}',
        '{"": {}, "": {}}',
        '[{"a": {"b": 1, "b": 1}}]',
        '{"a": 1,, "b": 2}',
        "{'a': 'it's'}",
        '{"a": 0x10}',
        '{"a": -}',
        *(f'{{"a": {value}}}' for value in NO_VALUES),
        "[5, -]",
        '{"n": "5" // old: "6"\n}',
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
    ("text", "wanted"),
    [('{"a": {"b": 1}', {"a": {"b": 1}}), ('[{"a": 1}', [{"a": 1}])],
)
def test_a_bracket_that_may_be_missing(text: str, wanted: Any) -> None:
    assert loads(text, missing=1) == wanted
    with pytest.raises(Malformed):
        loads(text)


scalars = st.none() | st.booleans() | st.integers() | st.text(max_size=6)
objects = st.dictionaries(
    st.text(max_size=4),
    st.recursive(
        scalars,
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


SIGNS = st.sampled_from([",", '"', "'", "{", "}", "[", "]", ":", "//x\n", "True", " ", "1", "\\"])


@given(objects, st.data())
def test_nothing_is_made_up_and_nothing_lost(value: Any, data: st.DataObject) -> None:
    text = json.dumps(value, ensure_ascii=False)
    at = data.draw(st.integers(0, len(text)))
    broken = text[:at] + data.draw(SIGNS) + text[at + data.draw(st.integers(0, 1)) :]
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


@given(objects)
def test_a_comma_too_many_changes_nothing(value: Any) -> None:
    text = json.dumps(value)
    assert loads(text) == value
    try:
        assert loads(text[:-1] + ",}") == value
    except Malformed:
        # what a strict reading has no way to tell from a slip of its own
        assert any(s != s.strip() or not s.isalnum() for s in strings(value))


@given(st.text(alphabet="{}[]\"',:\\/#*1a \n", max_size=40))
def test_noise_is_malformed_and_nothing_else(text: str) -> None:
    with contextlib.suppress(Malformed):
        json.dumps(loads(text, missing=1))


@pytest.mark.tables
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
