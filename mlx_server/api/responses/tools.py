"""`tools` and `tool_choice` of a responses body on the wire."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from pydantic import Discriminator, Field, Tag

from mlx_server import limits
from mlx_server.api.fields import Items, WireModel
from mlx_server.api.freeform import FreeformText, TextGrammar

Name = Annotated[str, Field(min_length=1)]
Label = Annotated[str, Field(min_length=1, max_length=limits.MCP_LABEL_CHARACTERS)]
Url = Annotated[str, Field(min_length=1, max_length=limits.MCP_URL_CHARACTERS)]
Names = Annotated[Items[str], Field(max_length=limits.MCP_FILTER_NAMES)]


class FunctionTool(WireModel):
    type: Literal["function"]
    name: Name
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None
    defer_loading: bool | None = None
    """Whether it is offered only once a tool search has found it."""


class FreeformGrammar(TextGrammar):
    type: Literal["grammar"]


class FreeformTool(WireModel):
    """A tool whose input is free text."""

    type: Literal["custom"]
    name: Name
    description: str | None = None
    format: Annotated[FreeformText | FreeformGrammar, Field(discriminator="type")] | None = None
    defer_loading: bool | None = None


class ToolSearchTool(WireModel):
    type: Literal["tool_search"]
    execution: Literal["server", "client"] | None = None
    description: str | None = None
    parameters: dict[str, Any] | None = None

    @property
    def is_clients(self) -> bool:
        return self.execution == "client"

    def ignored_as(self) -> str | None:
        return None if self.is_clients else self.type


class ToolFilterParam(WireModel):
    tool_names: Names | None = None
    read_only: bool | None = None


class ApprovalFilter(WireModel):
    always: ToolFilterParam | None = None
    never: ToolFilterParam | None = None


class McpTool(WireModel):
    type: Literal["mcp"]
    server_label: Label
    server_url: Url | None = None
    connector_id: Label | None = None
    server_description: str | None = None
    headers: Annotated[dict[str, str], Field(max_length=limits.MCP_HEADERS)] | None = None
    authorization: str | None = None
    allowed_tools: Names | ToolFilterParam | None = None
    require_approval: Literal["always", "never"] | ApprovalFilter | None = None

    def unused(self) -> Iterable[str]:
        if self.server_description:
            yield "server_description"


class OtherTool(WireModel):
    """A tool hosted by OpenAI, which clients offer to every server."""

    type: Annotated[str, Field(min_length=1)]

    def ignored_as(self) -> str:
        return self.type


@dataclass(frozen=True, slots=True)
class HostedTools:
    """The tools hosted by OpenAI that the client listed."""

    searches: bool = False
    interprets: bool = False


NOT_OFFERED = HostedTools()


def _kind(value: Any) -> str:
    """A union tag that is no field name, so that errors show only field names."""
    kind = value.get("type") if isinstance(value, dict) else getattr(value, "type", None)
    return f"<{kind}>" if kind in KINDS else "<other>"


KINDS = ("function", "custom", "namespace", "tool_search", "mcp", "allowed_tools")


def _kind_in_namespace(value: Any) -> str:
    kind = _kind(value)
    return kind if kind in ("<function>", "<custom>") else "<other>"


NamespacedTool = Annotated[
    Annotated[FunctionTool, Tag("<function>")]
    | Annotated[FreeformTool, Tag("<custom>")]
    | Annotated[OtherTool, Tag("<other>")],
    Discriminator(_kind_in_namespace),
]


class ToolNamespace(WireModel):
    """Tools of one kind or origin, which may have names that other tools have too."""

    type: Literal["namespace"]
    name: Name
    description: str | None = None
    tools: Annotated[Items[NamespacedTool], Field(max_length=limits.TOOLS)]


class ToolChoiceMcp(WireModel):
    type: Literal["mcp"]
    server_label: Label
    name: Name | None = None


class ToolChoiceFunction(WireModel):
    type: Literal["function", "custom"]
    name: Name
    namespace: Name | None = None


def _kind_of_tool(value: Any) -> str:
    kind = _kind(value)
    return "<other>" if kind == "<allowed_tools>" else kind


def _kind_of_allowed(value: Any) -> str:
    kind = "<function>" if (kind := _kind(value)) == "<custom>" else kind
    return kind if kind in ("<function>", "<mcp>") else "<other>"


def _kind_of_choice(value: Any) -> str:
    return kind if (kind := _kind(value)) == "<allowed_tools>" else _kind_of_allowed(value)


ToolParam = Annotated[
    Annotated[FunctionTool, Tag("<function>")]
    | Annotated[FreeformTool, Tag("<custom>")]
    | Annotated[ToolNamespace, Tag("<namespace>")]
    | Annotated[ToolSearchTool, Tag("<tool_search>")]
    | Annotated[McpTool, Tag("<mcp>")]
    | Annotated[OtherTool, Tag("<other>")],
    Discriminator(_kind_of_tool),
]

AllowedTool = Annotated[
    Annotated[ToolChoiceFunction, Tag("<function>")]
    | Annotated[ToolChoiceMcp, Tag("<mcp>")]
    | Annotated[OtherTool, Tag("<other>")],
    Discriminator(_kind_of_allowed),
]


class ToolChoiceAllowed(WireModel):
    type: Literal["allowed_tools"]
    mode: Literal["auto", "required"]
    tools: Annotated[Items[AllowedTool], Field(min_length=1, max_length=limits.TOOLS)]


Choice = (
    Literal["none", "auto", "required"]
    | Annotated[
        Annotated[ToolChoiceFunction, Tag("<function>")]
        | Annotated[ToolChoiceMcp, Tag("<mcp>")]
        | Annotated[ToolChoiceAllowed, Tag("<allowed_tools>")]
        | Annotated[OtherTool, Tag("<other>")],
        Discriminator(_kind_of_choice),
    ]
)
