"""Arguments and values as models write them, read while they are being written.

A string among the arguments streams. Any other value is transcribed to JSON up to its end and
handed to `json.loads`, whichever syntax it was written in.
"""

import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import lru_cache, partial
from typing import Any, Literal

from mlx_server import limits
from mlx_server.tool_parsers.call_repair import read_as
from mlx_server.tool_parsers.calls import ToolCallWriter
from mlx_server.tool_parsers.model_json import (
    ExactFloat,
    Malformed,
    bounded,
    loads_exactly,
    no_constant,
)
from mlx_server.tool_parsers.source import Into, Lookahead, Source, Steps

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
    source: Source, syntax: Syntax, start: Callable[[], ToolCallWriter], ends: tuple[str, ...] = ()
) -> Steps[ToolCallWriter]:
    """Reads the arguments of a call after their opening bracket, and the closing one.

    ends: the delimiters that may follow. Brackets that are still open there are missing their
    closing one.
    """
    call = None if syntax.begins_with_key else start()
    closing, first, is_in_doubt = syntax.brackets[syntax.opening], True, False
    positional = ("{", "**{", *syntax.text)
    if syntax.rules == "python" and (yield from source.after_space(*positional)):
        call, first = (yield from _read_positional(source, syntax, start)), False
    while not (call and not first and ends and (yield from source.after_space(*ends))):
        if not (yield from goes_on(source, syntax, closing, first=first)):
            return call or start()
        key = yield from key_of(source, syntax, call)
        call, first = call or start(), False
        key = call.meant(key)
        if is_in_doubt and call.known and key not in call.known:
            raise Malformed("a text that may go on")
        is_in_doubt = yield from _read_argument(source, syntax, call, key, ends)
        closes = (",", "}", "]", ")", *ends[:1])  # others than the first are text in a string
        if is_in_doubt and not (yield from source.after_space(*closes)):
            raise Malformed("a quote in a string was not escaped")
    call.repaired()
    return call


def _read_positional(
    source: Source, syntax: Syntax, start: Callable[[], ToolCallWriter]
) -> Steps[ToolCallWriter]:
    """Reads an argument without a key: an object with all arguments, or the only parameter's
    text."""
    yield from source.accept_spaced("**")
    positional = yield from value(source, syntax)
    call = start()
    if isinstance(positional, str) and len(call.known) == 1:
        positional = dict.fromkeys(call.known, positional)
    if not isinstance(positional, dict) or not call.known.issuperset(positional):
        raise Malformed("an argument without a key")
    call.repaired()
    for key, each in positional.items():
        call.value(key, each)
    return call


def goes_on(source: Source, syntax: Syntax, closing: str, *, first: bool) -> Steps[bool]:
    """Reads the text between two arguments; returns whether there is another one."""
    commas = 0
    yield from source.space()
    while (literal := (yield from source.accept(closing, ","))) == ",":
        commas += 1
        yield from source.space()
    counts = {0 if first else 1}
    if literal:
        counts = {0} | (counts if syntax.rules == "python" else set())
    if commas not in counts and syntax.rules != "free":
        raise Malformed("a comma is missing, or one too many")
    return not literal


def key_of(source: Source, syntax: Syntax, call: ToolCallWriter | None = None) -> Steps[str]:
    """Reads a key, the colon after it, and the white space around that."""
    quote = yield from source.accept(*syntax.key_quotes)
    if quote:
        key = yield from _string(source, syntax, quote)
    else:
        key = (yield from source.run(syntax.bare_key)).strip() if syntax.bare_key else ""
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
    """Reads an argument; returns whether its value is text that may go on: it has no quotes, or
    those of another syntax."""
    quote = (yield from source.accept(*syntax.text)) if call.streams(key) else ""
    if quote:
        yield from syntax.text[quote](source, quote, partial(call.text, key), call)
        call.end_text(key)
        return bool(syntax.closing_quote) and quote != syntax.closing_quote
    if (yield from source.comes(",", syntax.brackets[syntax.opening])):
        call.leave_empty(key)
        return False
    is_quoted = bool((yield from source.comes(*syntax.text)))
    may_be_bare = syntax.bare_text and not is_quoted and call.streams(key)
    if may_be_bare and (word := (yield from _bare_text(source, syntax))):
        call.repaired()
        call.value(key, word)
        return False
    bare = ""
    if syntax.untyped and not is_quoted:
        bare = yield from source.run(syntax.scalar)
    if (rest := (yield from _rest_of_text(source, syntax, call, key, bare))) is not None:
        call.repaired()
        call.value(key, f"{bare}{rest}".strip())
        return False
    bare = bare.strip()
    if bare.endswith("'") and bare.count("'") % 2:
        raise Malformed("a quote without the one before it")
    if bare:
        return call.untyped(key, syntax.words.get(bare, bare))
    call.value(key, (yield from value(source, syntax, call, ends)))
    return False


