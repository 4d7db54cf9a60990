"""Collects the events of one answer, and its text and reasoning so far."""

from mlx_server.events import (
    Event,
    ReasoningDelta,
    Repaired,
    RepairKind,
    TextDelta,
    ToolCallFinished,
    ToolCallStarted,
)
from mlx_server.parsers.code_fence import CodeFence
from mlx_server.parsers.markup.layout import MarkupLayout
from mlx_server.parsers.whitespace import PieceSeparator, WhitespaceTrimmer

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
