"""The parser of families that mark reasoning and calls in the text of an answer.

One pass for all of it, since marks mean something only where they stand: a call's mark inside of
reasoning is reasoning, a mark inside of a call's string is the string.
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
    """What a family's answers are made of."""

    reasoning: tuple[tuple[str, str], ...] = (THINK,)
    """Opening and closing marks."""
    call_formats: tuple[CallFormat, ...] = ()
    dropped: tuple[str, ...] = ()
    """Marks that say nothing: sections around calls, for example."""
    trims: bool = True
    """Whether white space beside marks belongs to them, rather than to the text."""
    trims_text: bool = True
    """Whether that goes for the answer's text too, not for reasoning alone."""
    after_reasoning: str = ""
    """White space between it and a text that may begin with such itself."""
    calls_end_reasoning: bool = False
    """Whether a call inside of reasoning ends it; else it is reasoning itself."""
    ends_reasoning: tuple[str, ...] = ()
    """Other marks that end it, whether it was closed or not."""
    new_id: Callable[[], str] = new_id
    """Makes the ids of calls, where the model gave none."""

    @property
    def calls(self) -> tuple[str, ...]:
        """The marks that open calls."""
        return tuple(mark for notation in self.call_formats for mark in notation.opens)

    @property
    def opens_reasoning(self) -> tuple[str, ...]:
        return tuple(opening for opening, _ in self.reasoning)

    @property
    def ends_of_reasoning(self) -> tuple[str, ...]:
        closes = dict.fromkeys(closing for _, closing in self.reasoning)
        calls = self.calls if closes and self.calls_end_reasoning else ()
        return (*closes, *self.ends_reasoning, *calls)

    def inside(self, ends_with: str) -> str | None:
        """The closing mark of the reasoning that a prompt ends in, if it ends in one."""
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
        self._by_delimiter = {mark: n for n in layout.call_formats for mark in n.opens}
        self._closing = dict(layout.reasoning)
        notation_marks = [mark for n in layout.call_formats for mark in (*n.opens, *n.closes)]
        self._delimiters = (
            *self._closing,
            *self._closing.values(),
            *notation_marks,
            *layout.dropped,
        )
        spelled = (*self._delimiters, *(mark for n in layout.call_formats for mark in n.inner))
        self._tokens = {
            id: token
            for id, token in context.control.items()
            if any(token in mark for mark in spelled)
        }
        self._control = context.control
        self._source = Source(frozenset(self._tokens.values()))
        self._events: list[Event] = []
        self._calls = ToolCallEmitter(
            context.index, context.tools, self._emit, layout.new_id, context.repair
        )
        self._whitespace = WhitespaceTrimmer(trims=layout.trims and layout.trims_text)
        self._stray_delimiters: tuple[str, ...] = ()
        """Closing marks that are text, as the opening one before them was."""
        self._unclosed = ""
        """The closing mark of reasoning that something else has ended."""
        self._repairs: set[Repaired] = set()
        self._has_reasoned: list[str] = []
        self._answered = False
        """Whether there was anything but those."""
        self._steps = self._answer()
        next(self._steps, None)  # a prompt may have begun reasoning

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
        while mark := (yield from self._read_delimiter()):
            yield from self._read_delimited(mark)
        self._emit_text(self._whitespace.flush())
        if not (self._answered or self._source.cut):
            yield from self._call_in_reasoning()

    def _read_delimiter(self) -> Steps[str]:
        """The next one, behind the text before it."""
        if not self._formatted:
            return (yield from self._source.up_to(*self._delimiters, into=self._read_text))
        self._read_text((yield from self._source.space()))
        if mark := (yield from self._source.accept(*self._delimiters)):
            return mark
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
        """Whether it closes what never began. Behind calls their own may be left over."""
        if self._calls.finished:
            return delimiter in self._closing.values()
        return delimiter not in self._layout.dropped

    def _foreign_reasoning(self) -> Steps[None]:
        """At the beginning of an answer, of a family that has no marks for it."""
        opening, closing = THINK
        space = yield from self._source.space()
        mark = yield from self._source.accept(opening, closing)
        if not mark:
            self._read_text(space)
            return
        self._add_repair("reasoning" if mark == opening else "unmarked")
        if mark == opening:
            yield from self._reasoning(closing)
        yield from self._source.space()

    def _call_in_reasoning(self) -> Steps[None]:
        """The one call in an answer that is reasoning and no more: the model waits for it."""
        marks = tuple(self._by_delimiter)
        source = complete_source("".join(self._has_reasoned))
        mark = yield from source.up_to(*marks, into=discard)
        if not mark:
            return
        before, self._events = self._events, []
        self._calls.misplaced = (*self._by_delimiter[mark].repairs, "reasoning")
        with suppress(Malformed):
            yield from self._by_delimiter[mark].read(source, self._calls)
            another = yield from source.up_to(*marks, into=discard)
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
        while mark := (yield from self._source.up_to(*ends, into=reason)):
            if mark not in calls:
                self.section = "text"
                self._unclosed = "" if mark == closing else closing
                yield from self._after_reasoning()
                return
            finished = self._calls.finished
            yield from self._call(
                self._by_delimiter[mark], space.at_delimiter() + mark, reason, "reasoning"
            )
            if self._calls.finished > finished:
                self._unclosed = closing
                return
            self.section = "reasoning"  # it was about a call, and none
        if held := space.flush():
            self._emit(ReasoningDelta(self._index, held))

    def _after_reasoning(self) -> Steps[None]:
        if not self._verbatim:
            self._whitespace.after_delimiter()
        elif self._layout.after_reasoning:
            yield from self._source.accept(self._layout.after_reasoning)

    def _unmarked_call(self) -> Steps[None]:
        """A call that only its first characters tell from text."""
        notations = {begin: n for n in self._layout.call_formats for begin in n.begins}
        if notations:
            space = yield from self._source.space()
            if (yield from self._source.comes(*notations)):
                begin = yield from self._source.accept(*notations)
                yield from self._call(notations[begin], space + begin, self._read_text)
            else:
                self._read_text(space)

    def _call(
        self, call_format: CallFormat, already: str, into: Into, *misplaced: RepairKind
    ) -> Steps[None]:
        """already: what was read of it, and before it. It goes on `into` if it is no call."""
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
        """Repairs what can be once all of it has come. What can't be is text, unless the model
        had no time to end it. Returns the mark of the next call, if it was read to its end."""
        broken = self._source.kept()
        end = following = ""
        is_call = bool(call_format.opens) or self._calls.begun
        thinks = yield from self._source.comes(*self._closing)
        if call_format.repair and ("{" in broken or thinks) and is_call:
            rest: list[str] = []
            # what has no mark to close it goes on to the next call, or for all of the answer
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
        """The reasoning that a call begins with where none belongs, and the rest of it."""
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
        """Of the text."""
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
    """Nothing comes of it."""
