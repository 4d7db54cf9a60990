"""Removes white space next to delimiters from streamed text."""

from collections.abc import Callable


class WhitespaceTrimmer:
    """Separates a text's own white space from that next to a delimiter.

    White space that may be either is held back until the next text or delimiter. Without `trims`
    all of it belongs to the text.
    """

    def __init__(
        self, *, trims: bool, leading: bool = False, drop: Callable[[str], object] = lambda _: None
    ) -> None:
        """drop: called with white space that follows a delimiter and is removed."""
        self._trims = trims
        self._leading = leading and trims
        self._held: list[str] = []
        self._drop = drop

    @property
    def holds(self) -> bool:
        """Whether there is white space between the text and what comes next."""
        return any(self._held)

    def feed(self, piece: str) -> str:
        """Adds a piece; returns what is certain to be text."""
        if not self._trims:
            return piece
        if self._leading:
            text = piece.lstrip()
            self._drop(piece[: len(piece) - len(text)])
            piece = text
            self._leading = not piece
        text = piece.rstrip()
        before = self.at_delimiter() if text else ""
        self._held.append(piece[len(text) :])
        return before + text

    def at_delimiter(self) -> str:
        """Ends the text at a delimiter; returns the white space before it."""
        held, self._held = self._held, []
        return "".join(held)

    def after_delimiter(self) -> None:
        """Drops white space that follows."""
        self._leading = self._trims

    def flush(self) -> str:
        """Ends the text; returns the held white space, which belongs to it."""
        return self.at_delimiter()


class PieceSeparator:
    """Finds the white space between the pieces of a text that calls or thoughts interrupt.

    It is what the model wrote there, or a line break if it wrote none: pieces are never glued.
    """

    def __init__(self, *, by_line: bool = False) -> None:
        """by_line: whether only a line break separates pieces."""
        self.last = ""
        """The last character of the text so far."""
        self._separates: Callable[[str], bool] = "\n".__eq__ if by_line else str.isspace
        self._dropped: list[str] = []
        self._is_interrupted = False

    def drop(self, space: str) -> str:
        """Notes white space that is no part of the text; returns what is left of it."""
        self._dropped.append(space)
        return ""

    def interrupt(self) -> None:
        """Notes a call, a thought or the end of a message."""
        self._is_interrupted = True

    def before(self, text: str) -> str:
        """Adds a text; returns what separates it from the text before."""
        space = ""
        if self._is_interrupted and self.last:
            own = "" if self._separates(text[0]) else "".join(self._dropped)
            separated = self._separates(self.last) or self._separates(text[0])
            space = own or ("" if separated else "\n")
        self.last, self._dropped, self._is_interrupted = text[-1], [], False
        return space
