"""The items of a conversation on the wire: a client's own and earlier output that it sends back."""

import json
import uuid
from collections.abc import Callable, Iterable, Mapping
from functools import cache
from typing import Annotated, Any, ClassVar, Literal, get_args

from pydantic import BeforeValidator, Field, TypeAdapter

from mlx_server import limits
from mlx_server.api.content import Content, OtherPart, TextPart, as_parts, types_in, unused_thoughts
from mlx_server.api.fields import (
    ROLES,
    UNKNOWN_ROLE,
    Arguments,
    Items,
    RoleName,
    Text,
    WireModel,
    role_of,
    type_of,
)
from mlx_server.api.responses.tools import ToolParam
from mlx_server.messages import Phase

Wire = dict[str, Any]

PREFIXES = {
    "response": "resp",
    "message": "msg",
    "reasoning": "rs",
    "function_call": "fc",
    "function_call_output": "fco",
    "custom_tool_call": "ctc",
    "custom_tool_call_output": "ctco",
    "tool_search_call": "tsc",
    "tool_search_output": "tso",
    "additional_tools": "at",
    "compaction": "cmp",
    "mcp_list_tools": "mcpl",
    "mcp_call": "mcp",
    "mcp_approval_request": "mcpr",
    "mcp_approval_response": "mcpa",
}


def new_item_id(kind: str) -> str:
    return f"{PREFIXES.get(kind, 'item')}_{uuid.uuid4().hex}"


ExtraContent = dict[str, Any] | None
"""What an upstream sent with a call, such as Gemini's signature."""


class Item(WireModel):
    ACCEPTED: ClassVar[frozenset[str]] = frozenset({"status", "created_by"})

    id: Text = None


class MessageItem(Item):
    type: Literal["message"]
    role: RoleName = UNKNOWN_ROLE
    content: Content | None = None
    phase: Phase | Text = None

    @property
    def known_phase(self) -> Phase | None:
        return next((phase for phase in get_args(Phase) if phase == self.phase), None)

    def unused(self) -> Iterable[str]:
        if self.role not in ROLES:
            yield "role"
        if self.phase and self.known_phase is None:
            yield "phase"
        if role_of(self.role) != "assistant":
            yield from unused_thoughts(self.content)


Thoughts = Annotated[
    str | Items[Annotated[TextPart | OtherPart, Field(union_mode="left_to_right")]],
    BeforeValidator(as_parts),
]


class ReasoningItem(Item):
    type: Literal["reasoning"]
    content: Thoughts | None = None
    summary: Thoughts | None = None
    encrypted_content: Text = None


class CompactionItem(Item):
    """The summary of the items before it, sealed by this server."""

    type: Literal["compaction"]
    encrypted_content: Text = None


class FunctionCallItem(Item):
    type: Literal["function_call"]
    call_id: Text = None
    name: Text = None
    namespace: Text = None
    arguments: Arguments = None
    extra_content: ExtraContent = None


class CustomCallItem(Item):
    """A call of a tool whose input is free text."""

    type: Literal["custom_tool_call"]
    call_id: Text = None
    name: Text = None
    namespace: Text = None
    input: Text = None
    extra_content: ExtraContent = None


class ToolSearchCallItem(Item):
    """A search for tools, which the client runs if it has a `call_id`."""

    ACCEPTED = Item.ACCEPTED | {"execution"}

    type: Literal["tool_search_call"]
    call_id: Text = None
    arguments: Any = None

    def ignored_as(self) -> str | None:
        return self.type if self.call_id is None else None


FoundTools = Annotated[Items[ToolParam], Field(max_length=limits.RESPONSE_TOOLS)]


class ToolSearchOutputItem(Item):
    ACCEPTED = Item.ACCEPTED | {"execution"}

    type: Literal["tool_search_output"]
    call_id: Text = None
    tools: FoundTools | None = None


class AdditionalToolsItem(Item):
    """Tools that the client offers in addition to those of the request."""

    ACCEPTED = Item.ACCEPTED | {"role"}

    type: Literal["additional_tools"]
    tools: FoundTools | None = None


class CallOutputItem(Item):
    type: Literal["function_call_output", "custom_tool_call_output"]
    call_id: Text = None
    output: Content | None = None


class McpListToolsItem(Item):
    ACCEPTED = Item.ACCEPTED | {"tools"}

    type: Literal["mcp_list_tools"]
    server_label: Text = None
    error: Any = None


class McpCallItem(Item):
    type: Literal["mcp_call"]
    server_label: Text = None
    name: Text = None
    arguments: Arguments = None
    output: Text = None
    error: Any = None
    approval_request_id: Text = None
    extra_content: ExtraContent = None


