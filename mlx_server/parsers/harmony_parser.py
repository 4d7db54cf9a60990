"""Parses gpt-oss's answers: messages on channels, read from token ids by OpenAI's own parser.

Every message gets a `StreamableParser` of its own, so that a broken one does not affect others. It
gets no misplaced control tokens, since it would output them as text: messages that the model failed
to end or to start are ended and started here. In a header that it can't read, the words that belong
to no header are text.
"""

import logging
import re
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from itertools import takewhile

from openai_harmony import (
    HarmonyEncoding,
    HarmonyError,
    Role,
    StreamableParser,
    TextContent,
    ToolNamespaceConfig,
)

from mlx_server import limits
from mlx_server.events import (
    BuiltInCall,
    Event,
    ReasoningDelta,
    Repaired,
    RepairKind,
    TextDelta,
    ToolCallStarted,
)
from mlx_server.grammars.arguments import lists_properties
from mlx_server.messages import Phase, Tool
from mlx_server.parsers.misplaced_calls import MisplacedCallReader
from mlx_server.parsers.parse_context import USUAL_TAGS, ParseContext, Section
from mlx_server.parsers.text_pieces import PieceSeparator
from mlx_server.tool_parsers import json_calls
from mlx_server.tool_parsers.call_repair import FoundCall
from mlx_server.tool_parsers.calls import ToolCallEmitter
from mlx_server.tool_parsers.model_json import Malformed, json_text, parsed, text_around_json
from mlx_server.tool_parsers.source import Source, Steps

START, CHANNEL, CONSTRAIN = "<|start|>", "<|channel|>", "<|constrain|>"

_CHANNEL = r"(analysis\b|commentary\b|final\b)?\s*"
_TYPE = r"(?:(?:json|code)\b\s*)?"
_TO = rf"{_TYPE}to=(\S*)\s*{_TYPE}"
HEADER_WORDS = {
    # without a recipient, a channel's name may be the first word of a text
    START: re.compile(rf"\s*(?:assistant\b)?\s*(?:{_CHANNEL}{_TO})?"),
    CHANNEL: re.compile(rf"\s*{_CHANNEL}(?:{_TO})?"),
    CONSTRAIN: re.compile(r"\s*(?:(?!to=)\w+)?\s*(?:to=(\S*))?\s*"),
}
"""Matches the words of a header after each control token, in the orders that models use."""


@dataclass(frozen=True)
class HarmonyHeader:
    channel: str | None = None
    recipient: str | None = None
    rest: str = ""
    """Text within the header that is not part of it."""
    broken: bool = False
    has_type: bool = False
    """Whether it names a content type, as the header of a call does."""

    def misplaced(self) -> tuple[RepairKind, ...]:
        """Repairs to report for a function call in this message."""
        in_reasoning: tuple[RepairKind, ...] = ("reasoning",) if self.channel == "analysis" else ()
        return (*in_reasoning, "unmarked") if self.broken else in_reasoning

    @property
    def phase(self) -> Phase:
        """Phase of the message's text; text for an unknown recipient is a final answer."""
        is_preamble = self.channel == "commentary" and not self.recipient
        return "commentary" if is_preamble else "final_answer"


def header_name(name: str) -> str:
    """Returns the name without characters that could end it within a header."""
    return re.sub(r"[\s<|>]+", "_", name)


def parse_header(sections: Iterable[tuple[str, str]]) -> HarmonyHeader:
    """Parses a header given as its control tokens, each with the text after it."""
    channel = recipient = None
    tokens, rest = [], []
    for token, text in sections:
        match = HEADER_WORDS[token].match(text)
        assert match, "every part of it is optional"
        *named, to = match.groups()
        channel = next(filter(None, named), channel)
        recipient = recipient or to
        tokens.append(token)
        rest.append(text[match.end() :])
    # OpenAI's parser rejects a content type without a recipient, which models write
    whole = tokens == [START, CHANNEL, CONSTRAIN] and not (to or any(rest))
    return HarmonyHeader(
        channel, recipient, "".join(rest), broken=not whole, has_type=CONSTRAIN in tokens
    )


