"""Rewrites a grammar in Lark as one regular expression, where its rules don't call themselves.

JSON Schema can restrict a string by a regular expression, in `pattern`, but by no other grammar.
"""

import ast
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from mlx_server import limits
from mlx_server.errors import InvalidGrammar

_TOKEN = re.compile(
    r"(?P<blank>[ \t\f]+|(?://|\#)[^\n]*)|(?P<line>(?:\r?\n[ \t]*)+)"
    r'|(?P<text>"(?:\\.|[^"\\\n])*"i?)|(?P<regex>/(?!/)(?:\\.|[^/\\\n])+/[imslux]*)'
    r"|(?P<directive>%[a-z]+)|(?P<name>[!?]?_?[A-Za-z][A-Za-z0-9_]*)|(?P<count>~\s*\d+(?:\s*\.\.\s*\d+)?)"
    r"|(?P<range>\.\.)|(?P<arrow>->\s*[A-Za-z_]\w*)|(?P<priority>\.\s*-?\d+)|(?P<sign>[:|()\[\]*+?,.])"
)
COMMON = {
    "DIGIT": "[0-9]",
    "HEXDIGIT": "[a-fA-F0-9]",
    "INT": "[0-9]+",
    "SIGNED_INT": "[+\\-]?[0-9]+",
    "NUMBER": "(?:[0-9]+(?:\\.[0-9]*)?|\\.[0-9]+)(?:[eE][+\\-]?[0-9]+)?",
    "LCASE_LETTER": "[a-z]",
    "UCASE_LETTER": "[A-Z]",
    "LETTER": "[a-zA-Z]",
    "WORD": "[a-zA-Z]+",
    "CNAME": "[_a-zA-Z][_a-zA-Z0-9]*",
    "ESCAPED_STRING": '"(?:[^"\\\\\\n]|\\\\.)*"',
    "WS_INLINE": "[ \\t]+",
    "WS": "[ \\t\\f\\r\\n]+",
    "CR": "\\r",
    "LF": "\\n",
    "NEWLINE": "(?:\\r?\\n)+",
}
"""The terminals of Lark's own `common` grammar that are in use."""


class NotRegular(Exception):
    """The grammar is no regular expression, or one that is too long."""


@dataclass(frozen=True, slots=True)
class _RegexToken:
    kind: str
    text: str
    line: int


def regex_of(source: str) -> str:
    """Returns the grammar as one regular expression. Raises NotRegular, and InvalidGrammar for what
    is not Lark."""
    definitions = dict(_definitions([*_tokens(source)]))
    if "start" not in definitions:
        raise InvalidGrammar("The grammar can't be used: it has no rule `start`.")
    return _Expansion(definitions).of("start", 0)


def _tokens(source: str) -> Iterator[_RegexToken]:
    at, line = 0, 1
    while at < len(source):
        found = _TOKEN.match(source, at)
        if not found or not found.lastgroup:
            raise _refused(line, f"{source[at : at + 20]!r} is not Lark")
        if found.lastgroup != "blank":
            yield _RegexToken(found.lastgroup, found[0], line)
        line += found[0].count("\n")
        at = found.end()


def _definitions(tokens: list[_RegexToken]) -> Iterator[tuple[str, list[_RegexToken] | str]]:
    """Yields the bodies of the rules and terminals, by name; imported terminals as expressions."""
    for statement in _statements(tokens):
        head, *rest = statement
        if head.kind == "directive":
            yield from _imported(head, rest)
            continue
        if rest and rest[0].kind == "priority":
            rest = rest[1:]
        if head.kind != "name" or not rest or rest[0].text != ":":
            raise _refused(head.line, f"{head.text[:20]!r} does not begin a rule")
        yield head.text.lstrip("!?"), rest[1:]


def _statements(tokens: list[_RegexToken]) -> Iterator[list[_RegexToken]]:
    """Yields the tokens of each rule. A line that begins with | continues the rule before."""
    statement: list[_RegexToken] = []
    for i, token in enumerate(tokens):
        if token.kind != "line":
            statement.append(token)
        elif statement and not (i + 1 < len(tokens) and tokens[i + 1].text == "|"):
            yield statement
            statement = []
    if statement:
        yield statement


def _imported(head: _RegexToken, rest: list[_RegexToken]) -> Iterator[tuple[str, str]]:
    said = "".join(token.text for token in rest)
    if head.text != "%import":
        raise NotRegular(f"{head.text} has no place in a regular expression")
    found = re.fullmatch(
        r"common(?:\.([A-Z_]+)(?:->([A-Z_]+))?|\(([A-Z_,]+)\))", said.replace(" ", "")
    )
    names = (found[3] or found[1]).split(",") if found else []
    if not found or not set(names) <= COMMON.keys():
        raise NotRegular("an import of an unknown terminal")
    for name in names:
        yield found[2] or name, COMMON[name]


