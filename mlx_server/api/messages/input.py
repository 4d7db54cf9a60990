"""`POST /v1/messages` and `/v1/messages/count_tokens` on the wire, as Anthropic documents them, and
the requests that they make.

Messages of one role in a row are one turn, however their blocks are divided: text as a list in one
request and as a string in the next gives the same prompt, and so is found in the prompt cache.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BeforeValidator, Field, Tag

from mlx_server import limits
from mlx_server.api import formats
from mlx_server.api.content import (
    Content,
    FileData,
    ForeignPart,
    MediaPart,
    OtherPart,
    as_parts,
    content_of_data,
    content_of_file,
    foreign_to,
    medium_of,
    parts_of,
    path_to,
)
from mlx_server.api.fields import (
    EMPTY_IS_UNSET,
    SOME_EFFORT,
    UNKNOWN_ROLE,
    WHOLE,
    Arguments,
    Items,
    OtherTool,
    RoleName,
    SamplingBody,
    StopStrings,
    Text,
    ThinkingTokens,
    WireModel,
    by_type,
    check_number,
    check_offered,
    check_usable,
    role_of,
)
from mlx_server.api.formats import FormatChoice, the_only_format
from mlx_server.api.histories import MENDED, AssistantDraft, assistant_messages
from mlx_server.errors import BadRequest
from mlx_server.http.errors import NO_THREADS
from mlx_server.http.security import Signer
from mlx_server.messages import (
    INSTRUCTION_ROLES,
    UNNAMED,
    ContentPart,
    Conversation,
    Media,
    Message,
    Role,
    Tool,
    ToolCall,
    content_of,
    media_parts,
)
from mlx_server.requests import GenerateRequest, JsonFormat, NamedTool, ToolChoice

Name = Annotated[str, Field(min_length=1)]

CACHE_CONTROL = frozenset({"cache_control"})
"""The field that marks a block for caching; one anywhere in a request counts (see
`has_cache_control`)."""


class CustomTool(WireModel):
    ACCEPTED = CACHE_CONTROL | {"eager_input_streaming"}

    type: Literal["custom"] | None = None
    name: Name
    description: str | None = None
    input_schema: dict[str, Any]
    strict: bool | None = None
    defer_loading: bool | None = None


ToolParam = Annotated[
    Annotated[CustomTool, Tag("<custom>")] | Annotated[OtherTool, Tag("<other>")],
    by_type("custom", untyped="custom"),
]


AnthropicEffort = Literal["low", "medium", "high", "xhigh", "max"]


class TextBlock(WireModel):
    ACCEPTED = CACHE_CONTROL | {"citations"}

    type: Literal["text"]
    text: Text = None


Texts = Annotated[
    str | Items[Annotated[TextBlock | OtherPart, Field(union_mode="left_to_right")]],
    BeforeValidator(as_parts),
]


class SearchResultBlock(WireModel):
    ACCEPTED = CACHE_CONTROL

    type: Literal["search_result"]
    title: Text = None
    source: Text = None
    content: Texts | None = None


class DocumentSource(WireModel):
    """A text, base64 of a text or a PDF file, parts, or a file elsewhere."""

    type: Text = None
    media_type: Text = None
    data: Text = None
    content: Content | None = None
    url: Text = None
    file_id: Text = None


class DocumentBlock(WireModel):
    ACCEPTED = CACHE_CONTROL

    type: Literal["document"]
    source: DocumentSource | None = None
    title: Text = None
    context: Text = None

    def unused(self) -> Iterable[str]:
        return () if self.source else ("source",)


class ToolReferenceBlock(WireModel):
    """Names a tool with `defer_loading`, which is offered from then on."""

    ACCEPTED = CACHE_CONTROL

    type: Literal["tool_reference"]
    tool_name: Name


class ToolReference(WireModel):
    type: Literal["tool_reference"]
    name: Name


class ToolDefinition(WireModel):
    type: Literal["tool_definition"]
    definition: ToolParam


class ToolChangeBlock(WireModel):
    """Offers a tool from its place in the conversation on, or withdraws it."""

    ACCEPTED = CACHE_CONTROL

    type: Literal["tool_addition", "tool_removal"]
    tool: Annotated[ToolReference | ToolDefinition | OtherPart, Field(union_mode="left_to_right")]


KnownResultBlock = Annotated[
    TextBlock | SearchResultBlock | DocumentBlock | ToolReferenceBlock, Field(discriminator="type")
]
ResultBlock = Annotated[
    KnownResultBlock | Annotated[ForeignPart, foreign_to(KnownResultBlock)],
    Field(union_mode="left_to_right"),
]


class ToolResultBlock(WireModel):
    ACCEPTED = CACHE_CONTROL

    type: Literal["tool_result"]
    tool_use_id: Text = None
    content: Annotated[str | Items[ResultBlock] | None, BeforeValidator(as_parts)] = None
    is_error: Any = None


class ToolUseBlock(WireModel):
    ACCEPTED = CACHE_CONTROL

    type: Literal["tool_use"]
    id: Text = None
    name: Text = None
    input: Arguments = None
    extra_content: dict[str, Any] | None = None
    """What an upstream sent with the call, such as Gemini's signature."""


