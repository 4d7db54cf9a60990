"""Finds how an upstream's text is parsed: by the family that models.yaml names, or as Harmony,
which is recognised in any answer that begins with it."""

from dataclasses import dataclass
from string import ascii_uppercase

from mlx_server.events import Event
from mlx_server.families import AS_TEXT, family_named
from mlx_server.families.base import ModelFamily
from mlx_server.families.harmony import HARMONY_TEXT
from mlx_server.parsers.harmony_text import CHANNELS, HEADS
from mlx_server.parsers.parse_context import DelegatingParser, ParseContext, Parser


@dataclass(frozen=True)
class ThoughtTags:
    opening: str
    closing: str

    def begun(self, thoughts: str, content: str) -> str:
        """The text of the message up to its answer: the thoughts, which may be in `content`, and
        their closing tag."""
        if thoughts:
            return f"{self.opening}\n{thoughts.strip()}\n{self.closing}\n\n{content}"
        if self.is_open(content):
            return f"{content.rstrip()}\n{self.closing}\n\n"
        return content or f"{self.opening}\n\n{self.closing}\n\n"

    def is_open(self, content: str) -> bool:
        return content.lstrip().startswith(self.opening) and self.closing not in content


def text_family(name: str | None) -> ModelFamily:
    """The family that parses an upstream's text, which comes without token ids; by default
    `plain`."""
    return family_named(AS_TEXT.get(name or "", name or "plain"))


def thought_tags(name: str | None) -> ThoughtTags | None:
    """The tags around the family's reasoning; None if it has none that a message's text may
    have."""
    opens, closes = family_named(name or "plain").thinking_delimiters()
    return ThoughtTags(opens[0], closes[0]) if opens and closes and name not in AS_TEXT else None


def opening_of_reasoning(name: str | None) -> str:
    """The delimiter that opens reasoning for the family's parser; "" if it has none."""
    opens, _ = family_named(name or "plain").thinking_delimiters()
    return opens[0] if opens else ""


HARMONY = (
    *(f"<|channel|>{name}" for name in CHANNELS),
    *("<|start|>assistant", *HEADS, "analysis to=", "commentary to="),
    *(f"analysis{letter}" for letter in ascii_uppercase),
)
"""The beginnings of an answer in Harmony, with control tokens and without, which no answer of
another family has."""


def parser_of(family: ModelFamily, context: ParseContext) -> Parser:
    """The parser for an upstream's text: the family's own, or Harmony's if the answer is in it."""
    if family is HARMONY_TEXT or context.formatted or context.continues:
        return family.make_parser(context)
    return HarmonyDetector(family.make_parser(context), context)


class HarmonyDetector(DelegatingParser):
    """Holds back the beginning of an answer while it may be Harmony's."""

    def __init__(self, parser: Parser, context: ParseContext) -> None:
        super().__init__(parser)
        self._context = context
        self._held: list[str] = []
        self._start = ""
        """What is held, without the white space before it, of which a model may write any
        amount."""
        self._is_certain = False

    @property
    def unread(self) -> str:
        return super().unread if self._is_certain else "".join(self._held)

    def feed(self, token: int, text: str) -> list[Event]:
        if self._is_certain:
            return self._parser.feed(token, text)
        self._held.append(text)
        self._start += text if self._start else text.lstrip()
        if any(len(self._start) < len(each) and each.startswith(self._start) for each in HARMONY):
            return []
        return self._released(token)

    def finish(self, *, cut: bool) -> list[Event]:
        held = [] if self._is_certain else self._released(-1)
        return [*held, *self._parser.finish(cut=cut)]

    def _released(self, token: int) -> list[Event]:
        self._is_certain = True
        if self._start.startswith(HARMONY):
            self._parser = HARMONY_TEXT.make_parser(self._context)
        return self._parser.feed(token, "".join(self._held))
