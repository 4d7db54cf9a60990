"""Grammars in GBNF, as llama.cpp's users write them."""

import pytest

from mlx_server.requests import GrammarFormat
from tests.grammars.matching import assert_matches, format_refusal

CASES: list[tuple[GrammarFormat, list[str], list[str]]] = [
    (
        GrammarFormat('root ::= "a" ws list\nws ::= [ \\t]*\nlist ::= item ("," ws item)* # c\n'
                'item ::= [a-z/\\]]+ | "\\"\\u0041\\x42\\"" | nested\nnested ::= "(" list\n  ")"'),
        ["a x,y", 'a "AB"', "a (x,(y/]))"],
        ["a", "a (x"],
    ),
    (GrammarFormat('root ::= [^"\\\\]{2,3} .'), ["abc", 'ab"'], ['a"c']),
    (
        GrammarFormat('root ::= "\\u00e9\\U0001F600\\[\\x22" [\\u00e0-\\u00ff&-~[]'),
        ['é😀["ü', 'é😀["&', 'é😀["['],
        ['é😀["À'],
    ),
    (GrammarFormat('root ::= "." . # "'), [".\n", ".a"], ["a."]),
    (GrammarFormat('Opt-1 ::= | "c"\nroot ::= (\n "a"\n | "b"\n)+ Opt-1 [-z]'),
     ["ab-", "acz"], ["-"]),
    (GrammarFormat('\n\n  root ::= "a\nb"\n\n\n\n | c\n \n\t c ::= "d"'), ["a\nb", "d"], ["a b"]),
]  # fmt: skip


@pytest.mark.parametrize(("wanted", "good", "bad"), CASES, ids=[str(c[0])[:60] for c in CASES])
def test_a_format_matches_what_it_says(
    wanted: GrammarFormat, good: list[str], bad: list[str]
) -> None:
    assert_matches(wanted, good, bad)


@pytest.mark.parametrize(
    ("wanted", "named"),
    [
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
def test_what_can_not_be_used_is_refused_by_name(wanted: GrammarFormat, named: str) -> None:
    assert named in format_refusal(wanted)
