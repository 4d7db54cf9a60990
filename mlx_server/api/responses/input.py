"""Converts a responses body to a `GenerateRequest` and the use of MCP servers.

Items of one model turn are merged into one message.
"""

from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from mlx_server.api import formats
from mlx_server.api.content import parts_of, thoughts_of
from mlx_server.api.fields import (
    OtherTool,
    check_choice,
    check_number,
    check_stream_options,
    check_usable,
    role_of,
)
from mlx_server.api.freeform import arguments_of_text
from mlx_server.api.histories import AssistantDraft, assistant_messages
from mlx_server.api.responses.items import (
    AdditionalToolsItem,
    CallOutputItem,
    CompactionItem,
    CustomCallItem,
    FunctionCallItem,
    InputItem,
    ItemReference,
    McpApprovalRequestItem,
    McpApprovalResponseItem,
    McpCallItem,
    McpListToolsItem,
    MessageItem,
    Open,
    ReasoningItem,
    Thoughts,
    ToolSearchCallItem,
    ToolSearchOutputItem,
    compact_json,
    read_items,
)
from mlx_server.api.responses.protocol import ResponsesBody
from mlx_server.api.responses.tools import (
    NO_TABLE,
    TOOL_SEARCH,
    ApprovalFilter,
    McpTool,
    ToolChoiceAllowed,
    ToolChoiceFunction,
    ToolChoiceMcp,
    ToolFilterParam,
    ToolParam,
    ToolTable,
    listed_tools,
    tool_table,
    without_use,
)
from mlx_server.errors import BadRequest
from mlx_server.messages import (
    UNNAMED,
    ContentPart,
    Conversation,
    Message,
    Tool,
    ToolCall,
    content_of,
    media_parts,
)
from mlx_server.requests import (
    ALL_TOOLS,
    NO_TOOLS,
    Approval,
    GenerateRequest,
    McpChoice,
    McpServer,
    McpTools,
    NamedTool,
    ToolChoice,
    ToolFilter,
)

DENIED = "The user has denied this call"

SUMMARY = "The conversation until here, in your own summary:\n\n"


