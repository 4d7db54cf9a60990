"""The JSON that a model wrote: with mistakes, with text around it, and read without losing anything
silently.
"""

import json
import math
import re
from collections.abc import Callable, Iterator, Set
from typing import Any, Self

import json_repair

from mlx_server import limits
from mlx_server.events import RepairKind
from mlx_server.json_bounds import check_bounds


class Malformed(Exception):
    """The text looked like markup but is not, or is broken beyond repair; it stays text."""


class UnknownTool(Malformed):
    """A call of a tool that the request does not offer."""

    def __init__(self, name: str) -> None:
        super().__init__(f"there is no tool {name!r}")
        self.name = name


MOST_VALUES = limits.JSON_NODES


class ExactFloat(float):
    """A finite float that keeps its text, which may carry more: 3.10 can also be a version."""

    text: str

    def __new__(cls, text: str) -> Self:
        number = super().__new__(cls, text)
        if not math.isfinite(number):
            raise ValueError("JSON has no infinite numbers")
        number.text = text
        return number


def loads_exactly(text: str, constant: Callable[[str], Any] | None = None) -> Any:
    """As `json.loads`, but a duplicate key is a ValueError because its value is ambiguous.

    constant: converts NaN and the infinities.
    """
    return json.loads(
        bounded(text),
        parse_float=ExactFloat,
        parse_constant=constant,
        object_pairs_hook=_each_key_once,
    )


def bounded(text: str) -> str:
    """The text. Raises ValueError if it has more lists and objects than a request may have, since
    the interpreter would be held while they are parsed."""
    if len(text) > MOST_VALUES:
        check_bounds(text.encode("utf-8", "surrogatepass"), MOST_VALUES)
    return text


def _each_key_once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    members = dict(pairs)
    if len(members) < len(pairs):
        raise ValueError("a key is given twice")
    return members


# A possessive repetition (`*+`) takes no memory for each character of a long string.
# The alternative for escapes keeps a quote after a backslash from opening a string: with many of
# them, each could be scanned to the end of the text.
STRINGS_AND_BRACKETS = re.compile(r'"(?>[^"\\]|\\.)*+"|\\.|[][{}]', re.DOTALL)
STRINGS_AND_COMMENTS = re.compile(
    r""""(?>[^"\\]|\\.)*+"|'(?>[^'\\]|\\.)*+'|“[^“”]*”|\\.|(//[^\n]*|\#[^\n]*|/\*.{0,1000}?\*/)""",
    re.DOTALL,
)
ESCAPE = re.compile(
    r"\\(?:u([dD][89abAB][0-9a-fA-F]{2})\\u([dD][c-fC-F][0-9a-fA-F]{2})|u([0-9a-fA-F]{4})|(.))",
    re.DOTALL,
)
SIGNS = {'"': '"', "'": "'", "\\": "\\", "/": "/", "b": "\b", "f": "\f"} | {
    "n": "\n",
    "r": "\r",
    "t": "\t",
}
# A leading zero counts as a word of its own, because such a number is ambiguous.
NUMBERS_AND_WORDS = re.compile(
    r"((?:(?!0_?\d)\d(?>_?\d)*+\.?\d*|\.\d+)(?:[eE][-+]?\d+)?)"
    r"""|([^\W\d_]+|0+(?=_?\d)|[^\s\w{}\[\](),:;"'`“”‘’]|_)"""
)
QUOTES = frozenset("\"'`“”‘’")
ENDS = re.compile("[]}\"'`“”‘’]")
UNQUOTED = re.compile(r"[^\W\d](?:.*\w)?", re.DOTALL)
LINE_BREAK = "\ue00a"
"""Stands for an escaped line break, since json_repair drops those at the end of a string."""

NO_TEXT = frozenset({"nil", "undefined", "nan", "infinity", "inf"})
"""Words for values that JSON can't express."""


