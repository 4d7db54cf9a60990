"""The options for parsing an upstream's answers."""

from dataclasses import dataclass

from mlx_server.families.base import ModelFamily
from mlx_server.parsers.parse_context import ParseContext


@dataclass(frozen=True)
class ReadingOptions:
    """Options for parsing the answer to one request."""

    family: ModelFamily
    opening: str
    """The delimiter that opens reasoning for the family's parser; empty if it has none."""
    context: ParseContext
    is_chat: bool = True
    stops: tuple[str, ...] = ()
    parallel: bool = True
    """Whether several calls are allowed; if not, the first one ends the answer."""
    expects_calls_as_text: bool = False
    """Whether the prompt asks the model to write calls in its text."""
    keeps_raw: bool = False
    logprobs: int | None = None
    """The number of alternatives to report for each token; None: no log probabilities."""
    bills_prompt: bool = True
    """Whether the prompt's tokens are counted with this answer. Of `n` answers only the first does,
    so that they are counted once."""
