"""Blocks of code in Markdown, in which a text shows what it is about."""

import re

OPENING = re.compile(r" {0,3}(`{3,}(?=[^`]*$)|~{3,})")
CLOSING = re.compile(r" {0,3}(`{3,}|~{3,})[ \t]*")


def open_fence(text: str) -> str:
    """The fence that would close the block of code in which a text ends; empty if it ends in none.
    A longer one closes it as well.
    """
    fence = CodeFence()
    fence.feed(text)
    return fence.open


class CodeFence:
    """The same of a text that is still being written."""

    def __init__(self) -> None:
        self._open = ""
        """At the end of the last complete line."""
        self._line: list[str] = []
        """The pieces of the line that has none yet."""

    def feed(self, piece: str) -> None:
        *complete, last = piece.split("\n")
        for line in complete:
            self._line.append(line)
            self._open = self.open
            self._line = []
        self._line.append(last)

    @property
    def open(self) -> str:
        line = "".join(self._line)
        if not self._open:
            opened = OPENING.match(line)
            return opened[1] if opened else ""
        closed = CLOSING.fullmatch(line)
        return "" if closed and closed[1].startswith(self._open) else self._open
