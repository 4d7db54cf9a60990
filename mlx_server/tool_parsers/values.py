"""Arguments and values as models write them, read while they are being written.

A string among the arguments streams. Any other value is transcribed to JSON up to its end and
handed to `json.loads`, whichever syntax it was written in.
"""

import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal

from mlx_server import limits
from mlx_server.repair.model_json import ExactFloat, Malformed
from mlx_server.tool_parsers.call_writer import ToolCallWriter
from mlx_server.tool_parsers.source import Into, Source, Steps

ReadText = Callable[[Source, str, Into, ToolCallWriter | None], Steps[None]]
"""Reads a string after its opening quote, and passes it on as it comes. The call is given if the
string is one of its arguments, and not part of another value."""

SEPARATORS = (",", ":")
CLOSING = ("}", "]", ")")
BARE_TEXT = re.compile(r"""[^,()\[\]{}"'=\n]+""")
"""Matches text without quotes among arguments that are written as Python."""


@dataclass(frozen=True)
class Syntax:
    """The syntax of values, and of the arguments of calls."""

    text: Mapping[str, ReadText]
    """Reads strings, by their opening quote."""
    scalar: re.Pattern[str]
    """A run of the characters of a value that is no string, list or object."""
    as_json: Callable[[str], str]
    """Converts a scalar to JSON; raises ValueError if it is none."""
    words: Mapping[str, str] = field(default_factory=dict)
    """Scalars that are spelled otherwise than in JSON."""
    brackets: Mapping[str, str] = field(default_factory=lambda: {"{": "}", "[": "]"})
    rules: Literal["json", "python", "free"] = "json"
    """python: a comma may follow the last item, a set is a list, and a key may be no string.
    free: commas may be missing or doubled."""
    opening: str = "{"
    """The bracket in front of the arguments."""
    colon: str = ":"
    """The text between an argument's key and its value."""
    other_colon: str = ""
    """The text that models write in place of `colon` by mistake; empty if there is none."""
    key_quotes: tuple[str, ...] = ('"',)
    bare_key: re.Pattern[str] | None = None
    """A key without quotes."""
    bare_text: bool = False
    """Whether a word without quotes among the arguments is text, rather than a variable."""
    begins_with_key: bool = False
    """Whether text looks like a call up to its first key, so that only this makes it one."""
    closing_quote: str = ""
    """The quote that ends a string whose opening quote is missing."""
    untyped: bool = False
    """Whether the tool's schema decides what a scalar among the arguments is."""


def arguments(
    source: Source,
    syntax: Syntax,
    start: Callable[[], ToolCallWriter],
    ends: tuple[str, ...] = (),
) -> Steps[ToolCallWriter]:
    """Reads the arguments of a call after their opening bracket, and the closing one.

    ends: the delimiters that may follow. Brackets that are still open there are missing their
    closing one.
    """
    call = None if syntax.begins_with_key else start()
    closing, first, is_bare = syntax.brackets[syntax.opening], True, False
    if syntax.rules == "python" and (yield from _is_positional(source, syntax)):
        call, first = (yield from _read_positional(source, syntax, start)), False
    while not (call and not first and ends and (yield from source.after_space(*ends))):
        if not (yield from goes_on(source, syntax, closing, first=first)):
            return call or start()
        key = yield from key_of(source, syntax, call)
        call, first = call or start(), False
        key = call.meant(key)
        if is_bare and call.known and key not in call.known:
            raise Malformed("text without quotes that may go on")
        is_bare = yield from _read_argument(source, syntax, call, key, ends)
    call.repaired()
    return call


def _is_positional(source: Source, syntax: Syntax) -> Steps[bool]:
    return bool((yield from source.after_space("{", "**{", *syntax.text)))


def _read_positional(
    source: Source, syntax: Syntax, start: Callable[[], ToolCallWriter]
) -> Steps[ToolCallWriter]:
    """Reads an argument without a key: an object with all arguments, or the only parameter's
    text."""
    yield from source.space()
    yield from source.accept("**")
    found = yield from value(source, syntax)
    call = start()
    if isinstance(found, str) and len(call.known) == 1:
        found = dict.fromkeys(call.known, found)
    if not isinstance(found, dict) or not call.known.issuperset(found):
        raise Malformed("an argument without a key")
    call.repaired()
    for key, each in found.items():
        call.value(key, each)
    return call