class ThinkingBlock(WireModel):
    ACCEPTED = CACHE_CONTROL

    type: Literal["thinking"]
    thinking: Text = None
    signature: Text = None


KnownBlock = Annotated[
    TextBlock
    | SearchResultBlock
    | DocumentBlock
    | ToolReferenceBlock
    | ToolChangeBlock
    | ToolResultBlock
    | ToolUseBlock
    | ThinkingBlock,
    Field(discriminator="type"),
]
Block = Annotated[
    KnownBlock | Annotated[ForeignPart, foreign_to(KnownBlock)],
    Field(union_mode="left_to_right"),
]

SPEAKERS = ("user", "assistant", "system")
NEXT_TURN = "next_user_message"


class MessageConfig(WireModel):
    effort: Annotated[AnthropicEffort | None, EMPTY_IS_UNSET] = None


class AnthropicMessageParam(WireModel):
    role: RoleName = UNKNOWN_ROLE
    content: Annotated[str | Items[Block] | None, BeforeValidator(as_parts)] = None
    clear_at: Text = None
    """A system message that only the turn before it needs has NEXT_TURN."""
    output_config: MessageConfig | None = None
    """Of a system message: the effort from here on."""

    @property
    def speaker(self) -> Literal["user", "assistant", "system"]:
        role = role_of(self.role)
        return role if role == "assistant" else "system" if role in INSTRUCTION_ROLES else "user"

    @property
    def effort(self) -> AnthropicEffort | None:
        config = self.output_config if self.speaker == "system" else None
        return config.effort if config else None

    def unused(self) -> Iterable[str]:
        if self.role not in SPEAKERS:
            yield "role"
        if self.speaker != "system":
            yield from (name for name in ("clear_at", "output_config") if getattr(self, name))
        elif self.clear_at not in (None, "", "never", NEXT_TURN):
            yield "clear_at"


class ToolChoiceParam(WireModel):
    type: Literal["auto", "any", "tool", "none"]
    name: Name | None = None
    disable_parallel_tool_use: bool | None = None

    def unused(self) -> Iterable[str]:
        if self.name and self.type != "tool":
            yield "name"


class AnthropicThinking(WireModel):
    type: Literal["enabled", "adaptive", "disabled"]
    budget_tokens: ThinkingTokens | None = None
    display: Literal["summarized", "omitted", "updates"] | None = None
    """"omitted": a thought comes back in its signature, for the next request, and not as text. With
    any other value the thought is sent as text, unabridged."""


class OutputFormat(WireModel):
    type: Literal["json_schema"]
    schema_: Annotated[dict[str, Any], Field(alias="schema")]


class OutputConfig(MessageConfig):
    format: OutputFormat | None = None


class PromptBody(SamplingBody):
    """A request whose tokens are counted. It may have all the fields of one that is answered."""

    ACCEPTED: ClassVar[frozenset[str]] = frozenset(
        {
            *("metadata", "inference_geo", "user_profile_id", "workspace_id"),
            *("anthropic_version", "anthropic_beta"),
        }
    )
    model: Name
    messages: Annotated[Items[AnthropicMessageParam], Field(min_length=1), MENDED]
    system: Texts | None = None
    stop_sequences: Annotated[StopStrings | None, EMPTY_IS_UNSET] = None
    tools: Annotated[Items[ToolParam], Field(max_length=limits.TOOLS)] | None = None
    tool_choice: ToolChoiceParam | None = None
    thinking: AnthropicThinking | None = None
    output_config: OutputConfig | None = None
    output_format: OutputFormat | None = None
    """The name of `output_config.format` in Anthropic's first beta of it."""
    mcp_servers: Items[dict[str, Any]] | None = None
    cache_control: dict[str, Any] | None = None

    @property
    def effort(self) -> str | None:
        return self.output_config.effort if self.output_config else None

    def stops(self) -> tuple[str, ...]:
        return (*(self.stop_sequences or ()), *super().stops())

    def ignored(self) -> list[str]:
        if (self.model_extra or {}).get("thread") is not None:
            raise BadRequest(
                "`thread` is not supported: this server keeps no messages. Send the whole "
                "conversation without it.",
                param="thread",
                code=NO_THREADS,
            )
        return super().ignored()

    def unused(self) -> Iterable[str]:
        if self.thinking and self.thinking.type == "disabled":
            if self.effort:
                yield "output_config.effort"
            if any(message.effort for message in self.messages):
                yield "messages.output_config.effort"


