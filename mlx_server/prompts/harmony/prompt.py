"""Renders conversations to Harmony token ids with openai-harmony.

The library never encodes text as control tokens. Only names in headers could break out of their
place, so characters that could end a name are removed from it.
"""

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
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

from mlx_server import limits
from mlx_server.errors import BadRequest
from mlx_server.messages import Conversation, Message, Tool, ToolCall
from mlx_server.models.checkpoint import Checkpoint
from mlx_server.parsers.harmony_grammar import NEXT, REASONING
from mlx_server.parsers.harmony_parser import (
    BROWSER,
    CHANNELS,
    FUNCTIONS,
    PYTHON,
    header_name,
    is_built_in,
)
from mlx_server.prompts.branches import FURTHER_TOOL, Branches, instructions
from mlx_server.prompts.control_token_guard import common_length
from mlx_server.prompts.harmony.tools_text import (
    AROUND,
    SOME_TOOLS,
    WHOLE,
    WINDOW,
    LongTools,
    for_typescript,
    long_words,
    parts,
    text_pieces,
)
from mlx_server.prompts.harmony.vocabulary import NAMED, check, encoding
from mlx_server.prompts.message_normalization import format_line
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

NAMED_ROLES = ("user", "tool")
"""The roles whose names are rendered; a result has the name of its tool."""

LONGEST_NAME = 2048
"""Most characters of names and schemas without a token boundary: these can't be split."""

CHUNK = 64
"""Messages that are rendered at a time. The first have the tools, by which the system message
differs."""

# the library's own rule would keep reasoning between two final answers
CONFIG = RenderConversationConfig(auto_drop_analysis=False)
ENDS = {NAMED[token] for token in ("<|end|>", "<|call|>", "<|return|>")}


def render(checkpoint: Checkpoint, conversation: Conversation) -> RenderedPrompt:
    if not checkpoint.has_built_in_vocabulary:  # it takes a tenth of a second
        check(checkpoint.tokenizer)
    kwargs = conversation.template_kwargs
    try:
        begun = conversation.continued
        earlier = conversation.messages[:-1] if begun else conversation.messages
        messages = list(_messages(replace(conversation, messages=earlier)))
        tokens = _rendered(messages, conversation)
        begins = len(tokens)
        if begun:
            tokens += _begun_answer(begun)
    except (HarmonyError, ValueError) as error:
        raise BadRequest(
            f"The messages can't be rendered as Harmony: {error}", param="messages"
        ) from None
    ignored = [f"chat_template_kwargs.{name}" for name in kwargs if name not in KWARGS]
    if any(each.name and each.role not in NAMED_ROLES for each in conversation.messages):
        ignored.append("messages.name")
    return RenderedPrompt(
        tokens, tuple(ignored), lambda: _branches(conversation, messages, tokens[:begins])
    )


def _rendered(messages: Sequence[HarmonyMessage], conversation: Conversation) -> list[int]:
    """Renders a few messages at a time, and texts in pieces: the library lets no other thread run
    meanwhile."""
    tokens = list[int]()
    for begin in range(0, len(messages), CHUNK):
        check_wanted()
        chunk = messages[begin : begin + CHUNK]
        contents = [content for message in chunk for content in message.content]
        is_short = sum(map(len, _texts(contents))) <= WINDOW
        if is_short and not any(isinstance(it, LongTools) for it in contents):
            whole = HarmonyConversation.from_messages(chunk)
            tokens += encoding().render_conversation(whole, CONFIG)
        else:
            bare = HarmonyConversation.from_messages(list(map(_without_texts, chunk)))
            tokens += _with_texts(encoding().render_conversation(bare, CONFIG), chunk)
    if conversation.add_generation_prompt:
        tokens += [NAMED["<|start|>"], *_tokens_of(["assistant"])]
    return tokens


def _without_texts(message: HarmonyMessage) -> HarmonyMessage:
    others = [
        SOME_TOOLS if isinstance(it, LongTools) else it
        for it in message.content
        if not isinstance(it, TextContent)
    ]
    return message.model_copy(update={"content": others})


def _with_texts(tokens: Iterable[int], messages: Iterable[HarmonyMessage]) -> Iterator[int]:
    """Yields the tokens of messages without their texts, and those of the texts in their places:
    before and after the tools, if a message has any."""
    following, after, is_other = iter(messages), list[str](), False
    for token in tokens:
        if token in ENDS:
            yield from _tokens_of(after)
            is_other = False
        if not is_other:
            yield token
        if token == NAMED["<|message|>"]:
            contents = next(following).content
            at = next((i for i, it in enumerate(contents) if not isinstance(it, TextContent)), None)
            yield from _tokens_of(_texts(contents[:at]))
            after = _texts(contents[at:]) if at is not None else []
            if at is not None and isinstance(tools := contents[at], LongTools):
                yield from _text_tokens(tools.text())
                is_other = True


