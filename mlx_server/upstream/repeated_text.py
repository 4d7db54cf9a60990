"""Removes text, thoughts and calls that an upstream sends twice.

Text may be repeated in each piece or in the last one; thoughts and calls may come both in the text
and in separate fields.
"""

import json
from collections import Counter, deque
from dataclasses import replace

from mlx_server.events import Event, ToolCallDelta, ToolCallFinished, ToolCallStarted
from mlx_server.upstream.pieces import AnswerPiece, GrowingText

CERTAIN = 8
"""The characters that a third piece must have to show that each piece repeats those before it."""

SHORTEST = 3
"""The fewest characters of a repetition. Shorter texts often occur twice by chance."""


class Repeats:
    """Removes from an answer's pieces the text and reasoning that earlier pieces had."""

    def __init__(self) -> None:
        self._text, self._reasoning = RepeatedText(), RepeatedText()

    @property
    def places(self) -> tuple[str, ...]:
        """The fields in which repetitions were removed, for the report."""
        if not (self._text.repeats or self._reasoning.repeats):
            return ()
        found = {"content": self._text, "reasoning_content": self._reasoning}
        return tuple(place for place, text in found.items() if text.repeats)

    def rest(self) -> AnswerPiece:
        """The held text and reasoning, to be called at the end of the answer."""
        return AnswerPiece(text=self._text.rest(), reasoning=self._reasoning.rest())

    def without(self, piece: AnswerPiece) -> AnswerPiece:
        ends = piece.finish is not None
        reasoning = self._reasoning.new_in(piece.reasoning, is_last=ends or bool(piece.text))
        text = self._text.new_in(piece.text, is_last=ends)
        if text == piece.text and reasoning == piece.reasoning:  # the usual case
            return piece
        return replace(piece, text=text, reasoning=reasoning)


class RepeatedText:
    """Finds what is new in each piece of a text.

    A second piece that begins with the first one may continue it ("1", "10") or repeat it ("I",
    "I am"), so it is held until the third piece shows which. In nearly all answers the second piece
    begins differently, and nothing is held.
    """

    def __init__(self) -> None:
        self.repeats = False
        """Whether a repetition was removed."""
        self._sent = GrowingText()
        """The text that was returned."""
        self._count = 0
        """The number of its pieces."""
        self._last = ""
        """The last piece, with its repetitions."""
        self._held = ""
        self._is_cumulative: bool | None = None

    def new_in(self, piece: str, *, is_last: bool = False) -> str:
        """The new text of a piece. is_last: whether the answer ends with it."""
        if not piece:
            return self.rest() if is_last else ""
        found = self._new_in(piece, is_last=is_last)
        self._last = piece
        self._add(found)
        return found + self.rest() if is_last else found

    def rest(self) -> str:
        """The new text of a held piece, to be called at the end of the text."""
        held, self._held = self._held, ""
        if not held:
            return ""
        found = self._beyond(held) if self._sent.size >= SHORTEST else held
        self._add(found)
        return found

    def _add(self, text: str) -> None:
        self._sent.add(text)
        self._count += bool(text)

    def _new_in(self, piece: str, *, is_last: bool) -> str:
        if self._is_cumulative:
            return self._grown(piece)
        if self._held:
            return self._decided(piece)
        if is_last and self._count > 1 and self._is_all(piece):
            self.repeats = True
            return ""
        if self._is_cumulative is None and self._count:
            if len(piece) > len(self._last) and piece.startswith(self._last):
                self._held = piece
                return ""
            self._is_cumulative = False
        return piece

    def _decided(self, piece: str) -> str:
        """The new text of a piece that follows a held one, and of the held one."""
        held, self._held = self._held, ""
        grows = len(piece) >= CERTAIN and piece.startswith(held) and len(set(piece)) > 2
        self._is_cumulative = grows
        return self._beyond(piece) if grows else held + piece

    def _grown(self, piece: str) -> str:
        if piece.startswith(self._last) or self._last.startswith(piece):
            return self._beyond(piece)
        self._is_cumulative = False  # the pieces before were alike by chance
        return piece

    def _beyond(self, piece: str) -> str:
        self.repeats = True
        return piece[self._sent.size :]

    def _is_all(self, piece: str) -> bool:
        return len(piece) == self._sent.size >= SHORTEST and self._sent.begins(piece)


class EchoedThoughts:
    """Recognises thoughts in a text that have also come in the reasoning field.

    Whitespace is ignored, since most servers change it.
    """

    def __init__(self) -> None:
        self._ahead: deque[str] = deque()
        """Thoughts of the reasoning field that the text has not repeated yet."""
        self._read = 0
        """The number of characters of the first of them that the text has repeated."""
        self._may_be = True
        """Whether all thoughts in the text so far were repetitions."""

    def add(self, thoughts: str) -> None:
        """Records thoughts of the reasoning field."""
        if self._may_be and (compact := "".join(thoughts.split())):
            self._ahead.append(compact)

    def repeats(self, thoughts: str) -> bool:
        """Whether these thoughts in the text repeat the next ones of the reasoning field."""
        text, at = "".join(thoughts.split()), 0
        while self._may_be and at < len(text):
            head = self._ahead[0] if self._ahead else ""
            size = min(len(head) - self._read, len(text) - at)
            self._may_be = size > 0 and head.startswith(text[at : at + size], self._read)
            at += size
            self._read += size
            if self._ahead and self._read == len(head):
                self._ahead.popleft()
                self._read = 0
        if not self._may_be:
            self._ahead.clear()
        return self._may_be


class EchoedCalls:
    """Recognises structured calls that were also in the text or in the thoughts."""

    def __init__(self) -> None:
        self._made: dict[tuple[str, int], tuple[str, list[str]]] = {}
        """The names and arguments of the calls, by their source and number within it."""
        self._left: Counter[tuple[str, str]] | None = None

    def add(self, source: str, event: ToolCallStarted | ToolCallDelta) -> None:
        match event:
            case ToolCallStarted(call=call, name=name):
                self._made[source, call] = (name, [])
            case ToolCallDelta(call=call, arguments=arguments) if (source, call) in self._made:
                self._made[source, call][1].append(arguments)

    def new_in(self, events: list[Event]) -> list[Event]:
        """The events without those of calls that were in the text or the thoughts. Each call there
        removes only one structured call."""
        if not self._made:
            return events
        if self._left is None:
            self._left = Counter(self._calls().values())
        own, again = EchoedCalls(), set[int]()
        for event in events:
            if isinstance(event, ToolCallStarted | ToolCallDelta):
                own.add("", event)
        for (_, call), written in own._calls().items():
            if self._left[written]:
                self._left[written] -= 1
                again.add(call)
        kinds = ToolCallStarted | ToolCallDelta | ToolCallFinished
        return [e for e in events if not (isinstance(e, kinds) and e.call in again)]

    def _calls(self) -> dict[tuple[str, int], tuple[str, str]]:
        return {key: _same(name, "".join(parts)) for key, (name, parts) in self._made.items()}


def _same(name: str, arguments: str) -> tuple[str, str]:
    """The call's name and its arguments in a canonical form, which is equal for equal calls."""
    try:
        return name, json.dumps(json.loads(arguments), sort_keys=True)
    except (ValueError, RecursionError):
        return name, arguments


def new_part(text: str, came: GrowingText) -> str:
    """The part of a text after what came before; empty if the text does not begin with that."""
    return text[came.size :] if came.begins(text) else ""
