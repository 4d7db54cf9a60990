"""Reads the calls of an answer that delimiters or first words open; what is broken becomes text.

A delimiter that the text only mentions opens nothing.
"""

import re
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

from mlx_server.events import (
    Event,
    ReasoningDelta,
    Repaired,
    RepairKind,
    TextDelta,
    ToolCallFinished,
    ToolCallStarted,
    Violation,
)
from mlx_server.parsers.markup_layout import QUOTES, MarkupDelimiters, MarkupLayout
from mlx_server.parsers.misplaced_calls import AROUND_NAME, TOOL_NAME, named_calls
from mlx_server.parsers.parse_context import ParseContext
from mlx_server.parsers.text_pieces import CodeFence, PieceSeparator, WhitespaceTrimmer
from mlx_server.tool_parsers.call_format import (
    BlockRepair,
    CallFormat,
    finished_calls,
    mixed_block,
)
from mlx_server.tool_parsers.calls import ToolCallEmitter
from mlx_server.tool_parsers.model_json import Malformed, UnknownTool, json_range
from mlx_server.tool_parsers.source import Into, Lookahead, Source, Steps, complete_source

LINE = 80
"""The characters of a line before a call that are looked at."""


class MarkupOutput:
    def __init__(self, layout: MarkupLayout, index: int) -> None:
        self.texts, self.thoughts = PieceSeparator(), PieceSeparator()
        self.whitespace = WhitespaceTrimmer(
            trims=layout.trims and layout.trims_text, drop=self.texts.drop
        )
        self.in_text = False
        """Whether there has been text since the last call or thought: then no thought may open."""
        self.line_begun = False
        """Whether there has been text since the last line break or delimiter."""
        self.answered = False
        """Whether there was any text or call, and not reasoning alone."""
        self.space_before_call = ""
        """White space before a call that has begun; it separates texts if the call is reported."""
        self._index = index
        self.line = ""
        """The end of the line in which the text or the thought so far ends."""
        self._events: list[Event] = []
        self._held: list[Event] | None = None
        """Events of calls that may turn out to be text."""
        self._repairs: set[Repaired] = set()
        self._reasoning: list[str] = []
        self._fence = CodeFence()

    @property
    def reasoning(self) -> str:
        return "".join(self._reasoning)

    @property
    def in_code(self) -> bool:
        """Whether the text ends in a block of code."""
        return bool(self._fence.open)

    def take(self) -> list[Event]:
        events, self._events = self._events, []
        return events

    def put_back(self, events: list[Event]) -> None:
        self._events = events

    def hold(self) -> None:
        """Holds all events back until `release`."""
        self._held = self._held or []

    @property
    def holds(self) -> bool:
        return self._held is not None

    def release(self, *, drops: bool = False) -> None:
        """drops: whether the events that were held are not reported."""
        held, self._held = self._held or [], None
        for event in () if drops else held:
            self.emit(event)

    def add(self, piece: str) -> None:
        """Adds a piece of text, whose white space may turn out to be next to a delimiter."""
        *_, line = piece.rsplit("\n", 1)
        self.line_begun = bool(line.strip()) or (self.line_begun and line == piece)
        self.add_text(self.whitespace.feed(piece))

    def add_text(self, text: str) -> None:
        if text:
            self.in_text = self.in_text or not text.isspace()
            self.emit(TextDelta(self._index, text, separator=self.texts.before(text)))

    def add_reasoning(self, text: str) -> None:
        self.emit(ReasoningDelta(self._index, text, self.thoughts.before(text)))

    def add_repair(self, what: RepairKind) -> None:
        """Reports a repair of the text, once per kind."""
        repair = Repaired(self._index, what, "content")
        if repair not in self._repairs:
            self._repairs.add(repair)
            self.emit(repair)

    def end_message(self, space: str) -> None:
        """space: stands between the message's text and its end."""
        self.texts.drop(space)
        self.texts.interrupt()
        self.line = ""

    def begin_thought(self) -> None:
        self.texts.interrupt()
        self.thoughts.interrupt()
        self.line = ""

    def end_thought(self) -> None:
        self.in_text = False
        self.line = ""

    def _add_to_line(self, text: str) -> None:
        _, is_new, last = text.rpartition("\n")
        self.line = last[-LINE:] if is_new else (self.line + last)[-LINE:]

    def emit(self, event: Event) -> None:
        if self._held is not None:
            self._held.append(event)
            return
        match event:
            case ReasoningDelta():
                self._reasoning.append(event.separated)
                self._add_to_line(event.separated)
            case TextDelta():
                self._add_to_line(event.separated)
                self._fence.feed(event.separated)
                self.answered = self.answered or bool(event.text.strip())
            case ToolCallStarted():
                self.answered = True
            case ToolCallFinished():
                self.in_text = False
                self.line = ""
                self.space_before_call = self.texts.drop(self.space_before_call)
                self.texts.interrupt()
        self._events.append(event)