def _rest_of_text(
    source: Source, syntax: Syntax, call: ToolCallWriter, key: str, bare: str
) -> Steps[str | None]:
    """Reads the rest of a text whose opening quote is missing, and the closing one; None if that
    does not come. Where the schema allows nothing but text, commas may stand in it."""
    quote = syntax.closing_quote
    if not (bare and quote):
        return None
    ahead, rest = source.lookahead(), ""
    if call.streams(key):
        rest = yield from ahead.text_up_to(quote, ":", "=", "}")
    if not (yield from ahead.accept(quote)):
        return None
    source.take(len(rest))
    yield from source.expect(quote)
    return rest


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
    source: Source, syntax: Syntax, call: ToolCallWriter | None = None, ends: tuple[str, ...] = ()
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
        word = yield from self._source.accept_spaced(*self._tokens)
        if word in SEPARATORS:
            self._separator(word)
        elif word in CLOSING:
            self._close(word)
        elif closing := self._syntax.brackets.get(word):
            self._begin_item()
            self.open.append((len(self.json), closing))
            self.json.append("{" if word == "{" else "[")
        else:
            yield from self._item(word)

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
            key = (yield from self._source.run(syntax.bare_key)).strip() if syntax.bare_key else ""
            if not key:
                raise Malformed("expected a key")
            return json.dumps(key)
        word = (yield from self._source.run(syntax.scalar)).strip()
        quote = syntax.closing_quote
        if self._call and word and quote and (yield from self._source.accept(quote)):
            self._call.repaired()  # its opening quote is missing
            return json.dumps(word)
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


def read_json(source: Source) -> Steps[str]:
    """Reads white space and the object or array that comes next, and returns their text. What is
    not JSON stays to be read, and so does white space before it, which may belong to a
    delimiter."""
    if not (yield from source.after_space("{", "[")):
        return ""
    space = yield from source.space()
    size = yield from json_size(source)
    try:
        json.loads(bounded(source.ahead()[:size]))
    except (ValueError, RecursionError):
        return space
    return space + source.take(size)


def json_size(source: Source, depth: int = 0, quotes: str = '"') -> Steps[int]:
    """Returns the length of the object or array, by its brackets; 0 if it has no end. depth: the
    number of its brackets that were read. quotes: those around strings."""
    size, quote, escaped = 0, "", False
    while size <= limits.READ_JSON_CHARACTERS:
        for character in source.ahead(size):
            size += 1
            if escaped:
                escaped = False
            elif quote:
                escaped = character == "\\"
                quote = "" if character == quote else quote
            elif character in quotes:
                quote = character
            elif character in "{[":
                depth += 1
            elif character in "}]":
                depth -= 1
                if not depth:
                    return size
        if source.closed:
            break
        yield
    return 0


KEY = re.compile(r"\w+")
NAME = re.compile(r"[\w.\-]+")
WORD = re.compile(r"\w")
VALUE_BEGINS = re.compile(r"""['"\[{(\-+.\dTFNtfn\])}]""")
"""Matches the beginning of a value, or the bracket after a trailing comma."""
AROUND_CALLS = ("]", "```")
"""Texts that end the list of calls, or the block of code around them."""


class InnerQuotes:
    """The quotes without a backslash that stand inside one string."""

    def __init__(self, quote: str) -> None:
        self._quote = quote
        self._before = ""
        """The character before the next one."""
        self._seen = False
        self._is_open = False
        """Whether an inner quote has been opened and not closed; an apostrophe opens none."""

    def after(self, piece: str) -> None:
        self._before = piece[-1:] or self._before

    def is_end(
        self, source: Source, call: ToolCallWriter | None, ends: tuple[str, ...]
    ) -> Steps[bool]:
        """Whether the quote that was just read ends the string."""
        if not self._is_open:
            ahead = source.lookahead()
            if call is None:
                closes = yield from _ends_value(ahead)
            else:
                closes = yield from _ends_argument(ahead, call, ends, is_escaped=not self._seen)
            if closes or (yield from self._is_last(source, ends)):
                return True
        self._seen = True
        following = yield from source.lookahead().peek()
        between = WORD.match(self._before) and WORD.match(following)
        self._is_open ^= not (self._quote == "'" and between)
        return False

    def _is_last(self, source: Source, ends: tuple[str, ...]) -> Steps[bool]:
        """Whether no quote follows that could end the string."""
        ahead = source.lookahead()
        delimiter = yield from ahead.up_to(self._quote, *ends)
        return delimiter != self._quote and not source.cut


