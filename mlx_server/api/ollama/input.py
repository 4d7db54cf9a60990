"""The bodies of Ollama's routes, as Ollama documents them, and the requests that they make."""

import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field

from mlx_server import limits
from mlx_server.api import formats
from mlx_server.api.content import Content, of_data, parts_of
from mlx_server.api.embeddings import Dimensions
from mlx_server.api.fields import (
    EMPTY_IS_UNSET,
    ROLES,
    SOME_EFFORT,
    UNKNOWN_ROLE,
    WHOLE,
    Arguments,
    Items,
    RoleName,
    SamplingBody,
    SharedFields,
    Text,
    WireModel,
    role_of,
    the_only,
)
from mlx_server.api.formats import FormatChoice
from mlx_server.api.histories import MENDED, UnansweredCalls
from mlx_server.errors import BadRequest
from mlx_server.messages import (
    UNNAMED,
    ContentPart,
    Conversation,
    Message,
    Tool,
    ToolCall,
    content_of,
    media_parts,
)
from mlx_server.requests import GenerateRequest, Infill, JsonFormat, Prompt, SamplingChoices

PARAM = "keep_alive"
MOST_CHARACTERS = 40
MOST_SECONDS = 1e9

SECONDS = {"ns": 1e-9, "us": 1e-6, "µs": 1e-6, "ms": 1e-3, "s": 1, "m": 60, "h": 3600}
PART = re.compile(r"([0-9]+\.?[0-9]*|\.[0-9]+)(ns|us|µs|ms|s|m|h)")
NUMBER = re.compile(r"-?[0-9]+\.?[0-9]*")

KeepAlive = int | float | str


def seconds_of(given: KeepAlive) -> float:
    """Infinite for a negative duration, which means that the model stays until memory is needed."""
    # a whole number may be too large for a float
    seconds = _parsed(given) if isinstance(given, str) else max(-1, min(given, 2 * MOST_SECONDS))
    return math.inf if seconds < 0 or seconds > MOST_SECONDS else seconds


def _parsed(text: str) -> float:
    if len(text) <= MOST_CHARACTERS:
        if NUMBER.fullmatch(text):
            return float(text)
        duration = text.removeprefix("-")
        if duration and not PART.sub("", duration):
            parts = PART.findall(duration)
            total = sum(float(number) * SECONDS[unit] for number, unit in parts)
            return -total if text.startswith("-") else total
    raise BadRequest(
        f"`{PARAM}` should be a number of seconds or a duration such as 5m or 1h30m; it is "
        f"{text[:MOST_CHARACTERS]!r}.",
        param=PARAM,
    )


Name = Annotated[str, Field(min_length=1)]
Think = bool | Literal["low", "medium", "high", "max"]
Format = Literal["", "json"] | dict[str, Any]
Images = Items[str]


class Options(SamplingBody):
    """Ollama's names of the sampling parameters, besides those of the other endpoints."""

    num_predict: Annotated[int, Field(ge=-2, lt=2**53), WHOLE] | None = None
    """A value that is not positive stands for as many tokens as fit the context."""
    repeat_penalty: Annotated[float, Field(gt=0, le=10)] | None = None

    def choices(self) -> SamplingChoices:
        choices = super().choices()
        names = ("repeat_penalty", "repetition_penalty")
        given = {f"options.{name}": value for name in names if (value := getattr(self, name))}
        if penalty := the_only(given, "are two names of one parameter"):
            choices["repetition_penalty"] = penalty
        return choices

    def shared_fields(self) -> SharedFields:
        """A negative seed asks for a random one."""
        seed = None if self.seed is None or self.seed < 0 else self.seed
        return {**super().shared_fields(), "seed": seed}

    @property
    def most_tokens(self) -> int | None:
        return self.num_predict if self.num_predict and self.num_predict > 0 else None


