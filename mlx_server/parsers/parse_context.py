"""The context of an answer that its parser needs, and the interface of all parsers."""

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
    formatted: bool = False
    """Whether a grammar constrains the text to its end, so that it contains no delimiters."""
    verbatim: bool = False
    """Whether that text may begin with white space of its own, as JSON never does."""


class Parser(Protocol):
    """Turns the tokens of one answer into events, independent of how they are chunked."""

    @property
    def section(self) -> Section:
        """The section to which the next token belongs, as far as is known."""

    @property
    def awaits_answer(self) -> bool:
        """Whether an answer that ended here would consist of reasoning alone."""

    def feed(self, token: int, text: str) -> list[Event]:
        """`text` is what the token adds; "" for control tokens and incomplete characters."""

    def messages(self) -> Sequence[Mapping[str, Any]]:
        """The output so far as messages of the family's own library; empty if it has none."""

    def finish(self, text: str, *, cut: bool) -> list[Event]:
        """End the answer. `text` is the detokenizer's rest; `cut` if a limit ended the answer."""