def _ends_argument(
    ahead: Lookahead, call: ToolCallWriter, ends: tuple[str, ...], *, is_escaped: bool
) -> Steps[bool]:
    """Whether another argument follows, or the end of the call.

    ends: the delimiters that may follow calls. is_escaped: whether the string has had no inner
    quote without a backslash; after one, only a parameter of the tool counts as another argument.
    """
    sign = yield from ahead.accept_spaced(",", ")")
    if sign == ",":
        yield from ahead.space()
        key = yield from ahead.run(KEY)
        sign = yield from ahead.accept_spaced("==", "=", ")")
        if key and sign == "=":
            return is_escaped or not call.known or key in call.awaited
        if key or sign != ")":
            return not (yield from ahead.peek())
    return not (yield from ahead.peek()) or (
        sign == ")" and (yield from _ends_call(ahead, call, ends))
    )


def _ends_call(ahead: Lookahead, call: ToolCallWriter, ends: tuple[str, ...]) -> Steps[bool]:
    """Whether another call, or the end of all calls, follows a call's closing bracket."""
    sign = yield from ahead.accept_spaced(*ends, *AROUND_CALLS, ",", ";")
    yield from ahead.space()
    if sign in AROUND_CALLS and ends:
        while sign in AROUND_CALLS:
            sign = yield from ahead.accept(*ends, *AROUND_CALLS)
            yield from ahead.space()
    elif sign == "```":
        return False
    elif not sign or sign in ",;":
        name = yield from ahead.run(NAME)
        bracket = yield from ahead.accept("(")
        if bracket:
            return call.knows(name) or call.knows(name.removesuffix(".call"))
        if name:
            sign = ""
    return bool(sign) or not (yield from ahead.peek())


def _ends_value(ahead: Lookahead) -> Steps[bool]:
    """Whether a list or an object goes on or ends after a string in it."""
    sign = yield from ahead.accept_spaced(",", ":", "]", "}", ")")
    if not sign:
        return not (yield from ahead.peek())
    yield from ahead.space()
    following = yield from ahead.peek()
    if sign in ",:":
        return not following or bool(VALUE_BEGINS.match(following))
    return following in ",:]})"


Escape = Callable[[Source], Steps[str]]

SCALAR = re.compile(r"[-+.\w]+")
HEXADECIMAL = re.compile(r"[0-9a-fA-F]+")
BARE = {"{": re.compile(r'[^{}\[\],"<>]+'), "(": re.compile(r'[^{}\[\](),"<>]+')}
"""Matches a bare scalar, by the bracket in front of the arguments."""
BARE_KEY = re.compile(r"""[^:={}\[\](),"'<>]+""")
PLAIN = {'"': re.compile(r'[^"\\]+'), "'": re.compile(r"[^'\\]+")}

ESCAPES = {"b": "\b", "f": "\f", "n": "\n", "r": "\r", "t": "\t"} | {c: c for c in '"\\/'}
PYTHON_ESCAPES = {"'": "'", "a": "\a", "v": "\v", "0": "\0", "\n": ""}
CODES = {"x": 2, "U": 8}
"""The number of digits in Python's escapes by number."""
KNOWN_ESCAPES = {"u", "N", *ESCAPES, *PYTHON_ESCAPES, *CODES}


def json_text(
    source: Source, quote: str, into: Into, call: ToolCallWriter | None = None
) -> Steps[None]:
    """Reads a string of JSON. Line breaks in it are accepted."""
    yield from _escaped_text(source, quote, into, _json_escape)


def _escaped_text(source: Source, quote: str, into: Into, escape: Escape) -> Steps[None]:
    source.quoted = True
    while not (yield from _piece(source, quote, into, escape)):
        pass
    source.quoted = False


