"""The tools that a conversation has made available or withdrawn."""

from dataclasses import dataclass, field

from mlx_server.api.messages.blocks import (
    McpToolChange,
    ToolAdditionBlock,
    ToolDefinition,
    ToolRemovalBlock,
)
from mlx_server.api.messages.tool_params import AnthropicTool, CustomTool


@dataclass
class ToolChanges:
    """State after the messages that were read so far."""

    named: dict[str, None] = field(default_factory=dict)
    """Tools with `defer_loading` that are offered by now, in the order in which they were named."""
    defined: dict[str, CustomTool] = field(default_factory=dict)
    """Tools that the messages define, and not the body."""
    removed: set[str] = field(default_factory=set)

    def name(self, tool: str) -> None:
        self.named[tool] = None

    def apply(self, block: ToolAdditionBlock | ToolRemovalBlock) -> None:
        change = block.tool
        if isinstance(change, McpToolChange):
            return
        if isinstance(change, ToolDefinition):
            if isinstance(change.definition, AnthropicTool):
                return
            name = change.definition.name
            self.defined[name] = change.definition
        else:
            name = change.name
        if block.type == "tool_removal":
            self.named.pop(name, None)
            self.removed.add(name)
        else:
            self.name(name)
            self.removed.discard(name)
