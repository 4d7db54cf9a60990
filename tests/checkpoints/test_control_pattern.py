"""One expression for many texts: it finds what a search for each of them finds, and as quickly."""

import re
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mlx_server.checkpoints.control_tokens import pattern_of
from mlx_server.errors import ModelUnusable
from tests.slowness import slowness

LETTERS = st.text("ab<|>.*[]\\^-\n", min_size=1, max_size=5)


def by_hand(texts: list[str], text: str) -> dict[int, str]:
    """The longest of the texts at each place."""
    return {
        at: max(begun, key=len)
        for at in range(len(text))
        if (begun := [each for each in texts if text.startswith(each, at)])
    }


@given(texts=st.lists(LETTERS, min_size=1, max_size=8), text=st.lists(LETTERS).map("".join))
def test_it_finds_the_longest_text_at_every_place(texts: list[str], text: str) -> None:
    pattern = pattern_of(texts)
    assert pattern
    matches = list(pattern.finditer(text))
    assert {match.start(): match[1] for match in matches} == by_hand(texts, text)
    assert not any(match[0] for match in matches)


def test_no_text_is_no_pattern() -> None:
    assert pattern_of([]) is None
    assert pattern_of(["", ""]) is None
    pattern = pattern_of(["", "a"])
    assert pattern
    assert not pattern.search("b"), "an empty text is found nowhere"


@pytest.mark.parametrize("text", ["<a>", "<\0a>\0", "<\0\0a>", "<a\0>\0\0"])
def test_what_stands_between_the_characters_belongs_to_the_match(text: str) -> None:
    pattern = pattern_of(["<a>", "<a", "<b>"], between="\0*")
    assert pattern
    (match,) = pattern.finditer(f"x{text}y")
    assert match[1] == text


def test_a_long_common_prefix_is_read_once() -> None:
    texts = [f"<|reserved_special_token_{number}|>" for number in range(3000)]
    pattern = pattern_of(texts)
    assert pattern
    began = time.perf_counter()
    assert not pattern.search("<|reserved_special_token_x" * 10_000)
    assert time.perf_counter() - began < slowness()
    assert {match[1] for match in pattern.finditer("".join(texts))} == set(texts)


def test_texts_within_texts_without_end_are_the_files_fault() -> None:
    nested = ["a" * length for length in range(1, 1500)]
    with pytest.raises(ModelUnusable, match="nested too deeply"):
        pattern_of(nested)
    long = "a" * 100_000
    pattern = pattern_of([long])
    assert pattern
    assert re.search(pattern, long)