def python_text(
    source: Source, quote: str, into: Into, call: ToolCallWriter | None, *, ends: tuple[str, ...]
) -> Steps[None]:
    """Reads a string of Python. A quote that can't end the string where it stands is part of it:
    templates that show past calls to a model escape nothing."""
    source.quoted = True
    inner = InnerQuotes(quote)

    def read(piece: str) -> None:
        inner.after(piece)
        into(piece)

    while True:
        if (yield from _piece(source, quote, read, escape=_python_escape)):
            if (yield from inner.is_end(source, call, ends)):
                break
            read(quote)
    source.quoted = False


def _quoted_text(
    source: Source, quote: str, into: Into, call: ToolCallWriter | None = None, *, delimiter: str
) -> Steps[None]:
    """Reads a string in quotes that its syntax does not have. The syntax's own delimiter may
    follow.

    Whether a backslash begins an escape there is in doubt, unless no escape begins so, as in a
    regular expression. Any quote in it is in doubt too.
    """
    if not (yield from _delimited_text(source, quote, into, call, delimiter=delimiter)):
        yield from _escaped_text(source, quote, into, _no_escape)
        yield from source.accept(delimiter)
        if call:
            call.repaired()
    if not (call or (yield from source.after_space(",", ":", "}", "]", ")"))):
        raise Malformed("a quote in a string was not escaped")


def _json_text_or_delimited(
    source: Source, quote: str, into: Into, call: ToolCallWriter | None = None, *, delimiter: str
) -> Steps[None]:
    """Reads a string of JSON in a syntax with a delimiter of its own, which may follow."""
    if (yield from _delimited_text(source, quote, into, call, delimiter=delimiter)):
        return
    yield from _escaped_text(source, quote, into, partial(_json_escape_or_none, call))
    if (yield from source.accept(delimiter)) and call:
        call.repaired()


def _delimited_text(
    source: Source, quote: str, into: Into, call: ToolCallWriter | None, *, delimiter: str
) -> Steps[bool]:
    """Reads a string between delimiters that have quotes around them. Returns whether there was
    one."""
    if not (yield from source.accept(delimiter)):
        return False
    yield from marked_text(source, delimiter, into)
    yield from source.accept(quote)
    if call:
        call.repaired()
    return True


def _piece(source: Source, quote: str, into: Into, escape: Escape) -> Steps[bool]:
    """Passes on some of a string. Returns whether the closing quote was read."""
    yield from source.match(PLAIN[quote[0]], into)
    if (yield from source.accept(quote)):
        return True
    if (yield from source.accept("\\")):
        into((yield from escape(source)))
    elif (yield from source.peek()):
        into(source.take(1))
    else:
        raise Malformed("a string has no end")
    return False


def marked_text(
    source: Source,
    quote: str,
    into: Into,
    call: ToolCallWriter | None = None,
    *,
    ends: tuple[str, ...] = (),
) -> Steps[None]:
    """Reads everything up to the same delimiter again, which may be missing after an argument.

    ends: the delimiters that may follow the call.
    """
    while not (yield from source.accept(quote)):
        yield from source.match(_marked(quote), into)
        if call and (yield from _may_end(source, call, ends)):
            if not (yield from _is_closed(source, quote, ends)):
                call.repaired()
                return
            call = None  # the next delimiter closes this string
        if not (yield from source.peek()):
            raise Malformed("a string has no end")
        if not (yield from source.comes(quote)):
            into(source.take(1))


@lru_cache(maxsize=8)
def _marked(quote: str) -> re.Pattern[str]:
    """Matches text within which no string can end that begins with this delimiter."""
    return re.compile(rf"[^,}}{re.escape(quote[0])}]+")


def _may_end(source: Source, call: ToolCallWriter, ends: tuple[str, ...]) -> Steps[bool]:
    """Whether another parameter of the call's tool follows, or the end of the call."""
    ahead = source.lookahead()
    sign = yield from ahead.accept(",", "}")
    yield from ahead.space()
    if sign == ",":
        key = yield from ahead.run(BARE_KEY)
        return key.strip() in call.awaited and bool((yield from ahead.accept(":", "=")))
    return bool(sign) and bool((yield from ahead.accept(*ends)))


def _is_closed(source: Source, quote: str, ends: tuple[str, ...]) -> Steps[bool]:
    """Whether the next delimiter of a string closes one, rather than opening another."""
    ahead = source.lookahead()
    is_found = yield from ahead.up_to(quote)
    yield from ahead.space()
    if not (is_found and (yield from ahead.peek())):
        return source.cut  # the string, or what follows it, may have gone on
    return bool((yield from ahead.accept(",", "}", "]", *ends)))


