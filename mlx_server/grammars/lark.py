"""A grammar on its way to llguidance, in its variant of Lark.

Names of rules and terminals are made here. What is alike is written once.
Syntax: https://github.com/guidance-ai/llguidance/blob/main/docs/syntax.md
"""

import json
import re
from collections.abc import Mapping
from typing import Any

OPTIONS = '%llguidance {"no_forcing": true}'
"""Text that a grammar forces would be tokenised, and could become a control token."""

SPACE = r"\x20|\n[\x20\x09]{0,40}"
"""Between the parts of JSON. Bounded, or a small model writes blanks until its limit."""


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

    def json(self, schema: Mapping[str, Any] | bool, *, lenient: bool = False) -> str:
        """JSON that follows a schema (see schema.py for those that can be used)."""
        ours = {"whitespace_pattern": SPACE, "lenient": lenient, "coerce_one_of": lenient}
        told = schema if isinstance(schema, bool) else {**schema, "x-guidance": ours}
        return self.rule(f"%json {json.dumps(told)}")

    def text(self, literal: str) -> str:
        """Exactly this; control tokens that it spells are meant as such."""
        parts, at = [], 0
        for match in self._marks.finditer(literal):
            parts += [quoted(literal[at : match.start()]), f"<[{self._ids[match[0]]}]>"]
            at = match.end()
        parts.append(quoted(literal[at:]))
        return " ".join(part for part in parts if part) or '""'

    def up_to(self, mark: str) -> str:
        """Any text, and the first of these marks behind it."""
        if mark in self._ids:
            return self.rule(f"{self.anything()} {self.text(mark)}")
        return self._named("r", f"{self.anything()} {quoted(mark)}", attributes="[lazy]")

    def anything(self, *but: str) -> str:
        """Any text in which none of these marks stands, and no control token."""
        whole = self.terminal("/(?s:.*)/")
        told = [quoted(mark) for mark in but if mark not in self._ids]
        found = [self.terminal(f"{whole} {mark} {whole}") for mark in told]
        return (
            self.terminal(" & ".join([whole, *(f"~{name}" for name in found)])) if found else whole
        )

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
    return json.dumps(text, ensure_ascii=False) if text else ""
