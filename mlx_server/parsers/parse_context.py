"""What a parser is told of the answer that it reads, and what it has to be."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

from mlx_server.events import Event
from mlx_server.messages import Tool
from mlx_server.repair.allowed import ALL_REPAIRS, RepairPolicy

Section = Literal["text", "reasoning", "call"]


@dataclass(frozen=True)
class ParseContext:
    index: int = 0
    """Of the answer, in the events."""
    tools: tuple[Tool, ...] = ()
    """Those that were offered; a call of any other is text."""
    prompt: tuple[int, ...] = ()
    """The token ids that the answer goes on from."""
    ends_with: str = ""
    """The end of the prompt as text, control tokens included: some leave the model in a block."""
    control: Mapping[int, str] = field(default_factory=dict)
    """The control tokens of the vocabulary, and how they are spelled."""
    repair: RepairPolicy = ALL_REPAIRS
    formatted: bool = False
    """Whether a grammar holds the text, to its end: what looks like a mark in it is none."""
    verbatim: bool = False
    """Whether that text may begin with white space of its own, as JSON never does."""


class Parser(Protocol):
    """Output tokens to events, for one answer. The same tokens give the same events."""

    @property
    def section(self) -> Section:
        """Where the next token will belong, as far as is known."""

    @property
    def awaits_answer(self) -> bool:
        """Whether an answer that ended here would be nothing but reasoning."""

    def feed(self, token: int, text: str) -> list[Event]:
        """text: what the token adds; empty for control tokens and unfinished characters."""

    def messages(self) -> Sequence[Mapping[str, Any]]:
        """What was said up to here, as the family's own library tells it; empty if it has none."""

    def finish(self, text: str, *, cut: bool) -> list[Event]:
        """The answer is over; text: what the detokenizer still held; cut: not by the model."""