def goes_on(source: Source, syntax: Syntax, closing: str, *, first: bool) -> Steps[bool]:
    """Reads the text between two arguments; returns whether there is another one."""
    commas = 0
    yield from source.space()
    while (found := (yield from source.accept(closing, ","))) == ",":
        commas += 1
        yield from source.space()
    wanted = {0 if first else 1}
    if found:
        wanted = {0} | (wanted if syntax.rules == "python" else set())
    if commas not in wanted and syntax.rules != "free":
        raise Malformed("a comma is missing, or one too many")
    return not found


def key_of(source: Source, syntax: Syntax, call: ToolCallWriter | None = None) -> Steps[str]:
    """Reads a key, the colon after it, and the white space around that."""
    quote = yield from source.accept(*syntax.key_quotes)
    if quote:
        key = yield from _string(source, syntax, quote)
    else:
        key = (yield from run(source, syntax.bare_key)) if syntax.bare_key else ""
        if not key:
            raise Malformed("expected a key")
    yield from source.space()
    others = filter(None, (syntax.other_colon,))
    if (yield from source.expect(syntax.colon, *others)) != syntax.colon and call:
        call.repaired()
    yield from source.space()
    return key


def _read_argument(
    source: Source, syntax: Syntax, call: ToolCallWriter, key: str, ends: tuple[str, ...]
) -> Steps[bool]:
    """Reads an argument; returns whether its value is text without quotes."""
    quote = (yield from source.accept(*syntax.text)) if call.streams(key) else ""
    if quote:
        yield from syntax.text[quote](source, quote, partial(call.text, key), call)
        call.end_text(key)
        return False
    if (yield from source.comes(",", syntax.brackets[syntax.opening])):
        call.leave_empty(key)
        return False
    is_quoted = bool((yield from source.comes(*syntax.text)))
    may_be_bare = syntax.bare_text and not is_quoted and call.streams(key)
    if may_be_bare and (word := (yield from _bare_text(source, syntax))):
        call.repaired()
        call.value(key, word)
        return False
    bare = (yield from run(source, syntax.scalar)) if syntax.untyped and not is_quoted else ""
    if bare and syntax.closing_quote and (yield from source.accept(syntax.closing_quote)):
        call.repaired()
        call.value(key, bare)
        return False
    if bare:
        return call.untyped(key, syntax.words.get(bare, bare))
    call.value(key, (yield from value(source, syntax, call, ends)))
    return False


def _bare_text(source: Source, syntax: Syntax) -> Steps[str]:
    """Reads text without quotes that is all of an argument, and no value of the syntax."""
    ahead = source.lookahead()
    text = yield from ahead.run(BARE_TEXT)
    if (yield from ahead.peek()) not in (",", ")"):
        return ""
    try:
        syntax.as_json(syntax.words.get(text.strip(), text.strip()))
    except ValueError:
        return source.take(len(text)).strip()
    return ""


def value(
    source: Source,
    syntax: Syntax,
    call: ToolCallWriter | None = None,
    ends: tuple[str, ...] = (),
) -> Steps[Any]:
    """Reads any value, and white space before it. call: the call, if the value is one of its
    arguments. ends: as for `arguments`."""
    transcript = _Transcript(source, syntax, call)
    while transcript.open or not transcript.json:
        if call and ends and transcript.may_end and (yield from source.after_space(*ends)):
            transcript.close()
            call.repaired()
        else:
            yield from transcript.token()
    try:
        return json.loads(
            "".join(transcript.json), parse_float=ExactFloat, parse_constant=no_constant
        )
    except ValueError:
        raise Malformed("no value") from None


