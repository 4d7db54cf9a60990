"""What is found in streamed text across its pieces: white space, code fences and stop strings; and
the report of the events that parsers make, for answers of this server and of others."""

import re
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from itertools import accumulate, islice

from mlx_server.events import (
    Event,
    Finished,
    FinishReason,
    Repaired,
    TextDelta,
    TokenCounts,
    TokenLogprob,
    ToolCallFinished,
    Violation,
)
from mlx_server.parsers.parse_context import Parser


class WhitespaceTrimmer:
    """Separates a text's own white space from that next to a delimiter.

    White space that may be either is held back until the next text or delimiter. Without `trims`
    all of it belongs to the text.
    """

    def __init__(
        self, *, trims: bool, leading: bool = False, drop: Callable[[str], object] = lambda _: None
    ) -> None:
        """drop: called with white space that follows a delimiter and is removed."""
        self._trims = trims
        self._leading = leading and trims
        self._held: list[str] = []
        self._drop = drop

    @property
    def holds(self) -> bool:
        """Whether there is white space between the text and what comes next."""
        return bool(self._held)

    def feed(self, piece: str) -> str:
        """Adds a piece; returns what is certain to be text."""
        if not self._trims:
            return piece
        if self._leading:
            text = piece.lstrip()
            self._drop(piece[: len(piece) - len(text)])
            piece = text
            self._leading = not piece
        text = piece.rstrip()
        before = self.at_delimiter() if text and self._held else ""
        if len(text) < len(piece):
            self._held.append(piece[len(text) :])
        return before + text

    def at_delimiter(self) -> str:
        """Ends the text at a delimiter, or the answer; returns the white space before it."""
        held, self._held = self._held, []
        return "".join(held)

    def after_delimiter(self) -> None:
        """Drops white space that follows."""
        self._leading = self._trims


class PieceSeparator:
    """Finds the white space between the pieces of a text that calls or thoughts interrupt.

    It is what the model wrote there, or a line break if it wrote none: pieces are never glued.
    """

    def __init__(self, *, by_line: bool = False) -> None:
        """by_line: whether only a line break separates pieces."""
        self.last = ""
        """The last character of the text so far."""
        self._separates: Callable[[str], bool] = "\n".__eq__ if by_line else str.isspace
        self._dropped: list[str] = []
        self._is_interrupted = False

    def drop(self, space: str) -> str:
        """Notes white space that is no part of the text; returns what is left of it."""
        self._dropped.append(space)
        return ""

    def interrupt(self) -> None:
        """Notes a call, a thought or the end of a message."""
        self._is_interrupted = True

    def before(self, text: str) -> str:
        """Adds a text; returns what separates it from the text before."""
        space = ""
        if self._is_interrupted and self.last:
            own = "" if self._separates(text[0]) else "".join(self._dropped)
            separated = self._separates(self.last) or self._separates(text[0])
            space = own or ("" if separated else "\n")
        self.last, self._dropped, self._is_interrupted = text[-1], [], False
        return space


OPENING = re.compile(r" {0,3}(`{3,}(?=[^`]*$)|~{3,})")
CLOSING = re.compile(r" {0,3}(`{3,}|~{3,})[ \t]*")


HEAD = 256
"""The characters of a line that are looked at: no model writes a longer line to open or close a
block."""


def open_fence(text: str) -> str:
    """Returns the fence that would close the block of code in which a text ends; empty if it ends
    in none. A longer fence closes the block as well."""
    fence = CodeFence()
    fence.feed(text)
    return fence.open


class CodeFence:
    """Finds the open fence of a text that is still being written. It keeps one line's beginning at
    most."""

    def __init__(self) -> None:
        self._open = ""
        """The fence that was open where the current line began."""
        self._line = ""
        """The beginning of the current line."""

    def feed(self, piece: str) -> None:
        *complete, last = piece.split("\n")
        for line in complete:
            self._add(line)
            self._open, self._line = self.open, ""
        self._add(last)

    def _add(self, piece: str) -> None:
        self._line += piece[: HEAD - len(self._line)]

    @property
    def open(self) -> str:
        if not self._open:
            opened = OPENING.match(self._line)
            return opened[1] if opened else ""
        closed = CLOSING.fullmatch(self._line)
        return "" if closed and closed[1].startswith(self._open) else self._open


class StopStrings:
    """Passes text on as soon as it can no longer be the beginning of a stop string.

    The match that is complete first counts, so that the result does not depend on chunk size.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = [stop for stop in stops if stop]
        self._held: list[TextDelta] = []
        self.match: str | None = None
        """The stop string that was found."""

    @property
    def matched(self) -> bool:
        return self.match is not None

    def feed(self, delta: TextDelta) -> list[TextDelta]:
        if self.matched:
            return []
        if not self._stops:
            return [delta]
        self._held.append(delta)
        text = "".join(held.separated for held in self._held)
        places = [(at + len(stop), at) for stop in self._stops if (at := text.find(stop)) >= 0]
        if places:
            end, begin = min(places)
            self.match = text[begin:end]
            released = self._release(begin)
            self._held = []
            return released
        return self._release(len(text) - self._undecided(text))

    def finish(self) -> list[TextDelta]:
        held, self._held = self._held, []
        return held

    def _undecided(self, text: str) -> int:
        """Length of the longest end of the text that may begin a stop string."""
        return max(
            size
            for stop in self._stops
            for size in range(min(len(stop) - 1, len(text)) + 1)
            if text.endswith(stop[:size])
        )

    def _release(self, size: int) -> list[TextDelta]:
        """Returns the first `size` characters. A log probability goes with the first character of
        its token."""
        released: list[TextDelta] = []
        deltas: list[TextDelta] = []
        for delta in self._held:
            before, separator = len(delta.separator), delta.separator
            count = min(size, before + len(delta.text))
            size -= count
            if count <= before and delta.text:
                size = count = 0  # a separator is not released without its text
            rest = delta.text[max(0, count - before) :]
            own = _begun(delta, count) if rest else len(delta.logprobs)
            if rest or (deltas and not count):  # a delta without text keeps its place
                logprobs = delta.logprobs[own:] if count else delta.logprobs
                separator = "" if count else separator
                deltas.append(replace(delta, text=rest, logprobs=logprobs, separator=separator))
            if count or not (rest or deltas):
                text = delta.text[: max(0, count - before)]
                released.append(replace(delta, text=text, logprobs=delta.logprobs[:own]))
        self._held = deltas
        return released


def _begun(delta: TextDelta, size: int) -> int:
    """Returns how many of a delta's tokens begin within its first `size` characters."""
    end = len(delta.separated[:size].encode("utf-8", "replace"))
    begins = accumulate((len(entry.bytes) for entry in delta.logprobs), initial=0)
    return sum(begin < end for begin in islice(begins, len(delta.logprobs)))


