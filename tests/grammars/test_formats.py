"""Formats as rules: what they match, and what a client may not bring, in Lark and GBNF too."""

import json
from collections.abc import Callable
from typing import Any

import pytest

from mlx_server.errors import InvalidGrammar
from mlx_server.grammars import formats, patterns
from mlx_server.grammars.lark import Lark
from mlx_server.requests import ChoiceFormat, Format, GrammarFormat, JsonFormat, RegexFormat
from tests.grammars.matching import (
    CONTROL,
    END,
    Refused,
    allowed,
    assert_matches,
    compiled,
    format_refusal,
    matcher_of,
    matches,
)
from tests.tables import cases

FORMATS: dict[str, Callable[[Any], Format]] = {
    "json": JsonFormat,
    "regex": RegexFormat,
    "choice": lambda options: ChoiceFormat(tuple(options)),
    "grammar": GrammarFormat,
}


@cases
def test_a_format_matches_what_it_says(kind: str, of: Any, good: list[str], bad: list[str]) -> None:
    assert_matches(FORMATS[kind](of), good, bad)


@pytest.mark.parametrize(
    ("wanted", "named"),
    [
        (RegexFormat("(?=a)b"), "look-ahead"),
        (RegexFormat("(?<!a)b"), "look-behind"),
        (RegexFormat(r"(a)\1"), "back-reference"),
        (RegexFormat(r"\bword\b"), "word boundary"),
        (RegexFormat("a\\"), "at its end"),
        (RegexFormat("(a{1000}){1000}"), "more than 50000"),
        (RegexFormat("a{10001}"), "more than 10000"),
        (RegexFormat("a{" + "9" * 5000 + "}"), "more than"),
        (RegexFormat("a" * 2001), "more than 2000"),
        (RegexFormat("\ud800"), "surrogate"),
        (ChoiceFormat(()), "empty"),
        (ChoiceFormat(("a", "")), "empty"),
        (ChoiceFormat(tuple(map(str, range(10_001)))), "more than 10000"),
        (ChoiceFormat(("a" * 300_000,)), "more than"),
        (ChoiceFormat(("\ud800",)), "surrogate"),
        # Lark
        (GrammarFormat('start: <|im_end|> "a"'), "special token"),
        (GrammarFormat('start: "a" <[5]>'), "special token"),
        (GrammarFormat("start: @other"), "@other"),
        (GrammarFormat('start: "a" }\nr0: "b"\nx: %lark {\ny: "a"'), "closes nothing"),
        (GrammarFormat('start: ("a"'), "never closed"),
        (GrammarFormat('start: "a'), "not Lark"),
        (GrammarFormat("start: /a"), "not Lark"),
        (GrammarFormat('%llguidance {"no_forcing": false}\nstart: "a"'), "%llguidance"),
        (GrammarFormat("%declare A\nstart: A"), "%declare"),
        (GrammarFormat('%override INT: "a"\nstart: "a"'), "%override"),
        (GrammarFormat("start: %json {"), "not followed by JSON"),
        (GrammarFormat("start: %json {} %json " + "[" * 10_000), "not followed by JSON"),
        (GrammarFormat('start: %json {"not": {}}'), "#/not "),
        (GrammarFormat('start: %json {"$ref": "http://localhost/"}'), "outside"),
        (GrammarFormat("start[max_tokens=3]: /a+/"), "max_tokens"),
        (GrammarFormat('start[stop=""]: /a+/'), "stop"),
        (GrammarFormat("start: /(a{1000}){1000}/"), "50000"),
        (GrammarFormat("start: " + "(" * 49 + '"a"' + ")" * 49), "deeper"),
        (GrammarFormat("\n".join(f'r{at}: "a"' for at in range(600))), "600 rules"),
        (GrammarFormat('start: "a" // ' + "x" * 200_000), "characters"),
        (GrammarFormat('A: /a/ & /b/ & /c/ & /d/ & /e/ & /f/ & /g/ & /h/ & /i/ & /j/'), "&"),
        # GBNF
        (GrammarFormat("root ::= nobody"), "nobody"),
        (GrammarFormat('other ::= "a"'), "root"),
        (GrammarFormat("root ::= <think>"), "special token"),
        (GrammarFormat('root ::= "a"\nroot ::= "b"'), "twice"),
        (GrammarFormat('root ::= "a'), "never closed"),
        (GrammarFormat("root ::= [a-"), "never closed"),
        (GrammarFormat('root ::= "\\UFFFFFFFF"'), "not a character"),
    ],
    ids=lambda value: str(value)[:40],
)  # fmt: skip
def test_what_can_not_be_used_is_refused_by_name(wanted: Format, named: str) -> None:
    assert named in format_refusal(wanted)


