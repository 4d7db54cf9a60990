"""Converts the wire's `tools` and `tool_choice` to functions and MCP servers."""

from collections.abc import Container, Iterable, Sequence
from dataclasses import dataclass, replace

from mlx_server import limits
from mlx_server.api.responses.protocol import ResponsesBody
from mlx_server.api.responses.tool_table import ToolTable, tool_table, without_use
from mlx_server.api.responses.tools import (
    ApprovalFilter,
    McpTool,
    OtherTool,
    ToolChoiceAllowed,
    ToolChoiceFunction,
    ToolChoiceMcp,
    ToolFilterParam,
    ToolParam,
)
from mlx_server.api.tool_choice import check_choice, check_usable
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
    table: ToolTable
    tools: tuple[Tool, ...]
    """The tools of the table that the model may call."""
    choice: ToolChoice
    servers: tuple[McpServer, ...]
    mcp_choice: McpChoice | None = None


def select_tools(
    body: ResponsesBody, *, listed: Container[str], found: Iterable[ToolParam] = ()
) -> ToolSelection:
    """The tools that the model may call, and whether it has to call one.

    `listed`: labels of the MCP servers whose tools are already in the conversation.
    `found`: tools that the conversation's items add.
    """
    given = list(enumerate(body.tools or ()))
    found = list(found)
    table = tool_table(body.tools or (), found)
    tools = table.tools
    servers = tuple(_server(tool, i, listed) for i, tool in given if isinstance(tool, McpTool))
    labels = [server.label for server in servers]
    for i, label in enumerate(labels):
        if label in labels[:i]:
            raise BadRequest(
                f"Two MCP servers have the `server_label` {label[:64]!r}: give each its own.",
                param="tools",
            )
    _check_number(tools)
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
        _refuse_unusable([*(body.tools or ()), *found])
    if not servers:
        check_choice(choice, tools)
    return ToolSelection(table, tools, choice, servers)


def _check_number(tools: Sequence[Tool]) -> None:
    if len(tools) > (most := limits.TOOLS):
        raise BadRequest(
            f"There are {len(tools)} tools, those of namespaces and of `input` included; the limit "
            f"is {most}. Send fewer.",
            param="tools",
        )


def _refuse_unusable(params: Sequence[ToolParam]) -> None:
    """Raises BadRequest if there are tools: none of them can be offered. A code interpreter may be
    the only one: it says how calls are reported that gpt-oss makes without being offered it."""
    kinds = list(without_use(params))
    if "code_interpreter" not in kinds:
        check_usable(kinds)


def _refuse_others(allowed: ToolChoiceAllowed) -> None:
    kinds = [each.type for each in allowed.tools if isinstance(each, OtherTool)]
    names = ", ".join(repr(kind[:64]) for kind in dict.fromkeys(kinds))
    raise BadRequest(
        f"`tool_choice` allows only tools that can't be offered: this server has no {names}.",
        param="tool_choice.tools",
    )


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
    kept = tuple(tool for tool in table.tools if tool.name in names)
    narrowed = tuple(_narrowed(s, of_servers[s.label]) for s in servers if s.label in of_servers)
    if not narrowed and not kept:
        _refuse_others(allowed)
    if not narrowed:
        check_choice(allowed.mode, kept)
    return ToolSelection(table, kept, allowed.mode, narrowed)


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


def _filter(given: list[str] | ToolFilterParam | None, otherwise: ToolFilter) -> ToolFilter:
    match given:
        case None:
            return otherwise
        case ToolFilterParam(tool_names=names, read_only=read_only):
            return ToolFilter(None if names is None else frozenset(names), read_only)
    return ToolFilter(frozenset(given))
