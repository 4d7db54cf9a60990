"""The parser of plain text, without reasoning or calls."""

from collections.abc import Mapping, Sequence
from typing import Any

from mlx_server.events import Event, TextDelta
from mlx_server.parsers.parse_context import ParseContext, Section


class TextParser:
    section: Section = "text"
    awaits_answer = is_unterminated = False

    def __init__(self, context: ParseContext) -> None:
        self._index = context.index

    def messages(self) -> Sequence[Mapping[str, Any]]:
        return ()

    def feed(self, token: int, text: str) -> list[Event]:
        return [TextDelta(self._index, text)] if text else []

    def finish(self, *, cut: bool) -> list[Event]:
        return []
