"""Parses Harmony that came as text: from a server that shows its control tokens, or drops them.

Some servers pass gpt-oss's output on as it is (`<|channel|>analysis<|message|>...`), others without
its control tokens (`analysis...assistantfinal...`). Either is turned back into Harmony's tokens,
which HarmonyParser reads. Text that begins as neither is an answer.
"""

import re
from collections.abc import Sequence
from functools import cache, partial

from openai_harmony import HarmonyEncoding

from mlx_server.events import Event
from mlx_server.parsers.harmony_parser import (
    CHANNEL,
    CONSTRAIN,
    FUNCTIONS,
    START,
    HarmonyParser,
    control_ids,
)
from mlx_server.parsers.parse_context import DelegatingParser, ParseContext
from mlx_server.tool_parsers.source import Source, Steps

DELIMITERS = (
    *(START, CHANNEL, CONSTRAIN, "<|message|>"),
    *("<|end|>", "<|call|>", "<|return|>", "<|endoftext|>"),
)
CHANNELS = ("analysis", "commentary", "final")
ROLE = "assistant"
HEADS = tuple(f"{ROLE}{channel}" for channel in CHANNELS)
"""Ways in which one message ends and the next begins, without control tokens."""

HEADER = re.compile(r"[\w .:=/-]*<\|(channel|message|constrain|start)\|>")
"""Matches a header whose first control token is missing."""
LONGEST_HEADER = 120
LONGEST_DELIMITER = max(map(len, DELIMITERS))
BEGINNING = re.compile(
    r"assistant(analysis|commentary|final)|(analysis|commentary)([^\s:]| to=)|final[^a-z\s:]"
)
"""Matches a message without control tokens: its text follows the channel's name at once. A colon
follows where the name is a heading of the answer."""
RECIPIENT = re.compile(r"[\w.:/-]+")
TYPES = ("json", "code")


class HarmonyTextParser(DelegatingParser):
    def __init__(self, encoding: HarmonyEncoding, context: ParseContext) -> None:
        super().__init__(HarmonyParser(encoding, context))
        self._encoding = encoding
        self._control = context.control
        self._tokens_of = cache(partial(_tokens, encoding))
        self._names = [tool.name for tool in context.tools]
        self._source = Source()
        self._events: list[Event] = []
        self._steps = self._answer()
        next(self._steps, None)

    @property
    def unread(self) -> str:
        return super().unread + self._source.unread

    def feed(self, token: int, text: str) -> list[Event]:
        self._source.feed(text or self._control.get(token, ""))
        return self._advance()

    def finish(self, *, cut: bool) -> list[Event]:
        self._source.close(cut=cut)
        return self._advance() + self._parser.finish(cut=cut)

    def _advance(self) -> list[Event]:
        next(self._steps, None)
        events, self._events = self._events, []
        return events

    def _answer(self) -> Steps[None]:
        space = yield from self._source.space()
        head = yield from self._source.after_space(*DELIMITERS, *HEADS, *CHANNELS, ROLE, "to=")
        if head and head not in DELIMITERS:
            size = len(head) + LONGEST_DELIMITER
            yield from self._source.until(size)
            if "to=" in self._source.ahead()[:size]:
                size = LONGEST_HEADER
                yield from self._source.until(size)
            ahead = self._source.ahead()[:size]
            if not HEADER.match(ahead):
                head = ""
                if BEGINNING.match(ahead):
                    yield from self._without_control_tokens()
                    return
            elif head in CHANNELS:
                self._feed_control(CHANNEL)
        if not head:
            self._open("final")
            self._feed_text(space)
        yield from self._with_control_tokens()

    def _with_control_tokens(self) -> Steps[None]:
        while delimiter := (yield from self._source.up_to(*DELIMITERS, into=self._feed_text)):
            self._feed_control(delimiter)
            yield from self._source.accept(" ")  # LLM-jp-4 writes one after each control token

    def _without_control_tokens(self) -> Steps[None]:
        head = yield from self._source.expect(*HEADS, *CHANNELS)
        while head:
            recipient = yield from self._recipient()
            self._open(head.removeprefix(ROLE) + recipient)
            head = yield from self._source.up_to(*HEADS, *DELIMITERS, into=self._feed_text)
            if head in DELIMITERS:  # it has control tokens after all
                self._feed_control(head)
                yield from self._with_control_tokens()
                return
            if head:
                self._feed_control("<|end|>")
                self._feed_control(START)
                self._feed_text(ROLE)

    def _recipient(self) -> Steps[str]:
        """Reads the recipient of a message and its content type; returns it as a header has it."""
        if not (yield from self._source.accept(" to=", "to=")):
            return ""
        name = yield from self._source.run(RECIPIENT)
        yield from self._source.space()
        name = self._without_type(name)
        yield from self._source.accept(*TYPES)
        return f" to={name}"

    def _without_type(self, recipient: str) -> str:
        """Takes the content type off that may follow a tool's name without a space."""
        name = recipient.removeprefix(FUNCTIONS)
        if name not in self._names:
            for type in TYPES:
                if name.endswith(type) and name.removesuffix(type) in self._names:
                    return recipient.removesuffix(type)
        return recipient

    def _open(self, header: str) -> None:
        self._feed_control(CHANNEL)
        self._feed_text(header)
        self._feed_control("<|message|>")

    def _feed_control(self, delimiter: str) -> None:
        self._events += self._parser.feed(control_ids(self._encoding)[delimiter], "")

    def _feed_text(self, piece: str) -> None:
        for character in piece:
            for token in self._tokens_of(character):
                self._events += self._parser.feed(token, "")


def _tokens(encoding: HarmonyEncoding, character: str) -> Sequence[int]:
    """Returns a character's tokens. Each is encoded by itself, so that it does not matter how the
    text is cut."""
    written = character.encode("utf-8", "replace").decode()
    ids: list[int] = encoding.encode(written, disallowed_special=())
    return ids
