"""The parser of families that delimit reasoning and calls within the text of an answer.

It reads everything in one pass, since a delimiter's meaning depends on its place: a call's
delimiter within reasoning is reasoning, and any delimiter within a call's string is the string's.
"""

import re
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from mlx_server.events import (
    Event,
    ReasoningDelta,
    Repaired,
    RepairKind,
    TextDelta,
    ToolCallFinished,
    ToolCallStarted,
)
from mlx_server.parsers.parse_context import ParseContext, Section
from mlx_server.parsers.whitespace import WhitespaceTrimmer
from mlx_server.repair.malformed import Malformed
from mlx_server.tool_parsers.call_format import CallFormat
from mlx_server.tool_parsers.calls import ToolCallEmitter, new_id
from mlx_server.tool_parsers.source import Into, Source, Steps, complete_source

THINK = ("<think>", "</think>")

ANYTHING = re.compile(r"(?s:.)+")


@dataclass(frozen=True)
class MarkupLayout:
    """The parts of a family's answers, with their delimiters."""

    reasoning: tuple[tuple[str, str], ...] = (THINK,)
    """Pairs of an opening and a closing delimiter."""
    call_formats: tuple[CallFormat, ...] = ()
    dropped: tuple[str, ...] = ()
    """Delimiters without a meaning of their own, such as those of a section of calls."""
    trims: bool = True
    """Whether white space next to delimiters is removed."""
    trims_text: bool = True
    """Whether it is removed from the answer's text too, and not from reasoning alone."""
    after_reasoning: str = ""
    """White space between reasoning and a text that may itself begin with white space."""
    calls_end_reasoning: bool = False
    """Whether a call within reasoning ends it; if not, the call is part of the reasoning."""
    ends_reasoning: tuple[str, ...] = ()
    """Delimiters that end reasoning besides its closing one."""
    new_id: Callable[[], str] = new_id
    """Makes the ids of calls for which the model wrote none."""

    @property
    def calls(self) -> tuple[str, ...]:
        """The delimiters that open calls."""
        return tuple(opening for each in self.call_formats for opening in each.opens)

    @property
    def opens_reasoning(self) -> tuple[str, ...]:
        return tuple(opening for opening, _ in self.reasoning)

    @property
    def ends_of_reasoning(self) -> tuple[str, ...]:
        closes = dict.fromkeys(closing for _, closing in self.reasoning)
        calls = self.calls if closes and self.calls_end_reasoning else ()
        return (*closes, *self.ends_reasoning, *calls)

    def inside(self, ends_with: str) -> str | None:
        """The closing delimiter of the reasoning that the prompt's end opens, if it does."""
        end = ends_with.rstrip()
        return next((c for o, c in self.reasoning if end.endswith(o.rstrip())), None)


