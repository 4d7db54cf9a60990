"""GBNF, llama.cpp's notation of grammars, as Lark.

https://github.com/ggml-org/llama.cpp/blob/master/grammars/README.md
"""

import json
import re
from collections.abc import Iterator

from mlx_server.errors import InvalidGrammar

_TOKEN = re.compile(
    r"(?P<blank>[ \t\r\n]+|#[^\n]*)|(?P<head>[a-zA-Z0-9_-]+)(?=[ \t]*::=)|(?P<defines>::=)"
    r'|(?P<text>"(?:\\.|[^"\\\n])*")|(?P<class>\[(?:\\.|[^\]\\])*\])|(?P<name>[a-zA-Z0-9_-]+)'
    r"|(?P<times>\{\s*\d+\s*(?:,\s*\d*\s*)?\})|(?P<special>!?<[^<>\s]+>)|(?P<any>\.)"
    r"|(?P<other>[()|*+?])",
    re.DOTALL,
)
_ESCAPE = re.compile(
    r"\\(?:x(?P<x>[0-9a-fA-F]{2})|u(?P<u>[0-9a-fA-F]{4})|U(?P<U>[0-9a-fA-F]{8})|(?P<one>.))",
    re.DOTALL,
)
_ONE = {"n": "\n", "r": "\r", "t": "\t"}

Token = tuple[str, str]


def is_gbnf(source: str) -> bool:
    return re.search(r"^\s*[a-zA-Z0-9_-]+\s*::=", source, re.MULTILINE) is not None


def lark_of(source: str) -> str:
    rules = _rules(source)
    if "root" not in rules:
        raise _refused("it has no rule named root")
    flat = _regular_rules(rules)
    # Upper case is one lexeme to Lark, which is much faster than a rule for each character.
    names = {name: f"{'G' if name in flat else 'g'}{at}" for at, name in enumerate(rules)}
    lines = [f"{names[name]}: {_body(body, names)}" for name, body in rules.items()]
    return "\n".join([f"start: {names['root']}", *lines])


def _rules(source: str) -> dict[str, list[Token]]:
    rules: dict[str, list[Token]] = {}
    body: list[Token] | None = None
    for kind, text in _tokens(source):
        if kind == "head":
            if text in rules:
                raise _refused(f"{text} is defined twice")
            body = rules[text] = []
        elif kind == "special":
            raise _refused(f"{text} is a special token; those are the model's own")
        elif body is None:
            raise _refused(f"{text!r} stands before the first rule")
        elif kind != "defines":
            body.append((kind, text))
    return rules


def _tokens(source: str) -> Iterator[Token]:
    at = 0
    while at < len(source):
        found = _TOKEN.match(source, at)
        if not found or not found.lastgroup:
            line = source.count("\n", 0, at) + 1
            raise _refused(f"line {line}: {source[at : at + 20]!r} is not GBNF")
        if found.lastgroup != "blank":
            yield found.lastgroup, found[0]
        at = found.end()


def _regular_rules(rules: dict[str, list[Token]]) -> set[str]:
    """The rules that refer to no rule that refers to itself: regular expressions, all told."""
    uses = {name: [text for kind, text in body if kind == "name"] for name, body in rules.items()}
    missing = {text for texts in uses.values() for text in texts} - set(rules)
    if missing:
        raise _refused(f"there is no rule named {min(missing)}")
    flat: set[str] = set()
    waiting = dict(uses)
    while found := {name for name, names in waiting.items() if flat.issuperset(names)}:
        flat |= found
        waiting = {name: names for name, names in waiting.items() if name not in found}
    return flat


def _body(body: list[Token], names: dict[str, str]) -> str:
    return " ".join(_piece(kind, text, names) for kind, text in body) or '""'


def _piece(kind: str, text: str, names: dict[str, str]) -> str:
    match kind:
        case "name":
            return names[text]
        case "text":
            literal = "".join(_characters(text[1:-1]))
            return json.dumps(literal, ensure_ascii=False).replace("\x7f", "\\u007f")
        case "class":
            return f"/{_class(text)}/"
        case "any":
            return "/(?s:.)/"
        case "times":
            return re.sub(r"\s", "", text)
    return text


def _characters(text: str) -> Iterator[str]:
    at = 0
    for escape in _ESCAPE.finditer(text):
        yield from text[at : escape.start()]
        yield _character(escape)
        at = escape.end()
    yield from text[at:]


def _character(escape: re.Match[str]) -> str:
    code = escape["x"] or escape["u"] or escape["U"]
    if code and (int(code, 16) > 0x10FFFF or 0xD800 <= int(code, 16) < 0xE000):
        raise _refused(f"{escape[0]} is no character")
    return chr(int(code, 16)) if code else _ONE.get(escape["one"], escape["one"])


def _class(text: str) -> str:
    """In the syntax of regular expressions, where more characters mean something."""
    negated = text.startswith("[^")
    inner, out, at = text[2 if negated else 1 : -1], [], 0
    for escape in [*_ESCAPE.finditer(inner), None]:
        end = escape.start() if escape else len(inner)
        out += [c if c == "-" else _coded(c) for c in inner[at:end]]
        if escape:
            out.append(_coded(_character(escape)))
            at = escape.end()
    if not out:
        raise _refused("[] matches nothing")
    return f"[{'^' if negated else ''}{''.join(out)}]"


def _coded(character: str) -> str:
    return (
        character if character.isalnum() and character.isascii() else f"\\x{{{ord(character):X}}}"
    )


def _refused(why: str) -> InvalidGrammar:
    return InvalidGrammar(f"The grammar can't be used: {why}.")
