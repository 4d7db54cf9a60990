"""Reads Harmony that a server leaves in its text, where models.yaml names no family or another one.

The family's parser reads any other text.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from mlx_server.events import Event
from mlx_server.families.base import ModelFamily
from mlx_server.families.harmony_text import HARMONY_TEXT
from mlx_server.parsers.harmony.text_parser import CHANNELS
from mlx_server.parsers.parse_context import ParseContext, Parser, Section

BEGINNINGS = (*(f"<|channel|>{name}" for name in CHANNELS), "<|start|>assistant")
"""No answer of another family begins so."""


def parser_of(family: ModelFamily, context: ParseContext) -> Parser:
    """The parser of an upstream's text."""
    if family is HARMONY_TEXT or context.formatted or context.continues:
        return family.make_parser(context)
    return LeakedHarmonyParser(family.make_parser(context), context)


class LeakedHarmonyParser:
    """Holds the first characters of an answer until they show which parser reads it."""

    def __init__(self, parser: Parser, context: ParseContext) -> None:
        self._parser = parser
        self._context = context
        self._held: list[tuple[int, str]] = []
        self._begun = False

    @property
    def section(self) -> Section:
        return self._parser.section

    @property
    def awaits_answer(self) -> bool:
        return self._parser.awaits_answer

    @property
    def is_unterminated(self) -> bool:
        return self._parser.is_unterminated

    def feed(self, token: int, text: str) -> list[Event]:
        if self._begun:
            return self._parser.feed(token, text)
        self._held.append((token, text))
        head = "".join(text for _, text in self._held).lstrip()
        if any(len(head) < len(each) and each.startswith(head) for each in BEGINNINGS):
            return []
        if head.startswith(BEGINNINGS):
            self._parser = HARMONY_TEXT.make_parser(self._context)
        return self._begin()

    def messages(self) -> Sequence[Mapping[str, Any]]:
        return self._parser.messages()

    def finish(self, text: str, *, cut: bool) -> list[Event]:
        return [*self._begin(), *self._parser.finish(text, cut=cut)]

    def _begin(self) -> list[Event]:
        held, self._held, self._begun = self._held, [], True
        return [event for token, text in held for event in self._parser.feed(token, text)]
