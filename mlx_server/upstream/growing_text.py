"""A text that arrives in pieces."""


class GrowingText:
    """Adding a piece, and comparing one with the text so far, takes no more work than the piece is
    long."""

    def __init__(self) -> None:
        self._pieces: list[str] = []
        self.size = 0

    def __str__(self) -> str:
        if len(self._pieces) > 1:
            self._pieces = ["".join(self._pieces)]
        return "".join(self._pieces)

    def add(self, piece: str) -> None:
        if piece:
            self._pieces.append(piece)
            self.size += len(piece)

    def begins(self, piece: str) -> bool:
        """Whether the piece begins with all of the text so far."""
        return self.size <= len(piece) and piece.startswith(str(self))

    def clear(self) -> None:
        self._pieces.clear()
        self.size = 0
