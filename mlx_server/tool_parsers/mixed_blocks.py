"""Reads blocks in which a model calls tools of the request and tools that do not exist."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from mlx_server.events import Event, Repaired, RepairKind
from mlx_server.messages import Tool
from mlx_server.repair.allowed import RepairPolicy
from mlx_server.repair.model_json import Malformed, UnknownTool
from mlx_server.tool_parsers.call_format import CallFormat, finished_calls, read_block
from mlx_server.tool_parsers.source import complete_source

MOST_UNKNOWN = 16
"""The most names of unknown tools in one block; for each of them the block is read once more."""

SEPARATORS = " \t\r\n,;"


@dataclass(frozen=True)
class KnownCall:
    name: str
    arguments: dict[str, Any]
    repairs: tuple[tuple[RepairKind, str], ...]
    """The kinds of repair, each with its path within the call."""


@dataclass(frozen=True)
class MixedBlock:
    calls: tuple[KnownCall, ...]
    """The calls of known tools."""
    unknown: tuple[str, ...]
    """The names of the unknown tools, in their order."""
    size: int
    """Characters of the text that belong to the block."""


def mixed_block(
    call_format: CallFormat, text: str, tools: Sequence[Tool], allowed: RepairPolicy
) -> MixedBlock:
    """Returns the calls that a text begins with, after a block's opening delimiter or another call.

    Malformed if it begins with anything else, or if none of the calls is of a known tool.
    """
    offered = {tool.name for tool in tools}
    unknown: dict[str, Tool] = {}
    while len(unknown) <= MOST_UNKNOWN:
        source, events = complete_source(text), list[Event]()
        source.take(len(text) - len(text.lstrip(SEPARATORS)))
        try:
            read_block(call_format, source, (*tools, *unknown.values()), events, allowed)
        except UnknownTool as error:
            unknown[error.name] = Tool(error.name)
            continue
        calls = finished_calls(events)
        known = tuple(
            KnownCall(call["name"], call["arguments"], _repairs_of(number, events))
            for number, call in enumerate(calls)
            if call["name"] in offered
        )
        if not known:
            break
        others = tuple(call["name"] for call in calls if call["name"] in unknown)
        return MixedBlock(known, others, source.position)
    raise Malformed("no call of a known tool")


def _repairs_of(number: int, events: Sequence[Event]) -> tuple[tuple[RepairKind, str], ...]:
    call = f"tool_calls[{number}]"
    return tuple(
        (event.what, event.where.removeprefix(call))
        for event in events
        if isinstance(event, Repaired) and event.where.startswith(call)
    )
