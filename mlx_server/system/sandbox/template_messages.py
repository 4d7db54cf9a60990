"""What the server and a process that renders chat templates send each other, as msgpack."""

from typing import Any, Literal

import msgspec

BIG_NUMBER = 1
"""The msgpack extension code of integers of more than 64 bits."""


class RenderTemplate(msgspec.Struct, array_like=True):
    source: str
    variables: dict[str, Any] | None
    """None: the template is compiled only."""
    seconds: float
    """Limit of processor time, of compiling the template and of rendering it; four times as much
    wall-clock time is allowed."""
    max_characters: int = 0


class TemplateReply(msgspec.Struct, array_like=True):
    """Its payload is the rendered text, in UTF-8."""

    reads: list[str] = []
    """Names of the variables that a template reads which is compiled only."""
    refusal: str | None = None
    """The error that the template raised, or why it can't be compiled."""
    is_broken: bool = False
    """Whether the template calls or names what does not exist, whatever its variables are."""
    exceeds: Literal["", "memory", "characters"] = ""
    """`memory`: the child ends after this reply. `characters`: the text has more than
    `max_characters`."""
