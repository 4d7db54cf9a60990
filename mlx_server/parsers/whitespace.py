"""Removes white space next to delimiters from streamed text."""


class WhitespaceTrimmer:
    """Separates a text's own white space from that next to a delimiter.

    White space that may be either is held back until the next text or delimiter. Without `trims`
    all of it belongs to the text.
    """

    def __init__(self, *, trims: bool, leading: bool = False) -> None:
        self._trims = trims
        self._leading = leading and trims
        self._held: list[str] = []

    def feed(self, piece: str) -> str:
        """Add a piece; return what is certain to be text."""
        if not self._trims:
            return piece
        if self._leading:
            piece = piece.lstrip()
            self._leading = not piece
        text = piece.rstrip()
        before = self.at_delimiter() if text else ""
        self._held.append(piece[len(text) :])
        return before + text

    def at_delimiter(self) -> str:
        """End the text at a delimiter; return the white space before it."""
        held, self._held = self._held, []
        return "".join(held)

    def after_delimiter(self) -> None:
        """Drop white space that follows."""
        self._leading = self._trims

    def flush(self) -> str:
        """End the text; return the held white space, which belongs to it."""
        return self.at_delimiter()