class MessagesBody(PromptBody):
    UNSUPPORTED: ClassVar[Mapping[str, str]] = {
        **PromptBody.UNSUPPORTED,
        "compaction": "ask for a summary in a message",
    }

    max_tokens: Annotated[int, Field(ge=0), WHOLE]
    """0 computes the prompt for the prompt cache and answers nothing."""
    stream: bool | None = None


def select_tools(body: PromptBody, turns: "Turns") -> tuple[tuple[Tool, ...], ToolChoice]:
    """The tools that the model may call, and whether it has to call one.

    A tool with `defer_loading` is among them once the conversation or `tool_choice` names it. Such
    tools come last, in the order in which they were named: what came before stays the same.
    """
    offered: dict[str, CustomTool] = {}
    unknown: list[str] = []
    for i, tool in enumerate(body.tools or ()):
        if isinstance(tool, OtherTool):
            unknown.append(tool.type)
            continue
        if tool.name in offered:
            raise BadRequest(
                f"Two `tools` have the name {tool.name[:64]!r}: give each its own.",
                param=f"tools[{i}].name",
            )
        offered[tool.name] = tool
    if body.mcp_servers:
        raise BadRequest(
            "`mcp_servers` is not supported here: call the server's tools yourself, or use "
            "`/v1/responses`, which has MCP servers.",
            param="mcp_servers",
        )
    choice = _choice(body)
    chosen = [choice.name] if isinstance(choice, NamedTool) else []
    at_once = {tool.name: tool for tool in offered.values() if not tool.defer_loading}
    offered |= {name: tool for name, tool in turns.named_tools.items() if tool}
    if not offered and choice != "none":
        check_usable(unknown)
    later = {name: offered[name] for name in (*turns.named_tools, *chosen) if name in offered}
    present = (tool for name, tool in (at_once | later).items() if name not in turns.withdrawn)
    tools = tuple(map(_tool, present))
    check_number(tools)
    if chosen:
        check_offered(chosen[0], tools)
    if choice == "required" and not tools:
        raise BadRequest("`tool_choice: any` needs `tools`.", param="tool_choice")
    return tools, choice


def _choice(body: PromptBody) -> ToolChoice:
    match body.tool_choice:
        case ToolChoiceParam(type="any"):
            return "required"
        case ToolChoiceParam(type="none"):
            return "none"
        case ToolChoiceParam(type="tool", name=str(name)):
            return NamedTool(name)
        case ToolChoiceParam(type="tool"):
            raise BadRequest(
                "`tool_choice.name` is missing: it names the tool that must be called.",
                param="tool_choice.name",
            )
    return "auto"


def _tool(tool: CustomTool) -> Tool:
    return Tool(tool.name, tool.description, tool.input_schema, bool(tool.strict))


AVAILABLE = "The tool {} is available now."
FAILED = "Error: "
"""Put before a result with `is_error`, since chat templates have no place for that flag."""

ROLES = {
    "tool_result": "user",
    "tool_use": "assistant",
    "thinking": "assistant",
    "redacted_thinking": "assistant",
}
"""The role to which such a block belongs, wherever it is; others belong to their message's."""