def _json_escape(source: Source) -> Steps[str]:
    """Reads an escape after its backslash."""
    kind = yield from source.peek()
    source.take(1)
    if kind == "u":
        return (yield from _utf16(source))
    if kind not in ESCAPES:
        raise Malformed("an escape that JSON does not know")
    return ESCAPES[kind]


def _json_escape_or_none(call: ToolCallWriter | None, source: Source) -> Steps[str]:
    kind = yield from source.peek()
    if kind in ESCAPES or kind == "u":
        return (yield from _json_escape(source))
    if call:
        call.repaired()
    return "\\"


def _no_escape(source: Source) -> Steps[str]:
    kind = yield from source.peek()
    if not kind or kind in KNOWN_ESCAPES:
        raise Malformed("a backslash that may begin an escape")
    return "\\"


def _python_escape(source: Source) -> Steps[str]:
    kind = yield from source.peek()
    if kind == "u" or kind in ESCAPES:
        return (yield from _json_escape(source))
    source.take(1)
    if kind in CODES:
        code = yield from _code(source, CODES[kind])
        if code > 0x10FFFF or 0xD800 <= code < 0xE000:
            raise Malformed("no character")
        return chr(code)
    return PYTHON_ESCAPES.get(kind, "\\" + kind)  # as Python reads those that it does not know


def _utf16(source: Source) -> Steps[str]:
    """Reads a character after `\\u`, in one escape or, as a surrogate pair, in two."""
    unit = yield from _code(source, 4)
    if 0xD800 <= unit < 0xDC00 and (yield from source.accept("\\u")):
        low = yield from _code(source, 4)
        if 0xDC00 <= low < 0xE000:
            return chr(0x10000 + ((unit - 0xD800) << 10) + (low - 0xDC00))
        raise Malformed("half a surrogate pair")
    if 0xD800 <= unit < 0xE000:
        raise Malformed("half a surrogate pair")
    return chr(unit)


def _code(source: Source, size: int) -> Steps[int]:
    digits = ""
    while len(digits) < size and (yield from source.peek()):
        digits += source.take(1)
    if len(digits) < size or not HEXADECIMAL.fullmatch(digits):
        raise Malformed("an escape without its digits")
    return int(digits, 16)


def _json_scalar(word: str) -> str:
    loads_exactly(word, no_constant)
    return word


def _python_scalar(word: str) -> str:
    try:
        return _json_scalar(word)
    except ValueError:
        pass
    try:
        return json.dumps(int(word))
    except ValueError:
        return json.dumps(float(word))


def _bare_scalar(word: str) -> str:
    """Returns a scalar as JSON; a text that looks like no other value is a string."""
    if not word:
        raise ValueError
    scalar = read_as(word, {}, "")
    return json.dumps(scalar) if isinstance(scalar, str) else word


JSON = Syntax({'"': json_text}, SCALAR, _json_scalar)


def python_syntax(*ends: str, bare_text: bool = False) -> Syntax:
    """ends: the delimiters that may follow calls. bare_text: as in `Syntax`."""
    return Syntax(
        dict.fromkeys(('"""', "'''", '"', "'"), partial(python_text, ends=ends)),
        SCALAR,
        _python_scalar,
        words={"True": "true", "False": "false", "None": "null"},
        brackets={"{": "}", "[": "]", "(": ")"},
        rules="python",
        opening="(",
        colon="=",
        key_quotes=(),
        bare_key=re.compile(r"\w+"),
        bare_text=bare_text,
        begins_with_key=True,
    )


def gemma_syntax(quote: str, opening: str = "{", *ends: str) -> Syntax:
    """Strings stand unescaped between two delimiters, and everything else is bare.

    opening: the bracket in front of the arguments; after a round one, arguments have equals signs.
    ends: the delimiters that may follow calls.
    """
    colon, other = (":", "=") if opening == "{" else ("=", ":")
    return Syntax(
        {
            quote: partial(marked_text, ends=ends),
            '"': partial(_json_text_or_delimited, delimiter=quote),
            "'": partial(_quoted_text, delimiter=quote),
        },
        BARE[opening],
        _bare_scalar,
        words={"True": "true", "False": "false", "None": "null"},
        brackets={"{": "}", "[": "]", "(": ")"},
        rules="free",
        opening=opening,
        colon=colon,
        other_colon=other,
        key_quotes=(quote, '"', "'"),
        bare_key=BARE_KEY,
        closing_quote=quote,
        untyped=True,
    )