@pytest.mark.parametrize(
    "wanted",
    [
        ChoiceFormat(("<think>", "<|end|>")),
        RegexFormat("<.*>"),
        GrammarFormat('start: "<think>"'),
        GrammarFormat('root ::= "<" [a-z]+ ">"'),
        JsonFormat({"const": "<think>"}),
        JsonFormat({"properties": {"<think>": {}}, "required": ["<think>"]}),
    ],
)
def test_text_is_never_a_control_token(wanted: Format) -> None:
    matcher = matcher_of(wanted)
    for _ in range(12):
        tokens = allowed(matcher)
        assert CONTROL not in tokens
        if END in tokens:
            break
        matcher.consume_token(tokens[0])


LISTED = {"properties": {"a": {"type": "integer"}}}


@cases
def test_arguments_are_those_listed_unless_more_is_said(
    more: dict[str, object], closed: bool
) -> None:
    lark = Lark()
    matcher = compiled(lark.source(formats.arguments({**LISTED, **more}, lark)).source)
    assert matches(matcher, '{"a": 1, "b": 1}') is not closed
    assert not matches(matcher, "[]"), "arguments are an object even if the schema does not say so"
    inside = compiled(lark.source(formats.arguments({"properties": {"o": LISTED}}, lark)).source)
    assert matches(inside, '{"o": {"a": 1, "b": 1}}')


def test_arguments_of_each_tool_refer_to_their_own_definitions() -> None:
    def tool(kind: str) -> dict[str, object]:
        return {"properties": {"a": {"$ref": "#/$defs/a"}}, "required": ["a"],
                "$defs": {"a": {"type": kind}}}  # fmt: skip

    lark = Lark()
    rules = [formats.arguments(tool(kind), lark) for kind in ("integer", "string")]
    matcher = compiled(lark.source(f'"1" {rules[0]} | "2" {rules[1]}').source)
    assert matches(matcher, '1{"a":1}')
    assert matches(matcher, '2{"a":"1"}')
    assert not matches(matcher, '1{"a":"1"}')


def test_arguments_are_lenient_unless_strict() -> None:
    parameters = {"properties": {"a": {"uniqueItems": True}}}
    formats.arguments(parameters, Lark())
    with pytest.raises(InvalidGrammar, match="uniqueItems"):
        formats.arguments(parameters, Lark(), strict=True)


def test_a_written_grammar_does_not_meet_our_rules() -> None:
    lark = Lark()
    mine = lark.rule('"mine"')
    theirs = formats.format_rule(
        GrammarFormat(f'start: {mine}\n{mine}: "theirs"\n%ignore / /'), lark
    )
    matcher = compiled(lark.source(f'{mine} "-" {theirs}').source)
    assert matches(matcher, "mine-theirs")
    assert not matches(matcher, "mine-mine")
    assert not matches(matcher, "mine - theirs")


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


@cases
def test_a_pattern_is_searched_for(pattern: str, found_in: list[str], not_in: list[str]) -> None:
    matcher = compiled(f"start: T\nT: /{patterns.search_pattern(pattern)}/")
    assert [text for text in found_in if not matches(matcher, text)] == []
    assert [text for text in not_in if matches(matcher, text)] == []


@pytest.mark.parametrize("pattern", ["(^a)", "a(b$)", "(?=a)", r"\ba", "(a"])
def test_a_pattern_that_no_grammar_says_is_not_searched_for(pattern: str) -> None:
    assert patterns.search_pattern(pattern) is None
