class WhitespaceTrimmer:
    """Tells white space of a text from that beside a mark, which belongs to the mark.

    What could be either is held until it is known. trims: else all of it is the text's.
    """

    def __init__(self, *, trims: bool, leading: bool = False) -> None:
        self._trims = trims
        self._leading = leading and trims
        self._held: list[str] = []

    def feed(self, piece: str) -> str:
        """As much of what has come as is certain to be text."""
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
        """A mark follows: the white space before it."""
        held, self._held = self._held, []
        return "".join(held)

    def after_delimiter(self) -> None:
        """White space that comes now is not the text's."""
        self._leading = self._trims

    def flush(self) -> str:
        """The text is over: what is held is a part of it."""
        return self.at_delimiter()