class MarkupParser:
    def __init__(self, layout: MarkupLayout, context: ParseContext) -> None:
        self.section: Section = "text"
        self._layout = layout
        self._index = context.index
        self._ends_with = context.ends_with
        self._formatted = context.formatted
        self._verbatim = context.verbatim
        self._by_delimiter = {opening: n for n in layout.call_formats for opening in n.opens}
        self._closing = dict(layout.reasoning)
        of_calls = [each for n in layout.call_formats for each in (*n.opens, *n.closes)]
        self._delimiters = (
            *self._closing,
            *self._closing.values(),
            *of_calls,
            *layout.dropped,
        )
        known = (*self._delimiters, *(inner for n in layout.call_formats for inner in n.inner))
        self._tokens = {
            id: token
            for id, token in context.control.items()
            if any(token in delimiter for delimiter in known)
        }
        self._control = context.control
        self._source = Source(frozenset(self._tokens.values()))
        self._events: list[Event] = []
        self._calls = ToolCallEmitter(
            context.index, context.tools, self._emit, layout.new_id, context.repair
        )
        self._whitespace = WhitespaceTrimmer(trims=layout.trims and layout.trims_text)
        self._stray_delimiters: tuple[str, ...] = ()
        """Closing delimiters that are text because their opening one was."""
        self._unclosed = ""
        """The closing delimiter of reasoning that was ended by another delimiter."""
        self._repairs: set[Repaired] = set()
        self._has_reasoned: list[str] = []
        self._answered = False
        """Whether there was any text or call, and not reasoning alone."""
        self._steps = self._answer()
        next(self._steps, None)  # the prompt may have opened reasoning

    def messages(self) -> Sequence[Mapping[str, Any]]:
        return ()

    @property
    def awaits_answer(self) -> bool:
        return self.section == "reasoning"

    def feed(self, token: int, text: str) -> list[Event]:
        if token in self._tokens:
            self._source.feed_delimiter(self._tokens[token])
        elif self._source.quoted:
            self._source.feed(text or self._control.get(token, ""))
        else:
            self._source.feed(text)
        return self._advance()

    def finish(self, text: str, *, cut: bool) -> list[Event]:
        self._source.feed(text)
        self._source.close(cut=cut)
        return self._advance()

    def _advance(self) -> list[Event]:
        next(self._steps, None)
        events, self._events = self._events, []
        return events

    def _answer(self) -> Steps[None]:
        if closing := self._layout.inside(self._ends_with):
            yield from self._reasoning(closing)
        elif not (self._layout.reasoning or self._formatted):
            yield from self._foreign_reasoning()
        if self._ends_with.endswith(self._delimiters) and not self._verbatim:
            self._whitespace.after_delimiter()
        yield from self._unmarked_call()
        while delimiter := (yield from self._read_delimiter()):
            yield from self._read_delimited(delimiter)
        self._emit_text(self._whitespace.flush())
        if not (self._answered or self._source.cut):
            yield from self._call_in_reasoning()

    def _read_delimiter(self) -> Steps[str]:
        """Read text up to and including the next delimiter, which is returned."""
        if not self._formatted:
            return (yield from self._source.up_to(*self._delimiters, into=self._read_text))
        self._read_text((yield from self._source.space()))
        if delimiter := (yield from self._source.accept(*self._delimiters)):
            return delimiter
        yield from self._source.match(ANYTHING, self._read_text)
        return ""

    def _read_delimited(self, delimiter: str) -> Steps[None]:
        if delimiter in self._stray_delimiters:  # the end of what turned out to be text
            self._stray_delimiters = tuple(
                stray for stray in self._stray_delimiters if stray != delimiter
            )
            self._read_text(delimiter)
            return
        space = self._whitespace.at_delimiter()
        if delimiter in self._closing:
            yield from self._reasoning(self._closing[delimiter])
            yield from self._unmarked_call()
        elif delimiter in self._by_delimiter:
            yield from self._call(self._by_delimiter[delimiter], space + delimiter, self._read_text)
        elif delimiter == self._unclosed:
            self._unclosed = ""
        elif self._is_stray(delimiter):
            self._add_repair("unmarked")

    def _is_stray(self, delimiter: str) -> bool:
        """Whether nothing was opened before. After calls, their closing delimiters may remain."""
        if self._calls.finished:
            return delimiter in self._closing.values()
        return delimiter not in self._layout.dropped

    def _foreign_reasoning(self) -> Steps[None]:
        """Read `<think>` at the start of an answer whose family has no reasoning delimiters."""
        opening, closing = THINK
        space = yield from self._source.space()
        delimiter = yield from self._source.accept(opening, closing)
        if not delimiter:
            self._read_text(space)
            return
        self._add_repair("reasoning" if delimiter == opening else "unmarked")
        if delimiter == opening:
            yield from self._reasoning(closing)
        yield from self._source.space()

    def _call_in_reasoning(self) -> Steps[None]:
        """Report the call of an answer that is only reasoning, if it contains exactly one: the
        model expects its result."""
        openings = tuple(self._by_delimiter)
        source = complete_source("".join(self._has_reasoned))
        opening = yield from source.up_to(*openings, into=discard)
        if not opening:
            return
        before, self._events = self._events, []
        self._calls.misplaced = (*self._by_delimiter[opening].repairs, "reasoning")
        with suppress(Malformed):
            yield from self._by_delimiter[opening].read(source, self._calls)
            another = yield from source.up_to(*openings, into=discard)
            if self._calls.finished == 1 and not another:
                before += self._events
        self._events = before

    def _reasoning(self, closing: str) -> Steps[None]:
        space = WhitespaceTrimmer(trims=self._layout.trims, leading=True)

        def reason(piece: str) -> None:
            if piece := space.feed(piece):
                self._emit(ReasoningDelta(self._index, piece))

        calls = tuple(self._by_delimiter) if self._layout.calls_end_reasoning else ()
        ends = (closing, *self._layout.ends_reasoning, *calls)
        self.section = "reasoning"
        while end := (yield from self._source.up_to(*ends, into=reason)):
            if end not in calls:
                self.section = "text"
                self._unclosed = "" if end == closing else closing
                yield from self._after_reasoning()
                return
            finished = self._calls.finished
            yield from self._call(
                self._by_delimiter[end], space.at_delimiter() + end, reason, "reasoning"
            )
            if self._calls.finished > finished:
                self._unclosed = closing
                return
            self.section = "reasoning"  # it turned out to be no call
        if rest := space.flush():
            self._emit(ReasoningDelta(self._index, rest))

    def _after_reasoning(self) -> Steps[None]:
        if not self._verbatim:
            self._whitespace.after_delimiter()
        elif self._layout.after_reasoning:
            yield from self._source.accept(self._layout.after_reasoning)

    def _unmarked_call(self) -> Steps[None]:
        """Read a call without an opening delimiter, recognised by its first characters."""
        formats = {begin: n for n in self._layout.call_formats for begin in n.begins}
        if formats:
            space = yield from self._source.space()
            if (yield from self._source.comes(*formats)):
                begin = yield from self._source.accept(*formats)
                yield from self._call(formats[begin], space + begin, self._read_text)
            else:
                self._read_text(space)

    def _call(
        self, call_format: CallFormat, already: str, into: Into, *misplaced: RepairKind
    ) -> Steps[None]:
        """Read a call. `already` is the text read so far; it goes to `into` if it is no call."""
        following = ""
        while already:
            self._calls.misplaced = (*call_format.repairs, *misplaced)
            self.section = "call"
            self._source.keep(already)
            try:
                yield from call_format.read(self._source, self._calls)
                self._whitespace.after_delimiter()
            except Malformed:
                following = yield from self._broken(call_format, already, into)
            self._source.kept()
            self._source.quoted = False
            self._calls.give_up()
            self.section = "text"
            already, following = following, ""
            call_format = self._by_delimiter.get(already, call_format)

    def _broken(self, call_format: CallFormat, already: str, into: Into) -> Steps[str]:
        """Repair a malformed call once it is complete. If that fails it becomes text, unless the
        model was cut off within it. Return the delimiter of the next call if it was consumed."""
        broken = self._source.kept()
        end = following = ""
        is_call = bool(call_format.opens) or self._calls.begun
        thinks = yield from self._source.comes(*self._closing)
        if call_format.repair and ("{" in broken or thinks) and is_call:
            rest: list[str] = []
            # without a closing delimiter, a call extends to the next one or to the answer's end
            ends = call_format.closes or tuple(self._by_delimiter)
            end = yield from self._source.up_to(*ends, into=rest.append)
            broken += "".join(rest)
            following = "" if call_format.closes else end
            with suppress(Malformed):
                if end or not (call_format.closes or self._source.cut):
                    inside = broken.removeprefix(already) if call_format.opens else broken
                    thought, inside = self._emit_reasoning(inside)
                    what: tuple[RepairKind, ...] = ("reasoning",) if thought else ("json",)
                    self._calls.add_repaired(call_format.repair(inside), what)
                    if thought:
                        self._emit(ReasoningDelta(self._index, thought))
                    self._whitespace.after_delimiter()
                    return following
        self._stray_delimiters = () if end else call_format.closes
        if end or not (is_call and self._source.ended and self._source.cut):
            into(broken if following else broken + end)
        return following

    def _emit_reasoning(self, inside: str) -> tuple[str, str]:
        """Split misplaced reasoning from the start of a call; "" if there is none."""
        text = inside.strip()
        for opening, closing in self._layout.reasoning:
            thought, closed, rest = text.removeprefix(opening).partition(closing)
            if text.startswith(opening) and closed:
                return thought.strip(), rest
        return "", inside

    def _read_text(self, piece: str) -> None:
        self._emit_text(self._whitespace.feed(piece))

    def _emit_text(self, text: str) -> None:
        if text:
            self._emit(TextDelta(self._index, text))

    def _add_repair(self, what: RepairKind) -> None:
        """Report a repair of the text, once per kind."""
        repair = Repaired(self._index, what, "content")
        if repair not in self._repairs:
            self._repairs.add(repair)
            self._emit(repair)

    def _emit(self, event: Event) -> None:
        match event:
            case ReasoningDelta(_, text):
                self._has_reasoned.append(text)
            case TextDelta(_, text) if text.strip():
                self._answered = True
            case ToolCallStarted():
                self._answered = True
            case ToolCallFinished():
                self._source.keep()
        self._events.append(event)


def discard(piece: str) -> None:
    """A sink that ignores what it is given."""
