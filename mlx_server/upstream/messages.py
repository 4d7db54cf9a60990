"""Converts a conversation to messages of OpenAI's chat completions that an upstream accepts."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from mlx_server.messages import Conversation, Message, ToolCall
from mlx_server.prompts.history_rendering import in_hermes_tags
from mlx_server.prompts.message_normalization import RESULT_BEGIN, RESULT_END, OwnText, Part
from mlx_server.prompts.system_text import format_text, tools_text
from mlx_server.requests import ToolChoice
from mlx_server.upstream.reasoning_details import DETAILS
from mlx_server.upstream.spec import UpstreamCapabilities

Wire = dict[str, Any]


def messages_of(
    conversation: Conversation,
    can: UpstreamCapabilities,
    choice: ToolChoice,
    *,
    tells_format: bool,
) -> list[Wire]:
    """The messages of a conversation. tells_format: whether the system prompt describes the format
    of the answer."""
    last = max(
        (i for i, each in enumerate(conversation.messages) if each.role == "user"), default=0
    )
    messages = [
        _wire(message, can, thinks=can.reasoning_messages is True or i > last)
        for i, message in enumerate(conversation.messages)
    ]
    if not (can.tools and can.tool_messages):
        messages = [as_text(message) for message in messages]
    if conversation.tools and not can.tools and choice != "none":
        messages = with_system_prompt(messages, tools_text(conversation.tools))
    if conversation.response_format and tells_format:
        messages = with_system_prompt(messages, format_text(conversation.response_format))
    return messages


def as_text(message: Wire) -> Wire:
    """The message for a server without tools, with calls and results as text in the format of
    Hermes models."""
    content = message.get("content") or ""
    if message["role"] == "tool":
        return {"role": "user", "content": _framed(RESULT_BEGIN.text, content, RESULT_END.text)}
    if not message.get("tool_calls"):
        return message
    functions = [call["function"] for call in message["tool_calls"]]
    calls = [ToolCall("", each["name"], each["arguments"] or "{}") for each in functions]
    written = in_hermes_tags(calls, lambda text: text)
    rest = {name: value for name, value in message.items() if name != "tool_calls"}
    return {**rest, "content": _framed("", content, f"\n{written}" if content else written)}


def with_system_prompt(messages: Sequence[Wire], added: Iterable[Part]) -> list[Wire]:
    """The messages with a paragraph at the end of their leading system prompt."""
    # another server tokenises all text alike, so control tokens in `OwnText` need no marking
    text = "".join(part.text if isinstance(part, OwnText) else str(part) for part in added)
    leading = next((i for i, each in enumerate(messages) if not _is_system(each)), len(messages))
    if not leading:
        return [{"role": "system", "content": text}, *messages]
    last = messages[leading - 1]
    content = last.get("content")
    extended = {**last, "content": _framed("", content, f"\n\n{text}") if content else text}
    return [*messages[: leading - 1], extended, *messages[leading:]]


def _wire(message: Message, can: UpstreamCapabilities, *, thinks: bool) -> Wire:
    """thinks: whether the message's reasoning is sent, if the upstream accepts any."""
    role = message.role
    if role == "developer" and not can.developer_role:
        role = "system"
    # the content is never null, since some servers fail for it
    wire: Wire = {"role": role, "content": message.content}
    if message.name and role != "tool":
        wire["name"] = message.name
    if message.tool_call_id and role == "tool":
        wire["tool_call_id"] = message.tool_call_id
    details = _details(message) if can.extra_content else None
    if details:  # they contain the reasoning's text
        wire[DETAILS] = details
    elif message.reasoning and can.reasoning_messages and thinks:
        wire[can.reasoning_field] = message.reasoning
    if message.tool_calls:
        wire["tool_calls"] = list(_calls(message, can))
    return wire


def _calls(message: Message, can: UpstreamCapabilities) -> Iterator[Wire]:
    for call in message.tool_calls:
        function = {"name": call.name, "arguments": call.arguments or "{}"}
        extra = {k: v for k, v in (call.extra_content or {}).items() if k != DETAILS}
        signed = {"extra_content": extra} if extra and can.extra_content else {}
        yield {"id": call.id, "type": "function", "function": function, **signed}


def _details(message: Message) -> Any:
    """The message's `reasoning_details`, which are stored with its first call."""
    extras = (call.extra_content or {} for call in message.tool_calls)
    return next((found for extra in extras if (found := extra.get(DETAILS))), None)


def _framed(before: str, content: str | list[Wire], after: str) -> str | list[Wire]:
    """A content, which may be text or parts, with a text before and after it."""
    if isinstance(content, str):
        return f"{before}{content}{after}"
    first, last = ([{"type": "text", "text": text}] if text else [] for text in (before, after))
    return [*first, *content, *last]


def _is_system(message: Mapping[str, Any]) -> bool:
    return message.get("role") in ("system", "developer")
