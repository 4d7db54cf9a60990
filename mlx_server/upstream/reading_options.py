"""The options with which an upstream's answers are read."""

from dataclasses import dataclass

from mlx_server.families.base import ModelFamily
from mlx_server.parsers.parse_context import ParseContext


@dataclass(frozen=True)
class ReadingOptions:
    """Options for reading the answers of one request."""

    family: ModelFamily
    opening: str
    """The delimiter of reasoning, as `opening_of_reasoning` gives it."""
    context: ParseContext
    is_chat: bool = True
    stops: tuple[str, ...] = ()
    parallel: bool = True
    """Whether there may be several calls; if not, the answer ends with the first."""
    expects_calls_as_text: bool = False
    """Whether the prompt asks the model to write calls in its text."""
    keeps_raw: bool = False
    logprobs: int | None = None
    """The number of alternatives that are reported for each token; None reports no log
    probabilities."""
    bills_prompt: bool = True
    """Whether the prompt's tokens are counted with this answer, and not with another of the n."""
