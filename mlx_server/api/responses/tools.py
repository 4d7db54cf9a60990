"""`tools` and `tool_choice` of a responses body on the wire."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from pydantic import Discriminator, Field, Tag

from mlx_server import limits
from mlx_server.api.fields import Items, WireModel

Name = Annotated[str, Field(min_length=1)]
Label = Annotated[str, Field(min_length=1, max_length=limits.MCP_LABEL_CHARACTERS.value)]
Url = Annotated[str, Field(min_length=1, max_length=limits.MCP_URL_CHARACTERS.value)]
Names = Annotated[Items[str], Field(max_length=limits.MCP_FILTER_NAMES.value)]


class FunctionTool(WireModel):
    type: Literal["function"]
    name: Name
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


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
    headers: Annotated[dict[str, str], Field(max_length=limits.MCP_HEADERS.value)] | None = None
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


class McpChoiceParam(WireModel):
    type: Literal["mcp"]
    server_label: Label
    name: Name | None = None


class FunctionChoice(WireModel):
    type: Literal["function"]
    name: Name


def _kind(value: Any) -> str:
    """A union tag that is no field name, so that errors show only field names."""
    kind = value.get("type") if isinstance(value, dict) else getattr(value, "type", None)
    return f"<{kind}>" if kind in ("function", "mcp") else "<other>"


def _kind_of_choice(value: Any) -> str:
    kind = value.get("type") if isinstance(value, dict) else getattr(value, "type", None)
    return "<allowed>" if kind == "allowed_tools" else _kind(value)


ToolParam = Annotated[
    Annotated[FunctionTool, Tag("<function>")]
    | Annotated[McpTool, Tag("<mcp>")]
    | Annotated[OtherTool, Tag("<other>")],
    Discriminator(_kind),
]

AllowedTool = Annotated[
    Annotated[FunctionChoice, Tag("<function>")]
    | Annotated[McpChoiceParam, Tag("<mcp>")]
    | Annotated[OtherTool, Tag("<other>")],
    Discriminator(_kind),
]


class AllowedToolsChoice(WireModel):
    type: Literal["allowed_tools"]
    mode: Literal["auto", "required"]
    tools: Annotated[Items[AllowedTool], Field(min_length=1, max_length=limits.TOOLS.value)]


Choice = (
    Literal["none", "auto", "required"]
    | Annotated[
        Annotated[FunctionChoice, Tag("<function>")]
        | Annotated[McpChoiceParam, Tag("<mcp>")]
        | Annotated[AllowedToolsChoice, Tag("<allowed>")]
        | Annotated[OtherTool, Tag("<other>")],
        Discriminator(_kind_of_choice),
    ]
)
