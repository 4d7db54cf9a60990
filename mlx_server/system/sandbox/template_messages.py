"""What the server and a process that renders chat templates send each other, as msgpack."""

from typing import Any

import msgspec

BIG_NUMBER = 1
"""The msgpack extension code of integers of more than 64 bits."""


class CompileTemplate(msgspec.Struct, array_like=True, tag=True):
    digest: bytes
    source: str
    seconds: float
    """Limit of processor time; four times as much wall-clock time is allowed."""


class RenderTemplate(msgspec.Struct, array_like=True, tag=True):
    digest: bytes
    variables: dict[str, Any]
    seconds: float
    max_characters: int


class CompiledReply(msgspec.Struct, array_like=True, tag=True):
    reads: list[str]
    """Names of the variables that the template reads."""


class RenderedReply(msgspec.Struct, array_like=True, tag=True):
    """The rendered text, in UTF-8, is the payload of this reply."""


class RefusedReply(msgspec.Struct, array_like=True, tag=True):
    message: str
    is_broken: bool = False
    """Whether the template calls or names what does not exist, whatever its variables are."""


class UnknownReply(msgspec.Struct, array_like=True, tag=True):
    """The template must be compiled first."""


class OutOfMemoryReply(msgspec.Struct, array_like=True, tag=True):
    """Memory ran out; the child ends after this reply."""


class TooLongReply(msgspec.Struct, array_like=True, tag=True):
    """The text has more than `max_characters`."""


Request = CompileTemplate | RenderTemplate
Reply = (
    CompiledReply | RenderedReply | RefusedReply | UnknownReply | OutOfMemoryReply | TooLongReply
)
