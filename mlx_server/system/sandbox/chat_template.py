"""A checkpoint's Jinja chat template, rendered in a process with limits."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import msgspec

from mlx_server import limits
from mlx_server.errors import BadRequest, ModelUnusable, TemplatesUnavailable
from mlx_server.system.sandbox.parent import Program, Stopped, WarmProcess, WarmProcesses
from mlx_server.system.sandbox.template_messages import BIG_NUMBER, RenderTemplate, TemplateReply

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
            reply, _ = _asked(lambda: RenderTemplate(source, None, limits.TEMPLATE_SECONDS))
        except (TemplateRefused, Stopped, UnicodeEncodeError) as error:
            raise ModelUnusable(
                f"The chat template can't be compiled: {str(error).rstrip('.')}. {ANOTHER}"
            ) from None
        self.source = source
        self.reads = frozenset(reply.reads)

    def takes(self, name: str) -> bool:
        """Whether a request may set this variable: the template must read it."""
        return name in self.reads and name not in RESERVED

    def render(self, variables: Mapping[str, Any]) -> str:
        return self.render_made(lambda: variables)

    def render_made(self, make: Callable[[], Mapping[str, Any]]) -> str:
        """Renders with variables that are made when they are sent and then dropped: they may take
        more memory than their source."""
        seconds, most = limits.TEMPLATE_SECONDS, limits.TEMPLATE_CHARACTERS
        try:
            _, text = _asked(lambda: RenderTemplate(self.source, dict(make()), seconds, most))
            return text
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
PROCESSES = WarmProcesses(PROGRAM, limits.TEMPLATE_PROCESSES, limits.IDLE_TEMPLATE_PROCESSES)

_requests = msgspec.msgpack.Encoder()
_replies = msgspec.msgpack.Decoder(TemplateReply)


class TemplateRefused(Exception):
    """The template can't be compiled, or it raised an error."""

    def __init__(self, message: str, *, is_broken: bool = False) -> None:
        super().__init__(message)
        self.is_broken = is_broken


def broken(refusal: RefusedByTemplate) -> ModelUnusable:
    return ModelUnusable(f"The model's chat template can't be used: {refusal.lacks}. {ANOTHER}")


def _asked(make: Callable[[], RenderTemplate]) -> tuple[TemplateReply, str]:
    with PROCESSES.one() as own:
        return ask(own, packed(make()), limits.TEMPLATE_SECONDS)


def ask(own: WarmProcess, request: bytearray, seconds: float) -> tuple[TemplateReply, str]:
    """Send a packed request, which is cleared as soon as it is sent; return the reply and the
    rendered text. Raises TemplateRefused, Stopped."""
    answer, payload = own.ask(request, seconds)
    try:
        reply, text = _replies.decode(answer), payload.decode()
    except (msgspec.DecodeError, UnicodeDecodeError):
        own.end()
        raise Stopped("ended its process") from None
    match reply.exceeds:
        case "memory":
            own.end()
            raise Stopped(f"needs more than {limits.TEMPLATE_MEMORY >> 20} MiB of memory")
        case "characters":
            raise Stopped(f"makes a prompt of more than {limits.TEMPLATE_CHARACTERS} characters")
    if reply.refusal is not None:
        raise TemplateRefused(reply.refusal, is_broken=reply.is_broken)
    return reply, text


def packed(request: RenderTemplate) -> bytearray:
    written = bytearray()
    try:
        _requests.encode_into(request, written)
    except OverflowError:
        request.variables = _with_big_numbers(request.variables)
        _requests.encode_into(request, written)
    return written


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
