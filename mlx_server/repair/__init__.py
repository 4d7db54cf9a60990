"""The repairs of a model's answers that models.yaml allows."""

from dataclasses import dataclass
from typing import Annotated, Literal

from annotated_types import Ge, Le

Streaming = Literal["live", "accumulate"]

MisplacedCalls = Literal["make", "text"]
"""The treatment of JSON that is a call in every way but its place in the answer."""


@dataclass(frozen=True, slots=True)
class RepairPolicy:
    names: bool = True
    """Whether a wrong tool name is corrected if only one tool can be meant."""
    json: bool = True
    """Whether mistakes in JSON are corrected, and prose or code fences around it removed."""
    coerce: bool = True
    """Whether arguments are converted to the types of the tool's schema if that is unambiguous."""
    promote_reasoning: bool = True
    """Whether the reasoning becomes the answer's text if the answer has nothing else."""
    retries: Annotated[int, Ge(0), Le(4)] = 1
    """The number of times that an answer which breaks the required format is generated again. An
    answer that has been streamed in part is never generated again."""
    repeats: Annotated[int, Ge(1), Le(1000)] | None = None
    """The number of identical calls in a row that are made; further ones are dropped. None makes
    all of them."""
    loops: int | None = 6
    """How often the same tokens come in a row until the answer is ended. Less than 256 tokens count
    as that many. None never ends it."""
    continuations: Annotated[int, Ge(0), Le(4)] = 1
    """The number of times that JSON which the server's token limit cut off is continued, by the
    same limit."""
    streaming: Streaming = "live"
    """`accumulate`: a stream holds back calls and what can be checked, so that it too can be
    repaired."""


ALL_REPAIRS = RepairPolicy()
