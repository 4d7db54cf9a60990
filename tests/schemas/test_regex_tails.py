"""Wherever a text stops within an expression, one of the tails completes it."""

import re
from collections.abc import Callable

import pytest

from mlx_server.schemas.patterns import as_rust
from mlx_server.schemas.regex_tails import regex_tails

WHOLE = {
    r"[^@]+@[^@]+\.[^@]+": "some.one@ex.am.ple",
    "(foo|bar)": "bar",
    r"\d+\.\d+\.\d+": "10.2.33",
    "[A-Z]{2}-[0-9]{3,5}": "XY-1234",
    "a(b|cd{40})*(xy|z{60})": "abcdddddd",
    "a?b*(?:c|d)+": "bbdc",
    r"\(\w+\)": "(word)",
    r"[\w|-|.]+@[\w]+\.[A-Za-z]{2,4}": "some.one@ex.com",
    r"[^\s\d-]+[\W]\[\d]+": "a_b$[0]]",
}


@pytest.mark.parametrize("pattern", WHOLE)
@pytest.mark.parametrize("spelled", [str, as_rust])
def test_every_beginning_has_its_tail(pattern: str, spelled: Callable[[str], str]) -> None:
    found = regex_tails(spelled(pattern))
    assert found
    assert re.fullmatch(pattern, found.shortest)
    for size in range(len(WHOLE[pattern]) + 1):
        begun = WHOLE[pattern][:size]
        assert any(re.fullmatch(pattern, begun + tail) for tail in found.tails), begun


@pytest.mark.parametrize(
    ("class_", "member"),
    {
        "[[a]": "a",
        "[a[b]]": "a]",
        "[&&]": "&",
        "[||]": "|",
        "[~~]": "~",
        "[+--]": "-",
        "[--/]": "-",
        "[x-z--/]": "-",
        "[]x]": "]",
        "[^^]": "a",
        r"[x\]]": "]",
        r"[\d_]": "0",
    }.items(),
)
def test_a_class_is_no_set_of_sets(class_: str, member: str) -> None:
    """Python warns where it may become one, and warnings are errors here."""
    found = regex_tails(class_)
    assert found
    assert found.shortest == member


@pytest.mark.parametrize("pattern", [r"\p{L}+", "(?=a)b", r"(a)\1", r"a\b", "[]"])
def test_what_is_not_read_has_none(pattern: str) -> None:
    assert regex_tails(pattern) is None


def test_a_large_expression_is_not_read() -> None:
    assert regex_tails("(a{1000}b{1000}){1000}") is None


def test_a_long_expression_has_few_tails() -> None:
    found = regex_tails("([a-z]{1,3}x|[0-9]{40})" * 30)
    assert found
    assert len(found.tails) < 1000