class ItemsToMessages:
    """Takes items one by one; `messages` and `approvals` are complete after `end`."""

    def __init__(self, table: ToolTable, opened: Open) -> None:
        """`opened` reads the encoded content of reasoning."""
        self.messages: list[Message] = []
        self.ignored: dict[str, None] = {}
        self._opened = opened
        self._table = table
        self.approvals: list[Approval] = []
        """Answers to approval requests that have not become messages yet."""
        self._drafts: list[AssistantDraft] = []
        self._calls: list[ToolCall] = []
        self._results: list[Message] = []
        """Results of MCP calls in the current turn."""
        self._requests: dict[str, McpApprovalRequestItem] = {}

    def add(self, item: InputItem, where: str) -> None:
        match item:
            case MessageItem(role=role) if role_of(role) == "assistant":
                self._say(item, parts_of(item.content, f"{where}.content"))
            case MessageItem(role=role):
                self.end()
                parts = parts_of(item.content, f"{where}.content")
                self.messages.append(
                    Message(role_of(role), content_of(parts), parts=media_parts(parts))
                )
            case ReasoningItem():
                self._add_reasoning(_reasoning(item, self._opened))
            case CompactionItem(encrypted_content=str(token)):
                self.end()
                if summary := self._opened(token):
                    self.messages.append(Message("user", SUMMARY + summary))
            case FunctionCallItem(arguments=arguments):
                self._client_call(item, arguments or "")
            case CustomCallItem(input=text):
                self._client_call(item, arguments_of_text(text or ""))
            case ToolSearchCallItem(call_id=str(id)):
                self._call(ToolCall(id, TOOL_SEARCH, compact_json(item.arguments or {})))
            case ToolSearchOutputItem(call_id=str(id)):
                self._answer(id, [self._found(item)])
            case CallOutputItem(call_id=id):
                self._answer(id or "", parts_of(item.output, f"{where}.output"))
            case McpCallItem():
                self._mcp_call(item)
            case McpApprovalRequestItem():
                self._requests[item.id] = item
            case McpApprovalResponseItem():
                self._approve(item)

    def end(self) -> None:
        """Ends the model's turn: drafts, calls and results become messages."""
        self.messages += assistant_messages(self._drafts, tuple(self._calls))
        self.messages += self._results
        self._drafts, self._calls, self._results = [], [], []

    def _draft(self) -> AssistantDraft:
        """The draft for the model's next text."""
        self._flush()
        if self._results:
            self.end()
        if not self._drafts or self._drafts[-1].texts:
            self._drafts.append(AssistantDraft())
        return self._drafts[-1]

    def _say(self, item: MessageItem, parts: tuple[ContentPart, ...]) -> None:
        draft = self._draft()
        draft.reasoning += thoughts_of(item.content)
        draft.texts, draft.phase = [content_of(parts)], item.known_phase
        draft.parts = media_parts(parts)

    def _add_reasoning(self, text: str) -> None:
        draft = self._draft()
        if text:
            draft.reasoning.append(text)

    def _client_call(self, item: FunctionCallItem | CustomCallItem, arguments: str) -> None:
        name = self._table.shown(item.name or UNNAMED, item.namespace)
        extra = item.extra_content
        self._call(ToolCall(item.call_id or "", name, arguments, extra_content=extra))

    def _call(self, call: ToolCall) -> None:
        self._flush()
        self._calls.append(call)

    def _answer(self, id: str, output: Sequence[ContentPart]) -> None:
        self.end()
        parts = media_parts(output)
        self.messages.append(Message("tool", content_of(output), tool_call_id=id, parts=parts))

    def _found(self, item: ToolSearchOutputItem) -> str:
        """The result of a search, as text: the tools themselves are among those of the request."""
        listed = (each for param in item.tools or () for each in listed_tools(param))
        names = [self._table.shown(each.name, each.namespace) for each in listed]
        return f"These tools can be called now: {', '.join(names)}" if names else "No tool found."

    def _mcp_call(self, item: McpCallItem) -> None:
        id = item.id or f"mcp_{len(self.messages)}_{len(self._calls)}"
        arguments, extra = item.arguments or "", item.extra_content
        name = item.name or UNNAMED
        self._call(ToolCall(id, name, arguments, item.server_label, extra_content=extra))
        output = item.output if item.output is not None else _error_text(item.error)
        self._results.append(Message("tool", output, tool_call_id=id))

    def _approve(self, item: McpApprovalResponseItem) -> None:
        request = self._requests.pop(item.approval_request_id, None)
        if request is None:  # it was answered before, or its request is not in the history
            self.ignored["input.approval_request_id"] = None
            return
        self.approvals.append(
            Approval(
                request.id,
                request.server_label,
                request.name,
                request.arguments or "",
                item.approve,
                item.reason,
                request.extra_content,
            )
        )

    def _flush(self) -> None:
        """Turns denied approvals into calls with results. The model went on after them, so granted
        ones follow as call items."""
        answered, self.approvals = self.approvals, []
        for denied in (approval for approval in answered if not approval.approve):
            extra = denied.extra_content
            call = ToolCall(
                denied.id, denied.name, denied.arguments, denied.server, extra_content=extra
            )
            result = f"{DENIED}: {denied.reason}" if denied.reason else f"{DENIED}."
            self._calls.append(call)
            self._results.append(Message("tool", result, tool_call_id=call.id))


def _reasoning(item: ReasoningItem, opened: Open) -> str:
    """The reasoning's text: its content, or the encoded content, or the summary."""
    if item.content:
        return "".join(_texts(item.content))
    if item.encrypted_content and (thought := opened(item.encrypted_content)) is not None:
        return thought
    return "\n\n".join(_texts(item.summary or ""))


def _texts(thoughts: Thoughts) -> list[str]:
    if isinstance(thoughts, str):
        return [thoughts]
    return [part.text for part in thoughts if part.text]


def _error_text(error: object) -> str:
    """The text of an MCP error in any of its forms."""
    match error:
        case None:
            return ""
        case str(text) | {"message": str(text)}:
            return text
        case {"content": [*parts]}:
            texts = [part["text"] for part in parts if isinstance(part, dict) and "text" in part]
            if texts and all(isinstance(text, str) for text in texts):
                return "\n".join(texts)
    return compact_json(error)


@dataclass(frozen=True, slots=True)
class ToolSelection:
    table: ToolTable
    tools: tuple[Tool, ...]
    """The tools of the table that the model may call."""
    choice: ToolChoice
    servers: tuple[McpServer, ...]
    mcp_choice: McpChoice | None = None


