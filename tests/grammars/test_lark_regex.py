import json
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st
from llguidance import LLMatcher, LLTokenizer

from mlx_server import limits
from mlx_server.errors import InvalidGrammar
from mlx_server.grammars.formats import arguments, schema_unenforced
from mlx_server.grammars.lark import Lark
from mlx_server.grammars.lark_regex import NotRegular, regex_of

PATCHES = r"""
start: begin_patch hunk+ end_patch
begin_patch: "*** Begin Patch" LF
end_patch: "*** End Patch" LF?

hunk: add_hunk | update_hunk
add_hunk: "*** Add File: " filename LF add_line+
update_hunk: "*** Update File: " filename LF change+
filename: /(.+)/
add_line: "+" /(.*)/ LF -> line
change: (change_context | change_line)+ eof_line?
change_context: ("@@" | "@@ " /(.+)/) LF
change_line: ("+" | "-" | " ") /(.*)/ LF
eof_line: "*** End of File" LF

%import common.LF
"""
"""A grammar of patches like those that coding agents send."""

PATCH = (
    '*** Begin Patch\n*** Add File: a.py\n+say("\\n")\n'
    "*** Update File: b\n@@ f\n-a\n+b\n*** End Patch"
)


@pytest.mark.parametrize(
    ("grammar", "matches", "others"),
    [
        (PATCHES, [PATCH, PATCH + "\n"], ["", PATCH + "x", PATCH.replace("+b", "b")]),
        ('start: "a.b"', ["a.b"], ["axb"]),
        ('start: "a"i "b"', ["Ab", "ab"], ["aB"]),
        ('start: "a".."c"~2..3', ["ab", "ccc"], ["a", "abcd", "de"]),
        ('start: "x"~2', ["xx"], ["x"]),
        ('start: ["a"] ("b" | "c")*', ["", "abcb"], ["aa"]),
        ('start: A\n  | "b"\nA: /x\\/+/i', ["x/", "X//", "b"], ["x", "a"]),
        ('?start: _a -> b // so\n_a.2: "#" # and so', ["#"], [""]),
        ("start: INT WS_INLINE\n%import common (INT, WS_INLINE)", ["12 "], ["a "]),
        ("start: N\n%import common.INT -> N", ["12"], ["a"]),
        ('start: "\\n" "\\u00e9" "\\""', ['\né"'], ["ne"]),
        ("start: /a|b/ /c/", ["ac", "bc"], ["a"]),
    ],
)
def test_it_matches_what_the_grammar_does(
    grammar: str, matches: list[str], others: list[str]
) -> None:
    found = re.compile(regex_of(grammar))
    assert [text for text in matches if not found.fullmatch(text)] == []
    assert [text for text in others if found.fullmatch(text)] == []


@pytest.mark.parametrize(
    "grammar",
    [
        'start: "(" start? ")"',
        'start: a\na: b\nb: "x" a?',
        'start: "a"\n%ignore " "',
        'start: "a"\n%declare B',
        "start: X\n%import mine.X",
        "start: SQL_COMMENT\n%import common.SQL_COMMENT",
        "start: /a b/x",
        "start: a a\n"
        + "".join(f"a{i or ''}: a{i + 1} a{i + 1}\n" for i in range(40))
        + 'a40: "x"',
        "start: a\n" + "".join(f"a{i or ''}: a{i + 1}\n" for i in range(400)) + 'a400: "x"',
        "start: " + "(" * 400 + '"x"' + ")" * 400,
        'start: "' + "x" * limits.PATTERN_CHARACTERS + '" "y"',
    ],
)
def test_what_no_expression_can_say(grammar: str) -> None:
    with pytest.raises(NotRegular):
        regex_of(grammar)


@pytest.mark.parametrize(
    ("grammar", "message"),
    [
        ("", "no rule `start`"),
        ('a: "b"', "no rule `start`"),
        ("start: b", "b is not defined"),
        ('start: "a" )', r"line 1: '\)' has no place"),
        ('start: ("a"', "is never closed"),
        ('\nstart: "a', "line 2: '\"a' is not Lark"),
        ("start", "does not begin a rule"),
        ('"a": "b"', "does not begin a rule"),
        ('start: "a".."bc"', "two characters"),
        ('start: "\\x"', "is not a text"),
        ("start: *", "has no place"),
    ],
)
def test_what_is_no_lark(grammar: str, message: str) -> None:
    with pytest.raises(InvalidGrammar, match=message):
        regex_of(grammar)


@given(st.text(alphabet='start: "ab|()[]*+?~.%/\\\n0', max_size=60))
def test_any_text_is_an_expression_or_refused(text: str) -> None:
    for source in (text, f"start: {text}"):
        try:
            regex_of(source)
        except (InvalidGrammar, NotRegular):
            continue


def accepts(grammar: str, text: str) -> bool:
    matcher = LLMatcher(LLTokenizer("byte"), grammar)
    tokens = LLTokenizer("byte").tokenize_str(json.dumps({"input": text}, ensure_ascii=False))
    return bool(matcher.try_consume_tokens(tokens) == len(tokens) and matcher.is_accepting())


def test_it_holds_a_text_within_json() -> None:
    text = {"type": "string", "pattern": f"^(?:{regex_of(PATCHES)})$"}
    schema = {"type": "object", "properties": {"input": text}, "required": ["input"]}
    assert schema_unenforced(schema) == ()
    lark = Lark()
    grammar = lark.source(arguments(schema, lark)).source
    assert accepts(grammar, PATCH)
    assert not accepts(grammar, PATCH.replace("+b", "b"))
    assert not accepts(grammar, "a" + PATCH)