class _Transcript:
    """The tokens of a value, as JSON.

    A token that has no place in JSON is Malformed: the text after it is not taken for a string.
    """

    def __init__(self, source: Source, syntax: Syntax, call: ToolCallWriter | None) -> None:
        self._call = call
        self.json: list[str] = []
        self.open: list[tuple[int, str]] = []
        """The open brackets: their place in `json`, and what closes each."""
        self._source = source
        self._syntax = syntax
        self._tokens = (*SEPARATORS, *CLOSING, *syntax.brackets, *syntax.text)

    @property
    def _wants_value(self) -> bool:
        return not self.json or self.json[-1] in ("{", "[", *SEPARATORS)

    @property
    def _wants_key(self) -> bool:
        in_object = bool(self.open) and self.json[self.open[-1][0]] == "{"
        return in_object and self.json[-1] != ":"

    @property
    def may_end(self) -> bool:
        """Whether only brackets are missing."""
        return bool(self.open) and not self._wants_value and self._syntax.rules != "python"

    def close(self) -> None:
        """Closes all brackets."""
        for _, closing in reversed(self.open[:]):
            self._close(closing)

    def token(self) -> Steps[None]:
        yield from self._source.space()
        found = yield from self._source.accept(*self._tokens)
        if found in SEPARATORS:
            self._separator(found)
        elif found in CLOSING:
            self._close(found)
        elif closing := self._syntax.brackets.get(found):
            self._begin_item()
            self.open.append((len(self.json), closing))
            self.json.append("{" if found == "{" else "[")
        else:
            yield from self._item(found)

    def _item(self, quote: str) -> Steps[None]:
        """Reads a key and its colon, or a value."""
        self._begin_item()
        is_key = self._syntax.rules != "python" and self._wants_key
        if quote:
            call = None if self.open else self._call
            text = yield from _string(self._source, self._syntax, quote, call)
            self.json.append(json.dumps(text))
        else:
            self.json.append((yield from self._bare(is_key=is_key)))
        if is_key:
            yield from self._source.space()
            self.json.append((yield from self._source.expect(":")))

    def _separator(self, sign: str) -> None:
        rules = self._syntax.rules
        if self._wants_value and (rules != "free" or self.json[-1:] == [":"]):
            raise Malformed("a value is missing")
        if sign == ":":
            if rules != "python":
                raise Malformed("a colon too many")
            if not self.json[-1].startswith('"'):
                self.json[-1] = json.dumps(self.json[-1])
        if sign == ":" or rules != "free":
            self.json.append(sign)

    def _begin_item(self) -> None:
        if not self._wants_value:
            if self._syntax.rules != "free":
                raise Malformed("a comma is missing")
            self.json.append(",")
        if len(self.open) >= limits.CALL_DEPTH:
            raise Malformed("nested too deep")
        if len(self.json) >= limits.JSON_STRINGS:
            raise Malformed("too many values")

    def _bare(self, *, is_key: bool) -> Steps[str]:
        syntax = self._syntax
        if is_key:
            key = (yield from run(self._source, syntax.bare_key)) if syntax.bare_key else ""
            if not key:
                raise Malformed("expected a key")
            return json.dumps(key)
        word = yield from run(self._source, syntax.scalar)
        try:
            return syntax.as_json(syntax.words.get(word, word))
        except ValueError:
            raise Malformed("no value") from None

    def _close(self, bracket: str) -> None:
        if not self.open or self.open[-1][1] != bracket:
            raise Malformed("no bracket to close")
        start, _ = self.open.pop()
        if self._syntax.rules == "python":
            if self.json[-1] == ",":
                self.json.pop()
            if len(self.json) > start + 1 and self.json[start + 2 : start + 3] != [":"]:  # a set
                self.json[start] = "["
        self.json.append("}" if self.json[start] == "{" else "]")


def _string(
    source: Source, syntax: Syntax, quote: str, call: ToolCallWriter | None = None
) -> Steps[str]:
    pieces: list[str] = []
    yield from syntax.text[quote](source, quote, pieces.append, call)
    return "".join(pieces)


def run(source: Source, pattern: re.Pattern[str]) -> Steps[str]:
    pieces: list[str] = []
    yield from source.match(pattern, pieces.append)
    return "".join(pieces).strip()


def no_constant(name: str) -> None:
    """Refuses NaN and the infinities, for `parse_constant`."""
    raise ValueError(name)