class OutputProcessor:
    """Ends an answer at a stop string, or after its call if it may have only one. Gives texts their
    log probabilities, and reports all of a text before any other output."""

    def __init__(self, index: int, stops: Sequence[str], *, parallel: bool) -> None:
        """parallel: whether several calls are allowed; if not, the first one ends the answer."""
        self.finished = False
        self._logprobs = deque[TokenLogprob]()
        """The log probabilities of the latest tokens, whose text may still come."""
        self._rest = b""
        """The end of the latest token of a text, which the next text may begin with."""
        self._later = 0
        """The bytes at the end of these tokens that belong to no text reported so far."""
        self._index = index
        self._stops = StopStrings(stops)
        self._parallel = parallel
        self._calls = 0
        """The complete calls so far."""

    @property
    def is_complete(self) -> bool:
        """Whether a stop string or the one call that is allowed ends the answer."""
        return self._stops.matched or (self._calls > 0 and not self._parallel)

    def _announce(self, events: Iterable[Event], parser: Parser) -> None:
        """Prepares for the report of these events, the latest of this parser."""
        texts = [event.separated for event in events if isinstance(event, TextDelta)]
        if self._logprobs and texts:
            texts.append(parser.unread)
            self._later = sum(len(text.encode("utf-8", "replace")) for text in texts)

    def _logprobs_of(self, delta: TextDelta) -> Iterator[TokenLogprob]:
        """Takes the log probabilities of the text's tokens, and of the white space before it, out
        of the pending ones. Earlier ones, of tokens that are not text, are dropped."""
        text = delta.separated.encode("utf-8", "replace")
        self._later -= len(text)
        body = delta.text.encode("utf-8", "replace")
        body = body.lstrip() or body
        begin, before, at = self._position_of(text, body), [], 0
        while self._logprobs and at + len(self._logprobs[0].bytes) <= begin:
            before.append(self._logprobs.popleft())
            at += len(before[-1].bytes)
        # delimiters may be between white space and the text, whose first token may have some too
        shared = self._logprobs[0].bytes[: max(0, begin - at)] if self._logprobs else b""
        yield from _spelled(text.removesuffix(body).removesuffix(shared), before)
        end, last = begin + len(body), self._rest
        while self._logprobs and at < end:
            last = self._logprobs[0].bytes
            at += len(last)
            yield self._logprobs.popleft()
        self._rest = last[len(last) - (at - end) :] if at > end else b""

    def _position_of(self, text: bytes, body: bytes) -> int:
        """Returns where the body of the text begins in the bytes of the pending tokens: after white
        space at once, or else as late as it can."""
        pending, rest = self._logprobs, self._rest
        if b"".join((rest, *(each.bytes for each in islice(pending, len(text))))).startswith(text):
            return len(text) - len(body) - len(rest)
        written = b"".join((rest, *(each.bytes for each in pending)))
        at = written.rfind(body, 0, len(written) - max(0, self._later))
        # characters that were cut are read as others, and a repair may have changed any text
        begin = at if at >= 0 else 0 if b"\xef\xbf\xbd" in body else len(written)
        return begin - len(rest)

    def _report(self, event: Event) -> Iterator[Event]:
        match event:
            case TextDelta():
                if self._logprobs or self._rest:
                    event = replace(event, logprobs=tuple(self._logprobs_of(event)))
                yield from self._stops.feed(event)
            case Repaired() | Violation():  # a report is not output and ends no text
                yield event
            case _:
                yield from self._stops.finish()
                self._calls += isinstance(event, ToolCallFinished)
                yield event

    def _end(self, reason: FinishReason, counts: TokenCounts) -> Finished:
        """The answer's last event, without what only one kind of row has. An answer with calls is
        one that waits for their results, also if a stop string ended it after them."""
        self.finished = True
        stop_string = self._stops.match
        if self._calls and reason == "stop":
            reason, stop_string = "tool_calls", None
        return Finished(self._index, reason, counts, stop_string=stop_string)


def _spelled(space: bytes, tokens: Sequence[TokenLogprob]) -> list[TokenLogprob]:
    """Returns those of the tokens that spell the white space, which delimiters may interrupt."""
    spelled: list[TokenLogprob] = []
    for token in reversed(tokens):
        if token.bytes.isspace() and space.endswith(token.bytes):
            space = space[: -len(token.bytes)]
            spelled.insert(0, token)
    return spelled