class McpApprovalRequestItem(WireModel):
    ACCEPTED = Item.ACCEPTED

    type: Literal["mcp_approval_request"]
    id: Annotated[str, Field(min_length=1)]
    server_label: str
    name: Annotated[str, Field(min_length=1)]
    arguments: Arguments = None
    extra_content: ExtraContent = None


class McpApprovalResponseItem(Item):
    type: Literal["mcp_approval_response"]
    approval_request_id: Annotated[str, Field(min_length=1)]
    approve: bool
    reason: str | None = None


class ItemReference(WireModel):
    type: Literal["item_reference"]
    id: Annotated[str, Field(min_length=1)]


class HostedItem(Item):
    """An item of OpenAI's hosted tools, or of another API, which is ignored."""

    type: str

    def ignored_as(self) -> str:
        return self.type


def _typed(value: Any) -> Any:
    """Messages, and references, may come without a type."""
    if not isinstance(value, dict) or value.get("type") is not None:
        return value
    if "role" in value or "content" in value:
        return {**value, "type": "message"}
    return {**value, "type": "item_reference"} if "id" in value else value


def _foreign(value: Any) -> Any:
    """An item of a known type is wrong, or it would not come here."""
    kind = type_of(value)
    if not isinstance(kind, str) or kind in KNOWN:
        raise ValueError("this is not an item")
    return value


KnownItem = Annotated[
    MessageItem
    | ReasoningItem
    | CompactionItem
    | FunctionCallItem
    | CustomCallItem
    | ToolSearchCallItem
    | ToolSearchOutputItem
    | AdditionalToolsItem
    | CallOutputItem
    | McpListToolsItem
    | McpCallItem
    | McpApprovalRequestItem
    | McpApprovalResponseItem
    | ItemReference,
    Field(discriminator="type"),
]
KNOWN = types_in(KnownItem)
InputItem = Annotated[
    Annotated[
        KnownItem | Annotated[HostedItem, BeforeValidator(_foreign)],
        Field(union_mode="left_to_right"),
    ],
    BeforeValidator(_typed),
]


@cache
def _items() -> TypeAdapter[list[InputItem]]:
    return TypeAdapter(list[InputItem])


def read_items(stored: Iterable[Mapping[str, Any]]) -> list[InputItem]:
    """Parses items from the store, which this server wrote or has validated before."""
    return _items().validate_python([dict(item) for item in stored])


DEFAULTS: Mapping[str, Wire] = {
    "reasoning": {"summary": []},
    "function_call": {"arguments": ""},
    "custom_tool_call": {"input": ""},
    "mcp_call": {"arguments": ""},
    "mcp_approval_request": {"arguments": ""},
    "mcp_list_tools": {"tools": []},
    "additional_tools": {"tools": []},
    "tool_search_call": {"arguments": {}},
    "tool_search_output": {"tools": []},
}
"""Fields that an item has also if the client left them out, by its type."""


def wire(item: InputItem) -> Wire:
    """The item in this server's normal form, with an id."""
    fields = item.model_dump(by_alias=True, exclude_none=True)
    fields["id"] = fields.get("id") or new_item_id(item.type)
    for name, default in DEFAULTS.get(item.type, {}).items():
        fields[name] = fields.get(name) or default
    match item:
        case MessageItem(role=role):
            is_answer = role_of(role) == "assistant"
            kind = "output_text" if is_answer else "input_text"
            more: Wire = {"annotations": [], "logprobs": []} if is_answer else {}
            message = {name: fields[name] for name in MESSAGE_FIELDS if name in fields}
            return {**message, "status": "completed", "content": _parts(item.content, kind, more)}
        case FunctionCallItem() | CustomCallItem():
            return {**fields, "status": "completed"}
        case CallOutputItem(output=output):
            parts = output if isinstance(output, str) else _parts(output, "input_text")
            return {**fields, "output": parts, "status": "completed"}
        case AdditionalToolsItem():
            return {"role": "developer", **fields}
        case ToolSearchOutputItem(call_id=id) | ToolSearchCallItem(call_id=id):
            execution = "client" if id else "server"
            return {"execution": execution, **fields, "status": "completed"}
    return fields


MESSAGE_FIELDS = ("id", "type", "role", "phase")


def _parts(content: Content | None, kind: str, more: Wire | None = None) -> list[Wire]:
    parts = [TextPart(type="text", text=content)] if isinstance(content, str) else content or []
    texts = {"type": kind, **(more or {})}
    return [
        {**texts, "text": part.text or ""}
        if isinstance(part, TextPart)
        else part.model_dump(exclude_none=True)
        for part in parts
    ]


def compact_json(value: object) -> str:
    return json.dumps(value, ensure_ascii=False)


Seal = Callable[[str], str]
"""Encrypts a thought or a summary, which clients send back unread."""
Open = Callable[[str], str | None]
"""Decrypts such a text; None for one that this server has not made."""
