"""The grammar rules of strings, words, lists and objects in a call format, by their schema.

A value with keywords that are not read here is written as JSON, which the readers of these formats
understand as well.
"""

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from mlx_server.grammars.lark import Lark, quoted
from mlx_server.schemas.values import KEYWORDS, MemberSchema, ValueSchema, members
from mlx_server.tool_parsers.json_rule import NEVER, json_rule
from mlx_server.tool_parsers.parameters import UncallableTool, comma_separated_rule


@dataclass(frozen=True)
class LiteralSyntax:
    """The literals that differ from JSON's."""

    string: Callable[[Lark, ValueSchema], str | None]
    """Returns the rule of a string that a schema allows; None where it has to be JSON."""
    text: Callable[[Lark, str], str | None]
    """Returns the rule of exactly this string; None if there is no way to write it."""
    key: Callable[[Lark, str], str | None]
    """Returns the rule of exactly this key of a member; None if there is no way to write it."""
    any_key: Callable[[Lark], str]
    words: Mapping[bool | None, tuple[str, ...]]
    ordered: Callable[[list[MemberSchema]], list[MemberSchema]] = list
    """Orders members as the models are used to see them."""


@dataclass(frozen=True)
class LiteralGrammar:
    lark: Lark
    syntax: LiteralSyntax
    _named: dict[tuple[int, str], str] = field(default_factory=dict)
    """The rules of referenced schemas, by the schema around the reference and the reference."""

    def value(self, value: ValueSchema) -> str:
        if target := value.target:
            name = (id(value.root), value.reference)
            return self._once(name, lambda: self.value(target))
        if value.alternatives:
            return self.lark.rule(" | ".join(map(self.value, value.alternatives)))
        if value.listed is not None:
            if not value.says_only("type", "enum", "const"):
                return json_rule(value, self.lark)
            listed = [self._exactly(listed) for listed in value.listed if value.may_list(listed)]
            return self.lark.rule(" | ".join(filter(None, listed)) or NEVER)
        if value.says_only():
            return self._once((0, ""), lambda: self._of_types(value))
        return self._of_types(value)

    def members(self, variants: list[list[MemberSchema]]) -> str:
        """Returns the rule of an object's members, without its brackets."""

        def written(member: MemberSchema) -> str | None:
            key = self.syntax.key(self.lark, member.key)
            return key and f"{key} {self._colon} {self.value(member.value)}"

        ordered = [self.syntax.ordered(found) for found in variants]
        return comma_separated_rule(ordered, written, self.lark, self._comma)

    @property
    def _comma(self) -> str:
        return self.lark.terminal(r"/,\x20?/")

    @property
    def _colon(self) -> str:
        return self.lark.terminal(r"/:\x20?/")

    def _once(self, name: tuple[int, str], body: Callable[[], str]) -> str:
        """Returns a rule that may use itself, defined once."""
        if name not in self._named:

            def named(own: str) -> str:
                self._named[name] = own
                return body()

            self._named[name] = self.lark.recursive(named)
        return self._named[name]

    def _of_types(self, value: ValueSchema) -> str:
        said = {keyword for type in value.types for keyword in KEYWORDS.get(type, ())}
        written = [self._of_type(type, value) for type in sorted(value.types)]
        if None in written or not value.says_only("type", *said):
            return json_rule(value, self.lark)
        return self.lark.rule(" | ".join(filter(None, written)))

    def _of_type(self, type: str, value: ValueSchema) -> str | None:
        match type:
            case "string":
                return self.syntax.string(self.lark, value)
            case "boolean":
                return " | ".join(map(quoted, (*self._words(True), *self._words(False))))
            case "null":
                return " | ".join(map(quoted, self._words(None)))
            case "array":
                return self._array(value)
            case "object":
                return self._object(value)
        return json_rule(value, self.lark, type)

    def _words(self, value: bool | None) -> tuple[str, ...]:
        return self.syntax.words[value]

    def _array(self, value: ValueSchema) -> str | None:
        items = value.items
        if not items:
            return None
        least, most = value.counts("minItems", "maxItems")
        if most == 0:
            return quoted("[]")
        item = self.value(items)
        more = f"{{{max(least - 1, 0)},{'' if most is None else most - 1}}}"
        several = f"{item} ({self._comma} {item}){more}"
        return f'"[" {several} "]"' if least else f'"[" ({several})? "]"'

    def _object(self, value: ValueSchema) -> str | None:
        found, others = members(value), value.others
        if not value.lists_all_members:
            return None
        if found or not others:
            try:
                return f"{quoted('{')} {self.members([found])} {quoted('}')}"
            except UncallableTool:
                return None
        more = self.value(others)
        pair = f"{self.syntax.any_key(self.lark)} {self._colon} {more}"
        return f"{quoted('{')} ({pair} ({self._comma} {pair})*)? {quoted('}')}"

    def _exactly(self, value: object) -> str | None:
        match value:
            case str():
                return self.syntax.text(self.lark, value)
            case bool() | None:
                return " | ".join(map(quoted, self._words(value)))
        return quoted(json.dumps(value, ensure_ascii=False))
