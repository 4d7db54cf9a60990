"""Turns a grammar that a client wrote, in Lark or GBNF, into one rule. It is nested, so that no
names collide.

Lark: https://github.com/guidance-ai/llguidance/blob/main/docs/syntax.md
GBNF: https://github.com/ggml-org/llama.cpp/blob/master/grammars/README.md
"""

import json
import re
from collections import Counter
from collections.abc import Iterator
from functools import lru_cache
from typing import Any, NamedTuple

from mlx_server import limits
from mlx_server.errors import InvalidGrammar
from mlx_server.grammars import patterns
from mlx_server.grammars.compiled import compiled
from mlx_server.grammars.compiled import lark_of as converted

_HEAD = re.compile(r"^[^\S\n]*([a-zA-Z0-9_-]+)[ \t]*::=", re.MULTILINE)
_LINE_BREAK = re.compile(r"\n\s*(?P<head>(?=[a-zA-Z0-9_-]+[ \t]*::=))?")
"""A line break with the white space after it; the group tells whether a rule begins there."""
_GBNF_PIECE = re.compile(
    r'#[^\n]*|(?P<text>"(?:\\.|[^"\\])*"|\[(?:\\.|[^\]\\])*\])|(?P<any>\.)'
    r"|(?P<special>!?<[^<>\s]+>)|(?P<start>(?<![\w-])start(?![\w-]))|(?P<open>[\"\[].*)",
    re.DOTALL,
)
_CHARACTER = re.compile(
    r"\\(?:x([0-9a-fA-F]{2})|u([0-9a-fA-F]{4})|U([0-9a-fA-F]{8})|(.))|(.)", re.DOTALL
)
_ONE = {"n": "\n", "r": "\r", "t": "\t"}


def is_gbnf(source: str) -> bool:
    return _HEAD.search(source) is not None


def lark_of(source: str) -> str:
    """Returns the grammar in Lark. Raises InvalidGrammar."""
    twice = [name for name, times in Counter(_HEAD.findall(source)).items() if times > 1]
    if twice:  # llguidance would use the last definition
        raise _gbnf_refused(f"{twice[0]} is defined twice")
    plain = _GBNF_PIECE.sub(_plain, source)
    return converted(_LINE_BREAK.sub(lambda found: " " if found["head"] is None else "\n", plain))


def _plain(piece: re.Match[str]) -> str:
    """Rewrites a piece with the escapes that llguidance converts correctly, and drops comments."""
    if piece["special"]:
        raise _gbnf_refused(f"{piece[0]} is a special token; those are the model's own")
    if piece["open"]:
        raise _gbnf_refused(f"a {piece[0][0]} is never closed")
    if piece["start"]:  # the converter renames `root` to it
        return "start-rule"
    if piece["any"]:
        return "[\\x00-\U0010ffff]"
    if not piece["text"]:
        return ""
    text = piece["text"]
    opening = "[^" if text.startswith("[^") else text[0]
    inner = _CHARACTER.sub(lambda found: _spelled(found, opening), text[len(opening) : -1])
    return f"{opening}{inner}{text[-1]}"


def _spelled(found: re.Match[str], opening: str) -> str:
    if found[0] == "-" and opening != '"':
        return "-"
    code = found[1] or found[2] or found[3]
    number = int(code, 16) if code else ord(found[5] or _ONE.get(found[4], found[4]))
    if number > 0x10FFFF or 0xD800 <= number < 0xE000:
        raise _gbnf_refused(f"{found[0]} is not a character")
    character = chr(number)
    is_plain = number > 0x7F or character.isalnum()
    return character if is_plain else f"\\x{number:02x}"


def _gbnf_refused(why: str) -> InvalidGrammar:
    return InvalidGrammar(f"The grammar can't be used: {why}.")


_TOKEN = re.compile(
    r"(?P<blank>[ \t]+|(?:#|//)[^\n]*)|(?P<line>(?:\r?\n)+)"
    r'|(?P<text>"(?:\\(?:["\\/bfnrt]|u[a-fA-F0-9]{4}|x[a-fA-F0-9]{2})|[^"\\\x00-\x1f\x7f])*"i?)'
    r"|(?P<regex>/(?:\\.|[^/\\])+/[imslux]*)"
    r"|(?P<special><[^<>\s]+>)|(?P<grammar>@[a-zA-Z0-9_-]+)|(?P<directive>%[a-z]+)"
    r"|(?P<name>[!?_]{0,2}[a-zA-Z][a-zA-Z0-9_-]*)|(?P<open>[(\[{])|(?P<close>[)\]}])"
    r"|(?P<other>[:|~&=,.*+?!^_0-9>-])"
)
_PAIRS = {")": "(", "]": "[", "}": "{"}
_OPTIONS = {"max_tokens", "stop", "temperature", "stop_capture", "capture"}


