"""Builds a grammar in llguidance's variant of Lark.

It chooses the names of rules and terminals, and writes rules with the same body only once.
Syntax: https://github.com/guidance-ai/llguidance/blob/main/docs/syntax.md
"""

import json
import re
from collections.abc import Callable, Mapping
from typing import Any

from mlx_server.engine.messages import Grammar
from mlx_server.grammars.grammar import text_of

OPTIONS = '%llguidance {"no_forcing": true}'
"""Keeps llguidance from tokenising text that a grammar forces, which could give control tokens."""


class Lark:
    def __init__(self, control: Mapping[int, str] | None = None) -> None:
        """control: the vocabulary's control tokens by id. Free text never matches one of them."""
        self._ids = {text: id for id, text in (control or {}).items()}
        longest_first = sorted(self._ids, key=len, reverse=True)
        self._marks = re.compile("|".join(map(re.escape, longest_first)) or "(?!)")
        self._names: dict[str, str] = {}
        """The names of rules and terminals, by their bodies."""
        self._schemas: dict[str, str] = {}
        """The names of schemas, by their JSON."""
        self._frames: dict[tuple[str, str], None] = {}

    def rule(self, body: str) -> str:
        """Adds a rule and returns its name, which other rules may use."""
        return self._named("r", body)

    def terminal(self, body: str) -> str:
        """Adds a terminal, one lexeme of regular expressions and texts, without control tokens."""
        return self._named("T", body)

    def json(self, schema: Mapping[str, Any] | bool) -> str:
        """Adds a rule of JSON that conforms to a schema, except for its unsupported keywords."""
        return self.schema(text_of(schema))

    def schema(self, text: str) -> str:
        """Adds a rule of JSON that conforms to a schema as the compiler wrote it."""
        return self._schemas.setdefault(text, f"j{len(self._schemas)}")

    def frame(self, schema: str, frame: Mapping[str, Any]) -> None:
        """Notes the object around a rule of `schema`, so that it can be completed too. frame: the
        object's schema, in which the rule's is `{"$ref": "#"}`."""
        self._frames[schema, _encoded(frame)] = None

    def text(self, literal: str) -> str:
        """Returns the body of a rule of exactly this text, whose control tokens are matched as
        tokens."""
        parts, at = [], 0
        for match in self._marks.finditer(literal):
            parts += [quoted(literal[at : match.start()]), f"<[{self._ids[match[0]]}]>"]
            at = match.end()
        parts.append(quoted(literal[at:]))
        return " ".join(part for part in parts if part) or '""'

    def first_control(self, literal: str) -> str:
        """Returns the first control token in the text; empty if it has none."""
        match = self._marks.search(literal)
        return match[0] if match else ""

    def up_to(self, delimiter: str, text: str = "") -> str:
        """Adds a rule of any text up to and including the first delimiter.

        text: a terminal that the text before the delimiter must match.
        """
        text = text or self.anything()
        control = self._marks.search(delimiter)
        if not control:
            return self._named("r", f"{text} {quoted(delimiter)}", attributes="[lazy]")
        before, rest = delimiter[: control.start()], delimiter[control.start() :]
        whole = self.terminal(f"{text} {quoted(before)}") if before else text
        return self.rule(f"{whole} {self.text(rest)}")

    def recursive(self, body: Callable[[str], str]) -> str:
        """Adds a rule that uses itself: `body` gets the rule's name and returns its body."""
        name = f"r{len(self._names)}"
        self._names[name] = name  # reserves it
        written = body(name)
        del self._names[name]
        while written in self._names:  # it needs a rule of its own although its body exists
            written = f"({written})"
        self._names[written] = name
        return name

    def later(self) -> str:
        """Returns the name of a rule that others may use before it is defined."""
        name = f"r{len(self._names)}"
        self._names[name] = name  # reserves it
        return name

    def define(self, name: str, body: str) -> None:
        body = f"({body})" if body in self._names else body
        self._names = {body if text == name else text: own for text, own in self._names.items()}

    def anything(self, *but: str) -> str:
        """Adds a terminal of any text without these delimiters and without control tokens."""
        whole = self.terminal("/(?s:.*)/")
        marks = [quoted(mark) for mark in but if mark not in self._ids]
        if not marks:
            return whole
        # one expression for all of them: separate ones would multiply the lexer's states
        terminal = self.terminal(f"{whole} ({' | '.join(marks)}) {whole}")
        return self.terminal(f"{whole} & ~{terminal}")

    def source(self, start: str) -> Grammar:
        """Returns the grammar of an answer that matches the body `start`."""
        rules = [f"{name}: {body}" for body, name in self._names.items()]
        lines = (OPTIONS, f"start: {start}", *rules)
        schemas = tuple((name, text) for text, name in self._schemas.items())
        is_schema = [start] == [name for name, _ in schemas]
        text = "".join(f"{line}\n" for line in lines)
        return Grammar(text, schemas, tuple(self._frames), is_schema)

    def _named(self, prefix: str, body: str, attributes: str = "") -> str:
        key = body
        if key not in self._names:
            self._names[key] = f"{prefix}{len(self._names)}{attributes}"
        return self._names[key].removesuffix(attributes)


_encoded = json.JSONEncoder(ensure_ascii=False).encode  # `json.dumps` would make one each time


def quoted(text: str) -> str:
    return _encoded(text).replace("\x7f", "\\u007f") if text else ""


def literally(text: str) -> str:
    """Returns a regular expression of exactly this text, to stand between slashes."""
    return re.sub(r"[!-/:;=?@\[-^`{-~]", lambda sign: "\\" + sign[0], text)
