"""The server's end of the processes that render chat templates; one serves all models."""

import hashlib
from collections.abc import Mapping
from typing import Any

import msgspec

from mlx_server import limits
from mlx_server.errors import TemplatesUnavailable
from mlx_server.sandbox.parent import Program, Stopped, WarmProcess, WarmProcesses
from mlx_server.templates import child
from mlx_server.templates.child import (
    Compile,
    Compiled,
    OutOfMemory,
    Refused,
    Render,
    Rendered,
    Reply,
    Request,
    TooLong,
    Unknown,
)

PROGRAM = Program(
    child.__file__,
    "renders chat templates",
    memory=limits.TEMPLATE_MEMORY.value,
    largest=4 * limits.TEMPLATE_CHARACTERS.value,
    unavailable=TemplatesUnavailable,
)

_replies: msgspec.msgpack.Decoder[Reply] = msgspec.msgpack.Decoder(Reply)


class TemplateRefused(Exception):
    """The template can't be compiled, or refuses what it was given."""


class TemplateProcesses(WarmProcesses):
    def __init__(self) -> None:
        super().__init__(
            PROGRAM, limits.TEMPLATE_PROCESSES.value, limits.IDLE_TEMPLATE_PROCESSES.value
        )

    def compile(self, source: str) -> list[str]:
        """The variables that the template looks up. Raises TemplateRefused, Stopped."""
        asked = Compile(digest_of(source), source, limits.TEMPLATE_SECONDS.value)
        with self.one() as own:
            reply, _ = ask(own, asked)
        reply = _checked(reply)
        assert isinstance(reply, Compiled)
        return reply.reads

    def render(self, source: str, variables: Mapping[str, Any]) -> str:
        """Raises TemplateRefused, Stopped."""
        seconds, most = limits.TEMPLATE_SECONDS.value, limits.TEMPLATE_CHARACTERS.value
        asked = Render(digest_of(source), dict(variables), seconds, most)
        with self.one() as own:
            reply, text = ask(own, asked)
            if isinstance(reply, Unknown):
                compiled, _ = ask(own, Compile(asked.digest, source, seconds))
                _checked(compiled)
                reply, text = ask(own, asked)
        assert isinstance(_checked(reply), Rendered)
        return text


def ask(own: WarmProcess, request: Request) -> tuple[Reply, str]:
    """The reply, and the text that it rendered."""
    packed, text = own.ask(_packed(request), request.seconds)
    try:
        reply = _replies.decode(packed)
        if isinstance(reply, OutOfMemory):
            own.end()
        return reply, text.decode()
    except (msgspec.DecodeError, UnicodeDecodeError):
        own.end()
        raise Stopped("ended its process") from None


def digest_of(source: str) -> bytes:
    return hashlib.sha256(source.encode("utf-8", "surrogatepass")).digest()


def _checked(reply: Reply) -> Reply:
    match reply:
        case Refused(message):
            raise TemplateRefused(message)
        case OutOfMemory():
            raise Stopped(f"needs more than {limits.TEMPLATE_MEMORY.value >> 20} MiB of memory")
        case TooLong():
            most = limits.TEMPLATE_CHARACTERS.value
            raise Stopped(f"makes a prompt of more than {most} characters")
    return reply


def _packed(asked: Request) -> bytes:
    try:
        return msgspec.msgpack.encode(asked)
    except OverflowError:
        assert isinstance(asked, Render)
        asked.variables = _with_big_numbers(asked.variables)
        return msgspec.msgpack.encode(asked)


def _with_big_numbers(value: Any) -> Any:
    """msgpack itself ends at 64 bits."""
    match value:
        case bool():
            return value
        case int() if value.bit_length() > 63:
            data = value.to_bytes(value.bit_length() // 8 + 1, signed=True)
            return msgspec.msgpack.Ext(child.BIG_NUMBER, data)
        case list() | tuple():
            return [_with_big_numbers(item) for item in value]
        case dict():
            return {key: _with_big_numbers(item) for key, item in value.items()}
    return value


PROCESSES = TemplateProcesses()
