"""Grammar rules of the values in a call, by their schema: as JSON, as bare text or as literals.

Where a schema allows strings and other types, a bare text is read as the type that it looks like.
So no string is allowed that would be read as a value that the schema forbids. What a schema says
about strings is enforced, except for patterns that can't be read (see `unsupported_as_text`).
Where strings are allowed, numbers with limits are not. A literal with keywords that are not read
here is written as JSON, which the readers of these formats understand as well.
"""

import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field

from mlx_server import limits
from mlx_server.grammars.arguments import KEYWORDS, MemberSchema, ValueSchema, listed_members
from mlx_server.grammars.lark import Lark, quoted
from mlx_server.grammars.patterns import search_pattern
from mlx_server.grammars.view import DEFINITIONS, View, named
from mlx_server.tool_parsers.call_format import UncallableTool, comma_separated_rule
from mlx_server.tool_parsers.values import BARE_KEY

NEVER = r"/[^\s\S]/"
ANYTHING = "/(?s:.*)/"

NUMBER = r"-?(0|[1-9][0-9]{0,40})(\.[0-9]{1,40})?([eE][-+]?[0-9]{1,2})?"
"""Matches numbers that are finite in 64 bits. The digits are limited, or a small model would write
them for ever."""


def json_rule(value: ValueSchema, lark: Lark, *types: str) -> str:
    """Returns the rule of the value. types: those of its types that are allowed; all if none are
    given."""
    if {"number"} == set(types or value.types) and value.is_any("number"):
        return lark.terminal(f"/{NUMBER}/")
    common = value.types & set(types or value.types)
    options = [option for option in value.options if option.types & common]
    if common < value.types and options != [value]:
        # next to a type, some keywords of the options can't be enforced
        rules = (json_rule(option, lark, *(option.types & common)) for option in options)
        return lark.rule(" | ".join(rules) or NEVER)
    root = value.root.root
    assert isinstance(root, Mapping)
    definitions = {key: root[key] for key in DEFINITIONS if key in root}
    own = {"type": sorted(common)} if common < value.types else {}
    return lark.json({**definitions, **value.schema, **own})


def _ipv6() -> str:
    """Returns the pattern of an IPv6 address: eight groups, or fewer around one `::`."""
    group = "[0-9a-fA-F]{1,4}"
    cut = (
        f"(?:{group}(?::{group}){{0,{before - 1}}})?::(?:{group}(?::{group}){{0,{6 - before}}})?"
        for before in range(1, 7)
    )
    return "|".join(
        [f"(?:{group}:){{7}}{group}", *cut, f"(?:{group}:){{7}}:", f":(?::{group}){{7}}"]
    )


def _falling(units: str) -> str:
    """Returns the pattern of units with numbers, each followed by the next smaller unit only:
    `1Y2M`, not `1Y2D`."""
    rule = ""
    for unit in reversed(units):
        rule = f"[0-9]+{unit}(?:{rule})?" if rule else f"[0-9]+{unit}"
    return rule


def _any_falling(units: str) -> str:
    return "|".join(_falling(units[at:]) for at in range(len(units)))


_DATE = (
    "[0-9]{4}-(?:(?:0[1-9]|1[0-2])-(?:0[1-9]|1[0-9]|2[0-9])"
    "|(?:0[13-9]|1[0-2])-30|(?:0[13578]|1[02])-31)"
)
_TIME = (
    r"(?:[01][0-9]|2[0-3]):[0-5][0-9]:(?:[0-5][0-9]|60)(?:\.[0-9]+)?"
    r"(?:[zZ]|[+\-](?:[01][0-9]|2[0-3]):[0-5][0-9])"
)
_CLOCK = f"T(?:{_any_falling('HMS')})"
_BYTE = "(?:25[0-5]|2[0-4][0-9]|1[0-9]{2}|[1-9]?[0-9])"
_IPV4 = rf"(?:{_BYTE}\.){{3}}{_BYTE}"
_IPV6 = _ipv6()
_LABEL = r"[a-zA-Z0-9](?:[a-zA-Z0-9\-]{0,61}[a-zA-Z0-9])?"
_HOST = rf"{_LABEL}(?:\.{_LABEL})*"
_ATOM = r"[a-zA-Z0-9!#$%\&'*+\-\/=?^_`{|}\~]+"
_HEX = "[0-9a-fA-F]"
_SIGNS = r"a-zA-Z0-9\-._\~!$\&'()*+,;="
_CODED = f"%{_HEX}{{2}}"
_SEGMENT = f"(?:[{_SIGNS}:@]|{_CODED})"
_PATH = rf"(?:\/{_SEGMENT}*)*"
_AUTHORITY = (
    rf"(?:(?:[{_SIGNS}:]|{_CODED})*@)?(?:\[(?:{_IPV6})\]|(?:[{_SIGNS}]|{_CODED})*)(?::[0-9]*)?"
)
_QUERY = rf"(?:{_SEGMENT}|[\/?])*"

