"""Grammar rules of free text: how far it goes, and which control tokens it may have."""

from collections.abc import Callable, Sequence

import pytest

from mlx_server.grammars.lark import Lark
from mlx_server.parsers.markup_grammar import FreeTextRule
from tests.grammars.matching import CONTROL, allowed, compiled

NAMES = {CONTROL: "<think>"}


def rule(free: Sequence[int] = (), ignored: Sequence[str] = ()) -> FreeTextRule:
    lark = Lark(NAMES)
    return FreeTextRule(lark, lark.anything(), free, ignored)


def tokens(text: str) -> list[int]:
    """Bytes, and the control tokens in it."""
    found: list[int] = []
    while text:
        special = next((id for id, name in NAMES.items() if text.startswith(name)), None)
        found += [special] if special else list(text[0].encode())
        text = text.removeprefix(NAMES[special]) if special else text[1:]
    return found


def matches(lark: Lark, start: str, text: str) -> bool:
    """Whether it is a whole text of the rule."""
    matcher = compiled(lark.source(start).source)
    return matcher.try_consume_tokens(tokens(text)) == len(tokens(text)) and matcher.is_accepting()


def check(
    text: FreeTextRule, made: Callable[[FreeTextRule], str], good: list[str], bad: list[str]
) -> None:
    start = made(text)
    assert [each for each in good if not matches(text.lark, start, each)] == []
    assert [each for each in bad if matches(text.lark, start, each)] == []


def test_the_rest_is_any_text_without_control_tokens() -> None:
    good = ["", "a", "\n<think", "< think>", "é🙂"]
    check(rule(), FreeTextRule.rest, good, ["<think>", "a<think>b"])
    matcher = compiled((text := rule()).lark.source(text.rest()).source)
    assert CONTROL not in allowed(matcher)


@pytest.mark.parametrize("delimiter", ["<call>", "<think>", "a<think>"])
def test_text_up_to_a_delimiter_ends_with_the_first_one(delimiter: str) -> None:
    good = [delimiter, f"b{delimiter}", f"<c{delimiter}"]
    bad = ["", "b", delimiter[:-1], f"{delimiter}b", f"{delimiter}{delimiter}"]
    check(rule(), lambda text: text.up_to(delimiter), good, bad)


def test_free_control_tokens_may_stand_anywhere_in_the_text() -> None:
    good = ["", "a", "<think>", "a<think><think>b", "<call>"]
    check(rule(free=[CONTROL]), FreeTextRule.rest, good, [])
    ended = ["<call>", "<think>a<call>"]
    check(rule([CONTROL]), lambda text: text.up_to("<call>"), ended, ["<think>", "<call><think>"])


def test_a_delimiter_may_be_allowed_although_its_control_token_alone_is_not() -> None:
    ignored = rule(ignored=["<think>ing"])
    good = ["<think>ing", "a<think>ing<think>ing b", "a"]
    check(ignored, FreeTextRule.rest, good, ["<think>", "<think>in", "<think>ed"])
    check(
        rule(ignored=["<think>ing"]),
        lambda text: text.up_to("<think>!"),
        ["a<think>ing b<think>!", "<think>!"],
        ["<think>ing", "<think>? a<think>!"],
    )


def starting(text: FreeTextRule, before_control: str = "") -> FreeTextRule:
    """Text that does not begin with a brace; before a control token there has to be some."""
    first = text.lark.terminal("/(?s:([^{].*)?)/")
    return text.starting_with(first, before_control and text.lark.terminal(before_control))


def test_the_beginning_is_restricted_up_to_the_first_control_token_only() -> None:
    good = ["", "a{", "<think>{", "a<think>{", "b{<think>"]
    check(starting(rule([CONTROL])), FreeTextRule.rest, good, ["{", "{<think>"])
    check(starting(rule()), FreeTextRule.rest, ["", "a{"], ["{", "{a"])
    ended = ["<call>", "a{<call>"]
    check(starting(rule()), lambda text: text.up_to("<call>"), ended, ["{<call>"])


def test_before_a_control_token_another_beginning_may_be_required() -> None:
    text = starting(rule([CONTROL]), "/(?s:[^{].*)/")
    check(text, FreeTextRule.rest, ["", "a", "a<think>{"], ["<think>", "{", "{<think>"])


def test_control_tokens_in_a_row_are_one_range() -> None:
    text = FreeTextRule(Lark(), "T", [7, 3, 1, 2, 9, 8, 5])
    assert text.rest()
    assert "<[1-3,5-5,7-9]>" in text.lark.source("T").source


def test_free_tokens_and_delimiters_that_are_allowed_go_together() -> None:
    text = FreeTextRule(Lark({1: "<a>", 2: "<b>"}), "T", [1], ["<b>x"])
    assert text.rest()
    assert {"<[1-1]>", "<[2]>"} <= {*text.lark.source("T").source.replace("(", " ").split()}
