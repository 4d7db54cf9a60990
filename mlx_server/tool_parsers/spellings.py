"""The spellings of values in the syntaxes of syntaxes.py, for grammars of calls."""

import json

from mlx_server.grammars.lark import Lark, quoted
from mlx_server.schemas.patterns import search_pattern
from mlx_server.schemas.values import MemberSchema, ValueSchema
from mlx_server.schemas.view import View
from mlx_server.tool_parsers.bare_text import text_of
from mlx_server.tool_parsers.literal_syntax import LiteralSyntax
from mlx_server.tool_parsers.syntaxes import BARE_KEY

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
        ordered=_sorted,
    )


def _sorted(found: list[MemberSchema]) -> list[MemberSchema]:
    """Sorts members as the templates show objects."""
    return sorted(found, key=lambda member: member.key.lower())
