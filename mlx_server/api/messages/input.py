"""Converts a messages body to a `GenerateRequest`.

Messages of one role in a row are one turn, however their blocks are divided: text as a list in one
request and as a string in the next gives the same prompt, and so is found in the prompt cache.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from mlx_server.api import formats
from mlx_server.api.content import (
    FileData,
    MediaPart,
    OtherPart,
    content_of_data,
    content_of_file,
    medium_of,
    parts_of,
    path_to,
)
from mlx_server.api.fields import SOME_EFFORT, check_offered, check_usable
from mlx_server.api.formats import FormatChoice, the_only_format
from mlx_server.api.histories import AssistantDraft, assistant_messages
from mlx_server.api.messages.protocol import (
    AnthropicMessageParam,
    AnthropicTool,
    Block,
    CustomTool,
    DocumentBlock,
    MessagesBody,
    OutputFormat,
    PromptBody,
    ResultBlock,
    SearchResultBlock,
    TextBlock,
    Texts,
    ThinkingBlock,
    ToolChoiceParam,
    ToolReferenceBlock,
    ToolResultBlock,
    ToolUseBlock,
)
from mlx_server.errors import BadRequest
from mlx_server.http.security import Signer
from mlx_server.messages import (
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


def select_tools(body: PromptBody, named: Iterable[str]) -> tuple[tuple[Tool, ...], ToolChoice]:
    """The tools that the model may call, and whether it has to call one.

    A tool with `defer_loading` is among them once the conversation or `tool_choice` names it. Such
    tools come last, in the order in which they were `named`: what came before stays the same.
    """
    given: dict[str, CustomTool] = {}
    unknown: list[str] = []
    for i, tool in enumerate(body.tools or ()):
        if isinstance(tool, AnthropicTool):
            unknown.append(tool.type)
            continue
        if tool.name in given:
            raise BadRequest(
                f"Two `tools` have the name {tool.name[:64]!r}: give each its own.",
                param=f"tools[{i}].name",
            )
        given[tool.name] = tool
    if body.mcp_servers:
        raise BadRequest(
            "`mcp_servers` is not supported here: call the server's tools yourself, or use "
            "`/v1/responses`, which has MCP servers.",
            param="mcp_servers",
        )
    choice = _choice(body)
    if not given and choice != "none":
        check_usable(unknown)
    chosen = [choice.name] if isinstance(choice, NamedTool) else []
    at_once = {tool.name: tool for tool in given.values() if not tool.defer_loading}
    later = {name: given[name] for name in (*named, *chosen) if name in given}
    tools = tuple(map(_tool, (at_once | later).values()))
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
        self.named_tools: dict[str, None] = {}
        """In the order in which they were named."""
        self.ignored: dict[str, None] = {}
        self._signer = signer
        self._role = ""
        self._drafts: list[AssistantDraft] = []
        self._calls: list[ToolCall] = []
        self._results: list[Message] = []
        self._parts: list[ContentPart] = []
        self._known: dict[str, int] = {}
        """Number of each call, by its id."""

    def add(self, message: AnthropicMessageParam, where: str) -> None:
        self._begin(message.speaker)
        content = message.content
        if isinstance(content, str):
            content = [TextBlock(type="text", text=content)]
        for i, block in enumerate(content or ()):
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
                self.named_tools[name] = None
                self._known.setdefault(id, len(self._known))
                arguments = block.input or "{}"
                extra = block.extra_content
                self._calls.append(ToolCall(id, name, arguments, extra_content=extra))
            case ThinkingBlock():
                self._think(block)
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
                self.named_tools[name] = None
                return [f"The tool {name} is available now."]


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
    for i, message in enumerate(messages):
        turns.add(message, f"messages[{i}]")
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
    tools, tool_choice = select_tools(body, turns.named_tools)
    constrained = the_only_format(list(_formats(body)), otherwise="output_config.format")
    system = system_text(body.system)
    messages = (*([Message("system", system)] if system else ()), *turns.messages)
    conversation = Conversation(
        messages=messages,
        tools=tools,
        template_kwargs=_template_kwargs(body),
        response_format=formats.prompt_description(constrained["format"]),
        continue_final_message=_is_begun(messages[-1]),
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
        param_names=_param_names(body),
        implied=frozenset() if body.effort else frozenset({"reasoning_effort"}),
        parallel_calls=not (choice and choice.disable_parallel_tool_use),
    )
    ignored = (*body.ignored(), *turns.ignored)
    return ParsedMessagesRequest(request, ignored, stores_prompt=has_cache_control(body))


def _is_begun(last: Message) -> bool:
    """Whether the client has begun the answer, which then goes on with its last message."""
    return last.role == "assistant" and bool(last.content) and not last.tool_calls


def has_cache_control(body: PromptBody) -> bool:
    """Whether there is a `cache_control` anywhere. Where it is makes no difference here: the prompt
    cache keeps every prompt, and finds the longest beginning that two have in common."""
    system = body.system if isinstance(body.system, list) else []
    contents = [message.content for message in body.messages]
    blocks = [block for content in contents if isinstance(content, list) for block in content]
    marked = (each.model_extra or {} for each in (*system, *blocks, *(body.tools or ())))
    return body.cache_control is not None or any(each.get("cache_control") for each in marked)


def _template_kwargs(body: PromptBody) -> dict[str, Any]:
    effort, thinking = body.effort, body.thinking
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


def _param_names(body: PromptBody) -> dict[str, str]:
    effort = "output_config.effort" if body.effort else "thinking.type"
    names = {"reasoning_effort": effort, "thinking_budget": "thinking.budget_tokens"}
    return {f"chat_template_kwargs.{variable}": name for variable, name in names.items()}


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
