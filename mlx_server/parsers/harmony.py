"""gpt-oss's answers: messages on channels, read from token ids by OpenAI's own parser.

Every message gets a `StreamableParser` of its own, so that a broken one spoils no other. It never
sees a control token where none belongs, since it would write it out: a message that the model
forgot to end or to begin is ended and begun here. Of a header that it can't read, what is no header
is text.
"""

import json
import logging
import re
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import lru_cache, partial
from typing import Any

from openai_harmony import (
    Author,
    HarmonyEncoding,
    HarmonyError,
    Role,
    StreamableParser,
    TextContent,
    ToolNamespaceConfig,
)
from openai_harmony import Message as HarmonyMessage

from mlx_server import limits
from mlx_server.events import BuiltInCall, Event, ReasoningDelta, Repaired, RepairKind, TextDelta
from mlx_server.messages import Phase, Tool
from mlx_server.parsers.harmony_header import CHANNEL, CONSTRAIN, START, HarmonyHeader, parse_header
from mlx_server.parsers.parse_context import ParseContext, Section
from mlx_server.repair.json_text import json_text, parsed, text_around_json
from mlx_server.repair.malformed import Malformed
from mlx_server.tool_parsers import values
from mlx_server.tool_parsers.calls import ToolCallEmitter
from mlx_server.tool_parsers.json_calls import call_object
from mlx_server.tool_parsers.source import Into, Source, Steps, complete_source
from mlx_server.tool_parsers.syntaxes import JSON

log = logging.getLogger("mlx_server.parsers")

MESSAGE = "<|message|>"
ENDS = ("<|end|>", "<|call|>", "<|return|>", "<|endoftext|>")
FIRST_CONTROL = 199_998
"""From here on all ids are control tokens, most of them without a meaning."""


THINK, THINK_END = "<think>", "</think>"

CHANNELS: dict[Phase, str] = {"commentary": "commentary", "final_answer": "final"}

FUNCTIONS = "functions."
PYTHON, BROWSER = "python", "browser"
BUILT_IN = re.compile(r"(python|browser|container)(\..*)?", re.DOTALL)
"""Recipients that the model knows from its training."""

FIELDS: dict[Section, str] = {"text": "content", "reasoning": "reasoning_content"}
"""Of the answer, as `Repaired` names them."""


def is_built_in(tool: Tool) -> bool:
    """`python` and `browser` by their bare names are the tools that the model was trained with;
    a tool with parameters of its own is somebody's function."""
    return tool.name in (PYTHON, BROWSER) and not tool.parameters.get("properties")


def callable_tools(tools: Sequence[Tool]) -> list[Tool]:
    """As the model calls them: the browser is a namespace."""
    own = [tool for tool in tools if not (is_built_in(tool) and tool.name == BROWSER)]
    if len(own) == len(tools):
        return own
    return own + [
        Tool(f"{BROWSER}.{tool.name}", tool.description, tool.parameters or {})
        for tool in ToolNamespaceConfig.browser().tools
    ]


def message_json(message: HarmonyMessage) -> dict[str, Any]:
    """As JSON, which has no enumerations."""
    found: dict[str, Any] = json.loads(message.to_json())
    return found


@lru_cache(maxsize=1)
def control_ids(encoding: HarmonyEncoding) -> dict[str, int]:
    names = (START, CHANNEL, CONSTRAIN, MESSAGE, *ENDS)
    return {name: encoding.encode(name, allowed_special={name})[0] for name in names}