class _LarkToken(NamedTuple):
    kind: str
    text: str
    line: int


@lru_cache(maxsize=limits.COMPILED_SCHEMAS)
def user_grammar_body(source: str) -> str:
    """Returns the body of a rule for a client's grammar in Lark or GBNF."""
    if len(source) > limits.GRAMMAR_CHARACTERS:
        raise InvalidGrammar(
            f"The grammar has {len(source)} characters, more than "
            f"{limits.GRAMMAR_CHARACTERS}. Send a shorter one."
        )
    lark = lark_of(source) if is_gbnf(source) else source
    tokens = list(_tokens(lark))
    _refuse_excess(tokens)
    return f"%lark {{\n{''.join(_checked_tokens(tokens))}\n}}"


def _tokens(source: str) -> Iterator[_LarkToken]:
    at, line = 0, 1
    while at < len(source):
        found = _TOKEN.match(source, at)
        if not found or not found.lastgroup:
            raise _refused(line, f"{source[at : at + 20]!r} is not Lark")
        kind, text = found.lastgroup, found[0]
        if text in ("%json", "%regex", "%llguidance"):
            _, end = _value_at(source, found.end(), line)
            kind, text = text, source[found.end() : end]
        yield _LarkToken(kind, text, line)
        at = end if kind.startswith("%") else found.end()
        line += source.count("\n", found.start(), at)


def _value_at(source: str, at: int, line: int) -> tuple[Any, int]:
    begun = re.compile(r"\s*").match(source, at)
    assert begun
    try:
        value, end = json.JSONDecoder().raw_decode(source, begun.end())
    except (ValueError, RecursionError):
        raise _refused(line, "a % directive is not followed by JSON") from None
    return value, end


def _refuse_excess(tokens: list[_LarkToken]) -> None:
    opened: list[str] = []
    for token in tokens:
        if token.kind == "open":
            opened.append(token.text)
        elif token.kind == "close" and (not opened or opened.pop() != _PAIRS[token.text]):
            raise _refused(token.line, f"{token.text} closes nothing")
        if len(opened) > limits.GRAMMAR_DEPTH:
            raise _refused(token.line, f"brackets are nested deeper than {limits.GRAMMAR_DEPTH}")
    if opened:
        raise InvalidGrammar(f"The grammar can't be used: {opened[-1]} is never closed.")
    if sum(token.text == "&" for token in tokens) > limits.GRAMMAR_INTERSECTIONS:
        raise InvalidGrammar(
            f"The grammar has more than {limits.GRAMMAR_INTERSECTIONS} intersections (&). "
            "Use fewer."
        )
    rules = sum(token.text == ":" for token in tokens)
    if rules > limits.GRAMMAR_RULES:
        raise InvalidGrammar(
            f"The grammar has {rules} rules, more than {limits.GRAMMAR_RULES}. Use fewer."
        )


def _checked_tokens(tokens: list[_LarkToken]) -> Iterator[str]:
    significant = [token for token in tokens if token.kind not in ("blank", "line")]
    following = dict(zip(map(id, significant), significant[1:], strict=False))
    for token in tokens:
        after = following.get(id(token))
        if token.kind == "name" and token.text in _OPTIONS and after and after.text == "=":
            raise _refused(token.line, f"the option {token.text} can't be used here")
        yield _token_text(token)


def _token_text(token: _LarkToken) -> str:
    kind, text, line = token
    match kind:
        case "special":
            raise _refused(line, f"{text} is a special token; those are the model's own")
        case "grammar":
            raise _refused(line, f"{text} refers to another grammar, and there is none")
        case "directive" if text not in ("%import", "%ignore"):
            raise _refused(line, f"{text} can't be used here")
        case "%llguidance" if json.loads(text):
            raise _refused(line, "%llguidance can't change options here; leave it out")
        case "%llguidance" | "blank":
            return " "
        case "%json":
            return _schema(json.loads(text))
        case "%regex":
            return f"%regex {json.dumps(json.loads(text))}"
        case "regex":
            if why := patterns.unsupported(text):
                raise _refused(
                    line, f"the pattern {text[:40]} has {why}, which can't be expressed here"
                )
            if why := patterns.excessive_part(text):
                raise _refused(line, f"the pattern {text[:40]} {why}")
    return text


def _schema(found: Any) -> str:
    json_schema = compiled(found)
    json_schema.require_all()
    return f"%json {json_schema.grammar}"


def _refused(line: int, why: str) -> InvalidGrammar:
    return InvalidGrammar(f"The grammar can't be used: line {line}: {why}.")
