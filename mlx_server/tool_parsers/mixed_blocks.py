"""Reads blocks in which a model calls tools of the request and tools that do not exist."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from mlx_server.events import Event
from mlx_server.messages import Tool
from mlx_server.repair.malformed import Malformed, UnknownTool
from mlx_server.tool_parsers.call_format import CallFormat, finished_calls, read_block
from mlx_server.tool_parsers.source import complete_source

MOST_UNKNOWN = 16
"""Names of unknown tools in one block; each of them has the block read once more."""

SEPARATORS = " \t\r\n,;"


@dataclass(frozen=True)
class MixedBlock:
    calls: tuple[dict[str, Any], ...]
    """The calls of known tools, with `id`, `name` and `arguments`."""
    unknown: tuple[str, ...]
    """Names of the others, in their order."""
    size: int
    """Characters of the text that belong to the block."""


def mixed_block(call_format: CallFormat, text: str, tools: Sequence[Tool]) -> MixedBlock:
    """The calls that a text begins with, after a block's opening delimiter or after another call.

    Malformed if it begins with anything else, or if none of them is of a known tool.
    """
    offered = {tool.name for tool in tools}
    unknown: dict[str, Tool] = {}
    while len(unknown) <= MOST_UNKNOWN:
        source, events = complete_source(text), list[Event]()
        source.take(len(text) - len(text.lstrip(SEPARATORS)))
        try:
            read_block(call_format, source, (*tools, *unknown.values()), events)
        except UnknownTool as error:
            unknown[error.name] = Tool(error.name)
            continue
        calls = finished_calls(events)
        known = tuple(call for call in calls if call["name"] in offered)
        if not known:
            break
        others = tuple(call["name"] for call in calls if call["name"] in unknown)
        return MixedBlock(known, others, source.position)
    raise Malformed("no call of a known tool")
