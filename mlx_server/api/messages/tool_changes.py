"""The tools that a conversation has made available or withdrawn."""

from dataclasses import dataclass, field

from mlx_server.api.messages.blocks import (
    McpToolChange,
    ToolAdditionBlock,
    ToolDefinition,
    ToolRemovalBlock,
)
from mlx_server.api.messages.tool_params import AnthropicTool, CustomTool
from mlx_server.api.messages.tool_refusals import no_mcp, not_offered


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

    def apply(self, block: ToolAdditionBlock | ToolRemovalBlock, where: str) -> None:
        change = block.tool
        match change:
            case McpToolChange():
                raise no_mcp(f"{where}.tool")
            case ToolDefinition(definition=tool):
                if isinstance(tool, AnthropicTool):
                    raise not_offered(tool.type, f"{where}.tool.definition")
                self.defined[tool.name] = tool
                name = tool.name
            case _:
                name = change.name
        if block.type == "tool_removal":
            self.named.pop(name, None)
            self.removed.add(name)
        else:
            self.name(name)
            self.removed.discard(name)