ReadMessage = Callable[[Source], Steps[object]]
"""Reads the content of a message."""


class HarmonyMessageReader:
    """Decodes the content of one message, and reads it."""

    def __init__(self, parser: StreamableParser, read: ReadMessage, header: HarmonyHeader) -> None:
        self._parser = parser
        self._source = Source()
        self._steps = read(self._source)
        self._length = 0
        if header.rest:
            self._add(header.rest)

    @property
    def unread(self) -> str:
        return self._source.unread

    def feed(self, token: int) -> None:
        self._parser.process(token)
        if piece := self._parser.last_content_delta:
            self._length += len(piece)
            self._add(piece)

    def _add(self, piece: str) -> None:
        self._source.feed(piece)
        next(self._steps, None)

    def end(self, *, cut: bool) -> None:
        """Ends the message; `cut` if a limit ended the answer, not the model."""
        self._parser.process_eos()
        (message,) = self._parser.messages
        (content,) = message.content
        assert isinstance(content, TextContent)
        # Bytes that are no character are decoded only now. Those at the end begin one that was cut.
        self._source.feed(str(content.text)[self._length :].removesuffix("\ufffd"))
        self._source.close(cut=cut)
        next(self._steps, None)


def json_arguments(source: Source, calls: ToolCallEmitter, name: str) -> Steps[None]:
    if (yield from source.accept_spaced("{")):
        call = calls.start(name)
        yield from json_calls.read_json_arguments(source, lambda: call, ())
        yield from source.space()
        if (yield from source.peek()):
            raise Malformed("more than arguments")
        call.finish()
    elif (yield from source.peek()):
        raise Malformed("arguments should be an object")
    elif not source.cut:
        calls.start(name).finish()


def code(source: Source, calls: ToolCallEmitter, name: str) -> Steps[None]:
    """Reads a program, which is the `code` argument of the call."""
    call = calls.start(name)
    yield from source.up_to(into=lambda piece: call.text("code", piece))
    if not source.cut:
        call.end_text("code")
        call.finish()


log = logging.getLogger("mlx_server.parsers")

MESSAGE = "<|message|>"
ENDS = ("<|end|>", "<|call|>", "<|return|>", "<|endoftext|>")
FIRST_CONTROL = 199_998
"""The first id of the control tokens, most of which have no meaning."""

CHANNELS: dict[Phase, str] = {"commentary": "commentary", "final_answer": "final"}

FUNCTIONS = "functions."
PYTHON, BROWSER = "python", "browser"
BUILT_IN = re.compile(r"(python|browser|container)(\..*)?", re.DOTALL)
"""Matches recipients that the model knows from its training."""

NAMELESS = re.compile(r"assistant|(functions?|tools?)\.?")
"""Matches recipients that name no tool."""

FIELDS: dict[Section, str] = {"text": "content", "reasoning": "reasoning_content"}
"""The part of the answer that a section belongs to, as `Repaired.where` names it."""


def is_built_in(tool: Tool) -> bool:
    """Whether a tool is the `python` or `browser` that the model was trained with, and not a
    client's function of that name, which has parameters."""
    return tool.name in (PYTHON, BROWSER) and not lists_properties(tool.parameters)


def callable_tools(tools: Sequence[Tool]) -> list[Tool]:
    """Returns the tools as the model calls them: the browser is a namespace of several."""
    own = [tool for tool in tools if not (is_built_in(tool) and tool.name == BROWSER)]
    if len(own) == len(tools):
        return own
    return own + [
        Tool(f"{BROWSER}.{tool.name}", tool.description, tool.parameters or {})
        for tool in ToolNamespaceConfig.browser().tools
    ]


@lru_cache(maxsize=1)
def control_ids(encoding: HarmonyEncoding) -> dict[str, int]:
    names = (START, CHANNEL, CONSTRAIN, MESSAGE, *ENDS)
    # to look for further special tokens, it would compile an expression of all of them each time
    tokens = {
        name: encoding.encode(name, allowed_special={name}, disallowed_special=()) for name in names
    }
    return {name: ids[0] for name, ids in tokens.items()}


