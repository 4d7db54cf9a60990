"""Parses gpt-oss's answers: messages on channels, read from token ids by OpenAI's own parser.

Every message gets a `StreamableParser` of its own, so that a broken one does not affect others. It
gets no misplaced control tokens, since it would output them as text: messages that the model failed
to end or to start are ended and started here. In a header that it can't read, the words that belong
to no header are text.
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
"""The first id of the control tokens, most of which have no meaning."""


THINK, THINK_END = "<think>", "</think>"

CHANNELS: dict[Phase, str] = {"commentary": "commentary", "final_answer": "final"}

FUNCTIONS = "functions."
PYTHON, BROWSER = "python", "browser"
BUILT_IN = re.compile(r"(python|browser|container)(\..*)?", re.DOTALL)
"""Matches recipients that the model knows from its training."""

FIELDS: dict[Section, str] = {"text": "content", "reasoning": "reasoning_content"}
"""The part of the answer that a section belongs to, as `Repaired.where` names it."""


def is_built_in(tool: Tool) -> bool:
    """Whether a tool is the `python` or `browser` that the model was trained with, and not a
    client's function of that name, which has parameters."""
    return tool.name in (PYTHON, BROWSER) and not tool.parameters.get("properties")


def callable_tools(tools: Sequence[Tool]) -> list[Tool]:
    """The tools as the model calls them: the browser is a namespace of several."""
    own = [tool for tool in tools if not (is_built_in(tool) and tool.name == BROWSER)]
    if len(own) == len(tools):
        return own
    return own + [
        Tool(f"{BROWSER}.{tool.name}", tool.description, tool.parameters or {})
        for tool in ToolNamespaceConfig.browser().tools
    ]


def message_json(message: HarmonyMessage) -> dict[str, Any]:
    """The message as JSON values, without enumerations."""
    found: dict[str, Any] = json.loads(message.to_json())
    return found


@lru_cache(maxsize=1)
def control_ids(encoding: HarmonyEncoding) -> dict[str, int]:
    names = (START, CHANNEL, CONSTRAIN, MESSAGE, *ENDS)
    return {name: encoding.encode(name, allowed_special={name})[0] for name in names}


class HarmonyParser:
    def __init__(self, encoding: HarmonyEncoding, context: ParseContext) -> None:
        self.section: Section = "call"
        """Headers count as "call" too: they are neither text nor reasoning."""
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
        """Parses a text to test whether it is a call, without any events."""
        self._may_call = bool(tools) and not context.formatted
        self._has_reasoned = False
        self._is_intended = False
        """Whether the current text is for the user even if it looks like a call."""
        self._header: list[int] = []
        self._role: Role | None = Role.ASSISTANT
        """Role of the next message, unless its header has one."""
        self._message: HarmonyMessageReader | None = None
        self._messages: list[HarmonyMessageReader] = []

    def feed(self, token: int, text: str) -> list[Event]:
        if token >= FIRST_CONTROL:
            self._feed_control(token)
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

    def _begin_broken(self) -> None:
        """Open a plain message in place of one whose header OpenAI's parser can't read."""
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

    def _sink(self, header: HarmonyHeader) -> "tuple[Section, Sink]":
        """The section of a message and the sink of its content. Unknown recipients are ignored."""
        name = header.recipient or ""
        self._phase = header.phase
        if self._calls.knows(name):
            # built-in tools are called within reasoning, so their calls are not misplaced
            self._calls.misplaced = () if BUILT_IN.fullmatch(name) else header.misplaced()
            return "call", ReadSink(lambda source: self._read_call(source, name))
        if BUILT_IN.fullmatch(name):
            # a call of a built-in tool that is not available: reported, but not as text
            log.info("the model called a built-in tool that the request does not have")
            return "reasoning", BuiltInSink(self._index, name, self._emit)
        if header.channel == "analysis" and not name.startswith(FUNCTIONS):
            if header.broken:
                self._add_repair("unmarked", "reasoning_content")
            return "reasoning", Sink(self._emit_reasoning)
        if header.broken:
            self._add_repair("unmarked", "content")
        # a final message after reasoning is meant as text, even if it looks like a call
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
        """Repair a malformed call once it is complete. If that fails it becomes text, unless the
        model was cut off within it."""
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
                    # text around the JSON of a call can only be reasoning
                    self._emit_reasoning(text_around_json(text))
                    return
        self._emit_text(text)

    def _read_text(self, source: Source) -> Steps[None]:
        """Read a text, which may begin with `<think>` or be a tool call without a header."""
        before = yield from source.space()
        if delimiter := (yield from source.accept(THINK, THINK_END)):
            if delimiter == THINK:
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
        """Whether the rest of the text is a call. Reads only as long as it may be one."""
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
        """End the message; `cut` if a limit ended the answer, not the model."""


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
    """Decodes the content of one message and feeds it to a sink."""

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
        """The message as parsed so far, without its content."""
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
        # bytes of an incomplete character are decoded only now
        if rest := str(content.text)[self._length :]:
            self._forward(rest)
        self._sink.end(cut=cut)

    def as_json(self) -> dict[str, Any]:
        """The message so far, completed by what OpenAI's parser could not read in its header."""
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
    """Read a program, which is the `code` argument of the call."""
    call = calls.start(name)
    yield from source.up_to(into=lambda piece: call.text("code", piece))
    if not source.cut:
        call.end_text("code")
        call.finish()