class Turns:
    """Takes messages one by one; `messages` is complete after `end`."""

    def __init__(self, signer: Signer) -> None:
        self.messages: list[Message] = []
        self.named_tools: dict[str, CustomTool | None] = {}
        """In the order in which they were named, with the definitions that messages have."""
        self.withdrawn: set[str] = set()
        self.effort: AnthropicEffort | None = None
        self.ignored: dict[str, None] = {}
        self._signer = signer
        self._role = ""
        self._drafts: list[AssistantDraft] = []
        self._calls: list[ToolCall] = []
        self._results: list[Message] = []
        self._parts: list[ContentPart] = []
        self._known: dict[str, int] = {}
        """Number of each call, by its id."""

    def add(self, message: AnthropicMessageParam, where: str, *, is_answered: bool) -> None:
        self._begin(message.speaker)
        is_over = is_answered and message.clear_at == NEXT_TURN
        self.effort = message.effort or self.effort
        content = message.content
        if isinstance(content, str):
            content = [TextBlock(type="text", text=content)]
        for i, block in enumerate(content or ()):
            if is_over and message.speaker == "system" and isinstance(block, TextBlock):
                continue
            role = ROLES.get(block.type, message.speaker)
            if role != self._role:
                self._begin(role)
            self._add(block, f"{where}.content[{i}]")

    def _begin(self, role: str) -> None:
        if role != self._role or role == "system":
            self.end()
            self._role = role

    def end(self) -> None:
        """Ends the turn: what was collected becomes messages."""
        match self._role:
            case "assistant":
                drafts = self._drafts or [AssistantDraft()]
                self.messages += assistant_messages(drafts, tuple(self._calls))
            case "user":
                last = len(self._known)
                self._results.sort(key=lambda each: self._known.get(each.tool_call_id or "", last))
                self.messages += self._results
                if self._parts or not self._results:
                    self._say_as("user")
            case "system" if self._parts:
                self._say_as("system")
        self._role = ""
        self._drafts, self._calls, self._results, self._parts = [], [], [], []

    def _say_as(self, role: Role) -> None:
        parts = self._parts
        self.messages.append(Message(role, content_of(parts), parts=media_parts(parts)))

    def _add(self, block: Block, where: str) -> None:
        match block:
            case TextBlock():
                self._say(block.text or "")
            case ToolResultBlock():
                self._result(block, where)
            case ToolUseBlock():
                id, name = block.id or "", block.name or UNNAMED
                self.named_tools.setdefault(name)
                self._known.setdefault(id, len(self._known))
                arguments = block.input or "{}"
                extra = block.extra_content
                self._calls.append(ToolCall(id, name, arguments, extra_content=extra))
            case ThinkingBlock():
                self._think(block)
            case ToolChangeBlock():
                self._change_tools(block)
            case OtherPart() if not block.text:
                pass
            case _:
                for part in self._block_parts(block, where):
                    self._say(part)

    def _say(self, part: ContentPart) -> None:
        if not part:
            return
        if self._role != "assistant":
            self._parts.append(part)
            return
        if not self._drafts:
            self._drafts.append(AssistantDraft())
        if isinstance(part, Media):
            self.ignored[part.place] = None
        self._drafts[-1].texts.append(content_of([part]))

    def _change_tools(self, change: ToolChangeBlock) -> None:
        match change.tool:
            case ToolReference(name=name):
                self.named_tools.setdefault(name)
            case ToolDefinition(definition=CustomTool(name=name) as tool):
                self.named_tools[name] = tool
            case _:
                return
        if change.type == "tool_removal":
            self.withdrawn.add(name)
            self._say(f"The tool {name} is not available any more.")
        else:
            self.withdrawn.discard(name)
            self._say(AVAILABLE.format(name))

    def _think(self, block: ThinkingBlock) -> None:
        signature = block.signature or ""
        thought = self._signer.opened(signature) or block.thinking or ""
        if not self._signer.is_own(thought, signature):
            self.ignored["messages.content.signature"] = None
        if not thought:
            return
        if not self._drafts or self._drafts[-1].texts:
            self._drafts.append(AssistantDraft())
        self._drafts[-1].reasoning.append(thought)

    def _result(self, block: ToolResultBlock, where: str) -> None:
        parts: list[ContentPart] = []
        if isinstance(block.content, str):
            parts.append(block.content)
        else:
            for i, each in enumerate(block.content or ()):
                parts += self._block_parts(each, f"{where}.content[{i}]")
        content = content_of(parts)
        if block.is_error in (True, "true"):
            content, parts = FAILED + content, [FAILED.strip(), *parts]
        id = block.tool_use_id
        self._results.append(Message("tool", content, tool_call_id=id, parts=media_parts(parts)))

    def _block_parts(self, block: ResultBlock, where: str) -> Sequence[ContentPart]:
        match block:
            case TextBlock() | OtherPart():
                return [block.text or ""]
            case MediaPart():
                return [medium_of(block, where)]
            case SearchResultBlock():
                texts = (block.title or "", block.source or "", system_text(block.content))
                return ["\n".join(filter(None, texts))]
            case DocumentBlock():
                named = filter(None, (block.title, block.context))
                return [*named, *_document(block, path_to(where, block.type))]
            case ToolReferenceBlock(tool_name=name):
                self.named_tools.setdefault(name)
                return [AVAILABLE.format(name)]


def _document(block: DocumentBlock, place: str) -> Sequence[ContentPart]:
    if (source := block.source) is None:
        return []
    match source.type:
        case "text":
            return [source.data or ""]
        case "base64":
            data = f"data:{source.media_type or ''};base64,{source.data or ''}"
            return [content_of_data(data, place)]
        case "content":
            return parts_of(source.content, place)
    return [content_of_file(FileData(file_url=source.url, file_id=source.file_id), place)]


