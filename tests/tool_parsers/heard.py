"""Records the events of an answer's calls."""

from typing import Any

from mlx_server.events import Event, ToolCallDelta
from mlx_server.messages import Tool
from mlx_server.tool_parsers.calls import ToolCallEmitter

SCHEMA = {
    "type": "object",
    "properties": {
        "text": {"type": "string"},
        "count": {"type": "integer"},
        "label": {"type": ["string", "null"]},
    },
}
TOOLS = [Tool("write", parameters=SCHEMA), Tool("now"), Tool("get_a"), Tool("GetA")]


class Heard:
    def __init__(self) -> None:
        self.events: list[Event] = []
        self.calls = ToolCallEmitter(3, TOOLS, self.events.append)

    def of(self, kind: type[Any]) -> list[Any]:
        return [event for event in self.events if isinstance(event, kind)]

    def arguments(self, call: int = 0) -> str:
        return "".join(e.arguments for e in self.of(ToolCallDelta) if e.call == call)