MARKS = "`*_>-#\"' \t"
"""Characters around the words of a line."""
SENTENCE_ENDS = frozenset(".!?。！？")
CONTINUES = frozenset(",;:.)!?")
"""The characters with which a sentence goes on after a call that is shown in it."""
TICKS = re.compile("`+")
CLOSING_FENCES = ("\n```", "\n~~~")
BLANKS = re.compile(r"[ \t]+")
ENDS_SENTENCE = re.compile(r"[\w.!?:。！？]")
"""The last character of a thought that a closing tag may end within a line."""


class Mentions:
    def __init__(self, source: Source, delimiters: MarkupDelimiters, output: MarkupOutput) -> None:
        self._source = source
        self._delimiters = delimiters
        self._output = output

    def is_mentioned(self, delimiter: str, unclosed: str) -> Steps[bool]:
        """Whether a delimiter that closes nothing is part of a text about delimiters. It then
        stands in quotes or within a line, while one that ends a thought ends a line.

        unclosed: the closing delimiter of a thought that another delimiter has ended.
        """
        output, delimiters = self._output, self._delimiters
        if output.line_begun and delimiter in delimiters.closing_tags:
            return delimiter != unclosed and not (yield from self._ends_thought())
        if output.in_code and delimiter not in delimiters.closing_tags:
            return True
        if output.texts.last in QUOTES and not output.whitespace.holds:
            return bool((yield from self._source.comes(*QUOTES)))
        if not output.line_begun or delimiter in delimiters.tokens.values():
            return False
        ahead = self._source.lookahead()
        yield from ahead.run(BLANKS)
        begun = yield from self._source.after_space(*delimiters.all)
        return not begun and (yield from ahead.peek()) not in ("", "\n")

    def ends_answer(self) -> Steps[bool]:
        """Whether an opening tag after a sentence is the last of an answer, which the model would
        have gone on with a thought."""
        output, ahead = self._output, self._source.lookahead()
        if output.in_code or (output.line_begun and output.texts.last not in SENTENCE_ENDS):
            return False
        yield from ahead.space()
        return not (yield from ahead.peek())

    def _ends_thought(self) -> Steps[bool]:
        """Whether a closing tag within a line follows a sentence, and a call or an empty line
        follows the tag: then the model has written a thought without an opening tag."""
        output = self._output
        if output.whitespace.holds or not ENDS_SENTENCE.fullmatch(output.texts.last):
            return False
        if (yield from self._source.comes(*self._delimiters.first_formats)):
            return True
        return (yield from self._source.comes("\n\n"))

    def line_before(self, already: str) -> str:
        """Returns the text on the line of a call. already: the call's beginning, and the white
        space before it."""
        begun = already.lstrip()
        space = already[: len(already) - len(begun)]
        return "" if "\n" in space else self._output.line + space

    def is_prose(
        self, before: str, ahead: Lookahead, *, lacks: bool = False, inline: bool = False
    ) -> Steps[bool]:
        """Whether a call that was just read is shown in a line of prose or in inline code, which
        goes on after it. A call next to whole sentences is made.

        before: the text on the line before the call. lacks: whether required arguments of the call
        are missing: then text on one of its sides will do. inline: whether models write such calls
        within a line.
        """
        words = before.strip(MARKS)
        in_code = before.endswith("`") and bool((yield from ahead.run(TICKS)))
        if before.endswith("`") and not (yield from ahead.peek()):
            in_code = in_code or self._source.cut
        yield from ahead.run(BLANKS)
        following = ""
        if not (yield from ahead.accept(*self._delimiters.all)):
            following = (yield from ahead.peek()).strip()
        if in_code:
            return bool(words or following) or lacks
        is_sentence = words[-1:] in SENTENCE_ENDS
        if lacks:
            return bool(following or (words and not is_sentence))
        if inline:
            return False
        goes_on = following.islower() or following in CONTINUES
        return bool(words and following) and (goes_on or not is_sentence)

    def is_example(self, delimiter: str) -> Steps[bool]:
        """Whether the call that a delimiter opens is shown in a block of code: one that is not all
        of the block, or after which the answer goes on."""
        call_format = self._delimiters.formats.get(delimiter)
        if not (call_format and self._output.in_code):
            return False
        ahead = self._source.lookahead()
        while (yield from ahead.up_to(*(call_format.closes or CLOSING_FENCES))):
            if not (yield from ahead.accept_spaced(*call_format.opens)):
                break
        while (yield from ahead.accept("`", "~")):
            pass
        yield from ahead.space()
        return bool((yield from ahead.peek())) and not self._source.cut


