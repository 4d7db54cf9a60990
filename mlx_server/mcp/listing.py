"""A server's list of tools, without those that the request or the limits exclude."""

import json
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from mcp import types

from mlx_server import limits
from mlx_server.events import ListedTool
from mlx_server.mcp.limits import McpLimits
from mlx_server.requests import McpServer
from mlx_server.schemas.view import remote_reference


@dataclass
class Listing:
    tools: dict[str, ListedTool] = field(default_factory=dict)
    sizes: dict[str, int] = field(default_factory=dict)
    """The bytes of each tool's name, description and schema together."""
    left_out: list[str] = field(default_factory=list)
    """Sentences that say which tools were left out, and why."""
    failure: str | None = None
    """The reason why the server has no tools at all."""

    @property
    def error(self) -> str | None:
        return self.failure or " ".join(self.left_out) or None


class Lister:
    """Collects a server's tools page by page, up to the limits."""

    def __init__(self, server: McpServer, limits: McpLimits) -> None:
        self.listing = Listing()
        self.full = False
        self._server = server
        self._limits = limits
        self._seen = 0
        self._bytes = 0

    def add(self, page: types.ListToolsResult) -> None:
        for tool in page.tools:
            self._seen += 1
            size = _size(tool)
            self._bytes += size
            if self._seen > self._limits.tools or self._bytes > self._limits.schema_bytes:
                self.full = True
                self.listing.left_out.append(
                    f"The server has more than {self._limits.tools} tools, or more than "
                    f"{self._limits.schema_bytes} bytes of tools: the rest is left out."
                )
                return
            self._add(tool, size)

    def _add(self, tool: types.Tool, size: int) -> None:
        read_only = bool(tool.annotations and tool.annotations.read_only_hint)
        if not self._server.allowed.holds(tool.name, read_only=read_only):
            return
        if reason := self._objection(tool):
            self.listing.left_out.append(
                f"{tool.name[: limits.TOOL_NAME_CHARACTERS.value]!r} is left out: {reason}."
            )
            return
        self.listing.sizes[tool.name] = size
        self.listing.tools[tool.name] = ListedTool(
            tool.name, tool.description, tool.input_schema, _annotations(tool)
        )

    def _objection(self, tool: types.Tool) -> str | None:
        if not 0 < len(tool.name) <= limits.TOOL_NAME_CHARACTERS.value:
            return f"its name should have 1 to {limits.TOOL_NAME_CHARACTERS.value} characters"
        if tool.name in self.listing.tools:
            return "another tool has the same name"
        if remote := remote_reference(tool.input_schema):
            return f"its schema refers to {remote[:200]!r}, which is not fetched"
        return None


def bound(listings: Iterable[Listing], limits: McpLimits) -> None:
    """Leaves out tools until those of all servers of a request together are within the limits."""
    tools, size = 0, 0
    for listing in listings:
        for name in list(listing.tools):
            tools += 1
            size += listing.sizes[name]
            if tools > limits.all_tools or size > limits.all_schema_bytes:
                del listing.tools[name]
        if len(listing.tools) < len(listing.sizes):
            listing.left_out.append(
                f"All servers of a request together may have {limits.all_tools} tools and "
                f"{limits.all_schema_bytes} bytes of tools: the rest is left out."
            )


def _annotations(tool: types.Tool) -> dict[str, Any] | None:
    found = tool.annotations
    return found.model_dump(by_alias=True, exclude_none=True) if found else None


def _size(tool: types.Tool) -> int:
    described = (tool.name, tool.description, tool.input_schema)
    return len(json.dumps(described, ensure_ascii=False).encode("utf-8", "replace"))
