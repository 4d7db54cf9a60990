"""Converts a conversation to messages of OpenAI's chat completions that an upstream accepts."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from mlx_server.messages import ContentPart, Conversation, Media, Message, ToolCall, content_of
from mlx_server.prompts.history_rendering import in_hermes_tags
from mlx_server.prompts.message_normalization import RESULT_BEGIN, RESULT_END, OwnText, Part
from mlx_server.prompts.system_text import format_text, tools_text
from mlx_server.requests import ToolChoice
from mlx_server.upstream.reasoning_details import DETAILS
from mlx_server.upstream.spec import UpstreamCapabilities

Wire = dict[str, Any]

NO_RESULT = "This call has no result."
FOLLOWS = "it follows in the next message"


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
    every = can.reasoning_messages is True
    thoughts = [
        replace(message, reasoning=message.reasoning if every or i > last else None)
        for i, message in enumerate(conversation.messages)
    ]
    messages = [_wire(message, can) for message in with_matching_results(thoughts, can)]
    if not (can.tools and can.tool_messages):
        messages = [as_text(message) for message in messages]
    if conversation.tools and not can.tools and choice != "none":
        messages = with_system_prompt(messages, tools_text(conversation.tools))
    if conversation.response_format and tells_format:
        messages = with_system_prompt(messages, format_text(conversation.response_format))
    return messages


def with_matching_results(
    messages: Iterable[Message], can: UpstreamCapabilities
) -> Iterator[Message]:
    """The messages as OpenAI's API demands them: calls are followed by their results and no others,
    which are text. Media in results, and results without a call, become messages of the user."""
    unanswered: dict[str, None] = {}
    after: list[Message] = []
    for message in messages:
        if message.role != "tool":
            yield from (Message("tool", NO_RESULT, tool_call_id=id) for id in unanswered)
            yield from after
            unanswered, after = dict.fromkeys(call.id for call in message.tool_calls), []
            yield message
        elif (id := message.tool_call_id or "") in unanswered:
            del unanswered[id]
            yield message
            if shown := [each for each in message.media if can.takes(each)]:
                after.append(Message("user", parts=tuple(shown)))
        else:
            framed = _framed(RESULT_BEGIN.text, message.content, RESULT_END.text)
            after.append(Message("user", str(framed)))
    yield from after


def shows(medium: Media, message: Message, can: UpstreamCapabilities) -> bool:
    return can.takes(medium) and message.role in ("user", "tool")


def _content(message: Message, can: UpstreamCapabilities) -> str | list[Wire]:
    parts = [(part, _shown(part, message, can)) for part in message.parts]
    if not any(shown for _, shown in parts):
        return message.content
    if message.role == "tool":
        return content_of(
            [
                replace(part, why=FOLLOWS) if isinstance(part, Media) and shown else part
                for part, shown in parts
            ]
        )
    return [dict(shown or {"type": "text", "text": content_of([part])}) for part, shown in parts]


def _shown(
    part: ContentPart, message: Message, can: UpstreamCapabilities
) -> Mapping[str, Any] | None:
    return part.part if isinstance(part, Media) and shows(part, message, can) else None


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


def _wire(message: Message, can: UpstreamCapabilities) -> Wire:
    role = message.role
    if role == "developer" and not can.developer_role:
        role = "system"
    # the content is never null, since some servers fail for it
    wire: Wire = {"role": role, "content": _content(message, can)}
    if message.name and role != "tool":
        wire["name"] = message.name
    if message.tool_call_id and role == "tool":
        wire["tool_call_id"] = message.tool_call_id
    details = _details(message) if can.extra_content else None
    if details:  # they contain the reasoning's text
        wire[DETAILS] = details
    elif message.reasoning and can.reasoning_messages:
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


def without_media(messages: Sequence[Wire]) -> list[Wire]:
    contents = ((message, message.get("content")) for message in messages)
    return [
        {**message, "content": [part for part in content if part["type"] == "text"]}
        if isinstance(content, list)
        else message
        for message, content in contents
    ]


def _is_system(message: Mapping[str, Any]) -> bool:
    return message.get("role") in ("system", "developer")
