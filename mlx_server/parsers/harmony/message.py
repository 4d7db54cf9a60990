"""Collects one message of a Harmony answer, and makes the events of its end."""

import json
from collections.abc import Callable
from typing import Any

from openai_harmony import Author, Role, StreamableParser, TextContent
from openai_harmony import Message as HarmonyMessage

from mlx_server.events import BuiltInCall, Event
from mlx_server.parsers.harmony.header import HarmonyHeader
from mlx_server.repair.model_json import Malformed
from mlx_server.tool_parsers import values
from mlx_server.tool_parsers.calls import ToolCallEmitter
from mlx_server.tool_parsers.source import Into, Source, Steps
from mlx_server.tool_parsers.syntaxes import JSON


class Sink:
    def __init__(self, into: Into) -> None:
        self.into = into

    def end(self, *, cut: bool) -> None:
        """Ends the message; `cut` if a limit ended the answer, not the model."""


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
        # Bytes that are no character are decoded only now. Those at the end begin one that was cut.
        if rest := str(content.text)[self._length :].removesuffix("\ufffd"):
            self._forward(rest)
        self._sink.end(cut=cut)

    def as_json(self) -> dict[str, Any]:
        """Returns the message so far, completed by what OpenAI's parser could not read in its
        header."""
        message = self._read.model_copy()
        message.channel = message.channel or self._header.channel
        message.recipient = message.recipient or self._header.recipient
        message.content = [TextContent(text="".join(self._pieces))]
        return message_json(message)

    def _forward(self, piece: str) -> None:
        self._pieces.append(piece)
        self._sink.into(piece)


def message_json(message: HarmonyMessage) -> dict[str, Any]:
    """Returns the message as JSON values, without enumerations."""
    found: dict[str, Any] = json.loads(message.to_json())
    return found


def json_arguments(source: Source, calls: ToolCallEmitter, name: str) -> Steps[None]:
    yield from source.space()
    if (yield from source.accept("{")):
        call = calls.start(name)
        yield from values.arguments(source, JSON, lambda: call)
        yield from source.space()
        while (yield from source.accept("}")):  # a surplus bracket
            call.repaired()
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
