"""Converts the `tools` and `tool_choice` of a body."""

import re
from collections.abc import Collection

from mlx_server.api.messages.protocol import AnthropicTool, CustomTool, PromptBody
from mlx_server.api.tool_choice import check_offered
from mlx_server.errors import BadRequest
from mlx_server.messages import Tool
from mlx_server.requests import NamedTool, ToolChoice

RUN_BY_CLIENTS = re.compile(r"(bash|browser|computer|memory|text_editor)_\w+")
"""Types of the tools that run at the client, but whose schema only Anthropic's models know."""


def select_tools(
    body: PromptBody, referenced: Collection[str]
) -> tuple[tuple[Tool, ...], ToolChoice]:
    """The tools that the model may call, and whether it has to call one.

    A tool with `defer_loading` is among them once the conversation or `tool_choice` names it. Such
    tools come last, in the order in which they were named: what came before stays the same.
    """
    given: dict[str, CustomTool] = {}
    for i, tool in enumerate(body.tools or ()):
        if isinstance(tool, AnthropicTool):
            raise _refused(tool.type, f"tools[{i}]")
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
    named = [choice.name] if isinstance(choice, NamedTool) else []
    at_once = [tool for tool in given.values() if not tool.defer_loading]
    wanted = dict.fromkeys([*referenced, *named])
    later = [given[name] for name in wanted if name in given and given[name].defer_loading]
    tools = tuple(map(_tool, [*at_once, *later]))
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


def _refused(kind: str, where: str) -> BadRequest:
    what = (
        "has a schema that only Anthropic's models know: describe it with a `name` and an "
        "`input_schema`"
        if RUN_BY_CLIENTS.fullmatch(kind)
        else "runs on Anthropic's servers, and not here: leave it out"
    )
    return BadRequest(f"The tool type {kind[:64]!r} {what}.", param=f"{where}.type")
