"""Converts messages on the wire, in the forms of today and of earlier APIs."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace

from mlx_server.api.chat_completions.protocol import (
    FreeformCall,
    FreeformCallParam,
    FunctionCall,
    FunctionCallParam,
    MessageParam,
    ToolCallParam,
)
from mlx_server.api.content import parts_of, thoughts_of
from mlx_server.api.freeform import arguments_of_text
from mlx_server.api.roles import role_of
from mlx_server.messages import UNNAMED, Message, ToolCall, content_of, media_parts
from mlx_server.upstream.pieces import part_text


def messages(given: Sequence[MessageParam]) -> tuple[Message, ...]:
    return tuple(_converted(given))


def _converted(given: Sequence[MessageParam]) -> Iterator[Message]:
    unanswered: list[ToolCall] = []
    for i, message in enumerate(given):
        calls = _calls(message, i)
        id, role = message.tool_call_id, role_of(message.role)
        parts = parts_of(message.content, f"messages[{i}].content")
        if role == "assistant":
            unanswered = list(calls)
        elif role == "tool":
            id = id or _answered(message, unanswered)
            unanswered = [call for call in unanswered if call.id != id]
        yield Message(
            role=role,
            content=content_of(parts) or message.refusal or "",
            name=message.name,
            reasoning=_reasoning(message),
            tool_calls=calls,
            tool_call_id=id,
            parts=media_parts(parts),
        )


def _reasoning(message: MessageParam) -> str | None:
    given = message.reasoning_content or message.reasoning
    if given is None or isinstance(given, str):
        return given or "\n\n".join(thoughts_of(message.content)) or None
    return part_text({"content": given})


def _answered(message: MessageParam, unanswered: Sequence[ToolCall]) -> str | None:
    """The id of the call that a result without an id answers: the next one, of its name if it has
    one."""
    return next((call.id for call in unanswered if message.name in (None, call.name)), None)


def _calls(message: MessageParam, place: int) -> tuple[ToolCall, ...]:
    calls = tuple(_with_details(map(_call, message.tool_calls or ()), message))
    if calls or (function := message.function_call) is None:
        return calls
    return (ToolCall(f"function_call_{place}", function.name or UNNAMED, function.arguments or ""),)


def _call(call: ToolCallParam) -> ToolCall:
    match call:
        case FreeformCallParam(custom=FreeformCall() as custom):
            name, arguments = custom.name, arguments_of_text(custom.input or "")
        case FreeformCallParam() | FunctionCallParam(function=None):
            name, arguments = "", ""
        case FunctionCallParam(function=FunctionCall() as function):
            name, arguments = function.name, function.arguments or ""
    return ToolCall(call.id or "", name or UNNAMED, arguments, extra_content=call.extra_content)


def _with_details(calls: Iterable[ToolCall], message: MessageParam) -> Iterator[ToolCall]:
    """The calls, of which the first has the details of the reasoning before it."""
    details = {"reasoning_details": found} if (found := message.reasoning_details) else {}
    for call in calls:
        extra = {**(call.extra_content or {}), **details}
        yield replace(call, extra_content=extra) if details else call
        details = {}
