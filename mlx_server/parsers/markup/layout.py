"""The parts of a family's answers, with their delimiters."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace

from mlx_server.messages import Tool
from mlx_server.parsers.reasoning_tags import THINK, Pair
from mlx_server.tool_parsers.call_format import CallFormat
from mlx_server.tool_parsers.call_ids import new_id


@dataclass(frozen=True)
class Header:
    """The beginning of a message, which may name its recipient."""

    opens: str
    """The delimiter before the name."""
    ends: tuple[str, ...]
    """The delimiters after the name. The name is no part of the message's text."""
    prefix: str = ""
    """The text before the name."""
    calls: bool = False
    """Whether the name is that of the tool which the message calls."""


@dataclass(frozen=True)
class MarkupLayout:
    reasoning: tuple[Pair, ...] = (THINK,)
    """Pairs of an opening and a closing delimiter."""
    call_formats: tuple[CallFormat, ...] = ()
    inline_formats: Callable[[Sequence[Tool]], tuple[CallFormat, ...]] = lambda tools: ()
    """Call formats without delimiters, or with delimiters in other spellings, which a known tool's
    name identifies within a text."""
    dropped: tuple[str, ...] = ()
    """Delimiters without a meaning of their own, such as those of a section of calls."""
    header: Header | None = None
    """How messages begin, in families whose answers consist of several."""
    literal: tuple[str, ...] = ()
    """Those of `dropped` that open a message to the user, which may contain examples of calls."""
    transparent: tuple[str, ...] = ()
    """Delimiters that are removed from a text, while the white space around them stays."""
    trims: bool = True
    """Whether white space next to delimiters is removed."""
    trims_text: bool = True
    """Whether it is removed next to the answer's text too, and not only next to reasoning."""
    after_reasoning: str = ""
    """White space between reasoning and a text that may itself begin with white space."""
    stutters: bool = False
    """Whether models write a call twice although they decided on it once."""
    calls_end_reasoning: bool = False
    """Whether a call within reasoning ends it; if not, the call is part of the reasoning."""
    ends_reasoning: tuple[str, ...] = ()
    """Delimiters that end reasoning besides its closing one."""
    worded_reasoning: tuple[tuple[str, str], ...] = ()
    """Delimiters like `reasoning`, in words that mean nothing unless an answer begins with the
    first."""
    leads: tuple[str, ...] = ()
    """Texts before an answer that are no part of it. They mean nothing elsewhere."""
    halves: tuple[str, ...] = ()
    """Control tokens with which several delimiters begin, and that are no delimiter alone."""
    stops: tuple[str, ...] = ()
    """Stop tokens, which models served elsewhere may spell out at the end of an answer."""
    new_id: Callable[[], str] = new_id
    """Makes the ids of calls for which the model wrote none."""

    @property
    def calls(self) -> tuple[str, ...]:
        """The delimiters that open calls."""
        return tuple(opening for each in self.call_formats for opening in each.opens)

    @property
    def torn(self) -> tuple[str, ...]:
        """The beginnings of delimiters that have more than a control token; no text ends like
        this."""
        whole = (*self.opens_reasoning, *self.ends_of_reasoning, *self.calls, *self.dropped)
        return tuple(
            delimiter[:size]
            for delimiter in whole
            if delimiter.startswith(self.halves)
            for size in range(min(map(len, self.halves)), len(delimiter))
            if delimiter[:size].startswith(self.halves)
        )

    @property
    def opens_reasoning(self) -> tuple[str, ...]:
        return tuple(opening for opening, _ in self.reasoning)

    @property
    def ends_of_reasoning(self) -> tuple[str, ...]:
        closes = dict.fromkeys(closing for _, closing in self.reasoning)
        calls = self.calls if closes and self.calls_end_reasoning else ()
        return (*closes, *self.ends_reasoning, *calls)

    def with_reasoning(self, pairs: Iterable[Pair]) -> "MarkupLayout":
        return replace(self, reasoning=tuple(dict.fromkeys((*self.reasoning, *pairs))))

    def inside(self, ends_with: str) -> str | None:
        """Returns the closing delimiter of the reasoning that the prompt's end opens; None if it
        opens none."""
        end = ends_with.rstrip()
        return next((c for o, c in self.reasoning if end.endswith(o.rstrip())), None)