FORMATS = {
    "date-time": f"{_DATE}[tT]{_TIME}",
    "time": _TIME,
    "date": _DATE,
    "duration": f"P(?:(?:{_any_falling('YMD')})(?:{_CLOCK})?|{_CLOCK}|[0-9]+W)",
    "email": rf"{_ATOM}(?:\.{_ATOM})*@(?:{_HOST}|\[{_IPV4}\])",
    "hostname": _HOST,
    "ipv4": _IPV4,
    "ipv6": _IPV6,
    "uuid": f"{_HEX}{{8}}-(?:{_HEX}{{4}}-){{3}}{_HEX}{{12}}",
    "uri": (
        rf"[a-zA-Z][a-zA-Z0-9+\-.]*:(?:\/\/{_AUTHORITY}{_PATH}|\/(?:{_SEGMENT}+{_PATH})?"
        rf"|{_SEGMENT}+{_PATH}|)(?:\?{_QUERY})?(?:\#{_QUERY})?"
    ),
}


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
    terminals = [" & ".join([text_of(value, lark), free, *(f"~{look}" for look in looks)])]
    for option in value.options:
        terminals += _scalars(option, lark, others)
    return lark.terminal(" | ".join(terminals))


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
            return ANYTHING
        schema = id(value.schema)
        if schema not in self._known:
            self._known[schema] = NEVER  # for a schema that refers to itself
            parts = [ANYTHING, *_own_patterns(value), *self._patterns_elsewhere(value, depth - 1)]
            self._known[schema] = self.lark.terminal(" & ".join(parts))
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
            name = (id(value.root), value.schema["$ref"])
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

        ordered = [self.syntax.ordered(variant) for variant in variants]
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
        keywords = {keyword for type in value.types for keyword in KEYWORDS.get(type, ())}
        written = [self._of_type(type, value) for type in sorted(value.types)]
        if None in written or not value.says_only("type", *keywords):
            return json_rule(value, self.lark)
        return self.lark.rule(" | ".join(filter(None, written)))

    def _of_type(self, type: str, value: ValueSchema) -> str | None:
        match type:
            case "string":
                return self.syntax.string(self.lark, value)
            case "boolean":
                return " | ".join(
                    map(quoted, (*self.syntax.words[True], *self.syntax.words[False]))
                )
            case "null":
                return " | ".join(map(quoted, self.syntax.words[None]))
            case "array":
                return self._array(value)
            case "object":
                return self._object(value)
        return json_rule(value, self.lark, type)

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
        members, others = listed_members(value), value.others
        if not value.lists_all_members:
            return None
        if members or not others:
            try:
                return f"{quoted('{')} {self.members([members])} {quoted('}')}"
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
                return " | ".join(map(quoted, self.syntax.words[value]))
        return quoted(json.dumps(value, ensure_ascii=False))


ESCAPED = (
    r"\\(?:[\x22'\\\/abfnrtv0]|x[0-9a-fA-F]{2}"
    r"|u(?:[0-9a-cefA-CEF][0-9a-fA-F]{3}|[dD][0-7][0-9a-fA-F]{2}))"
)
"""The escapes that a grammar allows: all but halves of surrogate pairs."""


def _python_string(lark: Lark, value: ValueSchema) -> str | None:
    if value.schema.keys() & {"pattern", "format"}:
        return None
    least, most = value.counts("minLength", "maxLength")
    times = "*" if (least, most) == (0, None) else f"{{{least},{'' if most is None else most}}}"
    return lark.rule(
        " | ".join(
            lark.terminal(f"/{quote}(?:[^{quote}\\\\]|{ESCAPED}){times}{quote}/")
            for quote in (r"\x22", "'")
        )
    )


def _python_text(lark: Lark, text: str) -> str:
    whole = json.dumps(text, ensure_ascii=False)
    plain = text.isprintable() and not set(text) & set("'\"\\")
    return lark.rule(" | ".join(map(quoted, [whole, *([f"'{text}'"] if plain else [])])))


PYTHON = LiteralSyntax(
    string=_python_string,
    text=_python_text,
    key=_python_text,
    any_key=lambda lark: _python_string(lark, ValueSchema({}, View({}))) or "",
    words={True: ("True", "true"), False: ("False", "false"), None: ("None", "null")},
)


def gemma(quote: str) -> LiteralSyntax:
    def string(lark: Lark, value: ValueSchema) -> str | None:
        if not search_pattern(value.pattern):
            return None
        text = lark.terminal(f"{text_of(value, lark)} & {lark.anything(quote)}")
        return f"{lark.text(quote)} {lark.up_to(quote, text)}"

    def text(lark: Lark, text: str) -> str | None:
        if quote in text and lark.text(quote) == quoted(quote):
            return None
        return f"{lark.text(quote)} {quoted(text)} {lark.text(quote)}"

    def key(lark: Lark, name: str) -> str | None:
        if BARE_KEY.fullmatch(name) and name == name.strip():
            return quoted(name)
        return text(lark, name)

    return LiteralSyntax(
        string=string,
        text=text,
        key=key,
        any_key=lambda lark: lark.terminal(r"/[A-Za-z0-9_]+/"),
        words={True: ("true",), False: ("false",), None: ("null",)},
        # as the templates show objects
        ordered=lambda members: sorted(members, key=lambda member: member.key.lower()),
    )
