"""Grammars in Lark that a client wrote: what they match, and what is refused."""

import pytest

from mlx_server.grammars import formats
from mlx_server.grammars.lark import Lark
from mlx_server.requests import GrammarFormat
from tests.grammars.matching import assert_matches, compiled, format_refusal, matches

CASES: list[tuple[GrammarFormat, list[str], list[str]]] = [
    (GrammarFormat('start: A r0 | "x"\nr0: "!"\nA: /[a-z]\\/[}"]/ // } {\n'),
     ['a/"!', "x"], ["a/"]),
    (GrammarFormat('start: "a" "b"\n%ignore / +/\n'), ["ab", "a b"], ["a", "b"]),
    (GrammarFormat("%llguidance {}\n%import common.INT\nstart: INT"), ["12"], ["a"]),
    (GrammarFormat('start: w\nw[lazy]: /a+b/'), ["aab"], ["aa"]),
    (GrammarFormat('start: %json {"type": "null"} "!"'), ["null!"], ["1!"]),
    (
        GrammarFormat('start: %json {"type": "object", "properties": {"a": {"type": "integer"}}}'),
        ['{"a":1}', '{"b":"x"}'],
        ['{"a":"x"}', r'{"\u0061":"x"}'],
    ),
    (
        GrammarFormat('start: %json {"x-guidance": {"whitespace_pattern": "x"}, "items": '
                '{"type": "array", "x-guidance": {"whitespace_pattern": "y"}}}'),
        ["[]", "[[ 1]]"],
        ["[x]", "[[y]]", "[[x1]]"],
    ),
    (GrammarFormat('start: "\\x41\\u0042" x{2}\nx: "<think>"'), ["AB<think><think>"], ["AB"]),
]  # fmt: skip


@pytest.mark.parametrize(("wanted", "good", "bad"), CASES, ids=[str(c[0])[:60] for c in CASES])
def test_a_format_matches_what_it_says(
    wanted: GrammarFormat, good: list[str], bad: list[str]
) -> None:
    assert_matches(wanted, good, bad)


@pytest.mark.parametrize(
    ("wanted", "named"),
    [
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
    ],
    ids=lambda value: str(value)[:40],
)  # fmt: skip
def test_what_can_not_be_used_is_refused_by_name(wanted: GrammarFormat, named: str) -> None:
    assert named in format_refusal(wanted)


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
