"""Checks that `tool_choice` fits the `tools` of a request."""

from collections.abc import Sequence

from mlx_server import limits
from mlx_server.errors import BadRequest
from mlx_server.messages import Tool
from mlx_server.requests import NamedTool, ToolChoice


def check_choice(choice: ToolChoice, tools: Sequence[Tool]) -> None:
    if choice == "required" and not tools:
        raise BadRequest("`tool_choice: required` needs `tools`.", param="tool_choice")
    if isinstance(choice, NamedTool):
        check_offered(choice.name, tools)


def check_usable(unknown: Sequence[str]) -> None:
    """Raises BadRequest for tools of which none can be offered. unknown: their types, empty if
    there are no tools. If there are others too, such tools are only reported."""
    if kinds := list(dict.fromkeys(unknown)):
        names = ", ".join(repr(kind[:64]) for kind in kinds[: limits.IGNORED_NAMES])
        raise BadRequest(
            f"None of the `tools` can be offered: this server has no {names}. Leave `tools` out, "
            "or send tools with a schema of their own.",
            param="tools",
        )


def check_offered(name: str, tools: Sequence[Tool]) -> None:
    if name not in {tool.name for tool in tools}:
        raise BadRequest(
            f"`tool_choice` names {name[:64]!r}, which is not among the `tools`.",
            param="tool_choice",
        )