def selected_tools(
    body: ResponsesBody, *, listed: Container[str], found: Iterable[ToolParam] = ()
) -> ToolSelection:
    """The tools that the model may call, and whether it has to call one.

    `listed`: labels of the MCP servers whose tools are already in the conversation.
    `found`: tools that the conversation's items add.
    """
    params = body.tools or []
    table = tool_table(params, found)
    tools = table.tools
    servers = tuple(
        _server(tool, i, listed) for i, tool in enumerate(params) if isinstance(tool, McpTool)
    )
    labels = [server.label for server in servers]
    for i, label in enumerate(labels):
        if label in labels[:i]:
            raise BadRequest(
                f"Two MCP servers have the `server_label` {label[:64]!r}: give each its own.",
                param="tools",
            )
    check_number(tools)
    match body.tool_choice:
        case ToolChoiceAllowed() as allowed:
            return _allowed(allowed, table, servers)
        case ToolChoiceMcp(server_label=label, name=name):
            _check_server(label, servers)
            return ToolSelection(table, tools, "auto", servers, McpChoice(label, name))
        case ToolChoiceFunction() as named:
            chosen = NamedTool(table.chosen(named).tool.name)
            return ToolSelection(table, tools, chosen, servers)
        case OtherTool(type=kind):
            raise BadRequest(
                f"`tool_choice` has a tool of type {kind[:64]!r}, which is not supported.",
                param="tool_choice.type",
            )
        case mode:
            choice = mode or "auto"
    if choice != "none" and not (tools or servers):
        check_usable(list(without_use(params)))
    if not servers:
        check_choice(choice, tools)
    return ToolSelection(table, tools, choice, servers)


def _allowed(
    allowed: ToolChoiceAllowed, table: ToolTable, servers: Sequence[McpServer]
) -> ToolSelection:
    chosen = (choice for choice in allowed.tools if isinstance(choice, ToolChoiceFunction))
    names = {table.chosen(choice).tool.name for choice in chosen}
    of_servers: dict[str, set[str] | None] = {}
    for choice in allowed.tools:
        if isinstance(choice, ToolChoiceMcp):
            _check_server(choice.server_label, servers)
            before = of_servers.get(choice.server_label, set())
            both = before | {choice.name} if choice.name and before is not None else None
            of_servers[choice.server_label] = both
    tools = tuple(tool for tool in table.tools if tool.name in names)
    narrowed = tuple(_narrowed(s, of_servers[s.label]) for s in servers if s.label in of_servers)
    if not narrowed and not tools:
        kinds = [each.type for each in allowed.tools if isinstance(each, OtherTool)]
        absent = ", ".join(repr(kind[:64]) for kind in dict.fromkeys(kinds))
        raise BadRequest(
            f"`tool_choice` allows only tools that can't be offered: this server has no {absent}.",
            param="tool_choice.tools",
        )
    if not narrowed:
        check_choice(allowed.mode, tools)
    return ToolSelection(table, tools, allowed.mode, narrowed)


def _narrowed(server: McpServer, names: set[str] | None) -> McpServer:
    if names is None:
        return server
    before = server.allowed.names
    both = frozenset(names) if before is None else before & names
    return replace(server, allowed=replace(server.allowed, names=both))


def _check_server(label: str, servers: Sequence[McpServer]) -> None:
    if label not in {server.label for server in servers}:
        raise BadRequest(
            f"`tool_choice` names the server {label[:64]!r}, which is not among the `tools`.",
            param="tool_choice",
        )


def _server(tool: McpTool, index: int, listed: Container[str]) -> McpServer:
    param = f"tools[{index}]"
    if (tool.server_url is None) == (tool.connector_id is None):
        raise BadRequest(f"`{param}` needs either a `server_url` or a `connector_id`.", param=param)
    always, never = _approvals(tool)
    return McpServer(
        label=tool.server_label,
        url=tool.server_url,
        connector=tool.connector_id,
        headers=tool.headers or {},
        authorization=tool.authorization,
        allowed=_filter(tool.allowed_tools, ALL_TOOLS),
        always_approve=always,
        never_approve=never,
        listed=tool.server_label in listed,
        param=param,
    )


def _approvals(tool: McpTool) -> tuple[ToolFilter, ToolFilter]:
    match tool.require_approval:
        case "never":
            return NO_TOOLS, ALL_TOOLS
        case ApprovalFilter(always=always, never=never):
            return _filter(always, NO_TOOLS), _filter(never, NO_TOOLS)
    return ALL_TOOLS, NO_TOOLS


def _filter(tools: list[str] | ToolFilterParam | None, otherwise: ToolFilter) -> ToolFilter:
    match tools:
        case None:
            return otherwise
        case ToolFilterParam(tool_names=names, read_only=read_only):
            return ToolFilter(None if names is None else frozenset(names), read_only)
    return ToolFilter(frozenset(tools))


