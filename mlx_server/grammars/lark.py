"""A grammar on its way to llguidance, in its variant of Lark.

Names of rules and terminals are made here. What is alike is written once.
Syntax: https://github.com/guidance-ai/llguidance/blob/main/docs/syntax.md
"""

import json
import re
from collections.abc import Callable, Mapping
from typing import Any

from mlx_server.schemas.grammar import text_of

OPTIONS = '%llguidance {"no_forcing": true}'
"""Text that a grammar forces would be tokenised, and could become a control token."""


class Lark:
    def __init__(self, control: Mapping[int, str] | None = None) -> None:
        """control: the control tokens of the vocabulary; text never stands for one."""
        self._ids = {text: id for id, text in (control or {}).items()}
        longest_first = sorted(self._ids, key=len, reverse=True)
        self._marks = re.compile("|".join(map(re.escape, longest_first)) or "(?!)")
        self._names: dict[str, str] = {}

    def rule(self, body: str) -> str:
        """Returns its name, to be used in other rules."""
        return self._named("r", body)

    def terminal(self, body: str) -> str:
        """One lexeme: regular expressions and texts, no rules and no control tokens."""
        return self._named("T", body)

    def json(self, schema: Mapping[str, Any] | bool) -> str:
        """JSON that follows a schema, but for what the report of it says."""
        return self.rule(text_of(schema))

    def text(self, literal: str) -> str:
        """Exactly this; control tokens that it spells are meant as such."""
        parts, at = [], 0
        for match in self._marks.finditer(literal):
            parts += [quoted(literal[at : match.start()]), f"<[{self._ids[match[0]]}]>"]
            at = match.end()
        parts.append(quoted(literal[at:]))
        return " ".join(part for part in parts if part) or '""'

    def first_control(self, literal: str) -> str:
        """The first control token in it; empty if it is all text."""
        found = self._marks.search(literal)
        return found[0] if found else ""

    def up_to(self, delimiter: str, text: str = "") -> str:
        """Any text, and the first of these marks behind it. text: a terminal that it has to be."""
        text = text or self.anything()
        control = self._marks.search(delimiter)
        if not control:
            return self._named("r", f"{text} {quoted(delimiter)}", attributes="[lazy]")
        before, rest = delimiter[: control.start()], delimiter[control.start() :]
        whole = self.terminal(f"{text} {quoted(before)}") if before else text
        return self.rule(f"{whole} {self.text(rest)}")

    def recursive(self, body: Callable[[str], str]) -> str:
        """A rule that uses itself: its body is made with its name."""
        name = f"r{len(self._names)}"
        self._names[name] = name  # nobody else's
        written = body(name)
        del self._names[name]
        while written in self._names:  # another rule's body, yet a rule of its own
            written = f"({written})"
        self._names[written] = name
        return name

    def later(self) -> str:
        """A rule that others may use before it is defined."""
        name = f"r{len(self._names)}"
        self._names[name] = name  # nobody else's
        return name

    def define(self, name: str, body: str) -> None:
        body = f"({body})" if body in self._names else body
        self._names = {body if text == name else text: own for text, own in self._names.items()}

    def anything(self, *but: str) -> str:
        """Any text in which none of these marks stands, and no control token."""
        whole = self.terminal("/(?s:.*)/")
        marks = [quoted(mark) for mark in but if mark not in self._ids]
        if not marks:
            return whole
        # one expression for all of them: the lexer multiplies those that are apart
        found = self.terminal(f"{whole} ({' | '.join(marks)}) {whole}")
        return self.terminal(f"{whole} & ~{found}")

    def source(self, start: str) -> str:
        lines = [OPTIONS, f"start: {start}"]
        return (
            "\n".join([*lines, *(f"{name}: {body}" for body, name in self._names.items())]) + "\n"
        )

    def _named(self, prefix: str, body: str, attributes: str = "") -> str:
        key = body
        if key not in self._names:
            self._names[key] = f"{prefix}{len(self._names)}{attributes}"
        return self._names[key].removesuffix(attributes)


def quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False).replace("\x7f", "\\u007f") if text else ""


def literally(text: str) -> str:
    """A regular expression of exactly this, for between slashes."""
    return re.sub(r"[!-/:;=?@\[-^`{-~]", lambda sign: "\\" + sign[0], text)
