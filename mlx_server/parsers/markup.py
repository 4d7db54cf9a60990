"""The parser of families that delimit reasoning and calls within the text of an answer.

It reads everything in one pass, since a delimiter's meaning depends on its place: a call's
delimiter within reasoning is reasoning, and any delimiter within a call's string is the string's.
"""

import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any

from mlx_server.events import (
    Event,
    RepairKind,
    ToolCallFinished,
)
from mlx_server.parsers.markup_delimiters import QUOTES, MarkupDelimiters
from mlx_server.parsers.markup_layout import MarkupLayout
from mlx_server.parsers.markup_output import MarkupOutput
from mlx_server.parsers.misplaced_calls import MisplacedCallReader
from mlx_server.parsers.parse_context import ParseContext, Section
from mlx_server.parsers.reasoning_tags import THINK, is_tag
from mlx_server.parsers.whitespace import WhitespaceTrimmer
from mlx_server.repair.malformed import Malformed
from mlx_server.tool_parsers.call_format import CallFormat
from mlx_server.tool_parsers.calls import ToolCallEmitter
from mlx_server.tool_parsers.source import Into, Source, Steps, complete_source

__all__ = ["THINK", "MarkupLayout", "MarkupParser"]

ANYTHING = re.compile(r"(?s:.)+")


