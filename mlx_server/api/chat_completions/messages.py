"""Converts messages on the wire, in the forms of today and of earlier APIs."""

import json
from collections.abc import Iterator, Sequence

from mlx_server.api.chat_completions.protocol import (
    FreeformCallParam,
    FunctionCall,
    MessageParam,
    ToolCallParam,
)
from mlx_server.api.content import text_of
from mlx_server.api.freeform import arguments_of_text
from mlx_server.errors import BadRequest
from mlx_server.messages import Message, ToolCall


def messages(given: Sequence[MessageParam]) -> tuple[Message, ...]:
    return tuple(_converted(given))


def _converted(given: Sequence[MessageParam]) -> Iterator[Message]:
    unanswered: list[ToolCall] = []
    for i, message in enumerate(given):
        where = f"messages[{i}]"
        calls = _calls(message, i)
        id = message.tool_call_id
        match message.role:
            case "assistant":
                unanswered = list(calls)
            case "tool" if not id:
                raise BadRequest(
                    "A `tool` message needs the `tool_call_id` that it answers.",
                    param=f"{where}.tool_call_id",
                )
            case "function" | "ipython" if not id:
                id = _answered(message, unanswered)
        if id:
            unanswered = [call for call in unanswered if call.id != id]
        yield Message(
            role="tool"
            if message.role == "function" or message.role == "ipython"
            else message.role,
            content=text_of(message.content, f"{where}.content") or message.refusal or "",
            name=message.name,
            reasoning=message.reasoning_content or message.reasoning,
            tool_calls=calls,
            tool_call_id=id,
        )


def _answered(message: MessageParam, unanswered: Sequence[ToolCall]) -> str | None:
    """The id of the call that a result without an id answers: the next one, of its name if it has
    one."""
    return next((call.id for call in unanswered if message.name in (None, call.name)), None)


def _calls(message: MessageParam, place: int) -> tuple[ToolCall, ...]:
    calls = tuple(map(_call, message.tool_calls or ()))
    if (function := message.function_call) is None:
        return calls
    if calls:
        raise BadRequest(
            "A message has either `tool_calls` or `function_call`.",
            param=f"messages[{place}].function_call",
        )
    return (ToolCall(f"function_call_{place}", function.name, _arguments(function)),)


def _call(call: ToolCallParam) -> ToolCall:
    if isinstance(call, FreeformCallParam):
        return ToolCall(call.id, call.custom.name, arguments_of_text(call.custom.input))
    return ToolCall(call.id, call.function.name, _arguments(call.function))


def _arguments(function: FunctionCall) -> str:
    arguments = function.arguments
    return arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)
