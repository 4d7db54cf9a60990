"""The tools of a responses body: on the wire, as the client names them, and as the model sees them.

A model knows only functions. Tools of other kinds are shown to it as functions, those of a
namespace under a name that joins both, and its calls are answered as what the client knows.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Annotated, Any, Literal

from pydantic import Field, Tag

from mlx_server import limits
from mlx_server.api.fields import Items, OtherTool, WireModel, by_type
from mlx_server.api.freeform import FreeformText, TextGrammar, freeform_tool
from mlx_server.errors import BadRequest
from mlx_server.generation.tool_loop import callable_name, unused_name
from mlx_server.messages import Tool

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


NamespacedTool = Annotated[
    Annotated[FunctionTool, Tag("<function>")]
    | Annotated[FreeformTool, Tag("<custom>")]
    | Annotated[OtherTool, Tag("<other>")],
    by_type("function", "custom"),
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


ToolParam = Annotated[
    Annotated[FunctionTool, Tag("<function>")]
    | Annotated[FreeformTool, Tag("<custom>")]
    | Annotated[ToolNamespace, Tag("<namespace>")]
    | Annotated[ToolSearchTool, Tag("<tool_search>")]
    | Annotated[McpTool, Tag("<mcp>")]
    | Annotated[OtherTool, Tag("<other>")],
    by_type("function", "custom", "namespace", "tool_search", "mcp"),
]

AllowedTool = Annotated[
    Annotated[ToolChoiceFunction, Tag("<function>")]
    | Annotated[ToolChoiceFunction, Tag("<custom>")]
    | Annotated[ToolChoiceMcp, Tag("<mcp>")]
    | Annotated[OtherTool, Tag("<other>")],
    by_type("function", "custom", "mcp"),
]


class ToolChoiceAllowed(WireModel):
    type: Literal["allowed_tools"]
    mode: Literal["auto", "required"]
    tools: Annotated[Items[AllowedTool], Field(min_length=1, max_length=limits.TOOLS)]


Choice = (
    Literal["none", "auto", "required"]
    | Annotated[
        Annotated[ToolChoiceFunction, Tag("<function>")]
        | Annotated[ToolChoiceFunction, Tag("<custom>")]
        | Annotated[ToolChoiceMcp, Tag("<mcp>")]
        | Annotated[ToolChoiceAllowed, Tag("<allowed_tools>")]
        | Annotated[OtherTool, Tag("<other>")],
        by_type("function", "custom", "mcp", "allowed_tools"),
    ]
)


ToolKind = Literal["function", "custom", "tool_search"]

TOOL_SEARCH = "tool_search"
SEARCH_SCHEMA = {
    "type": "object",
    "properties": {"query": {"type": "string", "description": "What the tool should do."}},
    "required": ["query"],
}
"""The arguments of a tool search whose client describes none."""


@dataclass(frozen=True, slots=True)
class OfferedTool:
    """A tool as the client names it."""

    kind: ToolKind
    name: str
    tool: Tool
    """The tool as the model sees it. While tools are listed, its name there is not decided yet."""
    namespace: str | None = None
    is_deferred: bool = False

    @property
    def key(self) -> tuple[str | None, str]:
        return self.namespace, self.name


class ToolTable:
    def __init__(self, offered: Iterable[OfferedTool] = ()) -> None:
        self._offered = list(offered)
        self._by_shown = {each.tool.name: each for each in self._offered}
        self._by_key = {each.key: each for each in self._offered}

    @property
    def tools(self) -> tuple[Tool, ...]:
        """The tools as the model sees them."""
        return tuple(each.tool for each in self._offered)

    def called(self, shown: str) -> OfferedTool | None:
        """The tool that the model calls by this name."""
        return self._by_shown.get(shown)

    def shown(self, name: str, namespace: str | None) -> str:
        """The name by which the model knows a tool, which earlier requests may have offered."""
        offered = self._by_key.get((namespace, name))
        return offered.tool.name if offered else _shown(name, namespace)

    def chosen(self, choice: ToolChoiceFunction) -> OfferedTool:
        """The tool that a `tool_choice` names. A namespace may be left out if no other tool has
        the name. Raises BadRequest."""
        name, namespace = choice.name, choice.namespace
        is_custom = choice.type == "custom"
        fitting = [
            each
            for each in self._offered
            if each.name == name and (each.kind == "custom") == is_custom
        ]
        for tool in fitting:
            if tool.namespace == namespace:
                return tool
        others = fitting if namespace is None else []
        if len(others) == 1:
            return others[0]
        whole = f"{namespace}.{name}" if namespace else name
        which = (
            "several of the `tools` have: add its `namespace`"
            if others
            else "is not among the `tools`"
        )
        raise BadRequest(f"`tool_choice` names {whole[:64]!r}, which {which}.", param="tool_choice")


NO_TABLE = ToolTable()


def tool_table(params: Iterable[ToolParam], found: Iterable[ToolParam]) -> ToolTable:
    """`found`: tools that items of the conversation add, for example those that a tool search has
    found. They replace tools of the same name."""
    params = list(params)
    searches = any(_is_clients_search(param) for param in params)
    listed: dict[tuple[str | None, str], OfferedTool] = {}
    for i, param in enumerate(params):
        for each in listed_tools(param):
            if each.key in listed and listed[each.key].kind != each.kind:
                raise BadRequest(
                    f"Two `tools` have the name {each.name[:64]!r}: give each its own.",
                    param=f"tools[{i}].name",
                )
            if not (searches and each.is_deferred):
                listed[each.key] = each
    for param in found:
        listed |= {each.key: each for each in listed_tools(param)}
    return ToolTable(_offered(listed.values()))


def without_use(params: Iterable[ToolParam]) -> Iterator[str]:
    """The types of tools that can't be offered, with their namespace."""
    for param in params:
        match param:
            case OtherTool(type=kind):
                yield kind
            case ToolSearchTool() if not _is_clients_search(param):
                yield param.type
            case ToolNamespace(name=name):
                yield from (f"{name}.{kind}" for kind in without_use(param.tools))


