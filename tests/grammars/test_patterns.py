"""Patterns that clients write: what the compiler would refuse is named before."""

import json

import pytest

from mlx_server.grammars import patterns
from tests.grammars.matching import Refused, compiled, matches

READ = [
    r"^\+?[1-9]\d{1,14}$", r"[\w.%+-]+@[A-Za-z0-9.-]+\.[A-Za-z]{2,}", "a**", "a+?", "a{2}{3}",
    "a{0,}", "a||b", "|", "()", "(|a)", "]", "}", "(?i)a", "(?i:a)", "(?P<n>a)", "(?<n>a)",
    r"\p{L}\pN\P{Lu}", r"\x41\u0042\x{43}\u{44}\U00000045", r"\x{ab}", r"\.\-\/\_\@\ ", r"\A\a\v\z",
    "[a-]", "[-a]", "[]a]", "[^]a]", r"[\w-a]", r"[\d-z]", r"[\-.]", r"[a\-z]", "[!-~]", "[é-ü]",
    r"[\x00-\x1f\x7f-\xff]", r"[\u000a-Z]", r"[\u{1F600}-\u{1F64F}]", r"[\p{L}\d_.-]", r"[!-\]]",
    r"[\t-\r]", "[+--]", "[[:alpha:]]", "(?:xa|y" * 60 + "a" + ")?" * 60,
]  # fmt: skip
UNREAD = [
    "(a", "(?:a", "a)", "(?", "(?a", "(?<a", "(?>a)", "(?#a)", "(?P=n)", "*a", "a|+", "(?:{2})",
    "a{2,1}", "a{", "a{,3}", "a{x}", "{", r"\e", r"\cA", r"\Z", r"\0", r"\é", r"\<", "[a", "[]",
    "[^]", "[z-a]", r"[a-\w]", r"[z-\\]", r"[\u0042-A]", r"[\b]", r"[\cA]", r"[\x]",
]  # fmt: skip


def compiles(pattern: str) -> bool:
    reported = json.dumps({"type": "string", "pattern": patterns.as_rust(pattern)})
    try:
        return bool(compiled(f"start: %json {reported}\n"))
    except Refused:
        return False


@pytest.mark.parametrize("pattern", [*READ, *UNREAD])
def test_what_is_refused_is_what_would_not_compile(pattern: str) -> None:
    refused = patterns.unsupported(pattern) or patterns.excessive_part(pattern)
    assert bool(refused) is (pattern in UNREAD), refused
    assert compiles(pattern) is not bool(refused)


@pytest.mark.parametrize(
    ("pattern", "found_in", "not_in"),
    [
        ("a", ["a", "xay", "\na"], ["", "b"]),
        ("^a$|b", ["a", "xb"], ["ac", "ca"]),
        (r"^a\$", ["a$", "a$b"], ["a", "ba$"]),
        ("a/[/b]$", ["xa/b", "a//"], ["a/c", "a/bc"]),
        (r"^\d[^\d]", ["1a"], ["11", "a1a"]),
        (r"^\p{Lu}+$", ["É"], ["é"]),
        ("", ["", "a"], []),
    ],
)
def test_a_pattern_is_searched_for(pattern: str, found_in: list[str], not_in: list[str]) -> None:
    matcher = compiled(f"start: T\nT: /{patterns.search_pattern(pattern)}/")
    assert [text for text in found_in if not matches(matcher, text)] == []
    assert [text for text in not_in if matches(matcher, text)] == []


@pytest.mark.parametrize("pattern", ["(^a)", "a(b$)", "(?=a)", r"\ba", "(a"])
def test_a_pattern_that_no_grammar_says_is_not_searched_for(pattern: str) -> None:
    assert patterns.search_pattern(pattern) is None