class HarmonyParser:
    def __init__(self, encoding: HarmonyEncoding, context: ParseContext) -> None:
        self.section: Section = "call"
        """Headers too: nobody counts or sees them."""
        self.awaits_answer = False
        self._encoding = encoding
        self._ids = control_ids(encoding)
        self._names = {id: name for name, id in self._ids.items()}
        self._index = context.index
        self._events: list[Event] = []
        self._repairs: set[Repaired] = set()
        self._phase: Phase = "final_answer"
        tools = callable_tools(context.tools)
        self._python = any(is_built_in(tool) and tool.name == PYTHON for tool in tools)
        make_calls = partial(ToolCallEmitter, context.index, tools, allowed=context.repair)
        self._calls = make_calls(emit=self._emit)
        self._trial = make_calls(emit=lambda event: None)
        """Tells whether a text is a call, and nobody of it."""
        self._may_call = bool(tools) and not context.formatted
        self._has_reasoned = False
        self._is_intended = False
        """Whether the text that comes is for the user, whatever it looks like."""
        self._header: list[int] = []
        self._role: Role | None = Role.ASSISTANT
        """Of the next message, where no header will say it."""
        self._message: HarmonyMessageReader | None = None
        self._messages: list[HarmonyMessageReader] = []

    def feed(self, token: int, text: str) -> list[Event]:
        if token >= FIRST_CONTROL:
            self._mark(token)
        elif self._message:
            self._message.feed(token)
        else:
            self._header.append(token)
            if len(self._header) > limits.HARMONY_HEADER_TOKENS.value:
                self._begin_broken()
        return self._take_events()

    def finish(self, text: str, *, cut: bool) -> list[Event]:
        self._end(cut=cut)
        return self._take_events()

    def messages(self) -> Sequence[Mapping[str, Any]]:
        return [message.as_json() for message in self._messages]

    def _take_events(self) -> list[Event]:
        events, self._events = self._events, []
        return events

    def _mark(self, token: int) -> None:
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
        parser = StreamableParser(self._encoding, self._role)
        start = [] if self._role else [self._ids[START]]
        try:
            for token in (*start, *self._header, self._ids[MESSAGE]):
                parser.process(token)
        except HarmonyError:
            self._begin_broken()
            return
        recipient = parser.current_recipient if parser.current_role == Role.ASSISTANT else None
        if recipient and "<|" in recipient:  # two headers ran into each other
            self._begin_broken()
        else:
            self._open(parser, HarmonyHeader(parser.current_channel, recipient))

    def _begin_broken(self) -> None:
        """A message whose header makes no sense to OpenAI's parser: a plain one in its place."""
        self._open_plain(self._parse_header())

    def _open_plain(self, header: HarmonyHeader) -> None:
        parser = StreamableParser(self._encoding, Role.ASSISTANT)
        parser.process(self._ids[MESSAGE])
        self._open(parser, header)

    def _open(self, parser: StreamableParser, header: HarmonyHeader) -> None:
        self._header, self._role = [], Role.ASSISTANT
        self.section, sink = self._sink(header)
        self.awaits_answer = self.section == "reasoning"
        self._message = HarmonyMessageReader(parser, sink, header)
        self._messages.append(self._message)

    def _end(self, *, cut: bool = False) -> None:
        if self._header:
            header = self._parse_header()
            # the last word of a header that was cut off may be half of anything
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
        return parse_header((mark, self._encoding.decode(tokens)) for mark, tokens in sections)

    def _sink(self, header: HarmonyHeader) -> "tuple[Section, Sink]":
        """Where the content of a message goes. Recipients that are no tools mean nothing."""
        name = header.recipient or ""
        self._phase = header.phase
        if self._calls.knows(name):
            # those that the model was trained with belong to its reasoning
            self._calls.misplaced = () if BUILT_IN.fullmatch(name) else header.misplaced()
            return "call", ReadSink(lambda source: self._read_call(source, name))
        if BUILT_IN.fullmatch(name):
            # meant for a part of OpenAI's own machinery, and no more for the user than reasoning
            log.info("the model called a tool that was not offered")
            return "reasoning", BuiltInSink(self._index, name, self._emit)
        if header.channel == "analysis" and not name.startswith(FUNCTIONS):
            if header.broken:
                self._add_repair("unmarked", "reasoning_content")
            return "reasoning", Sink(self._emit_reasoning)
        if header.broken:
            self._add_repair("unmarked", "content")
        # who has thought, and then says it to the user, means it as it stands
        self._is_intended = header.channel == "final" and self._has_reasoned
        return "text", ReadSink(self._read_text)

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
        """Repairs what can be once all of it has come. What can't be is text, unless the model
        had no time to end it."""
        pieces = [source.kept()]
        yield from source.up_to(into=pieces.append)
        if source.cut:
            return
        text = "".join(pieces)
        with suppress(Malformed):
            if found := json_text(text):
                arguments = parsed(found[0])
                if isinstance(arguments, dict):
                    self._calls.add_repaired([(name, arguments)], found[1] or ("json",))
                    self._emit_reasoning(
                        text_around_json(text)
                    )  # thinking: nothing else has a place there
                    return
        self._emit_text(text)

    def _read_text(self, source: Source) -> Steps[None]:
        """It may begin with thinking as other families mark it, and be a call without a header."""
        before = yield from source.space()
        if mark := (yield from source.accept(THINK, THINK_END)):
            if mark == THINK:
                self._add_repair("reasoning", "content")
                self.section = "reasoning"
                yield from source.up_to(THINK_END, into=self._emit_reasoning)
                self.section = "text"
            else:
                self._add_repair("unmarked", "content")
            yield from source.space()
            before = ""
        source.keep(before)
        may_call = self._may_call and not self._is_intended
        if may_call and (yield from self._is_call(source)):
            self._calls.misplaced = ("unmarked",)
            yield from call_object(complete_source(source.kept().partition("{")[2]), self._calls)
        else:
            self._emit_text(source.kept())
            yield from source.up_to(into=self._emit_text)

    def _is_call(self, source: Source) -> Steps[bool]:
        """Whether all that is left is one. Reads only as far as it may be."""
        if not (yield from source.accept("{")):
            return False
        try:
            yield from call_object(source, self._trial)
        except Malformed:
            return False
        yield from source.space()
        return (yield from source.at_end()) and not source.cut

    def _emit_text(self, piece: str) -> None:
        if piece:
            self._emit(TextDelta(self._index, piece, phase=self._phase))

    def _emit_reasoning(self, piece: str) -> None:
        if piece:
            self._has_reasoned = True
            self._emit(ReasoningDelta(self._index, piece))

    def _add_repair(self, what: RepairKind, where: str) -> None:
        repair = Repaired(self._index, what, where)
        if repair not in self._repairs:
            self._repairs.add(repair)
            self._emit(repair)

    def _emit(self, event: Event) -> None:
        self._events.append(event)


