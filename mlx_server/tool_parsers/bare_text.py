"""Values that stand as bare text between marks, by their schema: text as it is, the rest as JSON.

Where text and others are allowed, what is written is read as what it looks like: so no text is
allowed that would be read as something that the schema forbids. Of what a schema says about text,
enum, const, pattern, minLength and maxLength are kept. Beside text, numbers with limits are not
offered.
"""

import json
from collections.abc import Callable, Iterator

from mlx_server.grammars.lark import Lark, quoted
from mlx_server.tool_parsers.pattern_text import searched
from mlx_server.tool_parsers.value_schema import NUMBER, Value

Ends = Callable[[str], str]
"""What follows a value, as a rule with it: `Lark.up_to` for text, and itself for JSON."""

SPACE = r"[\s\x1c-\x1f]*"
LOOKS = {
    "null": rf"{SPACE}(null|None){SPACE}",
    "boolean": rf"{SPACE}(true|false|True|False){SPACE}",
    "integer": rf"{SPACE}-?[0-9]+{SPACE}",
    "number": rf"{SPACE}-?[0-9][-+.0-9eE]*{SPACE}",
    "object": rf"{SPACE}\{{(?s:.*)",
    "array": rf"{SPACE}\[(?s:.*)",
}
"""What text is read as, where the schema allows that type."""

PLAIN = {
    "null": r"null",
    "boolean": r"true|false|True|False",
    "integer": r"-?(0|[1-9][0-9]{0,40})",
    "number": NUMBER,
}
"""Beside text, of schemas that say no more than the type. Python's words are in templates too."""

WORDS = {"boolean": ("True", "False"), "null": ("None",)}


def bare_value(value: Value, lark: Lark, mark: str, *but: str) -> str:
    """A value and the mark behind it. but: other marks that can't stand in text."""
    if "string" in value.types:
        text = _text(value, lark, (mark, *but), sorted(value.types - {"string"}))
        return lark.rule(" | ".join([lark.up_to(mark, text), *_structures(value, lark, mark)]))
    words = [word for option in value.options() for word in _words(option)]
    return lark.rule(f"({' | '.join([value.as_json(lark), *words])}) {lark.text(mark)}")


def marked_text(value: Value, lark: Lark, mark: str, *but: str) -> str:
    """As `bare_value`, where something else tells that it is text, whatever it looks like."""
    return lark.up_to(mark, _text(value, lark, (mark, *but), []))


def _structures(value: Value, lark: Lark, mark: str) -> Iterator[str]:
    """Objects and arrays: no text begins as they do."""
    if types := value.types & {"object", "array"}:
        yield f"{value.as_json(lark, *types)} {lark.text(mark)}"


def _text(value: Value, lark: Lark, marks: tuple[str, ...], others: list[str]) -> str:
    """One terminal, since only the first of several that fit would be taken."""
    looks = [lark.terminal(f"/{LOOKS[type]}/") for type in others]
    free = lark.anything(*marks)
    found = []
    for option in value.options():
        if "string" in option.types:
            found.append(" & ".join([text_of(option, lark), free, *(f"~{look}" for look in looks)]))
        found += _scalars(option, lark, set(others))
    return lark.terminal(" | ".join(found))


def text_of(value: Value, lark: Lark) -> str:
    """A terminal for text, without regard to marks."""
    if value.listed is not None:
        texts = [quoted(text) or '""' for text in value.listed if isinstance(text, str)]
        return lark.terminal(" | ".join(texts) or "/[^\\s\\S]/")
    found = ["/(?s:.*)/"]
    least, most = value.schema.get("minLength", 0), value.schema.get("maxLength", "")
    if least or most != "":
        found.append(f"/(?s:.{{{least},{most}}})/")
    pattern = value.schema.get("pattern")
    if isinstance(pattern, str) and (expression := searched(pattern)):
        found.append(f"/{expression}/")
    return lark.terminal(" & ".join(found))


def _scalars(value: Value, lark: Lark, types: set[str]) -> Iterator[str]:
    if value.listed is not None:
        for listed in value.listed:
            if not isinstance(listed, (str, list, dict)):
                yield quoted(json.dumps(listed))
    else:
        for type in sorted(value.types & types & PLAIN.keys()):
            if value.is_any(type):
                yield lark.terminal(f"/{PLAIN[type]}/")


def _words(value: Value) -> Iterator[str]:
    for type in sorted(value.types & WORDS.keys()):
        if value.is_any(type):
            yield from map(quoted, WORDS[type])