Resolve = Callable[[str], Mapping[str, Any] | None]
"""Returns the wire form of the item with this id, None if it is not stored."""


@dataclass(frozen=True, slots=True)
class ParsedResponsesRequest:
    request: GenerateRequest
    mcp: McpTools
    ignored: tuple[str, ...]
    truncates: bool = False
    """Whether a prompt that is too long loses its oldest turns."""
    table: ToolTable = NO_TABLE
    """The tools that the names of calls stand for."""


def input_items(body: ResponsesBody, resolve: Resolve) -> list[InputItem]:
    """The items of this request, without references to items that are not stored."""
    if isinstance(body.input, str):
        return [MessageItem(type="message", role="user", content=body.input)]
    items: list[InputItem] = []
    for item in body.input or ():
        if not isinstance(item, ItemReference):
            items.append(item)
        elif (stored := resolve(item.id)) is not None:
            items += read_items([stored])
    return items


def to_request(
    body: ResponsesBody,
    items: Sequence[InputItem],
    earlier: Sequence[InputItem] = (),
    *,
    opened: Open,
) -> ParsedResponsesRequest:
    """`earlier`: the conversation's items before those of this request. `opened` reads the encoded
    content of reasoning."""
    check_stream_options(body.stream, body.stream_options)
    everything = [*earlier, *items]
    is_text = isinstance(body.input, str)
    places = ["previous_response_id"] * len(earlier)
    places += ["input" if is_text else f"input[{i}]" for i in range(len(items))]
    chosen = selected_tools(body, listed=_listed(everything), found=_tools_of(everything))
    turns = ItemsToMessages(chosen.table, opened)
    for item, where in zip(everything, places, strict=True):
        turns.add(item, where)
    turns.end()
    labels = {server.label for server in chosen.servers}
    approvals = tuple(approval for approval in turns.approvals if approval.server in labels)
    if len(approvals) < len(turns.approvals):  # the server has gone since, and nothing can be run
        turns.ignored["input.approval_request_id"] = None
    if not turns.messages and not approvals and body.instructions is None:
        raise BadRequest(
            "`input` is missing, or refers only to items that are not stored: there is nothing to "
            "answer. Send the items themselves.",
            param="input",
        )
    instructions = [Message("system", body.instructions)] if body.instructions else []
    constrained = body.constrained()
    conversation = Conversation(
        messages=(*instructions, *turns.messages),
        tools=chosen.tools,
        template_kwargs=body.template_kwargs(),
        response_format=formats.prompt_description(constrained["format"]),
    )
    request = GenerateRequest(
        model=body.model,
        **body.shared_fields(),
        **constrained,
        buffered=not body.stream,
        progress=body.include_progress,
        prompts=(conversation,),
        max_tokens=body.max_output_tokens,
        logprobs=body.logprobs,
        tool_choice=chosen.choice,
        thinking_budget=body.budget(),
        implied=body.implied_sampling(),
        param_names=body.param_names(),
        max_response_tokens=body.max_response_tokens,
        parallel_calls=body.parallel_tool_calls is not False,
    )
    mcp = McpTools(chosen.servers, approvals, chosen.mcp_choice, body.max_tool_calls)
    truncates = body.truncation == "auto"
    unread = turns.ignored | dict.fromkeys(_unread(body, items, opened))
    ignored = (*body.ignored(), *unread)
    return ParsedResponsesRequest(request, mcp, ignored, truncates, chosen.table)


def _tools_of(items: Iterable[InputItem]) -> Iterator[ToolParam]:
    """The tools that items add to those of the request."""
    for item in items:
        if isinstance(item, ToolSearchOutputItem | AdditionalToolsItem):
            yield from item.tools or ()


def _unread(body: ResponsesBody, items: Sequence[InputItem], opened: Open) -> Iterator[str]:
    """The paths of items that are not stored here, and of sealed texts that another server has
    made."""
    if isinstance(body.input, list) and len(items) < len(body.input):
        yield "input.item_reference"
    for item in items:
        match item:
            case (
                ReasoningItem(content=None | [] | "", encrypted_content=str(token))
                | CompactionItem(encrypted_content=str(token))
            ) if token and opened(token) is None:
                yield "input.encrypted_content"


def _listed(items: Iterable[InputItem]) -> set[str]:
    """Labels of the MCP servers whose tools are already listed in the conversation."""
    lists = (item for item in items if isinstance(item, McpListToolsItem))
    return {item.server_label or "" for item in lists if not item.error}
