"""Text that an upstream sends again: all of it so far in each piece, or all of it at the end."""

from dataclasses import replace

from mlx_server.upstream.pieces import AnswerPiece

CERTAIN = 8
"""Characters of a third piece that show by themselves that each piece repeats those before it."""

SHORTEST = 3
"""A text with fewer characters may well be said twice."""


class Repeats:
    """Leaves out of an answer's pieces what came before."""

    def __init__(self) -> None:
        self._text, self._reasoning = RepeatedText(), RepeatedText()

    @property
    def places(self) -> tuple[str, ...]:
        """Where something was left out."""
        if not (self._text.repeats or self._reasoning.repeats):
            return ()
        found = {"content": self._text, "reasoning_content": self._reasoning}
        return tuple(place for place, text in found.items() if text.repeats)

    def rest(self) -> AnswerPiece:
        """What is held, at the end of the answer."""
        return AnswerPiece(text=self._text.rest(), reasoning=self._reasoning.rest())

    def without(self, piece: AnswerPiece) -> AnswerPiece:
        ends = piece.finish is not None
        reasoning = self._reasoning.new_in(piece.reasoning, is_last=ends or bool(piece.text))
        text = self._text.new_in(piece.text, is_last=ends)
        if text == piece.text and reasoning == piece.reasoning:  # as nearly always
            return piece
        return replace(piece, text=text, reasoning=reasoning)


class RepeatedText:
    """Passes on what is new in each piece of a text.

    A second piece that begins with the first one may be its continuation ("1", "10") or repeat it
    ("I", "I am"): it is held until the third one shows which. Pieces of nearly all answers differ
    from the second one on, so that nothing is held.
    """

    def __init__(self) -> None:
        self.repeats = False
        """Whether something was left out."""
        self._sent: list[str] = []
        self._size = 0
        """Characters of what was sent."""
        self._last = ""
        """The piece before, as it came."""
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
        """The piece that is held, at the end of the text."""
        held, self._held = self._held, ""
        if not held:
            return ""
        found = self._beyond(held) if self._size >= SHORTEST else held
        self._add(found)
        return found

    def _add(self, text: str) -> None:
        if text:
            self._sent.append(text)
            self._size += len(text)

    def _new_in(self, piece: str, *, is_last: bool) -> str:
        if self._is_cumulative:
            return self._grown(piece)
        if self._held:
            return self._decided(piece)
        if is_last and len(self._sent) > 1 and self._is_all(piece):
            self.repeats = True
            return ""
        if self._is_cumulative is None and self._sent:
            if len(piece) > len(self._last) and piece.startswith(self._last):
                self._held = piece
                return ""
            self._is_cumulative = False
        return piece

    def _decided(self, piece: str) -> str:
        """What is new after a piece that was held."""
        held, self._held = self._held, ""
        grows = len(piece) >= CERTAIN and piece.startswith(held) and len(set(piece)) > 2
        self._is_cumulative = grows
        return self._beyond(piece) if grows else held + piece

    def _grown(self, piece: str) -> str:
        if piece.startswith(self._last) or self._last.startswith(piece):
            return self._beyond(piece)
        self._is_cumulative = False  # it was a chance likeness
        return piece

    def _beyond(self, piece: str) -> str:
        self.repeats = True
        return piece[self._size :]

    def _is_all(self, piece: str) -> bool:
        return len(piece) == self._size >= SHORTEST and piece == "".join(self._sent)