def deferred_in_vain(params: Iterable[ToolParam]) -> Iterator[str]:
    """Paths of `defer_loading` if the client has no search that would find these tools."""
    params = list(params)
    if any(map(_is_clients_search, params)):
        return
    for param in params:
        match param:
            case FunctionTool(defer_loading=True) | FreeformTool(defer_loading=True):
                yield "tools.defer_loading"
            case ToolNamespace():
                inside = (each for each in param.tools if not isinstance(each, OtherTool))
                yield from ("tools.tools.defer_loading" for each in inside if each.defer_loading)


def _is_clients_search(param: ToolParam) -> bool:
    return isinstance(param, ToolSearchTool) and param.is_clients


def listed_tools(param: ToolParam | NamespacedTool) -> Iterator[OfferedTool]:
    """The tools that a tool of the body stands for, those of a namespace one by one."""
    match param:
        case FunctionTool():
            tool = Tool(param.name, param.description, param.parameters or {}, bool(param.strict))
            yield OfferedTool("function", tool.name, tool, is_deferred=bool(param.defer_loading))
        case FreeformTool(format=format):
            grammar = format if isinstance(format, FreeformGrammar) else None
            tool = freeform_tool(param.name, param.description, grammar)
            yield OfferedTool("custom", tool.name, tool, is_deferred=bool(param.defer_loading))
        case ToolNamespace():
            yield from _in_namespace(param)
        case ToolSearchTool() if _is_clients_search(param):
            schema = param.parameters or SEARCH_SCHEMA
            tool = Tool(TOOL_SEARCH, param.description, schema)
            yield OfferedTool("tool_search", TOOL_SEARCH, tool)


def _in_namespace(namespace: ToolNamespace) -> Iterator[OfferedTool]:
    """The tools of a namespace. Its description precedes that of its first tool."""
    about = namespace.description
    for param in namespace.tools:
        for each in listed_tools(param):
            descriptions = filter(None, (about, each.tool.description))
            tool = replace(each.tool, description="\n\n".join(descriptions) or None)
            yield replace(each, tool=tool, namespace=namespace.name)
            about = None


def _offered(listed: Iterable[OfferedTool]) -> Iterator[OfferedTool]:
    listed = list(listed)
    taken = {each.name for each in listed if each.namespace is None}
    for each in listed:
        shown = each.name
        if each.namespace is not None:
            shown = unused_name(_shown(each.name, each.namespace), taken)
            taken.add(shown)
        yield replace(each, tool=replace(each.tool, name=shown))


def _shown(name: str, namespace: str | None) -> str:
    return name if namespace is None else callable_name(name, namespace)
