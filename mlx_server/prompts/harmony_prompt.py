"""Conversations to Harmony, by openai-harmony: token ids, in which text is never control.

The library writes all text as ordinary text; only where it ends does a name in a header end. So
names lose what could end them, and a header says nothing that a client made up.
"""

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from datetime import date
from typing import Any

from openai_harmony import (
    Author,
    Content,
    DeveloperContent,
    HarmonyError,
    ReasoningEffort,
    RenderConversationConfig,
    Role,
    SystemContent,
    TextContent,
    ToolDescription,
)
from openai_harmony import Conversation as HarmonyConversation
from openai_harmony import Message as HarmonyMessage

from mlx_server.checkpoints.checkpoint import Checkpoint
from mlx_server.errors import BadRequest
from mlx_server.messages import Conversation, Message, Tool, ToolCall
from mlx_server.parsers.harmony import (
    BROWSER,
    CHANNELS,
    FUNCTIONS,
    PYTHON,
    is_built_in,
    message_json,
)
from mlx_server.parsers.harmony_header import header_name
from mlx_server.prompts.harmony_schema import readable
from mlx_server.prompts.harmony_vocabulary import check, encoding, splitter
from mlx_server.prompts.template_prompt import RenderedPrompt
from mlx_server.request_threads import check_wanted

EFFORTS = {
    "none": ReasoningEffort.LOW,
    "minimal": ReasoningEffort.LOW,
    "low": ReasoningEffort.LOW,
    "medium": ReasoningEffort.MEDIUM,
    "high": ReasoningEffort.HIGH,
    "xhigh": ReasoningEffort.HIGH,
    "max": ReasoningEffort.HIGH,
}
KWARGS = ("reasoning_effort", "model_identity", "conversation_start_date")

EFFORT_NAMES = ("system", "developer")

LONGEST_WORD = 256
"""Characters between two places where tokens must end. openai-harmony takes time by the square."""

LONGEST_NAME = 2048
"""The same, of names and schemas."""

WINDOW = 1 << 14
"""Characters that are split into words at once: each word takes hundreds of bytes."""

LONG = re.compile(rf"(?<!\S)\S{{{LONGEST_WORD}}}|(?<!\s)\s{{{LONGEST_WORD}}}")
"""Only where a run begins, or each character would be looked at hundreds of times."""


def render(checkpoint: Checkpoint, conversation: Conversation) -> RenderedPrompt:
    check(checkpoint.tokenizer)
    asked = conversation.template_kwargs
    try:
        messages = list(_messages(conversation))
        tokens = encoding().render_conversation_for_completion(
            HarmonyConversation.from_messages(messages),
            Role.ASSISTANT,
            # it would keep reasoning that came between two final answers
            RenderConversationConfig(auto_drop_analysis=False),
        )
    except (HarmonyError, ValueError) as error:
        raise BadRequest(
            f"Harmony can't be written of these messages: {error}", param="messages"
        ) from None
    ignored = tuple(f"chat_template_kwargs.{name}" for name in asked if name not in KWARGS)
    return RenderedPrompt(tokens, ignored, lambda: [message_json(message) for message in messages])


def _messages(conversation: Conversation) -> Iterator[HarmonyMessage]:
    said = conversation.messages
    first = next((i for i, m in enumerate(said) if m.role not in EFFORT_NAMES), len(said))
    yield _message(Author(role=Role.SYSTEM), [_system(conversation)])
    instructions = "\n\n".join(m.content for m in said[:first] if m.content)
    if developer := list(_developer(instructions, conversation)):
        yield _message(Author(role=Role.DEVELOPER), developer)
    yield from _turns(said[first:], conversation.tools)


def _developer(instructions: str, conversation: Conversation) -> Iterator[Content]:
    texts = [_instructions(instructions), _response_format(conversation.response_format)]
    functions = [_tool_description(tool) for tool in conversation.tools if not is_built_in(tool)]
    if not functions:
        yield from _text_contents("\n\n".join(filter(None, texts)))
        return
    before, behind = texts
    yield from _text_contents(before and f"{before}\n\n")
    yield DeveloperContent.new().with_function_tools(functions)
    yield from _text_contents(behind and f"\n\n{behind}")


def _system(conversation: Conversation) -> SystemContent:
    asked = conversation.template_kwargs
    effort = asked.get("reasoning_effort") or "medium"
    if not isinstance(effort, str) or effort not in EFFORTS:
        known = ", ".join(EFFORTS)
        raise BadRequest(f"`reasoning_effort` can be one of {known}.", param="reasoning_effort")
    system = (
        SystemContent.new()
        .with_reasoning_effort(EFFORTS[effort])
        .with_conversation_start_date(_kwarg(asked, "conversation_start_date", f"{date.today()}"))
    )
    system.model_identity = _kwarg(asked, "model_identity", system.model_identity or "")
    names = {tool.name for tool in conversation.tools if is_built_in(tool)}
    if BROWSER in names:
        system = system.with_browser_tool()
    if PYTHON in names:
        system = system.with_python_tool()
    return system


def _kwarg(asked: Mapping[str, Any], name: str, otherwise: str) -> str:
    found = asked.get(name, otherwise)
    if not isinstance(found, str):
        where = f"chat_template_kwargs.{name}"
        raise BadRequest(f"`{where}` should be a string.", param=where)
    return _refuse_endless(found, f"chat_template_kwargs.{name}")


def _instructions(text: str) -> str:
    return text and f"# Instructions\n\n{text}"


