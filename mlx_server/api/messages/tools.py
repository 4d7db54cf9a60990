"""Converts the `tools` and `tool_choice` of a body."""

from mlx_server.api.messages.protocol import PromptBody
from mlx_server.api.messages.tool_changes import ToolChanges
from mlx_server.api.messages.tool_params import AnthropicTool, CustomTool
from mlx_server.api.tool_choice import check_offered, check_usable
from mlx_server.errors import BadRequest
from mlx_server.messages import Tool
from mlx_server.requests import NamedTool, ToolChoice


def select_tools(body: PromptBody, changes: ToolChanges) -> tuple[tuple[Tool, ...], ToolChoice]:
    """The tools that the model may call, and whether it has to call one.

    A tool with `defer_loading` is among them once the conversation or `tool_choice` names it, and
    so is one that the conversation defines. Such tools come last, in the order in which they were
    named: what came before stays the same.
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
    named = [choice.name] if isinstance(choice, NamedTool) else []
    kept = [tool for tool in given.values() if tool.name not in changes.removed]
    at_once = {tool.name: tool for tool in kept if not tool.defer_loading}
    known = {tool.name: tool for tool in kept} | changes.defined
    wanted = dict.fromkeys([*changes.named, *named])
    later = {name: known[name] for name in wanted if name in known}
    tools = tuple(map(_tool, (at_once | later).values()))
    if named:
        check_offered(named[0], tools)
    if choice == "required" and not tools:
        raise BadRequest("`tool_choice: any` needs `tools`.", param="tool_choice")
    return tools, choice


def _choice(body: PromptBody) -> ToolChoice:
    choice = body.tool_choice
    match choice and choice.type:
        case "any":
            return "required"
        case "none":
            return "none"
        case "tool":
            assert choice
            if choice.name is None:
                raise BadRequest(
                    "`tool_choice.name` is missing: it names the tool that must be called.",
                    param="tool_choice.name",
                )
            return NamedTool(choice.name)
    return "auto"


def _tool(tool: CustomTool) -> Tool:
    return Tool(tool.name, tool.description, tool.input_schema, bool(tool.strict))
