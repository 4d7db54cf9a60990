"""Errors for tools that this server can't offer."""

import re

from mlx_server.errors import BadRequest

RUN_BY_CLIENTS = re.compile(r"(bash|browser|computer|memory|text_editor)_\w+")
"""Types of the tools that run at the client, but whose schema only Anthropic's models know."""


def no_mcp(where: str) -> BadRequest:
    return BadRequest(
        "`mcp_servers` is not supported here: call the server's tools yourself, or use "
        "`/v1/responses`, which has MCP servers.",
        param=where,
    )


def not_offered(kind: str, where: str) -> BadRequest:
    what = (
        "has a schema that only Anthropic's models know: describe it with a `name` and an "
        "`input_schema`"
        if RUN_BY_CLIENTS.fullmatch(kind)
        else "runs on Anthropic's servers, and not here: leave it out"
    )
    return BadRequest(f"The tool type {kind[:64]!r} {what}.", param=f"{where}.type")