def _texts(contents: Iterable[Content]) -> list[str]:
    return [it.text for it in contents if isinstance(it, TextContent)]


def _tokens_of(pieces: Iterable[str]) -> Iterator[int]:
    for piece in pieces:
        check_wanted()
        yield from encoding().encode(piece, disallowed_special=())


def _branches(
    conversation: Conversation, messages: Sequence[HarmonyMessage], tokens: Sequence[int]
) -> Branches:
    """Finds where other prompts differ: other conversations from the first turn on, edited ones
    from the last question on. The next turn drops the reasoning since that question; a tool's
    result keeps it."""
    start = NAMED["<|start|>"]
    *starts, end = (place for place, token in enumerate(tokens) if token == start)
    roles = [message.author.role for message in messages]
    turn = next((i for i, r in enumerate(roles) if r not in (Role.SYSTEM, Role.DEVELOPER)), -1)
    last = max((i for i, role in enumerate(roles) if role == Role.USER), default=turn)
    dropped = (i for i in range(last, len(roles)) if messages[i].channel == "analysis")
    next_turn = starts[i] if (i := next(dropped, None)) is not None else end
    places = {starts[turn], starts[last], next_turn, end, _tools_end(conversation, tokens)}
    return Branches(tuple(sorted(places - {0})), next_turn, starts[turn])


def _tools_end(conversation: Conversation, tokens: Sequence[int]) -> int:
    """Returns the number of tokens up to where a further tool would be; 0 if there are no tools."""
    if not conversation.tools:
        return 0
    more = replace(conversation, tools=(*conversation.tools, FURTHER_TOOL))
    grown = replace(more, messages=tuple(instructions(conversation.messages)))
    other = _rendered(list(_messages(grown)), grown)
    return common_length(tokens, other)


def opening(begun: Message) -> str:
    """Returns the header, without its role, of the Harmony message that continues this one."""
    if begun.content or not begun.reasoning:
        return f"<|channel|>{_channel(begun)}<|message|>"
    return REASONING


def _begun_answer(begun: Message) -> Iterator[int]:
    """Yields the tokens of the message, from the end of its role to the end of its text."""
    if begun.reasoning and begun.content:
        yield from _with_control(REASONING)
        yield from _text_tokens(begun.reasoning)
        yield from _with_control(NEXT)
    yield from _with_control(opening(begun))
    yield from _text_tokens(begun.content or begun.reasoning or "")


def _with_control(text: str) -> list[int]:
    return list(encoding().encode(text, allowed_special="all"))


def _text_tokens(text: str) -> Iterator[int]:
    yield from _tokens_of(text_pieces(text))


def _messages(conversation: Conversation) -> Iterator[HarmonyMessage]:
    begin = instructions(conversation.messages)
    yield HarmonyMessage(author=Author(role=Role.SYSTEM), content=[_system(conversation)])
    text = "\n\n".join(message.content for message in begin if message.content)
    if developer := list(_developer(text, conversation)):
        yield HarmonyMessage(author=Author(role=Role.DEVELOPER), content=developer)
    yield from _turns(conversation.messages[len(begin) :], conversation.tools)


def _developer(instructions: str, conversation: Conversation) -> Iterator[Content]:
    texts = [_instructions(instructions), _response_format(conversation.response_format)]
    described = [_tool_description(tool) for tool in conversation.tools if not is_built_in(tool)]
    if not described:
        yield from _text_contents("\n\n".join(filter(None, texts)))
        return
    before, after = texts
    yield from _text_contents(before and f"{before}\n\n")
    kind = LongTools if sum(size for _, size in described) > WHOLE else DeveloperContent
    yield kind.new().with_function_tools([function for function, _ in described])
    yield from _text_contents(after and f"\n\n{after}")


def _system(conversation: Conversation) -> SystemContent:
    kwargs = conversation.template_kwargs
    effort = kwargs.get("reasoning_effort") or "medium"
    if not isinstance(effort, str) or effort not in EFFORTS:
        known = ", ".join(EFFORTS)
        raise BadRequest(f"`reasoning_effort` must be one of {known}.", param="reasoning_effort")
    system = (
        SystemContent.new()
        .with_reasoning_effort(EFFORTS[effort])
        .with_conversation_start_date(_kwarg(kwargs, "conversation_start_date", f"{date.today()}"))
    )
    system.model_identity = _kwarg(kwargs, "model_identity", system.model_identity or "")
    names = {tool.name for tool in conversation.tools if is_built_in(tool)}
    if BROWSER in names:
        system = system.with_browser_tool()
    if PYTHON in names:
        system = system.with_python_tool()
    return system


