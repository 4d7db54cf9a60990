import json
import re
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mlx_server.errors import BadRequest
from mlx_server.http.strict_json import PIECE, parse, parse_object, parse_request
from tests.tables import cases

TEXT = st.text(st.characters(exclude_categories=["Cs"]))
SCALARS = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | TEXT
FINITE = SCALARS.filter(lambda value: value not in (float("inf"), float("-inf")))
VALUES = st.recursive(FINITE, lambda inner: st.lists(inner) | st.dictionaries(TEXT, inner))
FRAGMENTS = st.sampled_from(
    [*'[]{},:"\\ \n0-', "\\u", "d83d", "\\ude00", "\\\\", '\\"', '"a"', "1e400", "NaN", "é", "null"]
)


def refusal(body: bytes) -> str:
    with pytest.raises(BadRequest) as caught:
        parse(body)
    assert caught.value.code == "invalid_json"
    return caught.value.message


@pytest.mark.slow
@given(VALUES, st.booleans(), st.sampled_from([None, 2]))
def test_equals_json_on_valid_documents(value: Any, ensure_ascii: bool, indent: int | None) -> None:
    text = json.dumps(value, ensure_ascii=ensure_ascii, indent=indent)
    assert parse(text.encode()) == json.loads(text) == value


@given(st.binary() | st.lists(FRAGMENTS).map("".join).map(str.encode))
def test_any_bytes_give_a_value_or_a_bad_request(body: bytes) -> None:
    try:
        value = parse(body)
    except BadRequest as error:
        error.message.encode()
    else:
        text = json.dumps(json.loads(body), ensure_ascii=False)
        assert json.dumps(value, ensure_ascii=False) == re.sub("[\ud800-\udfff]", "\ufffd", text)


@cases
def test_accepted(body: str, value: Any) -> None:
    assert parse(body.encode()) == value


@cases
def test_refused(body: str, message: str) -> None:
    """A lone surrogate of the body, such as \\udcff, is the byte that it escapes."""
    assert message in refusal(body.encode(errors="surrogateescape"))


def test_more_digits_than_python_reads() -> None:
    assert "more than 400 digits" in refusal(b"1" * 5000)


@pytest.mark.parametrize("opening", ["[", '{"a":', '[{"a":'])
def test_nesting_stops_at_64(opening: str) -> None:
    levels = opening.count("[") + opening.count("{")
    closing = "".join({"[": "]", "{": "}"}.get(char, "") for char in reversed(opening))
    fits = opening * (64 // levels) + "0" + closing * (64 // levels)
    assert parse(fits.encode()) == json.loads(fits)
    too_deep = refusal(f"[{fits}]".encode())
    assert "nested deeper than 64 levels" in too_deep


SIZE = 16 << 20


@pytest.mark.slow
@pytest.mark.parametrize(
    "body",
    [
        b"[" * SIZE,
        b'{"a":' * (SIZE // 5),
        b"[" + b"[]," * (SIZE // 3) + b"[" * 70,
        b'"' + b"\\" * (SIZE - 1),
        b"[" + b'"[",' * (SIZE // 4) + b"NaN",
        b"9" * SIZE,
        b'["' + b"9" * (SIZE // 2) + b'", ' + b"9" * (SIZE // 4),
        b"0." + b"9" * SIZE + b"e999999999",
    ],
    ids=[
        "lists",
        "objects",
        "deep at the end",
        "escapes",
        "strings",
        "digits",
        "digits in a string",
        "float",
    ],
)
def test_sixteen_hostile_mebibytes_are_refused(body: bytes) -> None:
    refusal(body)


@given(st.text(min_size=61).map(json.dumps))
@settings(max_examples=30)
def test_messages_repeat_little_of_the_input(key: str) -> None:
    message = refusal(f"{{{key}: 1, {key}: 2}}".encode())
    found = re.fullmatch(r"Invalid JSON: the key `(.{60})` occurs twice.*", message)
    assert found
    assert found[1].endswith("...")


@pytest.mark.slow
@pytest.mark.parametrize("before", range(PIECE - 13, PIECE + 1))
def test_surrogates_where_one_piece_ends_and_the_next_begins(before: int) -> None:
    padding = "x" * (before - 1)
    pair, half = r"\ud83d\ude42", r"\ud83d"
    assert parse(f'"{padding}{pair}"'.encode()) == padding + "🙂"
    made = {half: "�", half + half: "��", pair[6:]: "�", pair + half: "🙂�", half + pair: "�🙂"}
    for lone, text in made.items():
        assert parse(f'"{padding}{lone}"'.encode()) == padding + text


def test_only_a_request_says_that_halves_of_pairs_were_replaced() -> None:
    half, whole = b'{"a": ["\\ud83d"]}', b'{"a": ["\\ud83d\\ude42"]}'
    assert parse_object(half) == {"a": ["\ufffd"]}
    assert parse_request(half) == {"a": ["\ufffd"], "lone_surrogates": True}
    assert parse_request(whole) == {"a": ["🙂"]}
