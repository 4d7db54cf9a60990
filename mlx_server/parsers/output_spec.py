"""The required form of an answer, from which a family makes a grammar."""

from dataclasses import dataclass

from mlx_server.parsers.parse_context import ParseContext
from mlx_server.requests import Format, NamedTool, ToolChoice


@dataclass(frozen=True)
class OutputSpec:
    context: ParseContext
    choice: ToolChoice = "auto"
    format: Format | None = None
    """Format of the answer's text; it does not apply to calls."""
    thinks: bool = False
    """Whether the model may open reasoning itself (see `ModelFamily.thinks`)."""

    @property
    def must_call(self) -> bool:
        return self.choice == "required" or isinstance(self.choice, NamedTool)
