"""Marks in a text that keep it from becoming a control token, wherever a template puts it."""

import re
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mlx_server.errors import ModelUnusable
from mlx_server.models import tokenizer_file
from mlx_server.models.tokenizer_file import WINDOW, ControlTokenEscape, is_control, pattern_of
from tests.slowness import slowness
from tests.tables import cases

MARK = "\0"
TOKENS = ("<|end|>", "</s>", "[INST]", "system", "sys-", "tool_")


@cases
def test_edges_and_whole_words_are_marked_and_nothing_else(text: str, escaped: str) -> None:
    assert ControlTokenEscape(TOKENS)(text, MARK) == escaped


@pytest.mark.parametrize("text", ["end", "END", " end ", "e n d", "inst", "s", "|end|", "e-n-d"])
def test_a_text_to_which_a_template_may_add_the_edges_is_marked_within(text: str) -> None:
    """And it may trim the text, and change its case."""
    found = ControlTokenEscape(TOKENS)(text, MARK)
    assert found.startswith(text[0] + MARK)
    assert found.replace(MARK, "") == text


@pytest.mark.parametrize("text", ["ending", "end of it", "the end", "bend", "12"])
def test_a_text_that_is_more_than_a_token_is_not_marked(text: str) -> None:
    assert ControlTokenEscape(TOKENS)(text, MARK) == text


@pytest.mark.parametrize("tokens", [(), ("\n\n",), ("assistant", "[end]")])
def test_what_begins_no_control_token_stays(tokens: tuple[str, ...]) -> None:
    text = "<|end|> system \n"
    assert ControlTokenEscape(tokens)(text, MARK) == text


@given(st.lists(st.sampled_from([*TOKENS, "s", "sy", "-", "x", " ", "_", "é"])).map("".join))
def test_the_windows_of_a_long_text_do_not_show(text: str) -> None:
    whole = ControlTokenEscape(TOKENS)(text, MARK)
    assert whole.replace(MARK, "") == text
    assert not any(token in whole for token in TOKENS)
    with pytest.MonkeyPatch.context() as patch:
        for window in (1, 2, 7):
            patch.setattr(tokenizer_file, "WINDOW", window)
            assert ControlTokenEscape(TOKENS)(text, MARK) == whole


@pytest.mark.parametrize("before", [WINDOW - 6, WINDOW - 1, WINDOW])
def test_a_token_across_the_border_of_two_windows_is_marked_once(before: int) -> None:
    text = "x" * before + "system" + "x" * WINDOW
    found = ControlTokenEscape(TOKENS)(text, MARK)
    assert found == "x" * before + "s\0ystem" + "x" * WINDOW


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


@cases
def test_markup_is_control_even_if_it_is_not_marked_as_special(
    content: str, special: bool, expected: bool
) -> None:
    assert is_control(content, special) is expected
