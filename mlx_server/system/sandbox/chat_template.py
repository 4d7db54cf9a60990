"""A checkpoint's Jinja chat template, rendered in a process with limits."""

import hashlib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import msgspec

from mlx_server import limits
from mlx_server.errors import BadRequest, ModelUnusable, TemplatesUnavailable
from mlx_server.system.sandbox.parent import Program, Stopped, WarmProcess, WarmProcesses
from mlx_server.system.sandbox.template_messages import (
    BIG_NUMBER,
    CompiledReply,
    CompileTemplate,
    OutOfMemoryReply,
    RefusedReply,
    RenderedReply,
    RenderTemplate,
    Reply,
    Request,
    TooLongReply,
    UnknownReply,
)

RESERVED = frozenset({"messages", "tools", "documents", "add_generation_prompt"})
"""Variables that rendering sets; `chat_template_kwargs` of a request can't set them."""

ANOTHER = "Set another one with `chat_template:` in models.yaml."


class TemplateLimitExceeded(BadRequest):
    """The template exceeded a limit; the same conversation in another form would too."""


class RefusedByTemplate(BadRequest):
    """The template raised an error; it may accept the same conversation in another form."""

    lacks = ""
    """The error, if the template names a function, a filter or a test that does not exist."""


class ChatTemplate:
    def __init__(self, source: str) -> None:
        if len(source) > limits.TEMPLATE_SOURCE:
            most = limits.TEMPLATE_SOURCE
            raise ModelUnusable(f"The chat template has more than {most} characters. {ANOTHER}")
        try:
            self.reads = frozenset(PROCESSES.compile(source))
        except (TemplateRefused, Stopped, UnicodeEncodeError) as error:
            raise ModelUnusable(
                f"The chat template can't be compiled: {str(error).rstrip('.')}. {ANOTHER}"
            ) from None
        self.source = source

    def takes(self, name: str) -> bool:
        """Whether a request may set this variable: the template must read it."""
        return name in self.reads and name not in RESERVED

    def render(self, variables: Mapping[str, Any]) -> str:
        return self.render_made(lambda: variables)

    def render_made(self, make: Callable[[], Mapping[str, Any]]) -> str:
        """Renders with variables that are made when they are sent, and not kept."""
        try:
            return PROCESSES.render_made(self.source, make)
        except Stopped as error:
            raise TemplateLimitExceeded(
                f"The model's chat template {error} for these messages, so it was stopped. "
                "Shorten them, or set another `chat_template:` in models.yaml.",
                param="messages",
            ) from None
        except (TemplateRefused, UnicodeEncodeError) as error:
            refusal = RefusedByTemplate(
                f"The model's chat template refuses these messages: {error}", param="messages"
            )
            if isinstance(error, TemplateRefused) and error.is_broken:
                refusal.lacks = str(error).rstrip(".")
            raise refusal from None


PROGRAM = Program(
    str(Path(__file__).with_name("template_child.py")),  # whose libraries this process does without
    "renders chat templates",
    memory=limits.TEMPLATE_MEMORY,
    largest=4 * limits.TEMPLATE_CHARACTERS,
    unavailable=TemplatesUnavailable,
)

_requests = msgspec.msgpack.Encoder()
_replies: msgspec.msgpack.Decoder[Reply] = msgspec.msgpack.Decoder(Reply)


class TemplateRefused(Exception):
    """The template can't be compiled, or it raised an error."""

    def __init__(self, message: str, *, is_broken: bool = False) -> None:
        super().__init__(message)
        self.is_broken = is_broken


def broken(refusal: RefusedByTemplate) -> ModelUnusable:
    return ModelUnusable(f"The model's chat template can't be used: {refusal.lacks}. {ANOTHER}")


class TemplateProcesses(WarmProcesses):
    def __init__(self) -> None:
        super().__init__(PROGRAM, limits.TEMPLATE_PROCESSES, limits.IDLE_TEMPLATE_PROCESSES)

    def compile(self, source: str) -> list[str]:
        """Names of the variables that the template reads. Raises TemplateRefused, Stopped."""
        with self.one() as own:
            return _compiled(own, source)

    def render(self, source: str, variables: Mapping[str, Any]) -> str:
        """Raises TemplateRefused, Stopped."""
        return self.render_made(source, lambda: variables)

    def render_made(self, source: str, make: Callable[[], Mapping[str, Any]]) -> str:
        """Renders with variables that are made when they are sent and then dropped: they may take
        more memory than their source."""
        with self.one() as own:
            reply, text = _rendered(own, source, make)
            if isinstance(reply, UnknownReply):
                _compiled(own, source)
                reply, text = _rendered(own, source, make)
        assert isinstance(_checked(reply), RenderedReply)
        return text


def ask(own: WarmProcess, request: Request) -> tuple[Reply, str]:
    """Send a request; return the reply and the rendered text."""
    return _ask_packed(own, _packed(request), request.seconds)


def _ask_packed(own: WarmProcess, packed: bytearray, seconds: float) -> tuple[Reply, str]:
    """Like `ask`; `packed` is cleared as soon as it is sent."""
    answer, text = own.ask(packed, seconds)
    try:
        reply = _replies.decode(answer)
        if isinstance(reply, OutOfMemoryReply):
            own.end()
        return reply, text.decode()
    except (msgspec.DecodeError, UnicodeDecodeError):
        own.end()
        raise Stopped("ended its process") from None


def _compiled(own: WarmProcess, source: str) -> list[str]:
    reply, _ = ask(own, CompileTemplate(digest_of(source), source, limits.TEMPLATE_SECONDS))
    reply = _checked(reply)
    assert isinstance(reply, CompiledReply)
    return reply.reads


def _rendered(
    own: WarmProcess, source: str, make: Callable[[], Mapping[str, Any]]
) -> tuple[Reply, str]:
    seconds, most = limits.TEMPLATE_SECONDS, limits.TEMPLATE_CHARACTERS
    packed = _packed(RenderTemplate(digest_of(source), dict(make()), seconds, most))
    return _ask_packed(own, packed, seconds)


def digest_of(source: str) -> bytes:
    return hashlib.sha256(source.encode("utf-8", "surrogatepass")).digest()


def _checked(reply: Reply) -> Reply:
    match reply:
        case RefusedReply(message, is_broken):
            raise TemplateRefused(message, is_broken=is_broken)
        case OutOfMemoryReply():
            raise Stopped(f"needs more than {limits.TEMPLATE_MEMORY >> 20} MiB of memory")
        case TooLongReply():
            most = limits.TEMPLATE_CHARACTERS
            raise Stopped(f"makes a prompt of more than {most} characters")
    return reply


def _packed(request: Request) -> bytearray:
    packed = bytearray()
    try:
        _requests.encode_into(request, packed)
    except OverflowError:
        assert isinstance(request, RenderTemplate)
        request.variables = _with_big_numbers(request.variables)
        _requests.encode_into(request, packed)
    return packed


def _with_big_numbers(value: Any) -> Any:
    """The value with large integers as extensions, since msgpack's have at most 64 bits."""
    match value:
        case bool():
            return value
        case int() if value.bit_length() > 63:
            data = value.to_bytes(value.bit_length() // 8 + 1, signed=True)
            return msgspec.msgpack.Ext(BIG_NUMBER, data)
        case list() | tuple():
            return [_with_big_numbers(item) for item in value]
        case dict():
            return {key: _with_big_numbers(item) for key, item in value.items()}
    return value


PROCESSES = TemplateProcesses()
