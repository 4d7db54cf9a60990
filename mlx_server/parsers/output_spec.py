"""What an answer has to be, for the family that writes a grammar of it."""

from dataclasses import dataclass

from mlx_server.parsers.parse_context import ParseContext
from mlx_server.requests import Format, NamedTool, ToolChoice


@dataclass(frozen=True)
class OutputSpec:
    context: ParseContext
    choice: ToolChoice = "auto"
    format: Format | None = None
    """Of the answer's text; calls are free of it."""
    thinks: bool = False
    """Whether the model may open reasoning by itself: its template or vocabulary knows how."""

    @property
    def must_call(self) -> bool:
        return self.choice == "required" or isinstance(self.choice, NamedTool)
