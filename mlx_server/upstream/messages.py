"""A conversation as messages of OpenAI's chat completions, in the forms that an upstream knows."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from mlx_server.messages import Conversation, Message
from mlx_server.prompts.history_rendering import in_hermes_tags
from mlx_server.prompts.message_normalization import RESULT_BEGIN, RESULT_END, OwnText, Part
from mlx_server.prompts.system_text import format_text, tools_text
from mlx_server.requests import ToolChoice
from mlx_server.upstream.spec import UpstreamCapabilities

Wire = dict[str, Any]


def messages_of(
    conversation: Conversation,
    can: UpstreamCapabilities,
    choice: ToolChoice,
    *,
    tells_format: bool,
) -> list[Wire]:
    """tells_format: whether the system prompt says what format the answer must have."""
    as_text = not (can.tools and can.tool_messages)
    messages = [_wire(message, can, as_text=as_text) for message in conversation.messages]
    added: list[str] = []
    if conversation.tools and not can.tools and choice != "none":
        added.append(_plain(tools_text(conversation.tools)))
    if conversation.response_format and tells_format:
        added.append(_plain(format_text(conversation.response_format)))
    return _with_system_text(messages, added)


def _wire(message: Message, can: UpstreamCapabilities, *, as_text: bool) -> Wire:
    role = message.role
    if role == "developer" and not can.developer_role:
        role = "system"
    if role == "tool" and as_text:
        return {"role": "user", "content": f"{RESULT_BEGIN.text}{message.content}{RESULT_END.text}"}
    # never null: some servers fail with it
    wire: Wire = {"role": role, "content": message.content}
    if message.name and role != "tool":
        wire["name"] = message.name
    if message.tool_call_id and role == "tool":
        wire["tool_call_id"] = message.tool_call_id
    if message.reasoning and can.reasoning_messages:
        wire["reasoning_content"] = message.reasoning
    if message.tool_calls and as_text:
        calls = in_hermes_tags(message.tool_calls, lambda text: text)
        wire["content"] = f"{message.content}\n{calls}" if message.content else calls
    elif message.tool_calls:
        wire["tool_calls"] = list(_calls(message))
    return wire


def _calls(message: Message) -> Iterator[Wire]:
    for call in message.tool_calls:
        function = {"name": call.name, "arguments": call.arguments or "{}"}
        yield {"id": call.id, "type": "function", "function": function}


def _plain(parts: Iterable[Part]) -> str:
    """No text is control on an upstream's wire, so that ours and the client's are alike."""
    return "".join(part.text if isinstance(part, OwnText) else str(part) for part in parts)


def _with_system_text(messages: Sequence[Wire], added: Sequence[str]) -> list[Wire]:
    """The messages with paragraphs at the end of their leading system prompt."""
    if not added:
        return list(messages)
    text = "\n\n".join(added)
    leading = next((i for i, each in enumerate(messages) if not _is_system(each)), len(messages))
    if not leading:
        return [{"role": "system", "content": text}, *messages]
    last = messages[leading - 1]
    content = f"{last['content']}\n\n{text}" if last["content"] else text
    return [*messages[: leading - 1], {**last, "content": content}, *messages[leading:]]


def _is_system(message: Mapping[str, Any]) -> bool:
    return message["role"] in ("system", "developer")
