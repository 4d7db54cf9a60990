"""Converts the wire's `tools` and `tool_choice` to functions and MCP servers."""

from collections.abc import Container, Sequence
from dataclasses import dataclass, replace

from mlx_server.api.responses.protocol import ResponsesBody
from mlx_server.api.responses.tools import (
    AllowedToolsChoice,
    ApprovalFilter,
    FunctionChoice,
    FunctionTool,
    McpChoiceParam,
    McpTool,
    OtherTool,
    ToolFilterParam,
)
from mlx_server.api.tool_choice import check_choice, check_offered
from mlx_server.errors import BadRequest
from mlx_server.messages import Tool
from mlx_server.requests import (
    ALL_TOOLS,
    NO_TOOLS,
    McpChoice,
    McpServer,
    NamedTool,
    ToolChoice,
    ToolFilter,
)


@dataclass(frozen=True, slots=True)
class ToolSelection:
    tools: tuple[Tool, ...]
    choice: ToolChoice
    servers: tuple[McpServer, ...]
    mcp_choice: McpChoice | None = None


def select_tools(body: ResponsesBody, *, listed: Container[str]) -> ToolSelection:
    """The tools that the model may call, and whether it has to call one.

    `listed`: labels of the MCP servers whose tools are already in the conversation.
    """
    given = list(enumerate(body.tools or ()))
    tools = tuple(_tool(tool) for _, tool in given if isinstance(tool, FunctionTool))
    servers = tuple(_server(tool, i, listed) for i, tool in given if isinstance(tool, McpTool))
    labels = [server.label for server in servers]
    for i, label in enumerate(labels):
        if label in labels[:i]:
            raise BadRequest(
                f"Two MCP servers have the `server_label` {label[:64]!r}: give each its own.",
                param="tools",
            )
    match body.tool_choice:
        case AllowedToolsChoice() as allowed:
            return _allowed(allowed, tools, servers)
        case McpChoiceParam(server_label=label, name=name):
            _check_server(label, servers)
            return ToolSelection(tools, "auto", servers, McpChoice(label, name))
        case FunctionChoice(name=name):
            check_offered(name, tools)
            return ToolSelection(tools, NamedTool(name), servers)
        case OtherTool(type=kind):
            raise BadRequest(
                f"`tool_choice` has a tool of type {kind[:64]!r}, which is not supported.",
                param="tool_choice.type",
            )
        case mode:
            choice = mode or "auto"
    if not servers:
        check_choice(choice, tools)
    return ToolSelection(tools, choice, servers)


def _allowed(
    allowed: AllowedToolsChoice, tools: Sequence[Tool], servers: Sequence[McpServer]
) -> ToolSelection:
    names = {choice.name for choice in allowed.tools if isinstance(choice, FunctionChoice)}
    of_servers: dict[str, set[str] | None] = {}
    for choice in allowed.tools:
        if isinstance(choice, McpChoiceParam):
            _check_server(choice.server_label, servers)
            before = of_servers.get(choice.server_label, set())
            both = before | {choice.name} if choice.name and before is not None else None
            of_servers[choice.server_label] = both
    for name in names:
        check_offered(name, tools)
    kept = tuple(tool for tool in tools if tool.name in names)
    narrowed = tuple(_narrowed(s, of_servers[s.label]) for s in servers if s.label in of_servers)
    if not narrowed:
        check_choice(allowed.mode, kept)
    return ToolSelection(kept, allowed.mode, narrowed)


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


def _tool(tool: FunctionTool) -> Tool:
    return Tool(tool.name, tool.description, tool.parameters or {}, bool(tool.strict))


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


def _filter(given: list[str] | ToolFilterParam | None, otherwise: ToolFilter) -> ToolFilter:
    match given:
        case None:
            return otherwise
        case ToolFilterParam(tool_names=names, read_only=read_only):
            return ToolFilter(None if names is None else frozenset(names), read_only)
    return ToolFilter(frozenset(given))
