"""Grammar rules of values that stand as bare text between delimiters: strings as they are, other
values as JSON.

Where a schema allows strings and other types, a text is read as the type that it looks like. So no
string is allowed that would be read as a value that the schema forbids. What a schema says about
strings is enforced, except for patterns that can't be read (see schemas/unsupported_arguments.py).
Where strings are allowed, numbers with limits are not.
"""

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from mlx_server import limits
from mlx_server.grammars.lark import Lark, quoted
from mlx_server.schemas.patterns import search_pattern
from mlx_server.schemas.types import named
from mlx_server.schemas.values import KEYWORDS, ValueSchema
from mlx_server.tool_parsers.format_text import FORMATS
from mlx_server.tool_parsers.json_rule import NEVER, NUMBER, json_rule

Ends = Callable[[str], str]
"""Makes the rule of a value with what follows it: `Lark.up_to` for text, and the rule itself for
JSON."""

SPACE = r"[\s\x1c-\x1f]*"
LOOKS = {
    "null": rf"{SPACE}(null|None){SPACE}",
    "boolean": rf"{SPACE}(true|false|True|False){SPACE}",
    "integer": rf"{SPACE}-?[0-9]+{SPACE}",
    "number": rf"{SPACE}-?[0-9][-+.0-9eE]*{SPACE}",
    "object": rf"{SPACE}\{{(?s:.*)",
    "array": rf"{SPACE}\[(?s:.*)",
}
"""Patterns of texts that are read as another type, where the schema allows that type."""

PLAIN = {
    "null": r"null",
    "boolean": r"true|false|True|False",
    "integer": r"-?(0|[1-9][0-9]{0,40})",
    "number": NUMBER,
}
"""Patterns of values that may stand in place of a string, for schemas with nothing but a type.
Templates use Python's words too."""

WORDS = {"boolean": ("True", "False"), "null": ("None",)}


def bare_value_rule(value: ValueSchema, lark: Lark, delimiter: str, *but: str) -> str:
    """Returns the rule of a value and the delimiter after it. but: other delimiters that can't
    stand in text."""
    if "string" in value.types:
        text = _text_terminal(
            value, lark, (delimiter, *but), (value.types | value.read_as) - {"string"}
        )
        return lark.rule(
            " | ".join([lark.up_to(delimiter, text), *_structures(value, lark, delimiter)])
        )
    words = [word for option in value.options for word in _words(option)]
    return lark.rule(f"({' | '.join([json_rule(value, lark), *words])}) {lark.text(delimiter)}")


def marked_text(value: ValueSchema, lark: Lark, delimiter: str, *but: str) -> str:
    """Returns a rule like `bare_value_rule`, for a value that is marked as text, whatever it looks
    like."""
    return lark.up_to(delimiter, _text_terminal(value, lark, (delimiter, *but), frozenset()))


def _structures(value: ValueSchema, lark: Lark, delimiter: str) -> Iterator[str]:
    """Yields the rules of objects and arrays: no text begins as they do."""
    if types := value.types & {"object", "array"}:
        yield f"{json_rule(value, lark, *types)} {lark.text(delimiter)}"


def _text_terminal(
    value: ValueSchema, lark: Lark, delimiters: tuple[str, ...], others: frozenset[str]
) -> str:
    """Returns one terminal, since of several that match the lexer would take only the first."""
    looks = [lark.terminal(f"/{LOOKS[type]}/") for type in sorted(others)]
    free = lark.anything(*delimiters)
    found = [" & ".join([text_of(value, lark), free, *(f"~{look}" for look in looks)])]
    for option in value.options:
        found += _scalars(option, lark, others)
    return lark.terminal(" | ".join(found))


def text_of(value: ValueSchema, lark: Lark) -> str:
    """Returns a terminal for text, without regard to delimiters."""
    return _TextPatterns(lark).of(value, limits.TEXT_SCHEMA_DEPTH)


@dataclass(frozen=True)
class _TextPatterns:
    lark: Lark
    _known: dict[int, str] = field(default_factory=dict)
    """The terminals by the schema's id: several parts may refer to the same schema."""

    def of(self, value: ValueSchema, depth: int) -> str:
        if not depth:
            return NEVER
        schema = id(value.schema)
        if schema not in self._known:
            self._known[schema] = NEVER  # for a schema that refers to itself
            said = ["/(?s:.*)/", *_own_patterns(value), *self._patterns_elsewhere(value, depth - 1)]
            self._known[schema] = self.lark.terminal(" & ".join(said))
        return self._known[schema]

    def _patterns_elsewhere(self, value: ValueSchema, depth: int) -> Iterator[str]:
        for part in value.also:
            yield self.of(part, depth)
        for options in value.choices:
            yield self.lark.terminal(" | ".join(self.of(option, depth) for option in options))


def _own_patterns(value: ValueSchema) -> Iterator[str]:
    """Yields the patterns of text that the schema itself states."""
    if "string" not in named(value.schema):
        yield NEVER
    if value.listed is not None:
        texts = [quoted(text) or '""' for text in value.listed if isinstance(text, str)]
        yield f"({' | '.join(texts) or NEVER})"
    least, most = value.counts("minLength", "maxLength")
    if (least, most) != (0, None):
        yield f"/(?s:.{{{least},{'' if most is None else most}}})/"
    if value.pattern and (expression := search_pattern(value.pattern)):
        yield f"/{expression}/"
    if expression := FORMATS.get(value.format):
        yield f"/{expression}/"


def _scalars(value: ValueSchema, lark: Lark, types: frozenset[str]) -> Iterator[str]:
    if value.listed is not None:
        if value.says_only("type", "enum", "const", *KEYWORDS["string"]):
            for listed in value.listed:
                if types and not isinstance(listed, (str, list, dict)) and value.may_list(listed):
                    yield quoted(json.dumps(listed))
    else:
        for type in sorted(value.types & types & PLAIN.keys()):
            if value.is_any(type):
                yield lark.terminal(f"/{PLAIN[type]}/")


def _words(value: ValueSchema) -> Iterator[str]:
    for type in sorted(value.types & WORDS.keys()):
        if value.is_any(type):
            yield from map(quoted, WORDS[type])