def _tool_description(tool: Tool) -> ToolDescription:
    parameters = readable(tool.parameters)
    for text in _strings([tool.name, tool.description, parameters]):
        _refuse_endless(text, "tools")
    return ToolDescription.new(_checked_name(tool.name), tool.description or "", parameters)


def _strings(value: Any) -> Iterator[str]:
    match value:
        case str():
            yield value
        case list():
            for item in value:
                yield from _strings(item)
        case dict():
            yield from _strings([*value.keys(), *value.values()])


def _response_format(asked: Mapping[str, Any] | None) -> str:
    if not asked:
        return ""
    comment = "".join(f"// {line}\n" for line in (asked.get("description") or "").splitlines())
    schema = json.dumps(asked.get("schema") or {}, ensure_ascii=False, separators=(",", ":"))
    return f"# Response Formats\n\n## {asked.get('name') or 'answer'}\n\n{comment}{schema}"


def _turns(said: Sequence[Message], tools: Sequence[Tool]) -> Iterator[HarmonyMessage]:
    """Reasoning counts as long as its tool round is open; an answer, or a question, closes it."""
    closed = max((i for i, message in enumerate(said) if _closes(message)), default=-1)
    built_in = {tool.name for tool in tools if is_built_in(tool)}
    called: dict[str, str] = {}
    for i, message in enumerate(said):
        called |= {call.id: call.name for call in message.tool_calls}
        match message.role:
            case "assistant":
                yield from _answer(message, built_in, with_reasoning=i > closed)
            case "tool":
                name = called.get(message.tool_call_id or "") or message.name or "tool"
                yield _result(name, built_in, message.content)
            case "user":
                author = Author(role=Role.USER, name=message.name and _checked_name(message.name))
                yield _message(author, _text_contents(message.content))
            case _:
                yield _message(
                    Author(role=Role.DEVELOPER), _text_contents(_instructions(message.content))
                )


def _closes(message: Message) -> bool:
    said = message.role == "assistant" and message.content and not message.tool_calls
    return message.role == "user" or bool(said and _channel(message) == "final")


def _channel(message: Message) -> str:
    """Of an assistant's content."""
    if message.phase:
        return CHANNELS[message.phase]
    return "commentary" if message.tool_calls else "final"


def _answer(
    message: Message, built_in: set[str], *, with_reasoning: bool
) -> Iterator[HarmonyMessage]:
    author = Author(role=Role.ASSISTANT)
    if message.reasoning and with_reasoning:
        yield _message(author, _text_contents(message.reasoning), "analysis")
    if message.content:
        yield _message(author, _text_contents(message.content), _channel(message))
    for call in message.tool_calls:
        recipient, channel = _recipient_of(call.name, built_in)
        made = _message(author, _text_contents(_arguments(call, recipient)), channel, recipient)
        own = channel == "analysis"
        yield made.with_content_type("code" if own else "<|constrain|>json")


def _result(name: str, built_in: set[str], content: str) -> HarmonyMessage:
    author, channel = _recipient_of(name, built_in)
    return _message(
        Author(role=Role.TOOL, name=author), _text_contents(content), channel, "assistant"
    )


def _recipient_of(name: str, built_in: set[str]) -> tuple[str, str]:
    """A tool by its name in headers, and the channel on which it is spoken to."""
    namespace, _, _ = name.partition(".")
    if namespace in built_in:
        return _checked_name(name), "analysis"
    return FUNCTIONS + _checked_name(name), "commentary"


def _arguments(call: ToolCall, recipient: str) -> str:
    if recipient == PYTHON:
        try:
            code = json.loads(call.arguments)["code"]
        except (ValueError, LookupError, TypeError, RecursionError):
            return call.arguments
        return code if isinstance(code, str) else call.arguments
    return call.arguments or "{}"


def _message(
    author: Author,
    content: Sequence[Content],
    channel: str | None = None,
    recipient: str | None = None,
) -> HarmonyMessage:
    return HarmonyMessage(
        author=author, content=list(content), channel=channel, recipient=recipient
    )


def _checked_name(name: str) -> str:
    return header_name(_refuse_endless(name, "messages"))


def _text_contents(text: str) -> list[Content]:
    return [TextContent(text=piece) for piece in _text_pieces(text)]


def _text_pieces(text: str) -> Iterator[str]:
    """Cut only where a word is absurdly long."""
    begin = 0
    for at, size in _long_words(text):
        for place in range(at + LONGEST_WORD, at + size, LONGEST_WORD):
            yield text[begin:place]
            begin = place
    if text[begin:]:
        yield text[begin:]


def _long_words(text: str) -> Iterator[tuple[int, int]]:
    """Place and length of what tokens do not span, where that is long."""
    at = 0
    while at < len(text):
        check_wanted()
        part = _part(text, at)
        if LONG.search(part):
            for word, (start, _) in splitter().pre_tokenize_str(part):
                if len(word) > LONGEST_WORD:
                    yield at + start, len(word)
        at += len(part)


def _part(text: str, at: int) -> str:
    """To the last space of a window, where tokens can end, if there is one."""
    end = at + WINDOW
    space = text.rfind(" ", at + 1, end) if end < len(text) else -1
    return text[at : end if space < 0 else space]


def _refuse_endless(text: str, param: str) -> str:
    """For text that can't be cut without another meaning."""
    longest = max((size for _, size in _long_words(text)), default=0)
    if longest > LONGEST_NAME:
        raise BadRequest(f"A word of {longest} characters is too long here.", param=param)
    return text