class Sink:
    def __init__(self, into: Into) -> None:
        self.into = into

    def end(self, *, cut: bool) -> None:
        """The message is over; cut: the answer was ended from outside."""


class ReadSink(Sink):
    def __init__(self, read: Callable[[Source], Steps[None]]) -> None:
        self._source = Source()
        self._steps = read(self._source)
        super().__init__(self._feed)

    def _feed(self, piece: str) -> None:
        self._source.feed(piece)
        next(self._steps, None)

    def end(self, *, cut: bool) -> None:
        self._source.close(cut=cut)
        next(self._steps, None)


class BuiltInSink(Sink):
    def __init__(self, index: int, tool: str, emit: Callable[[Event], None]) -> None:
        self._index, self._tool, self._emit = index, tool, emit
        self._pieces: list[str] = []
        super().__init__(self._pieces.append)

    def end(self, *, cut: bool) -> None:
        text = "".join(self._pieces)
        self._emit(BuiltInCall(self._index, self._tool, text, is_whole=not cut))


class HarmonyMessageReader:
    """The content of one message, from tokens to text."""

    def __init__(self, parser: StreamableParser, sink: Sink, header: HarmonyHeader) -> None:
        self._parser = parser
        self._sink = sink
        self._header = header
        self._length = 0
        self._pieces: list[str] = []
        self._read = HarmonyMessage(
            author=Author(role=parser.current_role or Role.ASSISTANT),
            channel=parser.current_channel,
            recipient=parser.current_recipient,
            content_type=parser.current_content_type,
        )
        """But for its content."""
        if header.rest:
            self._forward(header.rest)

    def feed(self, token: int) -> None:
        self._parser.process(token)
        if piece := self._parser.last_content_delta:
            self._length += len(piece)
            self._forward(piece)

    def end(self, *, cut: bool) -> None:
        self._parser.process_eos()
        (self._read,) = self._parser.messages
        (content,) = self._read.content
        assert isinstance(content, TextContent)
        # bytes of a character that never became whole come only now
        if rest := str(content.text)[self._length :]:
            self._forward(rest)
        self._sink.end(cut=cut)

    def as_json(self) -> dict[str, Any]:
        """As far as it has come, with what OpenAI's parser could not read in its header."""
        message = self._read.model_copy()
        message.channel = message.channel or self._header.channel
        message.recipient = message.recipient or self._header.recipient
        message.content = [TextContent(text="".join(self._pieces))]
        return message_json(message)

    def _forward(self, piece: str) -> None:
        self._pieces.append(piece)
        self._sink.into(piece)


def json_arguments(source: Source, calls: ToolCallEmitter, name: str) -> Steps[None]:
    yield from source.space()
    if (yield from source.accept("{")):
        call = calls.start(name)
        yield from values.arguments(source, JSON, lambda: call)
        yield from source.space()
        if (yield from source.peek()):
            raise Malformed("more than arguments")
        if not source.cut:
            call.finish()
    elif (yield from source.peek()):
        raise Malformed("arguments should be an object")
    elif not source.cut:
        calls.start(name).finish()


def code(source: Source, calls: ToolCallEmitter, name: str) -> Steps[None]:
    """The program as it stands."""
    call = calls.start(name)
    yield from source.up_to(into=lambda piece: call.text("code", piece))
    if not source.cut:
        call.end_text("code")
        call.finish()