def _kwarg(kwargs: Mapping[str, Any], name: str, default: str) -> str:
    value = kwargs.get(name, default)
    if not isinstance(value, str):
        where = f"chat_template_kwargs.{name}"
        raise BadRequest(f"`{where}` must be a string.", param=where)
    return _refuse_endless(value, f"chat_template_kwargs.{name}")


def _instructions(text: str) -> str:
    return text and f"# Instructions\n\n{text}"


def _tool_description(tool: Tool) -> tuple[ToolDescription, int]:
    """Returns a tool as the library has it, and about the characters that describe it."""
    parameters, description = for_typescript(tool.parameters), tool.description or ""
    size, most = 0, limits.HARMONY_PARAMETERS
    for text in parts([tool.name, parameters]):
        size += len(_refuse_endless(text, "tools")) + AROUND
        if size > most:
            raise BadRequest(
                f"The parameters of tool {tool.name[:64]!r} have more than {most} characters. "
                "Shorten them.",
                param="tools",
            )
    _refuse_endless(description, "tools")
    described = ToolDescription.new(_checked_name(tool.name), description, parameters)
    return described, size + len(description)


def _response_format(format: Mapping[str, Any] | None) -> str:
    if not format:
        return ""
    if "schema" not in format:
        instruction, asked = format_line(format)
        return instruction.text + asked
    comment = "".join(f"// {line}\n" for line in (format.get("description") or "").splitlines())
    schema = json.dumps(format.get("schema") or {}, ensure_ascii=False, separators=(",", ":"))
    return f"# Response Formats\n\n## {format.get('name') or 'answer'}\n\n{comment}{schema}"


def _turns(messages: Sequence[Message], tools: Sequence[Tool]) -> Iterator[HarmonyMessage]:
    """Yields the turns' messages. Reasoning is kept while its tool round is open; a final answer or
    a user turn closes the round."""
    closed = max((i for i, message in enumerate(messages) if _closes(message)), default=-1)
    built_in = {tool.name for tool in tools if is_built_in(tool)}
    called: dict[str, str] = {}
    for i, message in enumerate(messages):
        called |= {call.id: call.name for call in message.tool_calls}
        match message.role:
            case "assistant":
                yield from _answer(message, built_in, with_reasoning=i > closed)
            case "tool":
                name = called.get(message.tool_call_id or "") or message.name or "tool"
                yield _tool_result(name, built_in, message.content)
            case "user":
                author = Author(role=Role.USER, name=message.name and _checked_name(message.name))
                yield _text_message(author, message.content)
            case _:
                author = Author(role=Role.DEVELOPER)
                yield _text_message(author, _instructions(message.content))


def _closes(message: Message) -> bool:
    is_text = message.role == "assistant" and message.content and not message.tool_calls
    return message.role == "user" or bool(is_text and _channel(message) == "final")


def _channel(message: Message) -> str:
    """Returns the channel of an assistant's content."""
    if message.phase:
        return CHANNELS[message.phase]
    return "commentary" if message.tool_calls else "final"


def _answer(
    message: Message, built_in: set[str], *, with_reasoning: bool
) -> Iterator[HarmonyMessage]:
    author = Author(role=Role.ASSISTANT)
    if message.reasoning and with_reasoning:
        yield _text_message(author, message.reasoning, "analysis")
    if message.content:
        yield _text_message(author, message.content, _channel(message))
    for call in message.tool_calls:
        recipient, channel = _recipient_of(call.name, built_in)
        written = _text_message(author, _arguments(call, recipient), channel, recipient)
        own = channel == "analysis"
        yield written.with_content_type("code" if own else "<|constrain|>json")


def _tool_result(name: str, built_in: set[str], content: str) -> HarmonyMessage:
    author, channel = _recipient_of(name, built_in)
    return _text_message(Author(role=Role.TOOL, name=author), content, channel, "assistant")


def _recipient_of(name: str, built_in: set[str]) -> tuple[str, str]:
    """Returns a tool's name in headers, and the channel of its calls and results."""
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


def _text_message(
    author: Author, text: str, channel: str | None = None, recipient: str | None = None
) -> HarmonyMessage:
    content = _text_contents(text)
    return HarmonyMessage(author=author, content=content, channel=channel, recipient=recipient)


def _checked_name(name: str) -> str:
    """Returns a name as headers have it. One of an earlier call may have any length."""
    return header_name(name[:LONGEST_NAME])


def _text_contents(text: str) -> list[Content]:
    return [TextContent(text=piece) for piece in text_pieces(text)]


def _refuse_endless(text: str, param: str) -> str:
    """Raises BadRequest for an overlong word in text that can't be split without a change."""
    longest = max((size for _, size in long_words(text)), default=0)
    if longest > LONGEST_NAME:
        raise BadRequest(
            f"A name or schema has a word of {longest} characters; the limit is {LONGEST_NAME}. "
            "Shorten it.",
            param=param,
        )
    return text