def loads(text: str, *, missing: int = 0, surplus: int = 0) -> Any:
    """Reads JSON and repairs mistakes. Raises Malformed.

    missing: how many closing brackets may be absent; text that lacks more was cut off. surplus: how
    many there may be at the end that close nothing.
    """
    if len(text) > limits.REPAIRED_JSON_CHARACTERS:
        raise Malformed("too long to be repaired")
    brackets = [token for token in STRINGS_AND_BRACKETS.findall(text) if len(token) == 1]
    opened = sum(1 if bracket in "[{" else -1 for bracket in brackets)
    if not brackets or opened > missing or text.rstrip()[-1:] not in ("}", "]"):
        raise Malformed("not complete JSON")
    if -surplus <= opened < 0:
        return loads(_without_surplus(text, -opened))
    try:
        return loads_exactly(text)
    except (ValueError, RecursionError):
        return _repaired(text.strip())  # white space after an array counts as another element


def loads_arguments(text: str, once: Set[str]) -> Any:
    """Reads JSON like `loads`. Of a key that is given twice the last value counts, unless it is one
    of `once`."""

    def last_of_each(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        keys = [key for key, _ in pairs]
        if any(keys.count(key) > 1 for key in once):
            raise ValueError("a key is given twice")
        return dict(pairs)

    try:
        return json.loads(text, parse_float=ExactFloat, object_pairs_hook=last_of_each)
    except (ValueError, RecursionError):
        return loads(text)


def loads_value(text: str) -> Any:
    """Reads a list or an object whose end is certain, so that its last bracket may be missing or
    doubled. It may also be escaped as in a JSON string."""
    try:
        return loads(text, missing=1, surplus=1)
    except Malformed:
        unescaped = _unescaped(text)
        if unescaped == text:
            raise
        return loads(unescaped)


def _unescaped(text: str) -> str:
    try:
        string = json.loads(f'"{text}"', strict=False)
    except ValueError:
        return text
    return str(string)


def _without_surplus(text: str, surplus: int) -> str:
    """The text without its last brackets, if these are more than were opened."""
    for _ in range(surplus):
        text = text.rstrip()
        if text[-1:] not in ("}", "]"):
            raise Malformed("a bracket closes nothing")
        text = text[:-1]
    return text


def _repaired(text: str) -> Any:
    if len(text) * len(ENDS.findall(text)) > limits.REPAIRED_JSON_STEPS:
        raise Malformed("too long to be repaired")
    text = ESCAPE.sub(_spelled_out, text)
    if LINE_BREAK in text:
        raise Malformed("it has the character that stands for line breaks")
    try:
        written = ESCAPE.sub(lambda each: LINE_BREAK if each[0] == r"\n" else each[0], text)
        value = _line_breaks_restored(json_repair.loads(written, skip_json_loads=True, strict=True))
        repaired = json.dumps(value, ensure_ascii=False)
    except (ValueError, RecursionError):
        raise Malformed("not JSON") from None
    without_comments = STRINGS_AND_COMMENTS.sub(lambda m: " " if m[1] else m[0], text)
    if _words(repaired) != _words(without_comments):
        raise Malformed("the repair would lose something")
    if not _occur_in_order(_strings(value), ESCAPE.sub(_unescape, without_comments)):
        raise Malformed("the repair would change a string")
    return value


def _spelled_out(escape: re.Match[str]) -> str:
    """Replaces the escapes that json_repair does not decode."""
    high, _, _, sign = escape.groups()
    return _unescape(escape) if high or sign == "/" else escape[0]


def _line_breaks_restored(value: Any) -> Any:
    match value:
        case str():
            return value.replace(LINE_BREAK, "\n")
        case dict():
            items = value.items()
            return {_line_breaks_restored(k): _line_breaks_restored(v) for k, v in items}
        case list():
            return [_line_breaks_restored(item) for item in value]
    return value


def _unescape(escape: re.Match[str]) -> str:
    high, low, unit, sign = escape.groups()
    if high:
        return chr(0x10000 + ((int(high, 16) - 0xD800) << 10) + (int(low, 16) - 0xDC00))
    return chr(int(unit, 16)) if unit else SIGNS.get(sign, escape[0])


def _words(text: str) -> list[float | str]:
    """The numbers and words of a text, without JSON's punctuation and its lookalikes."""
    matches = NUMBERS_AND_WORDS.findall(ESCAPE.sub(_unescape, text))
    words = (float(number.replace("_", "")) if number else word for number, word in matches)
    return ["null" if word in ("None", "none") else _folded_word(word) for word in words]


def _folded_word(word: float | str) -> float | str:
    return word.casefold() if isinstance(word, str) else word


def _strings(value: Any) -> Iterator[str]:
    match value:
        case str():
            yield value
        case dict():
            for key, item in value.items():
                yield key
                yield from _strings(item)
        case list():
            for item in value:
                yield from _strings(item)


def _occur_in_order(strings: Iterator[str], text: str) -> bool:
    """Whether the strings occur in the text in this order, quoted or as bare words, and no quote
    is left between them: one that was not escaped has cut its string short."""
    end = 0
    for string in strings:
        at = text.find(string, end)
        while at >= 0 and not _end_of_occurrence(string, text, at):
            at = text.find(string, at + 1)
        if at < 0 or not _is_gap(text[end:at]):
            return False
        end = at + len(string)
    return _is_gap(text[end:])


def _is_gap(between: str) -> bool:
    """Whether there is no quote but one that ends a string and one that begins the next."""
    inside = between[between[:1] in QUOTES :]
    inside = inside[: len(inside) - (inside[-1:] in QUOTES)]
    return QUOTES.isdisjoint(inside)


def _end_of_occurrence(string: str, text: str, at: int) -> bool:
    around = {text[max(0, at - 1) : at], text[at + len(string) : at + len(string) + 1]}
    if around <= QUOTES:
        return True
    is_text = UNQUOTED.fullmatch(string) and string.casefold() not in NO_TEXT
    return not around & QUOTES and bool(is_text)


THINK_DELIMITERS = re.compile(r"```\w*|</?think>")


def json_text(text: str) -> tuple[str, tuple[RepairKind, ...]] | None:
    """Returns the JSON and its repairs; None if any of it would have to be guessed.

    A single object or array is found in prose or code fences, if there are no other brackets. A
    mistake inside is repaired by `jsonish.loads`, so nothing is added, lost or closed.
    """
    if _is_json(text):
        return text, ()
    begin, end = json_range(text)
    inside = text[begin:end]
    around: tuple[RepairKind, ...] = ("fences",) if inside != text.strip() else ()
    if _is_json(inside):
        return inside, around
    try:
        return json.dumps(loads(inside), ensure_ascii=False, allow_nan=False), (*around, "json")
    except (Malformed, ValueError):
        return None


def text_around_json(text: str) -> str:
    """The text that `json_text` leaves out, without code fences and think tags."""
    begin, end = json_range(text)
    return THINK_DELIMITERS.sub("", text[:begin] + text[end:]).strip()


def json_range(text: str) -> tuple[int, int]:
    """The range from the first opening to the last closing bracket."""
    begin = min((at for at in map(text.find, "{[") if at >= 0), default=0)
    return begin, max(begin, *(text.rfind(bracket) + 1 for bracket in "}]"))


def parsed(text: str) -> Any:
    """Parses JSON. Raises ValueError if it is invalid or an object has a duplicate key."""
    try:
        return loads_exactly(text, no_constant)
    except RecursionError:
        raise ValueError("nested too deep") from None


def _is_json(text: str) -> bool:
    try:
        parsed(text[: limits.READ_JSON_CHARACTERS + 1])
    except ValueError:
        return False
    return len(text) <= limits.READ_JSON_CHARACTERS


def no_constant(name: str) -> None:
    """Refuses NaN and the infinities, for `parse_constant`."""
    raise ValueError(f"{name} is not JSON")
