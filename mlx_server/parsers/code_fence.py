"""Finds out whether a text ends in a block of code in Markdown: what stands there is an example."""

import re

OPENING = re.compile(r" {0,3}(`{3,}(?=[^`]*$)|~{3,})")
CLOSING = re.compile(r" {0,3}(`{3,}|~{3,})[ \t]*")


HEAD = 256
"""The characters of a line that are looked at: no model writes a longer line to open or close a
block."""


def open_fence(text: str) -> str:
    """Returns the fence that would close the block of code in which a text ends; empty if it ends
    in none. A longer fence closes the block as well."""
    fence = CodeFence()
    fence.feed(text)
    return fence.open


class CodeFence:
    """Finds the open fence of a text that is still being written. It keeps one line's beginning at
    most."""

    def __init__(self) -> None:
        self._open = ""
        """The fence that was open where the current line began."""
        self._line = ""
        """The beginning of the current line."""

    def feed(self, piece: str) -> None:
        *complete, last = piece.split("\n")
        for line in complete:
            self._add(line)
            self._open, self._line = self.open, ""
        self._add(last)

    def _add(self, piece: str) -> None:
        self._line += piece[: HEAD - len(self._line)]

    @property
    def open(self) -> str:
        if not self._open:
            opened = OPENING.match(self._line)
            return opened[1] if opened else ""
        closed = CLOSING.fullmatch(self._line)
        return "" if closed and closed[1].startswith(self._open) else self._open
