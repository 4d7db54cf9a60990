"""Finds how an upstream's text is parsed: by the family that models.yaml names, or by what it has.

Harmony is recognised in any answer that begins with it. If no family is named, other families'
delimiters are recognised too: of thoughts at the beginning of an answer, of calls anywhere.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from string import ascii_uppercase

from mlx_server.events import Event, ToolCallStarted
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

THOUGHTS: Mapping[str, str] = {
    "[THINK]": "mistral",
    "<seed:think>": "seed_oss",
    "<|channel>": "gemma4",
    "<|START_THINKING|>": "command",
    "<|inner_prefix|>": "apertus",
}
"""Delimiters of thoughts with which an answer may begin, and their families."""

CALLS: Mapping[str, str] = {
    "<｜tool▁calls▁begin｜>": "deepseek_v3",
    "<｜DSML｜": "deepseek_v32",
    "<|tool_calls_section_begin|>": "kimi_k2",
    "<|python_tag|>": "llama3",
    "<minimax:tool_call>": "minimax_m2",
    "<seed:tool_call>": "seed_oss",
    "<longcat_tool_call>": "longcat",
    "<|START_ACTION|>": "command",
    "<|tool_call_start|>": "lfm2",
    "<|tool_call|>": "granite",
    "<|tool_call>": "gemma4",
    "<|tools_prefix|>": "apertus",
    "<TOOLCALL>": "nemotron",
    "<tool_calls>": "hunyuan",
}
"""Delimiters of calls, and their families. All of them begin with `<`."""

OPENING_SIZE = max(map(len, CALLS))


def parser_of(family: ModelFamily, context: ParseContext) -> Parser:
    """The parser for an upstream's text: the family's own, or one that may switch to another."""
    if family is HARMONY_TEXT or context.formatted or context.continues:
        return family.make_parser(context)
    is_known = family is not family_named("plain")
    return LeakedFormatParser(family.make_parser(context), context, only_harmony=is_known)


class LeakedFormatParser(DelegatingParser):
    """Holds back text that may be a delimiter of another family, and switches to that family's
    parser if it is."""

    def __init__(self, parser: Parser, context: ParseContext, *, only_harmony: bool) -> None:
        super().__init__(parser)
        self._context = context
        harmony = dict.fromkeys(HARMONY, HARMONY_TEXT.name)
        has_calls = bool(context.tools) and context.repair.mistakes
        self._calls = CALLS if has_calls and not only_harmony else {}
        self._beginnings = harmony if only_harmony else {**harmony, **THOUGHTS}
        self._space: list[str] = []
        """The held white space before `_held`, of which a model may write any amount."""
        self._held = ""
        self._begun = self._is_certain = False
        """Whether the answer's beginning has been parsed, and whether its parser is final."""

    def feed(self, token: int, text: str) -> list[Event]:
        if self._is_certain:
            return self._parser.feed(token, text)
        self._hold(text)
        if not self._begun:
            if _may_become(self._held, self._beginnings):
                return []
            self._begun = True
            if found := _at_the_beginning(self._held, self._beginnings):
                return self._switch(token, found)
        events = self._until_calls(token)
        self._is_certain = self._is_certain or not self._calls
        return events

    def finish(self, *, cut: bool) -> list[Event]:
        return [*self._released(-1, len(self._held)), *self._parser.finish(cut=cut)]

    def _hold(self, text: str) -> None:
        if self._held:
            self._held += text
            return
        self._held = text.lstrip()
        self._space.append(text[: len(text) - len(self._held)])

    def _until_calls(self, token: int) -> list[Event]:
        """The events of the held text. The beginning of a delimiter at its end, and the white space
        before that, stay held."""
        events: list[Event] = []
        while self._calls:
            if size := len(self._held[: _next_call(self._held)].rstrip()):
                events += self._released(token, size)
            elif not (found := _at_the_beginning(self._held, self._calls)):
                return events
            elif self._parser.section == "text":
                self._space.clear()
                ended = self._parser.finish(cut=False)
                return [*events, *ended, *self._switch(token, found)]
            else:
                events += self._released(token, 1)
        return [*events, *self._released(token, len(self._held))]

    def _released(self, token: int, size: int) -> list[Event]:
        """The events of the held white space and of the `size` characters after it."""
        text, rest = "".join((*self._space, self._held[:size])), self._held[size:]
        self._space, self._held = [], ""
        self._hold(rest)
        events = self._parser.feed(token, text) if text else []
        if any(isinstance(event, ToolCallStarted) for event in events):
            self._calls = {}  # the current parser knows the format of the model's calls
        return events

    def _switch(self, token: int, family: str) -> list[Event]:
        """Replaces the parser by that of `family`, and parses the held text with it."""
        made = HARMONY_TEXT if family == HARMONY_TEXT.name else family_named(family)
        self._parser = made.make_parser(self._context)
        self._is_certain = True
        return self._released(token, len(self._held))


def _next_call(text: str) -> int:
    """Where a delimiter of calls begins, of which only the beginning may have come; the end if
    there is none."""
    openings, at = tuple(CALLS), text.find("<")
    while at >= 0:
        is_cut = len(text) - at < OPENING_SIZE and _may_become(text[at:], CALLS)
        if is_cut or text.startswith(openings, at):
            return at
        at = text.find("<", at + 1)
    return len(text)


def _at_the_beginning(text: str, delimiters: Mapping[str, str]) -> str | None:
    return next((name for each, name in delimiters.items() if text.startswith(each)), None)


def _may_become(text: str, delimiters: Mapping[str, str]) -> bool:
    """Whether the text is empty or the beginning of a delimiter."""
    return any(len(text) < len(each) and each.startswith(text) for each in delimiters)
