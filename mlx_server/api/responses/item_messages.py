"""Converts items to messages: items of one model turn are merged into one message."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field

from mlx_server.api.content import parts_of, thoughts_of
from mlx_server.api.freeform import arguments_of_text
from mlx_server.api.responses.items import (
    CallOutputItem,
    CompactionItem,
    CustomCallItem,
    FunctionCallItem,
    InputItem,
    McpApprovalRequestItem,
    McpApprovalResponseItem,
    McpCallItem,
    MessageItem,
    Open,
    ReasoningItem,
    Thoughts,
    ToolSearchCallItem,
    ToolSearchOutputItem,
    json_text,
)
from mlx_server.api.responses.tool_table import TOOL_SEARCH, ToolTable
from mlx_server.api.responses.tools import (
    FreeformTool,
    FunctionTool,
    NamespacedTool,
    ToolNamespace,
    ToolParam,
)
from mlx_server.api.roles import role_of
from mlx_server.messages import (
    UNNAMED,
    ContentPart,
    Message,
    Phase,
    ToolCall,
    content_of,
    media_parts,
)
from mlx_server.requests import Approval

SUMMARY = "What was said before, in short:\n\n"
DENIED = "The user has denied this call"


@dataclass
class AssistantDraft:
    reasoning: list[str] = field(default_factory=list)
    text: str | None = None
    phase: Phase | None = None
    parts: tuple[ContentPart, ...] = ()


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
            case FunctionCallItem():
                name = self._table.shown(item.name or UNNAMED, item.namespace)
                self._call(_tool_call(item, name, item.arguments or ""))
            case CustomCallItem():
                name = self._table.shown(item.name or UNNAMED, item.namespace)
                self._call(_tool_call(item, name, arguments_of_text(item.input or "")))
            case ToolSearchCallItem(call_id=str(id)):
                self._call(ToolCall(id, TOOL_SEARCH, json_text(item.arguments or {})))
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
            case CompactionItem():
                self.end()
                if (summary := self._opened(item.encrypted_content or "")) is None:
                    self.ignored["input.encrypted_content"] = None
                else:
                    self.messages.append(Message("system", SUMMARY + summary))

    def end(self) -> None:
        """Ends the model's turn: drafts, calls and results become messages."""
        drafts, calls = self._drafts, tuple(self._calls)
        if calls:  # results must directly follow their calls, so all drafts become one message
            drafts = [_merged(drafts)]
        self.messages += [
            Message(
                "assistant",
                each.text or "",
                reasoning="\n\n".join(each.reasoning) or None,
                tool_calls=calls,
                phase=each.phase,
                parts=each.parts,
            )
            for each in drafts
        ]
        self.messages += self._results
        self._drafts, self._calls, self._results = [], [], []

    def _draft(self) -> AssistantDraft:
        """The draft for the model's next text."""
        self._flush()
        if self._results:
            self.end()
        if not self._drafts or self._drafts[-1].text is not None:
            self._drafts.append(AssistantDraft())
        return self._drafts[-1]

    def _say(self, item: MessageItem, parts: tuple[ContentPart, ...]) -> None:
        draft = self._draft()
        draft.reasoning += thoughts_of(item.content)
        draft.text, draft.phase = content_of(parts), item.known_phase
        draft.parts = media_parts(parts)

    def _add_reasoning(self, text: str) -> None:
        draft = self._draft()
        if text:
            draft.reasoning.append(text)

    def _call(self, call: ToolCall) -> None:
        self._flush()
        self._calls.append(call)

    def _answer(self, id: str, output: Sequence[ContentPart]) -> None:
        self.end()
        parts = media_parts(output)
        self.messages.append(Message("tool", content_of(output), tool_call_id=id, parts=parts))

    def _found(self, item: ToolSearchOutputItem) -> str:
        """The result of a search, as text: the tools themselves are among those of the request."""
        names = [self._table.shown(name, ns) for name, ns in _names(item.tools or ())]
        return f"These tools can be called now: {', '.join(names)}" if names else "No tool found."

    def _mcp_call(self, item: McpCallItem) -> None:
        id = item.id or f"mcp_{len(self.messages)}_{len(self._calls)}"
        arguments, extra = item.arguments or "", item.extra_content
        self._call(ToolCall(id, item.name, arguments, item.server_label, extra_content=extra))
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


def _tool_call(item: FunctionCallItem | CustomCallItem, name: str, arguments: str) -> ToolCall:
    return ToolCall(item.call_id or "", name, arguments, extra_content=item.extra_content)


def _merged(drafts: Sequence[AssistantDraft]) -> AssistantDraft:
    texts = [(each.text, each.phase) for each in drafts if each.text]
    phases = {phase for _, phase in texts}
    return AssistantDraft(
        parts=media_parts([part for each in drafts for part in each.parts]),
        reasoning=[text for each in drafts for text in each.reasoning],
        text="\n\n".join(text for text, _ in texts),
        phase=phases.pop() if len(phases) == 1 else None,
    )


def _reasoning(item: ReasoningItem, opened: Open) -> str:
    """The reasoning's text: its content, or the encoded content, or the summary."""
    if item.content:
        return "".join(_texts(item.content))
    if item.encrypted_content and (found := opened(item.encrypted_content)) is not None:
        return found
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
        case {"content": [*parts]} if parts and all(_is_text(part) for part in parts):
            return "\n".join(part["text"] for part in parts)
    return json_text(error)


def _is_text(part: object) -> bool:
    return isinstance(part, dict) and isinstance(part.get("text"), str)


def _names(
    tools: Iterable[ToolParam | NamespacedTool], namespace: str | None = None
) -> Iterator[tuple[str, str | None]]:
    """The names of tools, with their namespace."""
    for tool in tools:
        match tool:
            case FunctionTool(name=name) | FreeformTool(name=name):
                yield name, namespace
            case ToolNamespace():
                yield from _names(tool.tools, tool.name)


def messages_of(
    items: Iterable[tuple[InputItem, str]], table: ToolTable, opened: Open
) -> ItemsToMessages:
    """The messages and approvals of items, which come with their place in the request."""
    turns = ItemsToMessages(table, opened)
    for item, where in items:
        turns.add(item, where)
    turns.end()
    return turns