RECIPIENT = re.compile(r"[\w.:/-]+")
LONGEST_PROSE = 120
"""The characters of prose that may come before the JSON of a call between its delimiters."""
BRACKETS = re.compile(r"[\s\]}]+")


class MarkupCallReader:
    def __init__(
        self,
        layout: MarkupLayout,
        context: ParseContext,
        delimiters: MarkupDelimiters,
        source: Source,
        output: MarkupOutput,
        mentions: Mentions,
    ) -> None:
        self._index, self._tools = context.index, context.tools
        self._holds_calls = context.holds_calls
        self.calls = ToolCallEmitter(
            context.index,
            context.tools,
            self._emit,
            layout.new_id,
            context.repair,
            holds_calls=context.holds_calls,
        )
        self.is_reading = False
        self.stray_delimiters: tuple[str, ...] = ()
        """Closing delimiters that are text because their opening one was."""
        self._layout = layout
        self._delimiters = delimiters
        self._source = source
        self._output = output
        self._mentions = mentions
        self._block: list[str] = []
        """The text of the block in progress, up to the last call that was complete."""
        self._is_read = False
        """Whether all that can be read of the block as it is written was read."""
        self._is_inline = False
        """Whether models write calls like the one in progress within a line of text."""
        self._is_delimited = False
        """Whether delimiters opened the last call."""
        self._finished_before = 0
        """The number of calls that were complete before the block in progress."""

    def read(
        self, call_format: CallFormat, already: str, into: Into, *misplaced: RepairKind
    ) -> Steps[None]:
        """Reads a call. `already` is the text read so far; it goes to `into` if it is no call."""
        following = ""
        while already:
            self.is_reading = True
            self.calls.misplaced = (*call_format.repairs, *misplaced)
            is_uncertain = any(call_format is each for each in self._delimiters.uncertain_formats)
            self.calls.holds_calls = self._holds_calls or is_uncertain
            self._finished_before = self.calls.finished
            is_delimited = bool(call_format.opens) and "unmarked" not in call_format.repairs
            is_echo = self._is_delimited and not is_delimited and not self._output.in_text
            self.calls.may_echo = is_echo or self._layout.stutters
            before = self._mentions.line_before(already)
            self._is_inline = self._delimiters.is_inline(call_format, already)
            counts = self.calls.started, self.calls.finished
            self._block = []
            self._is_read = False
            self._source.keep(already)
            if before and self.calls.holds_calls:
                self._output.hold()
            try:
                yield from self._doubled(call_format)
                yield from call_format.read(self._source, self.calls)
                self.is_reading = False
                if (yield from self._is_prose(before, self._source)):
                    self._make_text(counts, into)
                    return
                yield from self._leftovers(call_format)
                self._output.whitespace.after_delimiter()
            except Malformed as error:
                self._is_read = True
                rest = self._source.kept()
                self._source.keep(rest)
                after = complete_source(rest) if rest.strip() else self._source
                is_line = "\n" not in rest[: len(rest) - len(rest.lstrip())]
                if (yield from self._is_prose(before, after, is_line=is_line)):
                    self._make_text(counts, into)
                    return
                is_mixed = isinstance(error, UnknownTool) and bool(call_format.opens)
                if not (is_mixed and (yield from self._mixed(call_format, already))):
                    following = yield from self._broken(call_format, already, into)
            self._output.release()
            self._source.kept()
            self._source.quoted = False
            self.calls.give_up()
            if self.calls.finished > self._finished_before:
                self._is_delimited = is_delimited
            already, following = following, ""
            call_format = self._delimiters.formats.get(already, call_format)
        self.is_reading = False

    def _is_prose(self, before: str, after: Source, *, is_line: bool = True) -> Steps[bool]:
        """Whether the calls of a block, whose events are held, are shown in a line of prose. If
        not, their events are released. is_line: whether what comes after them is on their line."""
        is_prose = False
        if is_line and self._output.holds and self.calls.finished > self._finished_before:
            is_prose = yield from self._mentions.is_prose(
                before, after.lookahead(), lacks=self.calls.lacks_arguments, inline=self._is_inline
            )
        if not is_prose:
            self._output.release()
        return is_prose

    def _make_text(self, counts: tuple[int, int], into: Into) -> None:
        """Makes text of the calls of a block. counts: the numbers of calls before it."""
        self.calls.take_back(*counts)
        self._output.release(drops=True)
        into("".join((*self._block, self._source.kept())))
        self.is_reading = False

    def recipient(self, before: str) -> Steps[None]:
        """Reads the name of a recipient whom the layout does not list, and the call of the message
        if it begins with one. before: the text before the name, if it is known."""
        header = self._layout.header
        if not header or (before and not before.endswith(header.opens)):
            return
        if (yield from self._source.after_space(*self._delimiters.all)):
            return
        ahead = self._source.lookahead()
        name = yield from ahead.run(BLANKS)
        if header.prefix and not (yield from ahead.accept(header.prefix)):
            return
        name += header.prefix
        name += yield from ahead.run(RECIPIENT)
        if not (yield from ahead.accept(*header.ends)):
            return
        self._source.take(len(name))
        calls, is_read = self.calls.finished, True
        if opening := (yield from self._source.accept(*self._delimiters.formats)):
            call_format = self._delimiters.formats[opening]
            yield from self.read(call_format, name + opening, self._output.add)
            is_read = self.calls.finished > calls
        if is_read and name.strip() not in ("", *(tool.name for tool in self._tools)):
            self._output.add_repair("format")
            if header.calls:
                self._report_unknown(name.strip())

    def _report_unknown(self, name: str) -> None:
        what = f"tool_calls: the model called {name!r}, which is no tool of this request"
        self._output.emit(Violation(self._index, what))

    def _doubled(self, call_format: CallFormat) -> Steps[None]:
        """Reads opening delimiters that repeat the one before."""
        while call_format.opens and (yield from self._source.after_space(*call_format.opens)):
            yield from self._source.expect_spaced(*call_format.opens)
            self.calls.misplaced = ("format", *self.calls.misplaced)

    def _leftovers(self, call_format: CallFormat) -> Steps[None]:
        """Reads what closes nothing after a call: delimiters that its format has not, or within it
        only, and brackets with which the answer ends."""
        ahead = self._source.lookahead()
        text, closing = (yield from ahead.space()), ""
        inner = (each for each in call_format.inner if each.startswith("</"))
        closes = (*call_format.may_close, *inner)
        while more := (yield from ahead.accept(*closes)):
            closing = text = text + more
            text += yield from ahead.space()
        if closing:
            text = closing
        else:
            brackets = yield from ahead.run(BRACKETS)
            text += brackets
            if not brackets.strip() or (yield from ahead.peek()) or self._source.cut:
                return
        self._source.take(len(text))
        self._output.add_repair("format")

    def _mixed(self, call_format: CallFormat, already: str) -> Steps[bool]:
        """Makes the calls of known tools in a block that calls unknown ones too, and reports the
        unknown ones. Without any known tool it is no block of calls, and nothing is read."""
        begun = self._source.kept()
        self._source.keep(begun)
        ahead = self._source.lookahead()
        others = call_format.opens if call_format.closes else self._delimiters.formats
        rest = yield from ahead.text_up_to(*call_format.closes, *others)
        closing = yield from ahead.accept(*call_format.closes)
        inside = _without_opening(begun, already, call_format.opens)
        if call_format.closes and not closing:
            return False
        try:
            text = inside + rest + closing
            events, size = mixed_block(call_format, text, self._tools, self.calls.allowed)
        except Malformed:
            return False
        self._source.take(size - len(inside))
        self.calls.give_up()
        names = [tool.name for tool in self._tools]
        for number, read in enumerate(finished_calls(events)):
            if read["name"] not in names:
                self._report_unknown(read["name"])
                continue
            call, path = self.calls.start(read["name"]), f"tool_calls[{number}]"
            for event in events:
                if isinstance(event, Repaired) and event.where.startswith(path):
                    call.add_repair(event.what, event.where.removeprefix(path))
            call.finish_with(read["arguments"])
        self._output.whitespace.after_delimiter()
        return True

    def _broken(self, call_format: CallFormat, already: str, into: Into) -> Steps[str]:
        """Repairs a malformed call once it is complete. If that fails it becomes text, unless the
        model was cut off within it. Returns the delimiter of the next call if it was consumed."""
        broken = self._source.kept()
        end = following = ""
        is_call = bool(call_format.opens) or self.calls.begun
        thinks = yield from self._source.comes(*self._delimiters.own)
        is_named = yield from self._names_tool(call_format, broken, already)
        repair = self._repair_named if is_named else call_format.repair if is_call else None
        leads = is_named or "{" in broken or thinks
        if repair and (leads or (yield from self._leads_to_json())):
            rest: list[str] = []
            # without a closing delimiter, a call extends to the next one or to the answer's end
            ends = call_format.closes or (*self._delimiters.formats, *call_format.may_close)
            end = yield from self._source.up_to(*ends, into=rest.append)
            broken += "".join(rest)
            following = end if end in self._delimiters.formats else ""
            with suppress(Malformed):
                if end or not (call_format.closes or self._source.cut):
                    inside = _without_opening(broken, already, call_format.opens)
                    thought, inside = self._delimiters.split_reasoning(inside)
                    kind: RepairKind = "format" if is_named else "json"
                    what: tuple[RepairKind, ...] = ("reasoning",) if thought else (kind,)
                    calls, prose = _calls_in(inside, repair)
                    self.calls.add_repaired(calls, what)
                    for piece in prose:  # apart, as each has its own log probabilities
                        into(piece)
                    if thought:
                        self._output.thoughts.interrupt()
                        self._output.add_reasoning(thought)
                    self._output.whitespace.after_delimiter()
                    return following
        follows_call = self.calls.finished > self._finished_before
        inner = (each for each in call_format.inner if each in self._delimiters.after_calls)
        closes = (*call_format.closes, *call_format.may_close, *inner)
        unread = (each for each in dict.fromkeys(closes) if each != end)
        self.stray_delimiters = () if follows_call else tuple(unread)
        if self._is_lone_opening(broken):
            self._output.add_repair("format")
        elif end or not (is_call and self._is_cut_within(call_format)):
            self.calls.give_up(broken=True)
            into(broken if following or follows_call else broken + end)
        return following

    def _is_cut_within(self, call_format: CallFormat) -> bool:
        """Whether the answer was cut off before the call's end; if so, the rest of it is read."""
        left = self._source.ahead() if call_format.closes and self._source.closed else ""
        delimiters = (*call_format.closes, *self._delimiters.formats)
        if self._source.cut and not any(each in left for each in delimiters):
            self._source.take(len(left))
        return self._source.cut and self._source.ended

    def _names_tool(self, call_format: CallFormat, begun: str, already: str) -> Steps[bool]:
        """Whether a block begins with a tool's name, in a form that its format has not."""
        if not call_format.closes or not self.calls.allowed.mistakes:
            return False
        inside = _without_opening(begun, already, call_format.opens)
        ahead = self._source.lookahead()
        if inside.strip():
            ahead = complete_source(inside + (yield from ahead.run(TOOL_NAME))).lookahead()
        for _ in range(3):  # two words may come before it
            yield from ahead.run(AROUND_NAME)
            name = yield from ahead.run(TOOL_NAME)
            if name not in ("function", "name"):
                break
        return self.calls.knows(name)

    def _repair_named(self, text: str) -> list[tuple[str, dict[str, Any]]]:
        tools = {tool.name: tool for tool in self._tools}
        calls = named_calls(text, tools, repairs=self.calls.allowed.mistakes)
        return [(call.name, dict(call.arguments)) for call in calls]

    def _leads_to_json(self) -> Steps[bool]:
        """Whether a few words of prose come, and then an object."""
        ahead = self._source.lookahead()
        for _ in range(LONGEST_PROSE):
            character = yield from ahead.peek()
            if character in ("{", "[", "<", "`", ""):
                return character in ("{", "[")
            yield from ahead.accept(character)
        return False

    def _is_lone_opening(self, broken: str) -> bool:
        """Whether the model has ended its answer with an opening delimiter."""
        is_last = self._source.ended and not self._source.cut
        return is_last and broken.strip() in self._layout.calls

    def _emit(self, event: Event) -> None:
        is_first = self.calls.finished == self._finished_before + 1
        if isinstance(event, ToolCallFinished):
            self._block.append(self._source.kept())
            self._source.keep()
        elif (
            self.calls.holds_calls and is_first and self.calls.lacks_arguments and not self._is_read
        ):
            self._output.hold()
        self._output.emit(event)


def _calls_in(text: str, repair: BlockRepair) -> tuple[Sequence[tuple[str, Any]], tuple[str, ...]]:
    """Returns the calls of a broken block, and the pieces of prose around their JSON."""
    try:
        return repair(text), ()
    except Malformed:
        begin, end = json_range(text)
        before, after = text[:begin].strip(), text[end:].strip()
        if not before:
            raise
        return repair(text[begin:end]), (before, f" {after}") if after else (before,)


def _without_opening(text: str, already: str, opens: Sequence[str]) -> str:
    """Returns the content of a block, after its opening delimiter or several of them."""
    if not opens:
        return text
    inside = text.removeprefix(already)
    while opening := next((each for each in opens if inside.lstrip().startswith(each)), ""):
        inside = inside.lstrip().removeprefix(opening)
    return inside
