"""What an answer has to be, for the family that writes a grammar of it."""

from dataclasses import dataclass

from mlx_server.parsers.parse_context import Reading
from mlx_server.requests import Format, Named, ToolChoice


@dataclass(frozen=True)
class Wanted:
    reading: Reading
    choice: ToolChoice = "auto"
    format: Format | None = None
    """Of the answer's text; calls are free of it."""
    thinks: bool = False
    """Whether the model may open reasoning by itself: its template or vocabulary knows how."""

    @property
    def must_call(self) -> bool:
        return self.choice == "required" or isinstance(self.choice, Named)
