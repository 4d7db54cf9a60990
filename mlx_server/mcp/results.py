"""Converts the result of a tool to text for the model."""

import json

from mcp import types

from mlx_server.mcp.texts import cut


def text_of(result: types.CallToolResult, longest: int) -> str:
    parts = [_part_text(part) for part in result.content]
    if not parts and result.structured_content is not None:  # parts contain it as text too
        parts = [json.dumps(result.structured_content, ensure_ascii=False)]
    return cut("\n".join(parts), longest)


def _part_text(part: types.ContentBlock) -> str:
    match part:
        case types.TextContent(text=text):
            return text
        case types.EmbeddedResource(resource=types.TextResourceContents(text=text)):
            return text
        case types.ResourceLink(uri=uri):
            return f"[resource link: {uri}]"
        case _:
            return f"[{part.type}]"
