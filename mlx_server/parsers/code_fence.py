"""Blocks of code in Markdown, in which a text shows what it is about."""

import re

OPENING = re.compile(r" {0,3}(`{3,}(?=[^`]*$)|~{3,})")
CLOSING = re.compile(r" {0,3}(`{3,}|~{3,})[ \t]*")


def open_fence(text: str) -> str:
    """The fence that would close the block of code in which a text ends; empty if it ends in none.
    A longer one closes it as well.
    """
    fence = ""
    for line in text.split("\n"):
        if not fence:
            opened = OPENING.match(line)
            fence = opened[1] if opened else ""
        elif (closed := CLOSING.fullmatch(line)) and closed[1].startswith(fence):
            fence = ""
    return fence
