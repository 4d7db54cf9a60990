"""The parser of families that delimit reasoning and calls within the text of an answer.

It reads everything in one pass, since a delimiter's meaning depends on its place: a call's
delimiter within reasoning is reasoning, and any delimiter within a call's string is the string's.
"""

import re
from functools import partial

from mlx_server.events import Event
from mlx_server.parsers.markup_calls import MarkupCallReader, MarkupOutput, Mentions
from mlx_server.parsers.markup_layout import QUOTES, TURN_HEADERS, MarkupDelimiters, MarkupLayout
from mlx_server.parsers.misplaced_calls import MisplacedCallReader
from mlx_server.parsers.parse_context import ParseContext, Section, is_tag
from mlx_server.parsers.text_pieces import WhitespaceTrimmer, open_fence
from mlx_server.tool_parsers.model_json import Malformed
from mlx_server.tool_parsers.source import Into, Source, Steps, complete_source, discard

FENCES = " \t\r\n`~"
"""What may follow the last call of a thought: the call may be in a block of code."""
ANYTHING = re.compile(r"(?s:.)+")


class MarkupParser:
    def __init__(self, layout: MarkupLayout, context: ParseContext) -> None:
        self._section: Section = "text"
        self._layout = layout
        self._context = context
        self._continues = context.continues
        self._delimiters = MarkupDelimiters(layout, context)
        tokens = frozenset(self._delimiters.tokens.values())
        self._source = Source(tokens, self._delimiters.spelled_stops)
        self._output = MarkupOutput(layout, context.index)
        self._mentions = Mentions(self._source, self._delimiters, self._output)
        self._reader = MarkupCallReader(
            layout, context, self._delimiters, self._source, self._output, self._mentions
        )
        self._calls = self._reader.calls
        self._misplaced = MisplacedCallReader(
            self._calls,
            context.tools,
            context.repair,
            makes=context.reads_misplaced_calls,
            closes=self._delimiters.after_calls,
            inline=not context.continues_text
            and any("{" in each.begins and not each.repairs for each in layout.call_formats),
        )
        self._unclosed = ""
        """The closing delimiter of reasoning that was ended by another delimiter."""
        self._may_begin = True
        """Whether a call without a delimiter may come next."""
        self._steps = self._answer()
        next(self._steps, None)  # the prompt may have opened reasoning

    @property
    def section(self) -> Section:
        return "call" if self._reader.is_reading else self._section

    @property
    def awaits_answer(self) -> bool:
        return self.section == "reasoning" and not self._misplaced.at_end_of(self._output.reasoning)

    @property
    def is_unterminated(self) -> bool:
        return self.section == "reasoning"

    @property
    def unread(self) -> str:
        return self._source.unread

    def feed(self, token: int, text: str) -> list[Event]:
        if delimiter := self._delimiters.tokens.get(token):
            self._source.feed_delimiter(delimiter)
        elif self._source.quoted:
            self._source.feed(text or self._context.control.get(token, ""))
        else:
            self._source.feed(text)
        return self._advance()

    def finish(self, *, cut: bool) -> list[Event]:
        self._source.close(cut=cut)
        return self._advance()

    def _advance(self) -> list[Event]:
        next(self._steps, None)
        return self._output.take()

    def _answer(self) -> Steps[None]:
        if self._context.continues_text:
            yield from self._rest_of_text()
            return
        if closing := self._layout.inside(self._context.ends_with):
            yield from self._reasoning(closing)
        elif self._layout.worded_reasoning and not self._context.formatted:
            yield from self._worded_reasoning()
        if not self._context.formatted:
            yield from self._lead()
        if self._context.ends_with.endswith(self._delimiters.all) and not self._context.verbatim:
            self._output.whitespace.after_delimiter()
        yield from self._reader.recipient(self._context.ends_with.rstrip())
        yield from self._beginning()
        yield from self._read_all()
        if not (self._output.answered or self._source.cut):
            yield from self._call_in_reasoning()

    def _rest_of_text(self) -> Steps[None]:
        """Reads the rest of a text whose beginning is in the prompt."""
        self._output.in_text = True
        if self._context.formatted:
            yield from self._source.match(ANYTHING, self._output.add)
        yield from self._read_all()

    def _read_all(self) -> Steps[None]:
        while delimiter := (yield from self._read_delimiter()):
            yield from self._read_delimited(delimiter)
            if not self._output.in_text:
                yield from self._beginning()
        self._output.add_text(self._output.whitespace.at_delimiter())

    def _beginning(self) -> Steps[None]:
        """Reads what only stands before any text: thoughts, and a call without a delimiter."""
        delimiters, delimiter = self._delimiters, ""
        while True:
            space = yield from self._source.space()
            if delimiters.is_foreign(delimiter):  # no text of this family begins so
                space = self._output.texts.drop(space)
            delimiter = yield from self._source.accept(*delimiters.first)
            delimiter = delimiter or (yield from self._header_again())
            if not delimiter:
                break
            self._output.texts.drop(space)
            if delimiter in delimiters.reasoning:
                yield from self._thought(delimiter)
            elif delimiter not in (*delimiters.empty_thoughts, *delimiters.dropped_first):
                self._output.add_repair("unmarked")
        if self._may_begin:
            self._may_begin = False
            yield from self._unmarked_call(space)
        else:
            self._output.add(space)
            yield from self._misplaced_call("")

    def _header_again(self) -> Steps[str]:
        """Reads the words of a header without its token after another thought: a budget closes a
        thought between the two. Returns the whole delimiter if they open a thought."""
        headers = {} if self._context.formatted else self._delimiters.headers
        if not self._output.reasoning or not (words := (yield from self._source.accept(*headers))):
            return ""
        self._output.add_repair("format")
        closing = self._delimiters.own[headers[words]]
        following = yield from self._source.lookahead().find(closing, *self._delimiters.formats)
        return headers[words] if following == closing else ""

    def _thought(self, opening: str) -> Steps[None]:
        if self._delimiters.is_foreign(opening):
            self._output.add_repair("reasoning")
        yield from self._reasoning(self._delimiters.reasoning[opening])

    def _read_delimiter(self) -> Steps[str]:
        """Reads text up to and including the next delimiter, which is returned."""
        if not self._context.formatted:
            return (yield from self._read_free_text(self._delimiters.all))
        self._output.add((yield from self._source.space()))
        if delimiter := (yield from self._source.accept(*self._delimiters.all)):
            return delimiter
        yield from self._source.match(ANYTHING, self._output.add)
        return ""

    def _read_free_text(self, delimiters: tuple[str, ...]) -> Steps[str]:
        calls = self._misplaced.in_text
        # a delimiter may begin with a bracket like a call
        after_line = tuple(f"\n{each}" for each in delimiters if each.startswith(("[", "{")))
        while True:
            delimiter = yield from self._source.up_to(
                *delimiters, *calls, *(after_line if calls else ()), into=self._output.add
            )
            if delimiter in after_line:
                self._output.add("\n")
                return delimiter[1:]
            if delimiter not in calls:
                return delimiter
            if not (yield from self._misplaced_call(delimiter)):
                self._output.add(delimiter)

    def _misplaced_call(self, already: str) -> Steps[bool]:
        """Reads calls in JSON. already: what was read of them."""
        beginnings = self._misplaced.beginnings
        if not (already or (beginnings and (yield from self._source.comes(*beginnings)))):
            return False
        before = self._mentions.line_before(already)
        is_prose = partial(self._mentions.is_prose, before, inline=True)
        if is_made := (yield from self._misplaced.read(self._source, already, before, is_prose)):
            self._output.whitespace.at_delimiter()
            self._output.whitespace.after_delimiter()
        return is_made

    def _read_delimited(self, delimiter: str) -> Steps[None]:
        if delimiter in self._layout.transparent:
            return
        if delimiter in self._reader.stray_delimiters:  # the end of what turned out to be text
            others = (each for each in self._reader.stray_delimiters if each != delimiter)
            self._reader.stray_delimiters = tuple(others)
            self._output.add(delimiter)
            return
        if self._output.in_text and delimiter in self._delimiters.own and is_tag(delimiter):
            if (yield from self._mentions.ends_answer()):
                self._output.add_repair("unmarked")
                self._output.whitespace.at_delimiter()
                yield from self._source.space()
                return
            self._reader.stray_delimiters += (
                self._delimiters.own[delimiter],
            )  # the text is about tags
            self._output.add(delimiter)
            return
        if self._is_stray(delimiter):
            is_shown = yield from self._mentions.is_mentioned(delimiter, self._unclosed)
        elif (is_shown := (yield from self._mentions.is_example(delimiter))) and (
            closes := self._delimiters.formats[delimiter].closes
        ):
            self._output.add(delimiter)
            delimiter = yield from self._source.up_to(*closes, into=self._output.add)
        if is_shown:
            self._output.add(delimiter)
            return
        self._output.line_begun = False
        space = self._output.whitespace.at_delimiter()
        if delimiter in self._delimiters.own:
            self._output.texts.drop(space)
            yield from self._thought(delimiter)
        elif delimiter in self._delimiters.formats:
            self._output.space_before_call = space
            yield from self._reader.read(
                self._delimiters.formats[delimiter], space + delimiter, self._output.add
            )
        elif delimiter in self._layout.literal:
            yield from self._literal_message()
        elif delimiter in self._layout.dropped and not self._context.verbatim:
            self._output.end_message(space)
        elif delimiter == self._unclosed:
            self._unclosed = ""
        elif delimiter in self._delimiters.untaught_closes:
            self._output.add_repair("format")
            self._output.whitespace.after_delimiter()
        elif self._is_stray(delimiter):
            self._output.add_repair("unmarked")
            if not self._output.in_text:
                self._output.whitespace.after_delimiter()
        elif self._context.verbatim:
            self._output.add_text(space)
        yield from self._reader.recipient(delimiter)

    def _literal_message(self) -> Steps[None]:
        """Reads a message in which a call is text, unless the message begins with it."""
        own = self._delimiters.own
        ends = (*own, *own.values(), *self._layout.dropped)
        while not (yield from self._source.after_space(*self._delimiters.formats)):
            self._output.texts.interrupt()
            end = yield from self._read_free_text(ends)
            if end not in self._layout.literal:
                if end:
                    yield from self._read_delimited(end)
                return

    def _is_stray(self, delimiter: str) -> bool:
        """Whether nothing was opened before. After calls, their closing delimiters may remain."""
        if delimiter in self._delimiters.own or delimiter in self._delimiters.formats:
            return False
        if delimiter in self._layout.dropped:
            return False
        return not self._calls.finished or delimiter in self._delimiters.own.values()

    def _worded_reasoning(self) -> Steps[None]:
        pairs = dict(self._layout.worded_reasoning)
        space = yield from self._source.space()
        if opening := (yield from self._source.accept(*pairs)):
            if self._layout.halves:  # a delimiter after all, with spaces in it
                self._output.add_repair("format")
            yield from self._reasoning(pairs[opening])
        else:
            self._output.add(space)

    def _lead(self) -> Steps[None]:
        """Reads the header of an answer, which is no part of it."""
        layout = self._layout
        if not (yield from self._source.after_space(*TURN_HEADERS, *layout.leads)):
            return
        if (yield from self._source.accept_spaced(*TURN_HEADERS, *layout.leads)) in TURN_HEADERS:
            yield from self._source.space()

    def _call_in_reasoning(self) -> Steps[None]:
        """Reports the calls that an answer of nothing but reasoning ends with: the model expects
        their results."""
        openings = tuple(self._delimiters.formats)
        source = complete_source(self._output.reasoning)
        if not (opening := (yield from source.up_to(*openings, into=discard))):
            self._misplaced.emit(self._misplaced.at_end_of(self._output.reasoning), "reasoning")
            return
        before, calls = self._output.take(), self._calls
        while opening:
            self._output.take()
            calls.started = calls.finished = 0
            calls.misplaced = (*self._delimiters.formats[opening].repairs, "reasoning")
            rest: list[str] = []
            try:
                while opening:
                    yield from self._delimiters.formats[opening].read(source, calls)
                    opening = yield from source.accept_spaced(*openings)
            except Malformed:
                calls.finished = 0
            opening = yield from source.up_to(*openings, into=rest.append)
        if calls.finished and not "".join(rest).strip(FENCES):
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
        ends = (*closes, *self._layout.ends_reasoning, *calls, *self._layout.transparent)
        self._section = "reasoning"
        yield from self._opened_again(closing, reason)
        nested = 0
        while end := (yield from self._source.up_to(*ends, *opens, into=reason)):
            if end in self._layout.transparent:
                continue
            if end in opens:
                nested += space.holds or self._output.thoughts.last not in QUOTES
                reason(end)
            elif end in closes and nested and (yield from self._goes_on(closes)):
                nested -= 1
                reason(end)
            elif end in calls and open_fence(self._output.reasoning):
                reason(end)  # the thought is about calls
            elif end not in calls:
                self._output.thoughts.drop(space.at_delimiter())
                self._end_reasoning(unclosed="" if end in closes else closing)
                yield from self._after_reasoning()
                return
            else:
                finished = self._calls.finished
                yield from self._reader.read(
                    self._delimiters.formats[end], space.at_delimiter() + end, reason, "reasoning"
                )
                if self._calls.finished > finished:
                    self._end_reasoning(unclosed=closing)
                    return
        if rest := space.at_delimiter():
            self._output.add_reasoning(rest)

    def _opened_again(self, closing: str, reason: Into) -> Steps[None]:
        """Reads a second opening delimiter, such as one after that at the prompt's end."""
        leading = yield from self._source.space()
        if not (yield from self._source.accept(*self._delimiters.opens(closing))):
            reason(leading)

    def _goes_on(self, closes: tuple[str, ...]) -> Steps[bool]:
        """Whether a thought in which another one was opened continues after this closing delimiter:
        it is closed once more before any call."""
        begins = [begin for each in self._layout.call_formats for begin in each.begins]
        if self._context.formatted or (begins and (yield from self._source.after_space(*begins))):
            return False
        following = yield from self._source.lookahead().find(*closes, *self._delimiters.formats)
        return following in closes

    def _end_reasoning(self, *, unclosed: str) -> None:
        self._section = "text"
        self._unclosed = unclosed
        self._output.end_thought()
        self._may_begin = True

    def _after_reasoning(self) -> Steps[None]:
        if not self._context.verbatim:
            self._output.whitespace.after_delimiter()
        elif self._layout.after_reasoning:
            yield from self._source.accept(self._layout.after_reasoning)

    def _unmarked_call(self, space: str) -> Steps[None]:
        """Reads a call without an opening delimiter, recognised by its first characters. `space`
        was read before it."""
        formats = {begin: n for n in self._layout.call_formats for begin in n.begins}
        broken: list[str] = []
        begun = self._calls.attempts

        def unread(piece: str) -> None:
            if self._calls.attempts > begun:
                self._output.add(space + piece)
            else:
                broken.append(piece)

        delimited = yield from self._source.comes(*self._delimiters.first_formats)
        if formats and not delimited and (yield from self._source.comes(*formats)):
            begin = yield from self._source.accept(*formats)
            yield from self._reader.read(formats[begin], begin, unread)
            if not broken:
                return
        if not (yield from self._misplaced_call("".join(broken))):
            self._output.add("".join([space, *broken]))