class HarmonyParser:
    def __init__(self, encoding: HarmonyEncoding, context: ParseContext) -> None:
        self.section: Section = "call"
        """Headers count as "call" too: they are neither text nor reasoning."""
        self._encoding = encoding
        self._ids = control_ids(encoding)
        self._names = {id: name for name, id in self._ids.items()}
        self._index = context.index
        self._events: list[Event] = []
        self._repairs: set[Repaired] = set()
        self._phase: Phase = "final_answer"
        self._texts, self._thoughts = PieceSeparator(by_line=True), PieceSeparator(by_line=True)
        self._opens_thought = {} if context.formatted else dict(USUAL_TAGS)
        tools = callable_tools(context.tools)
        self._python = any(is_built_in(tool) and tool.name == PYTHON for tool in tools)
        self._calls = ToolCallEmitter(
            context.index,
            tools,
            self._emit,
            allowed=context.repair,
            holds_calls=context.holds_calls,
        )
        makes = context.reads_misplaced_calls
        self._misplaced = partial(
            MisplacedCallReader, self._calls, tools, context.repair, makes=makes
        )
        self._line_end = ""
        """The last character of the text so far that is no white space."""
        self._answered = False
        """Whether the answer has had anything but reasoning and white space."""
        self._reasoned: list[str] = []
        """The reasoning of the most recent message that has any."""
        self._ends_reasoning = False
        """Whether the most recent message is reasoning."""
        self._begins_thought = False
        """Whether the next thought is the first of its message."""
        self._header: list[int] = []
        self._role: Role | None = Role.ASSISTANT
        """Role of the next message, unless its header has one."""
        self._message: HarmonyMessageReader | None = None
        self._continues_text = False
        if context.continues:
            self._continue(context.ends_with)

    def feed(self, token: int, text: str) -> list[Event]:
        if token >= FIRST_CONTROL:
            self._feed_control(token)
        elif self._message:
            self._message.feed(token)
        else:
            self._header.append(token)
            if self._is_too_long(self._header):
                self._begin_broken()
        return self._take_events()

    def _is_too_long(self, header: list[int]) -> bool:
        # up to three more tokens complete a character
        surplus = len(header) - limits.HARMONY_HEADER_TOKENS
        is_too_long = surplus > 0 and not self._encoding.decode(header[-4:]).endswith("\ufffd")
        return surplus > 3 or is_too_long

    def finish(self, *, cut: bool) -> list[Event]:
        self._end(cut=cut)
        if not cut:
            self._misplaced().emit(self._calls_in_reasoning(), "reasoning")
        return self._take_events()

    @property
    def is_unterminated(self) -> bool:
        return False  # the token that ends the answer ends the message too

    @property
    def unread(self) -> str:
        return self._message.unread if self._message else ""

    @property
    def awaits_answer(self) -> bool:
        return self._ends_reasoning and not self._calls_in_reasoning()

    def _calls_in_reasoning(self) -> list[FoundCall]:
        """Returns the calls that end an answer of reasoning alone: the model expects their
        results."""
        return [] if self._answered else self._misplaced().at_end_of("".join(self._reasoned))

    def _continue(self, header: str) -> None:
        """Opens the message that the prompt has begun."""
        self._continues_text = True
        for token in self._encoding.encode(header, allowed_special="all"):
            self.feed(token, "")
        self._continues_text = False

    def _take_events(self) -> list[Event]:
        events, self._events = self._events, []
        return events

    def _feed_control(self, token: int) -> None:
        match self._names.get(token):
            case "<|start|>":
                self._end()
                self._role = None
            case "<|channel|>":
                if self._message:
                    self._end()
                self._header.append(token)
            case "<|constrain|>" if not self._message:
                self._header.append(token)
            case "<|message|>" if not self._message:
                self._begin()
            case "<|end|>" | "<|call|>" | "<|return|>" | "<|endoftext|>":
                self._end()
            case _ if self._message and self.section in FIELDS:
                self._add_repair("unmarked", FIELDS[self.section])

    def _begin(self) -> None:
        if self._role is None and not self._begins_with_role():
            self._begin_broken()  # OpenAI's parser takes a header without a role for a tool's
            return
        parser = StreamableParser(self._encoding, self._role)
        start = [] if self._role else [self._ids[START]]
        try:
            for token in (*start, *self._header, self._ids[MESSAGE]):
                parser.process(token)
        except HarmonyError:
            self._begin_broken()
            return
        recipient = parser.current_recipient if parser.current_role == Role.ASSISTANT else None
        if recipient and "<|" in recipient:  # two headers without a message between them
            self._begin_broken()
        else:
            self._open(parser, HarmonyHeader(parser.current_channel, recipient))

    def _begins_with_role(self) -> bool:
        tokens = takewhile(lambda token: token not in self._names, self._header)
        return bool(self._encoding.decode(list(tokens)).strip())

    def _begin_broken(self) -> None:
        """Opens a plain message in place of one whose header OpenAI's parser can't read."""
        self._open_plain(self._parse_header())

    def _open_plain(self, header: HarmonyHeader) -> None:
        parser = StreamableParser(self._encoding, Role.ASSISTANT)
        parser.process(self._ids[MESSAGE])
        self._open(parser, header)

    def _open(self, parser: StreamableParser, header: HarmonyHeader) -> None:
        self._header, self._role = [], Role.ASSISTANT
        self._texts.interrupt()
        self._thoughts.interrupt()
        self.section, read = self._reader(header)
        self._ends_reasoning = self._begins_thought = self.section == "reasoning"
        self._message = HarmonyMessageReader(parser, read, header)

    def _end(self, *, cut: bool = False) -> None:
        if self._header:
            header = self._parse_header()
            # the last word of a header that was cut off may be incomplete
            if header.rest and not (cut and len(header.rest.split()) < 2):
                self._open_plain(replace(header, recipient=None, broken=True))
        self._header, self._role = [], Role.ASSISTANT
        if message := self._message:
            self._message = None
            message.end(cut=cut)
            self.section = "call"

    def _parse_header(self) -> HarmonyHeader:
        sections: list[tuple[str, list[int]]] = [(START, [])]
        for token in self._header:
            if token in self._names:
                sections.append((self._names[token], []))
            else:
                sections[-1][1].append(token)
        return parse_header((name, self._encoding.decode(tokens)) for name, tokens in sections)

    def _reader(self, header: HarmonyHeader) -> tuple[Section, ReadMessage]:
        """Returns the section of a message and the reader of its content. Unknown recipients are
        ignored."""
        name = header.recipient or ""
        self._phase = header.phase
        if self._calls.knows(name):
            # built-in tools are called within reasoning, so their calls are not misplaced
            self._calls.misplaced = () if BUILT_IN.fullmatch(name) else header.misplaced()
            return "call", partial(self._read_call, name=name)
        if BUILT_IN.fullmatch(name):
            # a call of a built-in tool that is not available: reported, but not as text
            log.info("the model called a built-in tool that the request does not have")
            return "reasoning", partial(self._read_built_in, name=name)
        is_nameless = bool(NAMELESS.fullmatch(name))
        if header.channel == "analysis" and not name.startswith(FUNCTIONS):
            if header.broken:
                self._add_repair("unmarked", "reasoning_content")
            self._reasoned = []
            may_be_nameless = is_nameless or header.has_type
            return "reasoning", self._read_nameless if may_be_nameless else self._read_reasoning
        if header.broken:
            self._add_repair("unmarked", "content")
        if self._continues_text:
            return "text", lambda source: source.up_to(into=self._emit_text)
        may_be_nameless = is_nameless or (header.channel == "commentary" and not name)
        return "text", partial(self._read_text, may_be_nameless=may_be_nameless)

    def _read_built_in(self, source: Source, name: str) -> Steps[None]:
        text, _ = yield from source.text_up_to()
        self._emit(BuiltInCall(self._index, name, text, is_whole=not source.cut))

    def _read_call(self, source: Source, name: str) -> Steps[None]:
        read = code if self._python and name == PYTHON else json_arguments
        source.keep()
        try:
            yield from read(source, self._calls, name)
            source.kept()
        except Malformed:
            yield from self._broken(source, name)
        self._calls.give_up()

    def _broken(self, source: Source, name: str) -> Steps[None]:
        """Repairs a malformed call once it is complete. If that fails it becomes text, unless the
        model was cut off within it."""
        pieces = [source.kept()]
        yield from source.up_to(into=pieces.append)
        if source.cut:
            return
        text = "".join(pieces)
        with suppress(Malformed):
            if repair := json_text(text):
                arguments = parsed(repair[0])
                if isinstance(arguments, dict):
                    self._calls.add_repaired([(name, arguments)], repair[1] or ("json",))
                    # text around the JSON of a call can only be reasoning
                    self._emit_reasoning(text_around_json(text))
                    return
        self._calls.give_up(broken=True)
        self._emit_text(text)

    def _read_nameless(self, source: Source) -> Steps[None]:
        """Reads reasoning that may be the arguments of a call whose tool was not named."""
        if not (yield from self._misplaced().read_nameless(source)):
            yield from self._read_reasoning(source)

    def _read_reasoning(self, source: Source) -> Steps[None]:
        yield from source.up_to(into=self._emit_reasoning)

    def _read_text(self, source: Source, *, may_be_nameless: bool) -> Steps[None]:
        """Reads a text, which may begin with a thought in tags or be a tool call without a header.

        may_be_nameless: the tool may be known by the arguments only."""
        before = yield from self._read_thoughts(source)
        calls = self._misplaced()
        if (yield from source.comes(*calls.beginnings)) and (yield from calls.read(source)):
            yield from source.space()
        elif may_be_nameless and (yield from calls.read_nameless(source)):
            return
        else:
            self._emit_text(before)
        while mark := (yield from source.up_to(*calls.in_text, into=self._emit_text)):
            if (yield from calls.read(source, mark, self._line_end)):
                self._texts.interrupt()
                yield from source.space()
            else:
                self._emit_text(mark)

    def _read_thoughts(self, source: Source) -> Steps[str]:
        """Reads thoughts in tags; returns the white space before the text."""
        space = yield from source.space()
        closes = self._opens_thought.values()
        while delimiter := (yield from source.accept(*self._opens_thought, *closes)):
            if delimiter in closes:
                self._add_repair("unmarked", "content")
            else:
                self._add_repair("reasoning", "content")
                self.section = "reasoning"
                self._thoughts.interrupt()
                closing = self._opens_thought[delimiter]
                yield from source.up_to(closing, into=self._emit_reasoning)
                self.section = "text"
            yield from source.space()
            space = ""
        return space

    def _emit_text(self, piece: str) -> None:
        if piece:
            separator = self._texts.before(piece)
            self._emit(TextDelta(self._index, piece, phase=self._phase, separator=separator))

    def _emit_reasoning(self, piece: str) -> None:
        if piece:
            self._reasoned.append(piece)
            begins, self._begins_thought = self._begins_thought and bool(self._thoughts.last), False
            separator = self._thoughts.before(piece)
            self._emit(ReasoningDelta(self._index, piece, separator, begins_message=begins))

    def _add_repair(self, what: RepairKind, where: str) -> None:
        repair = Repaired(self._index, what, where)
        if repair not in self._repairs:
            self._repairs.add(repair)
            self._emit(repair)

    def _emit(self, event: Event) -> None:
        match event:
            case TextDelta(_, text):
                self._line_end = text.rstrip()[-1:] or self._line_end
                self._answered = self._answered or not text.isspace()
            case ToolCallStarted() | BuiltInCall():
                self._answered = True
        self._events.append(event)
