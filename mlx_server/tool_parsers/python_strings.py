"""Where a string ends among calls that are written as Python, with inner quotes escaped or not.

A quote ends a string if what follows it goes on as calls do, or if no other quote follows. Where it
is in doubt the string has no end and there is no call: a command that is cut short must not be run.
"""

import re

from mlx_server.tool_parsers.call_writer import ToolCallWriter
from mlx_server.tool_parsers.source import Lookahead, Source, Steps

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
                found = yield from _ends_value(ahead)
            else:
                found = yield from _ends_argument(ahead, call, ends, is_escaped=not self._seen)
            if found or (yield from self._is_last(source, ends)):
                return True
        self._seen = True
        following = yield from source.lookahead().peek()
        between = WORD.match(self._before) and WORD.match(following)
        self._is_open ^= not (self._quote == "'" and between)
        return False

    def _is_last(self, source: Source, ends: tuple[str, ...]) -> Steps[bool]:
        """Whether no quote follows that could end the string."""
        ahead = source.lookahead()
        found = yield from ahead.up_to(self._quote, *ends)
        return found != self._quote and not source.cut


def _ends_argument(
    ahead: Lookahead, call: ToolCallWriter, ends: tuple[str, ...], *, is_escaped: bool
) -> Steps[bool]:
    """Whether another argument follows, or the end of the call.

    ends: the delimiters that may follow calls. is_escaped: whether the string has had no inner
    quote without a backslash; after one, only a parameter of the tool counts as another argument.
    """
    yield from ahead.space()
    sign = yield from ahead.accept(",", ")")
    if sign == ",":
        yield from ahead.space()
        key = yield from ahead.run(KEY)
        yield from ahead.space()
        sign = yield from ahead.accept("==", "=", ")")
        if key and sign == "=":
            return is_escaped or not call.known or key in call.awaited
        if key or sign != ")":
            return not (yield from ahead.peek())
    return not (yield from ahead.peek()) or (
        sign == ")" and (yield from _ends_call(ahead, call, ends))
    )


def _ends_call(ahead: Lookahead, call: ToolCallWriter, ends: tuple[str, ...]) -> Steps[bool]:
    """Whether another call, or the end of all calls, follows a call's closing bracket."""
    yield from ahead.space()
    sign = yield from ahead.accept(*ends, *AROUND_CALLS, ",", ";")
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
    yield from ahead.space()
    sign = yield from ahead.accept(",", ":", "]", "}", ")")
    if not sign:
        return not (yield from ahead.peek())
    yield from ahead.space()
    following = yield from ahead.peek()
    if sign in ",:":
        return not following or bool(VALUE_BEGINS.match(following))
    return following in ",:]})"
