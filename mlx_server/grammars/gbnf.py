"""Converts GBNF, llama.cpp's notation of grammars, to Lark, with llguidance's converter.

https://github.com/ggml-org/llama.cpp/blob/master/grammars/README.md
"""

import re
from collections import Counter

from mlx_server.errors import InvalidGrammar
from mlx_server.schemas.compiled import lark_of as converted

_HEAD = re.compile(r"^[^\S\n]*([a-zA-Z0-9_-]+)[ \t]*::=", re.MULTILINE)
_LINE_BREAK = re.compile(r"\n\s*(?P<head>(?=[a-zA-Z0-9_-]+[ \t]*::=))?")
"""A line break with the white space after it; the group tells whether a rule begins there."""
_PIECE = re.compile(
    r'#[^\n]*|(?P<text>"(?:\\.|[^"\\])*"|\[(?:\\.|[^\]\\])*\])|(?P<any>\.)'
    r"|(?P<special>!?<[^<>\s]+>)|(?P<start>(?<![\w-])start(?![\w-]))|(?P<open>[\"\[].*)",
    re.DOTALL,
)
_CHARACTER = re.compile(
    r"\\(?:x([0-9a-fA-F]{2})|u([0-9a-fA-F]{4})|U([0-9a-fA-F]{8})|(.))|(.)", re.DOTALL
)
_ONE = {"n": "\n", "r": "\r", "t": "\t"}


def is_gbnf(source: str) -> bool:
    return _HEAD.search(source) is not None


def lark_of(source: str) -> str:
    """Returns the grammar in Lark. Raises InvalidGrammar."""
    twice = [name for name, times in Counter(_HEAD.findall(source)).items() if times > 1]
    if twice:  # llguidance would use the last definition
        raise _refused(f"{twice[0]} is defined twice")
    plain = _PIECE.sub(_plain, source)
    return converted(_LINE_BREAK.sub(lambda found: " " if found["head"] is None else "\n", plain))


def _plain(piece: re.Match[str]) -> str:
    """Rewrites a piece with the escapes that llguidance converts correctly, and drops comments."""
    if piece["special"]:
        raise _refused(f"{piece[0]} is a special token; those are the model's own")
    if piece["open"]:
        raise _refused(f"a {piece[0][0]} is never closed")
    if piece["start"]:  # the converter renames `root` to it
        return "start-rule"
    if piece["any"]:
        return "[\\x00-\U0010ffff]"
    if not piece["text"]:
        return ""
    text = piece["text"]
    opening = "[^" if text.startswith("[^") else text[0]
    inner = _CHARACTER.sub(lambda found: _spelled(found, opening), text[len(opening) : -1])
    return f"{opening}{inner}{text[-1]}"


def _spelled(found: re.Match[str], opening: str) -> str:
    if found[0] == "-" and opening != '"':
        return "-"
    code = found[1] or found[2] or found[3]
    number = int(code, 16) if code else ord(found[5] or _ONE.get(found[4], found[4]))
    if number > 0x10FFFF or 0xD800 <= number < 0xE000:
        raise _refused(f"{found[0]} is not a character")
    character = chr(number)
    is_plain = number > 0x7F or character.isalnum()
    return character if is_plain else f"\\x{number:02x}"


def _refused(why: str) -> InvalidGrammar:
    return InvalidGrammar(f"The grammar can't be used: {why}.")