class AnswerBody(WireModel):
    """The fields that `/api/chat` and `/api/generate` share."""

    model: Name
    stream: bool | None = None
    """Unlike elsewhere, an answer is streamed by default."""
    format: Format | None = None
    options: Options | None = None
    keep_alive: KeepAlive | None = None
    think: Annotated[Think | None, EMPTY_IS_UNSET] = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=limits.TOP_LOGPROBS), WHOLE] | None = None

    @property
    def streams(self) -> bool:
        return self.stream is not False

    @property
    def keep_seconds(self) -> float | None:
        """The seconds for which the model is kept; None leaves that to models.yaml."""
        return None if self.keep_alive is None else seconds_of(self.keep_alive)

    @property
    def unloads(self) -> bool:
        return self.keep_seconds is not None and math.isclose(self.keep_seconds, 0)


class CalledFunction(WireModel):
    ACCEPTED = frozenset({"index"})

    name: Text = None
    arguments: Arguments = None


class ToolCallParam(WireModel):
    ACCEPTED = frozenset({"type"})

    id: Text = None
    function: CalledFunction | None = None


READ_BY_ROLE = {
    "assistant": ("thinking", "tool_calls"),
    "tool": ("tool_name", "tool_call_id"),
}
"""The fields of a message that have an effect, besides its content."""


class OllamaMessageParam(WireModel):
    role: RoleName = UNKNOWN_ROLE
    content: Content | None = None
    thinking: Text = None
    images: Images | None = None
    tool_calls: Items[ToolCallParam] | None = None
    tool_name: Text = None
    tool_call_id: Text = None

    def unused(self) -> Iterable[str]:
        if self.role not in ROLES:
            yield "role"
        used = READ_BY_ROLE.get(role_of(self.role), ())
        for name in ("thinking", "tool_calls", "tool_name", "tool_call_id"):
            if name not in used and getattr(self, name):
                yield name


class OllamaFunctionParam(WireModel):
    name: Name
    description: str | None = None
    parameters: dict[str, Any] | None = None


class ToolParam(WireModel):
    type: Literal["function"] | None = None
    function: OllamaFunctionParam


class OllamaChatBody(AnswerBody):
    messages: Annotated[Items[OllamaMessageParam], MENDED] | None = None
    """Without any, the model is loaded, or unloaded if `keep_alive` is 0."""
    tools: Annotated[Items[ToolParam], Field(max_length=limits.TOOLS)] | None = None


class GenerateBody(AnswerBody):
    UNSUPPORTED: ClassVar[Mapping[str, str]] = {
        "template": "the model's owner sets it in models.yaml",
    }

    prompt: str | None = None
    """Without one, the model is loaded, or unloaded if `keep_alive` is 0."""
    system: str | None = None
    raw: bool | None = None
    """Whether the prompt is continued as it is, and not answered as a message."""
    suffix: Annotated[str | None, EMPTY_IS_UNSET] = None
    """The text after the answer, which then is what is missing between the prompt and it."""
    images: Images | None = None

    def unused(self) -> Iterable[str]:
        without = ("system",) if self.suffix else ()
        for name in ("think", "images", *without) if self.raw or self.suffix else ():
            if getattr(self, name) is not None:
                yield name


class ShowBody(WireModel):
    model: Name | None = None
    name: Name | None = None
    """The older name of `model`."""


class EmbedBody(WireModel):
    """`/api/embed`. The options that have an effect on an embedding are none."""

    model: Name
    input: str | Items[str] | None = None
    truncate: bool | None = None
    """Whether inputs that are too long are cut, which they are by default."""
    dimensions: Dimensions | None = None
    options: dict[str, Any] | None = None
    keep_alive: KeepAlive | None = None

    def unused(self) -> Iterable[str]:
        yield from (f"options.{name}" for name in self.options or {})


class OlderEmbedBody(WireModel):
    """`/api/embeddings`, which takes one text."""

    model: Name
    prompt: str | None = None
    options: dict[str, Any] | None = None
    keep_alive: KeepAlive | None = None

    def unused(self) -> Iterable[str]:
        yield from (f"options.{name}" for name in self.options or {})


