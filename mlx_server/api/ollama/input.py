"""Converts the bodies of `/api/chat` and `/api/generate` to a `GenerateRequest`."""

from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from mlx_server.api import formats, media
from mlx_server.api.content import parts_of
from mlx_server.api.formats import FormatChoice
from mlx_server.api.ollama.protocol import (
    AnswerBody,
    CalledFunction,
    GenerateBody,
    OllamaChatBody,
    OllamaMessageParam,
    Options,
    ToolCallParam,
)
from mlx_server.api.roles import role_of
from mlx_server.api.thinking import SOME_EFFORT
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
from mlx_server.requests import GenerateRequest, JsonFormat, Prompt

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
        **options.adapter_choice(),
        include_raw=options.include_raw,
        on_disk=options.store is not False,
        **_format(body),
        buffered=not body.streams,
        prompts=(prompt,),
        max_tokens=options.most_tokens,
        stop=options.stops(),
        choices=options.choices(),
        logit_bias=options.biases(),
        seed=options.chosen_seed,
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
    unanswered = _UnansweredCalls(())
    for i, message in enumerate(given):
        calls = tuple(_calls(message.tool_calls or (), i))
        answered, role = None, role_of(message.role)
        images = _images(message.images, "messages.images")
        parts = [*parts_of(message.content, f"messages[{i}].content"), *images]
        if role == "assistant":
            unanswered = _UnansweredCalls(calls)
        elif role == "tool":
            answered = message.tool_call_id or unanswered.next(message.tool_name)
            unanswered.remove(answered)
        yield Message(
            role,
            content_of(parts),
            name=message.tool_name if role == "tool" else None,
            reasoning=message.thinking or None,
            tool_calls=calls,
            tool_call_id=answered,
            parts=media_parts(parts),
        )


def _calls(given: Sequence[ToolCallParam], place: int) -> Iterator[ToolCall]:
    for number, call in enumerate(given):
        function = call.function or CalledFunction()
        id = call.id or f"call_{place}_{number}"
        yield ToolCall(id, function.name or UNNAMED, function.arguments or "{}")


class _UnansweredCalls:
    """The calls of a turn that no result has answered yet. Most clients send no id with a result:
    it then answers the next call of its name, or without a name the next one."""

    def __init__(self, calls: Sequence[ToolCall]) -> None:
        self._ids = {call.id for call in calls}
        self._next: dict[str | None, deque[str]] = {None: deque(call.id for call in calls)}
        """The ids of the calls by name, and all ids under None; answered ones are skipped later."""
        for call in calls:
            self._next.setdefault(call.name, deque()).append(call.id)

    def next(self, name: str | None) -> str | None:
        ids = self._next.get(name, deque())
        while ids and ids[0] not in self._ids:
            ids.popleft()
        return ids[0] if ids else None

    def remove(self, id: str | None) -> None:
        self._ids.discard(id or "")


def _images(images: Sequence[str] | None, place: str) -> Iterator[ContentPart]:
    return (media.of_data("image", image, "", place) for image in images or ())
