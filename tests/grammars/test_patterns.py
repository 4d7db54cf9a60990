"""Patterns that clients write: what the compiler would refuse is told by its name before."""

import json

import pytest

from mlx_server.grammars import formats
from mlx_server.requests import JsonFormat
from mlx_server.schemas import patterns
from mlx_server.worker.constrained_decoding.grammar_compiler import in_a_line
from tests.grammars.matching import Refused, compiled, matcher_of

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
    told = json.dumps({"type": "string", "pattern": patterns.as_rust(pattern)})
    try:
        return bool(compiled(f"start: %json {told}\n"))
    except Refused:
        return False


@pytest.mark.parametrize("pattern", [*READ, *UNREAD])
def test_what_is_refused_is_what_would_not_compile(pattern: str) -> None:
    refused = patterns.unsupported(pattern) or patterns.excessive_part(pattern)
    assert bool(refused) is (pattern in UNREAD), refused
    assert compiles(pattern) is not bool(refused)


def test_a_pattern_too_deep_for_the_compiler_is_too_deep() -> None:
    deep = "(?:xa|y" * 100 + "a" + ")?" * 100
    assert not compiles(deep)
    assert "60 groups" in str(patterns.excessive_part(deep))


@pytest.mark.parametrize(
    ("found", "at"),
    [
        ({"patternProperties": {"^a": {}, "^ab": {}}}, "#/properties/q/patternProperties"),
        ({"type": "string", "pattern": r"\d^b"}, "#/properties/q/pattern"),
    ],
)
def test_what_only_the_compiler_knows_is_told_with_its_place(found: object, at: str) -> None:
    wanted = JsonFormat({"properties": {"p": {"pattern": "^b"}, "q": found}})
    formats.check(wanted, "format")
    with pytest.raises(Refused) as caught:
        matcher_of(wanted)
    assert formats.with_place(in_a_line(str(caught.value)), wanted).endswith(f" ({at})")