class MarkupParser:
    def __init__(self, layout: MarkupLayout, context: ParseContext) -> None:
        self.section: Section = "text"
        self._layout = layout
        self._ends_with = context.ends_with
        self._continues = context.continues
        self._continues_text = context.continues_text
        self._formatted = context.formatted
        self._verbatim = context.verbatim
        self._delimiters = MarkupDelimiters(layout, context)
        self._control = context.control
        self._source = Source(frozenset(self._delimiters.tokens.values()))
        self._output = MarkupOutput(layout, context.index)
        self._calls = ToolCallEmitter(
            context.index,
            context.tools,
            self._emit,
            layout.new_id,
            context.repair,
            holds_calls=context.holds_calls,
        )
        self._misplaced = MisplacedCallReader(
            self._calls,
            context.tools,
            context.repair,
            makes=context.misplaced_calls == "make" and not context.formatted,
            closes=self._delimiters.after_calls,
        )
        self._stray_delimiters: tuple[str, ...] = ()
        """Closing delimiters that are text because their opening one was."""
        self._unclosed = ""
        """The closing delimiter of reasoning that was ended by another delimiter."""
        self._finished_before = 0
        """How many calls were complete before the block that is read."""
        self._may_begin = True
        """Whether a call without a delimiter may come next."""
        self._steps = self._answer()
        next(self._steps, None)  # the prompt may have opened reasoning

    def messages(self) -> Sequence[Mapping[str, Any]]:
        return ()

    @property
    def awaits_answer(self) -> bool:
        return self.section == "reasoning" and not self._misplaced.at_end_of(self._output.reasoning)

    @property
    def is_unterminated(self) -> bool:
        return self.section == "reasoning"

    def feed(self, token: int, text: str) -> list[Event]:
        if delimiter := self._delimiters.tokens.get(token):
            self._source.feed_delimiter(delimiter)
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
        return self._output.take()

    def _answer(self) -> Steps[None]:
        if self._continues_text:
            yield from self._rest_of_text()
            return
        if closing := self._layout.inside(self._ends_with):
            yield from self._reasoning(closing)
        elif self._layout.worded_reasoning and not self._formatted:
            yield from self._worded_reasoning()
        if self._layout.leads and not self._formatted:
            yield from self._lead()
        if self._ends_with.endswith(self._delimiters.all) and not self._verbatim:
            self._output.whitespace.after_delimiter()
        yield from self._beginning()
        yield from self._read_all()
        if not (self._output.answered or self._source.cut):
            yield from self._call_in_reasoning()

    def _rest_of_text(self) -> Steps[None]:
        """Read the rest of a text whose beginning is in the prompt."""
        self._output.in_text = True
        if self._formatted:
            yield from self._source.match(ANYTHING, self._output.add)
        yield from self._read_all()

    def _read_all(self) -> Steps[None]:
        while delimiter := (yield from self._read_delimiter()):
            yield from self._read_delimited(delimiter)
            if not self._output.in_text:
                yield from self._beginning()
        self._output.add_text(self._output.whitespace.flush())

    def _beginning(self) -> Steps[None]:
        """Read what only stands before any text: thoughts, and a call without a delimiter."""
        delimiters = self._delimiters
        delimiter = ""
        while True:
            space = yield from self._source.space()
            if delimiters.is_foreign(delimiter):  # no text of this family begins so
                space = self._output.texts.drop(space)
            delimiter = yield from self._source.accept(*delimiters.first)
            if not delimiter:
                break
            self._output.texts.drop(space)
            if delimiter in delimiters.reasoning:
                yield from self._thought(delimiter)
            else:
                self._output.add_repair("unmarked")
        if self._may_begin:
            self._may_begin = False
            yield from self._unmarked_call(space)
        else:
            self._output.add(space)
            yield from self._misplaced_call("")

    def _thought(self, opening: str) -> Steps[None]:
        if self._delimiters.is_foreign(opening):
            self._output.add_repair("reasoning")
        yield from self._reasoning(self._delimiters.reasoning[opening])

    def _read_delimiter(self) -> Steps[str]:
        """Read text up to and including the next delimiter, which is returned."""
        if not self._formatted:
            return (yield from self._read_free_text())
        self._output.add((yield from self._source.space()))
        if delimiter := (yield from self._source.accept(*self._delimiters.all)):
            return delimiter
        yield from self._source.match(ANYTHING, self._output.add)
        return ""

    def _read_free_text(self) -> Steps[str]:
        delimiters, calls = self._delimiters.all, self._misplaced.in_text
        # a delimiter may begin with a bracket like a call
        after_line = tuple(f"\n{each}" for each in delimiters if each.startswith(("[", "{")))
        while True:
            found = yield from self._source.up_to(
                *delimiters, *calls, *(after_line if calls else ()), into=self._output.add
            )
            if found in after_line:
                self._output.add("\n")
                return found[1:]
            if found not in calls:
                return found
            if not (yield from self._misplaced_call(found)):
                self._output.add(found)

    def _misplaced_call(self, already: str) -> Steps[bool]:
        """Read calls in JSON that reach to the answer's end. already: what was read of them."""
        beginnings = self._misplaced.beginnings
        if not already and not (beginnings and (yield from self._source.comes(*beginnings))):
            return False
        is_made = yield from self._misplaced.read(self._source, already)
        if is_made:
            self._output.whitespace.at_delimiter()
        return is_made

    def _read_delimited(self, delimiter: str) -> Steps[None]:
        if delimiter in self._stray_delimiters:  # the end of what turned out to be text
            self._stray_delimiters = tuple(
                stray for stray in self._stray_delimiters if stray != delimiter
            )
            self._output.add(delimiter)
            return
        if self._output.in_text and delimiter in self._delimiters.own and is_tag(delimiter):
            self._stray_delimiters += (self._delimiters.own[delimiter],)  # the text is about tags
            self._output.add(delimiter)
            return
        if self._is_stray(delimiter) and (yield from self._is_quoted()):
            self._output.add(delimiter)
            return
        space = self._output.whitespace.at_delimiter()
        if delimiter in self._delimiters.own:
            self._output.texts.drop(space)
            yield from self._thought(delimiter)
        elif delimiter in self._delimiters.formats:
            self._output.space_before_call = space
            yield from self._call(
                self._delimiters.formats[delimiter], space + delimiter, self._output.add
            )
        elif delimiter == self._unclosed:
            self._unclosed = ""
        elif self._is_stray(delimiter):
            self._output.add_repair("unmarked")
            if not self._output.in_text:
                self._output.whitespace.after_delimiter()
        elif self._verbatim:
            self._output.add_text(space)

    def _is_stray(self, delimiter: str) -> bool:
        """Whether nothing was opened before. After calls, their closing delimiters may remain."""
        if delimiter in self._delimiters.own or delimiter in self._delimiters.formats:
            return False
        if delimiter in self._layout.dropped:
            return False
        return not self._calls.finished or delimiter in self._delimiters.own.values()

    def _is_quoted(self) -> Steps[bool]:
        """Whether the delimiter just read stands in quotes, as in a text about delimiters."""
        if self._output.whitespace.holds or self._output.texts.last not in QUOTES:
            return False
        return (yield from self._source.comes(*QUOTES))

    def _worded_reasoning(self) -> Steps[None]:
        pairs = dict(self._layout.worded_reasoning)
        space = yield from self._source.space()
        if opening := (yield from self._source.accept(*pairs)):
            yield from self._reasoning(pairs[opening])
        else:
            self._output.add(space)

    def _lead(self) -> Steps[None]:
        space = yield from self._source.space()
        if not (yield from self._source.accept(*self._layout.leads)):
            self._output.add(space)

    def _call_in_reasoning(self) -> Steps[None]:
        """Report the call of an answer that is only reasoning, if it contains exactly one: the
        model expects its result."""
        openings = tuple(self._delimiters.formats)
        source = complete_source(self._output.reasoning)
        opening = yield from source.up_to(*openings, into=discard)
        if not opening:
            self._misplaced.emit(self._misplaced.at_end_of(self._output.reasoning), "reasoning")
            return
        before = self._output.take()
        self._calls.misplaced = (*self._delimiters.formats[opening].repairs, "reasoning")
        with suppress(Malformed):
            yield from self._delimiters.formats[opening].read(source, self._calls)
            another = yield from source.up_to(*openings, into=discard)
            if self._calls.finished == 1 and not another:
                before += self._output.take()
        self._output.put_back(before)

    def _reasoning(self, closing: str) -> Steps[None]:
        is_new, self._continues = not self._continues, False
        space = WhitespaceTrimmer(
            trims=self._layout.trims, leading=is_new, drop=self._output.thoughts.drop
        )
        self._output.begin_thought()

        def reason(piece: str) -> None:
            if piece := space.feed(piece):
                self._output.add_reasoning(piece)

        delimiters, calls = self._delimiters, self._delimiters.calls_in_reasoning
        closes, opens = delimiters.closes(closing), delimiters.opens_within(closing)
        ends = (*closes, *delimiters.end_of_reasoning, *calls)
        self.section = "reasoning"
        yield from self._opened_again(closing, reason)
        nested = 0
        while end := (yield from self._source.up_to(*ends, *opens, into=reason)):
            if end in opens:
                nested += space.holds or self._output.thoughts.last not in QUOTES
                reason(end)
            elif end in closes and nested and (yield from self._goes_on(closes)):
                nested -= 1
                reason(end)
            elif end not in calls:
                self._output.thoughts.drop(space.at_delimiter())
                self._end_reasoning(unclosed="" if end in closes else closing)
                yield from self._after_reasoning()
                return
            else:
                finished = self._calls.finished
                yield from self._call(
                    self._delimiters.formats[end], space.at_delimiter() + end, reason, "reasoning"
                )
                if self._calls.finished > finished:
                    self._end_reasoning(unclosed=closing)
                    return
                self.section = "reasoning"  # it turned out to be no call
        if rest := space.flush():
            self._output.add_reasoning(rest)

    def _opened_again(self, closing: str, reason: Into) -> Steps[None]:
        """Read a second opening delimiter, such as one after that at the prompt's end."""
        leading = yield from self._source.space()
        if not (yield from self._source.accept(*self._delimiters.opens(closing))):
            reason(leading)

    def _goes_on(self, closes: tuple[str, ...]) -> Steps[bool]:
        """Whether a thought in which another one was opened goes on after this closing delimiter:
        it is closed once more before any call."""
        begins = [begin for each in self._layout.call_formats for begin in each.begins]
        if self._formatted or (begins and (yield from self._source.after_space(*begins))):
            return False
        return (yield from self._source.first_of(*closes, *self._delimiters.formats)) in closes

    def _end_reasoning(self, *, unclosed: str) -> None:
        self.section = "text"
        self._unclosed = unclosed
        self._output.in_text = False
        self._may_begin = True

    def _after_reasoning(self) -> Steps[None]:
        if not self._verbatim:
            self._output.whitespace.after_delimiter()
        elif self._layout.after_reasoning:
            yield from self._source.accept(self._layout.after_reasoning)

    def _unmarked_call(self, space: str) -> Steps[None]:
        """Read a call without an opening delimiter, recognised by its first characters. `space`
        was read before it."""
        formats = {begin: n for n in self._layout.call_formats for begin in n.begins}
        broken: list[str] = []
        begun = self._calls.started

        def unread(piece: str) -> None:
            if self._calls.started > begun:
                self._output.add(space + piece)
            else:
                broken.append(piece)

        if formats and (yield from self._source.comes(*formats)):
            begin = yield from self._source.accept(*formats)
            yield from self._call(formats[begin], begin, unread)
            if not broken:
                return
        if not (yield from self._misplaced_call("".join(broken))):
            self._output.add("".join([space, *broken]))

    def _call(
        self, call_format: CallFormat, already: str, into: Into, *misplaced: RepairKind
    ) -> Steps[None]:
        """Read a call. `already` is the text read so far; it goes to `into` if it is no call."""
        following = ""
        while already:
            self._calls.misplaced = (*call_format.repairs, *misplaced)
            self.section = "call"
            self._finished_before = self._calls.finished
            self._source.keep(already)
            try:
                yield from self._doubled(call_format)
                yield from call_format.read(self._source, self._calls)
                self._output.whitespace.after_delimiter()
            except Malformed:
                following = yield from self._broken(call_format, already, into)
            self._source.kept()
            self._source.quoted = False
            self._calls.give_up()
            self.section = "text"
            already, following = following, ""
            call_format = self._delimiters.formats.get(already, call_format)

    def _doubled(self, call_format: CallFormat) -> Steps[None]:
        """Read opening delimiters that repeat the one before."""
        while call_format.opens and (yield from self._source.after_space(*call_format.opens)):
            yield from self._source.space()
            yield from self._source.expect(*call_format.opens)
            self._calls.misplaced = ("format", *self._calls.misplaced)

    def _broken(self, call_format: CallFormat, already: str, into: Into) -> Steps[str]:
        """Repair a malformed call once it is complete. If that fails it becomes text, unless the
        model was cut off within it. Return the delimiter of the next call if it was consumed."""
        broken = self._source.kept()
        end = following = ""
        is_call = bool(call_format.opens) or self._calls.begun
        thinks = yield from self._source.comes(*self._delimiters.own)
        if call_format.repair and ("{" in broken or thinks) and is_call:
            rest: list[str] = []
            # without a closing delimiter, a call extends to the next one or to the answer's end
            ends = call_format.closes or tuple(self._delimiters.formats)
            end = yield from self._source.up_to(*ends, into=rest.append)
            broken += "".join(rest)
            following = "" if call_format.closes else end
            with suppress(Malformed):
                if end or not (call_format.closes or self._source.cut):
                    inside = _without_opening(broken, already, call_format.opens)
                    thought, inside = self._delimiters.split_reasoning(inside)
                    what: tuple[RepairKind, ...] = ("reasoning",) if thought else ("json",)
                    self._calls.add_repaired(call_format.repair(inside), what)
                    if thought:
                        self._output.thoughts.interrupt()
                        self._output.add_reasoning(thought)
                    self._output.whitespace.after_delimiter()
                    return following
        follows_call = self._calls.finished > self._finished_before
        self._stray_delimiters = () if end or follows_call else call_format.closes
        if self._is_lone_opening(broken):
            self._output.add_repair("format")
        elif end or not (is_call and self._source.ended and self._source.cut):
            self._calls.give_up(broken=True)
            into(broken if following or follows_call else broken + end)
        return following

    def _is_lone_opening(self, broken: str) -> bool:
        """Whether all that the model has written after its calls is an opening delimiter."""
        is_last = self._source.ended and not self._source.cut
        return is_last and bool(self._calls.finished) and broken.strip() in self._layout.calls

    def _emit(self, event: Event) -> None:
        if isinstance(event, ToolCallFinished):
            self._source.keep()
        self._output.emit(event)


def _without_opening(text: str, already: str, opens: Sequence[str]) -> str:
    """What stands in a block, after its opening delimiter or several of them."""
    if not opens:
        return text
    inside = text.removeprefix(already)
    while opening := next((each for each in opens if inside.lstrip().startswith(each)), ""):
        inside = inside.lstrip().removeprefix(opening)
    return inside


def discard(piece: str) -> None:
    """A sink that ignores what it is given."""
