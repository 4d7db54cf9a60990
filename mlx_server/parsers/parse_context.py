"""What a parser or a grammar has to know of an answer, and the interface of all parsers."""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal, Protocol

from mlx_server.events import Event, TextDelta
from mlx_server.messages import Tool
from mlx_server.requests import ALL_REPAIRS, Format, NamedTool, RepairPolicy, ToolChoice

Pair = tuple[str, str]
"""An opening and a closing delimiter."""

THINK: Pair = ("<think>", "</think>")

_TAG = re.compile(r"(?><[\w:-]+>)++")


USUAL_TAGS: tuple[Pair, ...] = (
    THINK,
    ("<thinking>", "</thinking>"),
    ("<reasoning>", "</reasoning>"),
    ("<thought>", "</thought>"),
    ("◁think▷", "◁/think▷"),
)
"""Tags of reasoning that models of any family may write at the beginning of an answer. Those that a
family does not have are reported as a repair."""


def is_tag(opening: str) -> bool:
    """Whether an answer's text could mention this delimiter, as it is spelled like any other tag.

    Delimiters made of control tokens or in capitals open reasoning wherever they stand."""
    return bool(_TAG.fullmatch(opening.strip()))


Section = Literal["text", "reasoning", "call"]


@dataclass(frozen=True)
class ParseContext:
    index: int = 0
    """The answer's `index` in the events."""
    tools: tuple[Tool, ...] = ()
    """Tools of the request; a call of any other tool is text."""
    prompt: tuple[int, ...] = ()
    """Token ids of the prompt."""
    ends_with: str = ""
    """The prompt's end as text with control tokens, since it may open reasoning."""
    control: Mapping[int, str] = field(default_factory=dict)
    """Control tokens of the vocabulary: id to text."""
    repair: RepairPolicy = ALL_REPAIRS
    holds_calls: bool = False
    """Whether a call is reported only once it is complete: if no grammar guarantees that it will
    be, or streams are held back."""
    formatted: bool = False
    """Whether a grammar constrains the text to its end, so that it contains no delimiters."""
    verbatim: bool = False
    """Whether text that a grammar constrains may begin with white space of its own, as JSON never
    does."""
    continues: bool = False
    """Whether the answer continues a message: the prompt ends in the section that `ends_with`
    opens, and has a part of it."""

    @property
    def continues_text(self) -> bool:
        """Whether the answer begins within a text that no delimiter opened."""
        return self.continues and not self.ends_with

    @property
    def reads_misplaced_calls(self) -> bool:
        """Whether calls are read that are not written in the family's own format."""
        return self.repair.mistakes and bool(self.tools) and not self.formatted


class Parser(Protocol):
    """Turns the tokens of one answer into events, independent of how they are chunked."""

    @property
    def section(self) -> Section:
        """The section to which the next token belongs, as far as is known."""

    @property
    def awaits_answer(self) -> bool:
        """Whether an answer that ended here would consist of reasoning alone."""

    @property
    def is_unterminated(self) -> bool:
        """Whether the answer so far ends within reasoning that was not closed."""

    @property
    def unread(self) -> str:
        """The end of the text that has come, of which nothing was made yet."""

    def feed(self, token: int, text: str) -> list[Event]:
        """`text` is what the token adds; "" for control tokens and incomplete characters."""

    def finish(self, *, cut: bool) -> list[Event]:
        """Ends the answer. `cut`: whether a limit ended it."""


class DelegatingParser:
    """Base of parsers that prepare an answer for another parser, which they may replace."""

    def __init__(self, parser: Parser) -> None:
        self._parser = parser

    @property
    def section(self) -> Section:
        return self._parser.section

    @property
    def awaits_answer(self) -> bool:
        return self._parser.awaits_answer

    @property
    def is_unterminated(self) -> bool:
        return self._parser.is_unterminated

    @property
    def unread(self) -> str:
        return self._parser.unread


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


class TextParser:
    section: Section = "text"
    awaits_answer = is_unterminated = False
    unread = ""

    def __init__(self, context: ParseContext) -> None:
        self._index = context.index

    def feed(self, token: int, text: str) -> list[Event]:
        return [TextDelta(self._index, text)] if text else []

    def finish(self, *, cut: bool) -> list[Event]:
        return []