def turns_of(messages: Sequence[AnthropicMessageParam], signer: Signer) -> Turns:
    turns = Turns(signer)
    last = max((i for i, message in enumerate(messages) if message.speaker == "user"), default=0)
    for i, message in enumerate(messages):
        turns.add(message, f"messages[{i}]", is_answered=i < last)
    turns.end()
    if not turns.messages:
        raise BadRequest("`messages` has no content: add a user message.", param="messages")
    return turns


def system_text(system: Texts | None) -> str:
    if isinstance(system, str):
        return system
    return "\n".join(block.text for block in system or () if block.text)


@dataclass(frozen=True, slots=True)
class ParsedMessagesRequest:
    request: GenerateRequest
    ignored: tuple[str, ...]
    stores_prompt: bool
    """Whether the client asks with `cache_control` to keep the prompt for later requests."""


def to_request(body: PromptBody, signer: Signer) -> ParsedMessagesRequest:
    turns = turns_of(body.messages, signer)
    effort = turns.effort or body.effort
    effort_param = "output_config.effort" if effort else "thinking.type"
    tools, tool_choice = select_tools(body, turns)
    constrained = the_only_format(list(_formats(body)), otherwise="output_config.format")
    system = system_text(body.system)
    messages = (*([Message("system", system)] if system else ()), *turns.messages)
    last = messages[-1]  # the answer goes on with it, if the client has begun the answer
    is_begun = last.role == "assistant" and bool(last.content) and not last.tool_calls
    conversation = Conversation(
        messages=messages,
        tools=tools,
        template_kwargs=_template_kwargs(body.thinking, effort),
        response_format=formats.prompt_description(constrained["format"]),
        continue_final_message=is_begun,
    )
    choice = body.tool_choice
    is_streamed = isinstance(body, MessagesBody) and bool(body.stream)
    request = GenerateRequest(
        model=body.model,
        **body.shared_fields(),
        **constrained,
        buffered=not is_streamed,
        progress=is_streamed,
        prompts=(conversation,),
        max_tokens=max(1, body.max_tokens) if isinstance(body, MessagesBody) else None,
        may_end_early=True,
        tool_choice=tool_choice,
        thinking_budget=body.thinking.budget_tokens if body.thinking else None,
        param_names={
            "chat_template_kwargs.reasoning_effort": effort_param,
            "chat_template_kwargs.thinking_budget": "thinking.budget_tokens",
        },
        implied=frozenset() if effort else frozenset({"reasoning_effort"}),
        parallel_calls=not (choice and choice.disable_parallel_tool_use),
    )
    ignored = (*body.ignored(), *turns.ignored)
    return ParsedMessagesRequest(request, ignored, stores_prompt=has_cache_control(body))


def has_cache_control(body: PromptBody) -> bool:
    """Whether there is a `cache_control` anywhere. Where it is makes no difference here: the prompt
    cache keeps every prompt, and finds the longest beginning that two have in common."""
    system = body.system if isinstance(body.system, list) else []
    contents = [message.content for message in body.messages]
    blocks = [block for content in contents if isinstance(content, list) for block in content]
    marked = (each.model_extra or {} for each in (*system, *blocks, *(body.tools or ())))
    return body.cache_control is not None or any(each.get("cache_control") for each in marked)


def _template_kwargs(thinking: AnthropicThinking | None, effort: str | None) -> dict[str, Any]:
    if thinking is None:
        return {"reasoning_effort": effort} if effort else {}
    budget = thinking.budget_tokens
    if (thinking.type == "enabled") != (budget is not None):
        raise BadRequest(
            "`thinking.budget_tokens` and `thinking.type: enabled` need each other.",
            param="thinking.budget_tokens",
        )
    if thinking.type == "disabled":
        return {"reasoning_effort": "none"}
    chosen = {"reasoning_effort": effort or SOME_EFFORT}
    return chosen if budget is None else {**chosen, "thinking_budget": budget}


def _formats(body: PromptBody) -> Iterator[FormatChoice]:
    """The schema is held, as Anthropic promises: one that can't be held whole is refused."""
    config = body.output_config
    named: dict[str, OutputFormat | None] = {
        "output_config.format": config.format if config else None,
        "output_format": body.output_format,
    }
    for name, format in named.items():
        if format:
            json = JsonFormat(format.schema_, strict=True)
            yield {"format": json, "format_param": f"{name}.schema"}
