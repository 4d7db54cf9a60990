"""Converts messages on the wire, in the forms of today and of earlier APIs."""

import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace

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
    known: set[str] = set()
    for i, message in enumerate(given):
        where = f"messages[{i}]"
        calls = _calls(message, i)
        id = message.tool_call_id
        match message.role:
            case "assistant":
                unanswered = list(calls)
                known.update(call.id for call in calls)
            case "tool" if not id:
                raise BadRequest(
                    "A `tool` message needs the `tool_call_id` that it answers.",
                    param=f"{where}.tool_call_id",
                )
            case "tool" if id and id not in known:
                raise BadRequest(
                    f"`{where}.tool_call_id` is {id[:64]!r}, but no earlier call has this id.",
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
    calls = tuple(_with_details(map(_call, message.tool_calls or ()), message))
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
        name, arguments = call.custom.name, arguments_of_text(call.custom.input)
    else:
        name, arguments = call.function.name, _arguments(call.function)
    return ToolCall(call.id, name, arguments, extra_content=call.extra_content)


def _with_details(calls: Iterable[ToolCall], message: MessageParam) -> Iterator[ToolCall]:
    """The calls, of which the first has the details of the reasoning before it."""
    details = {"reasoning_details": found} if (found := message.reasoning_details) else {}
    for call in calls:
        extra = {**(call.extra_content or {}), **details}
        yield replace(call, extra_content=extra) if details else call
        details = {}


def _arguments(function: FunctionCall) -> str:
    arguments = function.arguments
    return arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)
