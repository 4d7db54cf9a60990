"""The parser of families whose output is nothing but text."""

from mlx_server.events import Event, TextDelta


class TextParser:
    def __init__(self, index: int) -> None:
        self._index = index

    def feed(self, token: int, text: str) -> list[Event]:
        return [TextDelta(self._index, text)] if text else []

    def finish(self, text: str) -> list[Event]:
        return [TextDelta(self._index, text)] if text else []