EFFORTS: Mapping[bool | str, str] = {True: SOME_EFFORT, False: "none", "max": "xhigh"}
"""Ollama's words for an effort that the families know by another one."""


def chat_request(body: OllamaChatBody, model: str) -> GenerateRequest:
    tools = [tool.function for tool in body.tools or ()]
    conversation = Conversation(
        messages=tuple(_messages(body.messages or ())),
        tools=tuple(Tool(each.name, each.description, each.parameters or {}) for each in tools),
        **_rendering(body),
    )
    return _request(body, model, conversation)


def generate_request(body: GenerateBody, model: str) -> GenerateRequest:
    if body.suffix:
        return _request(body, model, Infill(body.prompt or "", body.suffix))
    if body.raw:
        if body.system:
            raise BadRequest(
                "`raw` takes the prompt as it is: put the system prompt into it, or leave out "
                "`system`.",
                param="system",
            )
        return _request(body, model, body.prompt or "")
    system = [Message("system", body.system)] if body.system else []
    parts = [*filter(None, (body.prompt,)), *_images(body.images, "images")]
    user = Message("user", content_of(parts), parts=media_parts(parts))
    conversation = Conversation(messages=(*system, user), **_rendering(body))
    return _request(body, model, conversation)


def _request(body: AnswerBody, model: str, prompt: Prompt) -> GenerateRequest:
    options = body.options or Options()
    if body.top_logprobs and not body.logprobs:
        raise BadRequest("`top_logprobs` needs `logprobs: true`.", param="top_logprobs")
    return GenerateRequest(
        model=model,
        **options.shared_fields(),
        **_format(body),
        buffered=not body.streams,
        prompts=(prompt,),
        max_tokens=options.most_tokens,
        logprobs=(body.top_logprobs or 0) if body.logprobs else None,
        param_names={"chat_template_kwargs.reasoning_effort": "think"},
    )


def _rendering(body: AnswerBody) -> dict[str, Any]:
    effort = None if body.think is None else EFFORTS.get(body.think, body.think)
    return {
        "template_kwargs": {} if effort is None else {"reasoning_effort": effort},
        "response_format": formats.prompt_description(_format(body)["format"]),
    }


def _format(body: AnswerBody) -> FormatChoice:
    match body.format:
        case "json":
            return {"format": JsonFormat(), "format_param": "format"}
        case dict(schema):
            return {"format": JsonFormat(schema, strict=False), "format_param": "format"}
    return {"format": None, "format_param": "format"}


def _messages(given: Sequence[OllamaMessageParam]) -> Iterator[Message]:
    unanswered = UnansweredCalls()
    for i, message in enumerate(given):
        calls = tuple(_calls(message.tool_calls or (), i))
        answered, role = message.tool_call_id or None, role_of(message.role)
        images = _images(message.images, "messages.images")
        parts = [*parts_of(message.content, f"messages[{i}].content"), *images]
        if role == "assistant":
            unanswered = UnansweredCalls(calls)
        elif role == "tool":
            answered = unanswered.answered_by(answered, message.tool_name)
        yield Message(
            role,
            content_of(parts),
            name=message.tool_name if role == "tool" else None,
            reasoning=message.thinking or None,
            tool_calls=calls,
            tool_call_id=answered if role == "tool" else None,
            parts=media_parts(parts),
        )


def _calls(given: Sequence[ToolCallParam], place: int) -> Iterator[ToolCall]:
    for number, call in enumerate(given):
        function = call.function or CalledFunction()
        id = call.id or f"call_{place}_{number}"
        yield ToolCall(id, function.name or UNNAMED, function.arguments or "{}")


def _images(images: Sequence[str] | None, place: str) -> Iterator[ContentPart]:
    return (of_data("image", image, "", place) for image in images or ())
