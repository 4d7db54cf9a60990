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
    Mended,
    ReasoningDelta,
    Repaired,
    TextDelta,
    ToolCallFinished,
    ToolCallStarted,
)
from mlx_server.parsers.parse_context import Place, Reading
from mlx_server.parsers.whitespace import Space
from mlx_server.repair.malformed import Malformed
from mlx_server.tool_parsers.call_format import Notation
from mlx_server.tool_parsers.calls import Calls, new_id
from mlx_server.tool_parsers.source import Into, Source, Steps, written

THINK = ("<think>", "</think>")

ANYTHING = re.compile(r"(?s:.)+")


@dataclass(frozen=True)
class Layout:
    """What a family's answers are made of."""

    reasoning: tuple[tuple[str, str], ...] = (THINK,)
    """Opening and closing marks."""
    notations: tuple[Notation, ...] = ()
    dropped: tuple[str, ...] = ()
    """Marks that say nothing: sections around calls, for example."""
    trims: bool = True
    """Whether white space beside marks belongs to them, rather than to the text."""
    trims_text: bool = True
    """Whether that goes for the answer's text too, not for reasoning alone."""
    behind_reasoning: str = ""
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
        return tuple(mark for notation in self.notations for mark in notation.opens)

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
    def __init__(self, layout: Layout, reading: Reading) -> None:
        self.place: Place = "text"
        self._layout = layout
        self._index = reading.index
        self._ends_with = reading.ends_with
        self._formatted = reading.formatted
        self._verbatim = reading.verbatim
        self._by_mark = {mark: n for n in layout.notations for mark in n.opens}
        self._closing = dict(layout.reasoning)
        notation_marks = [mark for n in layout.notations for mark in (*n.opens, *n.closes)]
        self._marks = (*self._closing, *self._closing.values(), *notation_marks, *layout.dropped)
        spelled = (*self._marks, *(mark for n in layout.notations for mark in n.inner))
        self._tokens = {
            id: token
            for id, token in reading.control.items()
            if any(token in mark for mark in spelled)
        }
        self._control = reading.control
        self._source = Source(frozenset(self._tokens.values()))
        self._events: list[Event] = []
        self._calls = Calls(reading.index, reading.tools, self._emit, layout.new_id, reading.repair)
        self._space = Space(trims=layout.trims and layout.trims_text)
        self._strays: tuple[str, ...] = ()
        """Closing marks that are text, as the opening one before them was."""
        self._unclosed = ""
        """The closing mark of reasoning that something else has ended."""
        self._repairs: set[Repaired] = set()
        self._thoughts: list[str] = []
        self._answered = False
        """Whether there was anything but those."""
        self._steps = self._answer()
        next(self._steps, None)  # a prompt may have begun reasoning

    def messages(self) -> Sequence[Mapping[str, Any]]:
        return ()

    @property
    def awaits_answer(self) -> bool:
        return self.place == "reasoning"

    def feed(self, token: int, text: str) -> list[Event]:
        if token in self._tokens:
            self._source.feed_mark(self._tokens[token])
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
        if self._ends_with.endswith(self._marks) and not self._verbatim:
            self._space.behind_mark()
        yield from self._unmarked_call()
        while mark := (yield from self._mark()):
            yield from self._marked(mark)
        self._emit_text(self._space.end())
        if not (self._answered or self._source.cut):
            yield from self._call_in_reasoning()

    def _mark(self) -> Steps[str]:
        """The next one, behind the text before it."""
        if not self._formatted:
            return (yield from self._source.up_to(*self._marks, into=self._text))
        self._text((yield from self._source.space()))
        if mark := (yield from self._source.accept(*self._marks)):
            return mark
        yield from self._source.match(ANYTHING, self._text)
        return ""

    def _marked(self, mark: str) -> Steps[None]:
        if mark in self._strays:  # the end of what turned out to be text
            self._strays = tuple(stray for stray in self._strays if stray != mark)
            self._text(mark)
            return
        space = self._space.mark()
        if mark in self._closing:
            yield from self._reasoning(self._closing[mark])
            yield from self._unmarked_call()
        elif mark in self._by_mark:
            yield from self._call(self._by_mark[mark], space + mark, self._text)
        elif mark == self._unclosed:
            self._unclosed = ""
        elif self._is_stray(mark):
            self._mended("unmarked")

    def _is_stray(self, mark: str) -> bool:
        """Whether it closes what never began. Behind calls their own may be left over."""
        if self._calls.finished:
            return mark in self._closing.values()
        return mark not in self._layout.dropped

    def _foreign_reasoning(self) -> Steps[None]:
        """At the beginning of an answer, of a family that has no marks for it."""
        opening, closing = THINK
        space = yield from self._source.space()
        mark = yield from self._source.accept(opening, closing)
        if not mark:
            self._text(space)
            return
        self._mended("reasoning" if mark == opening else "unmarked")
        if mark == opening:
            yield from self._reasoning(closing)
        yield from self._source.space()

    def _call_in_reasoning(self) -> Steps[None]:
        """The one call in an answer that is reasoning and no more: the model waits for it."""
        marks = tuple(self._by_mark)
        source = written("".join(self._thoughts))
        mark = yield from source.up_to(*marks, into=ignored)
        if not mark:
            return
        before, self._events = self._events, []
        self._calls.misplaced = (*self._by_mark[mark].mends, "reasoning")
        with suppress(Malformed):
            yield from self._by_mark[mark].read(source, self._calls)
            another = yield from source.up_to(*marks, into=ignored)
            if self._calls.finished == 1 and not another:
                before += self._events
        self._events = before

    def _reasoning(self, closing: str) -> Steps[None]:
        space = Space(trims=self._layout.trims, leading=True)

        def reason(piece: str) -> None:
            if piece := space.passed(piece):
                self._emit(ReasoningDelta(self._index, piece))

        calls = tuple(self._by_mark) if self._layout.calls_end_reasoning else ()
        ends = (closing, *self._layout.ends_reasoning, *calls)
        self.place = "reasoning"
        while mark := (yield from self._source.up_to(*ends, into=reason)):
            if mark not in calls:
                self.place = "text"
                self._unclosed = "" if mark == closing else closing
                yield from self._behind_reasoning()
                return
            finished = self._calls.finished
            yield from self._call(self._by_mark[mark], space.mark() + mark, reason, "reasoning")
            if self._calls.finished > finished:
                self._unclosed = closing
                return
            self.place = "reasoning"  # it was about a call, and none
        if held := space.end():
            self._emit(ReasoningDelta(self._index, held))

    def _behind_reasoning(self) -> Steps[None]:
        if not self._verbatim:
            self._space.behind_mark()
        elif self._layout.behind_reasoning:
            yield from self._source.accept(self._layout.behind_reasoning)

    def _unmarked_call(self) -> Steps[None]:
        """A call that only its first characters tell from text."""
        notations = {begin: n for n in self._layout.notations for begin in n.begins}
        if notations:
            space = yield from self._source.space()
            if (yield from self._source.comes(*notations)):
                begin = yield from self._source.accept(*notations)
                yield from self._call(notations[begin], space + begin, self._text)
            else:
                self._text(space)

    def _call(
        self, notation: Notation, already: str, into: Into, *misplaced: Mended
    ) -> Steps[None]:
        """already: what was read of it, and before it. It goes on `into` if it is no call."""
        following = ""
        while already:
            self._calls.misplaced = (*notation.mends, *misplaced)
            self.place = "call"
            self._source.keep(already)
            try:
                yield from notation.read(self._source, self._calls)
                self._space.behind_mark()
            except Malformed:
                following = yield from self._broken(notation, already, into)
            self._source.kept()
            self._source.quoted = False
            self._calls.give_up()
            self.place = "text"
            already, following = following, ""
            notation = self._by_mark.get(already, notation)

    def _broken(self, notation: Notation, already: str, into: Into) -> Steps[str]:
        """Repairs what can be once all of it has come. What can't be is text, unless the model
        had no time to end it. Returns the mark of the next call, if it was read to its end."""
        broken = self._source.kept()
        end = following = ""
        is_call = bool(notation.opens) or self._calls.begun
        thinks = yield from self._source.comes(*self._closing)
        if notation.repair and ("{" in broken or thinks) and is_call:
            rest: list[str] = []
            # what has no mark to close it goes on to the next call, or for all of the answer
            ends = notation.closes or tuple(self._by_mark)
            end = yield from self._source.up_to(*ends, into=rest.append)
            broken += "".join(rest)
            following = "" if notation.closes else end
            with suppress(Malformed):
                if end or not (notation.closes or self._source.cut):
                    inside = broken.removeprefix(already) if notation.opens else broken
                    thought, inside = self._thought(inside)
                    what: tuple[Mended, ...] = ("reasoning",) if thought else ("json",)
                    self._calls.repaired(notation.repair(inside), what)
                    if thought:
                        self._emit(ReasoningDelta(self._index, thought))
                    self._space.behind_mark()
                    return following
        self._strays = () if end else notation.closes
        if end or not (is_call and self._source.ended and self._source.cut):
            into(broken if following else broken + end)
        return following

    def _thought(self, inside: str) -> tuple[str, str]:
        """The reasoning that a call begins with where none belongs, and the rest of it."""
        text = inside.strip()
        for opening, closing in self._layout.reasoning:
            thought, closed, rest = text.removeprefix(opening).partition(closing)
            if text.startswith(opening) and closed:
                return thought.strip(), rest
        return "", inside

    def _text(self, piece: str) -> None:
        self._emit_text(self._space.passed(piece))

    def _emit_text(self, text: str) -> None:
        if text:
            self._emit(TextDelta(self._index, text))

    def _mended(self, what: Mended) -> None:
        """Of the text."""
        repair = Repaired(self._index, what, "content")
        if repair not in self._repairs:
            self._repairs.add(repair)
            self._emit(repair)

    def _emit(self, event: Event) -> None:
        match event:
            case ReasoningDelta(_, text):
                self._thoughts.append(text)
            case TextDelta(_, text) if text.strip():
                self._answered = True
            case ToolCallStarted():
                self._answered = True
            case ToolCallFinished():
                self._source.keep()
        self._events.append(event)


def ignored(piece: str) -> None:
    """Nothing comes of it."""