@dataclass
class _Expansion:
    definitions: dict[str, list[_RegexToken] | str]
    _written: dict[str, str] = field(default_factory=dict)
    _open: set[str] = field(default_factory=set)
    _depth: int = 0

    def of(self, name: str, line: int) -> str:
        """Returns the expression of a rule or terminal."""
        body = self.definitions.get(name)
        if body is None:
            raise _refused(line, f"{name[:40]} is not defined")
        if isinstance(body, str):
            return body
        if name in self._open:
            raise NotRegular("a rule that calls itself")
        if name not in self._written:
            self._open.add(name)
            with self.deeper():
                self._written[name] = _RuleReader(body, self).read()
            self._open.discard(name)
        return self._written[name]

    @contextmanager
    def deeper(self) -> Iterator[None]:
        self._depth += 1
        if self._depth > limits.GRAMMAR_DEPTH:
            raise NotRegular("rules and brackets that are nested too deep")
        yield
        self._depth -= 1


class _RuleReader:
    """Reads the body of one rule."""

    def __init__(self, tokens: list[_RegexToken], rules: _Expansion) -> None:
        self._tokens = [token for token in tokens if token.kind not in ("line", "arrow")]
        self._rules = rules
        self._at = 0

    def read(self) -> str:
        found = self._choice()
        if self._at < len(self._tokens):
            token = self._tokens[self._at]
            raise _refused(token.line, f"{token.text[:20]!r} has no place here")
        return found

    def _choice(self) -> str:
        options = [self._sequence()]
        while self._accept("|"):
            options.append(self._sequence())
            _check_length(options)
        return options[0] if len(options) == 1 else f"(?:{'|'.join(options)})"

    def _sequence(self) -> str:
        parts: list[str] = []
        while (token := self._next()) and token.text not in ("|", ")", "]"):
            self._at += 1
            parts.append(self._repeated(self._atom(token)))
            _check_length(parts)
        return "".join(parts)

    def _atom(self, token: _RegexToken) -> str:
        match token.kind, token.text:
            case "name", name:
                return self._rules.of(name.lstrip("!?"), token.line)
            case "regex", text:
                return _pattern(text)
            case "text", text:
                return self._literal(token)
            case "sign", "(" | "[" as opened:
                with self._rules.deeper():
                    inner = self._choice()
                if not self._accept(")" if opened == "(" else "]"):
                    raise _refused(token.line, f"{opened} is never closed")
                return inner if opened == "(" else f"(?:{inner})?"
        raise _refused(token.line, f"{token.text[:20]!r} has no place here")

    def _literal(self, token: _RegexToken) -> str:
        text = _literal_text(token)
        if (following := self._next()) and following.kind == "range":
            self._at += 1
            last = self._next()
            if not last or last.kind != "text" or len(text) != 1 or len(_literal_text(last)) != 1:
                raise _refused(token.line, "a range needs two characters")
            self._at += 1
            return f"[{_escaped(text)}-{_escaped(_literal_text(last))}]"
        flag = "(?i:{})" if token.text.endswith("i") else "{}"
        return flag.format("".join(map(_escaped, text)))

    def _repeated(self, atom: str) -> str:
        while (token := self._next()) and (token.text in ("*", "+", "?") or token.kind == "count"):
            self._at += 1
            times = token.text
            if token.kind == "count":
                least, _, most = times[1:].replace(" ", "").partition("..")
                times = f"{{{least},{most}}}" if most else f"{{{least}}}"
            atom = f"(?:{atom}){times}"
        return atom

    def _next(self) -> _RegexToken | None:
        return self._tokens[self._at] if self._at < len(self._tokens) else None

    def _accept(self, text: str) -> bool:
        token = self._next()
        found = token is not None and token.text == text
        self._at += found
        return found


def _check_length(parts: list[str]) -> None:
    if sum(map(len, parts)) > limits.PATTERN_CHARACTERS:
        raise NotRegular("an expression that is too long")


def _literal_text(token: _RegexToken) -> str:
    try:
        return str(ast.literal_eval(token.text.removesuffix("i")))
    except (ValueError, SyntaxError):
        raise _refused(token.line, f"{token.text[:20]} is not a text") from None


def _pattern(token: str) -> str:
    body, _, flags = token[1:].rpartition("/")
    if "x" in flags:
        raise NotRegular("a pattern with blanks in it")
    flags = "".join(flag for flag in "ims" if flag in flags)
    return f"(?{flags}:{body.replace(chr(92) + '/', '/')})"


def _escaped(character: str) -> str:
    if character == "\n":
        return "\\n"
    return f"\\{character}" if character in r"\.^$|?*+()[]{}-/" else character


def _refused(line: int, why: str) -> InvalidGrammar:
    return InvalidGrammar(f"The grammar can't be used: line {line}: {why}.")
