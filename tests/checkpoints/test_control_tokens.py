"""Marks in a text that keep it from becoming a control token, wherever a template puts it."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mlx_server.checkpoints import control_tokens
from mlx_server.checkpoints.control_tokens import WINDOW, ControlTokenEscape

MARK = "\0"
TOKENS = ("<|end|>", "</s>", "[INST]", "system", "sys-", "tool_")


@pytest.mark.parametrize(
    ("text", "escaped"),
    [
        ("", ""),
        ("Hello, world!", "Hello, world!"),
        ("<|end|>", "<\0\0|end|>\0"),
        ("a < b > c", "a <\0 b >\0 c"),
        ("[1]", "[\0" + "1]\0"),
        ("a - b", "a -\0 b"),
        ("a system", "a s\0ystem"),
        ("a sys-", "a s\0ys-\0"),
        ("systems", "s\0ystems"),
        ("sysadmin", "sysadmin"),
        ("snake_case", "snake_\0case"),
    ],
)
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


def test_tokens_of_signs_or_white_space_alone() -> None:
    escape = ControlTokenEscape(("<>", "\n\n"))
    for text, escaped in {"": "", "--": "--", "<>": "<\0>\0", "a\n\n\nb": "a\n\0\n\0\nb"}.items():
        assert escape(text, MARK) == escaped


@given(st.lists(st.sampled_from([*TOKENS, "s", "sy", "-", "x", " ", "_", "é"])).map("".join))
def test_the_windows_of_a_long_text_do_not_show(text: str) -> None:
    whole = ControlTokenEscape(TOKENS)(text, MARK)
    assert whole.replace(MARK, "") == text
    assert not any(token in whole for token in TOKENS)
    with pytest.MonkeyPatch.context() as patch:
        for window in (1, 2, 7):
            patch.setattr(control_tokens, "WINDOW", window)
            assert ControlTokenEscape(TOKENS)(text, MARK) == whole


@pytest.mark.parametrize("before", [WINDOW - 6, WINDOW - 1, WINDOW])
def test_a_token_across_the_border_of_two_windows_is_marked_once(before: int) -> None:
    text = "x" * before + "system" + "x" * WINDOW
    found = ControlTokenEscape(TOKENS)(text, MARK)
    assert found == "x" * before + "s\0ystem" + "x" * WINDOW
