"""The repairs of a model's answers that models.yaml allows."""

from dataclasses import dataclass
from typing import Annotated, Literal

from annotated_types import Ge, Le

Streaming = Literal["live", "accumulate"]


@dataclass(frozen=True, slots=True)
class RepairPolicy:
    mistakes: bool = True
    """Whether mistakes are corrected where only one thing can be meant: in JSON and around it, in
    the names of tools and the types of their arguments, calls in the wrong place, and an answer
    that is all in the reasoning."""
    retries: Annotated[int, Ge(0), Le(4)] = 1
    """The number of times that an answer which breaks the required format is generated again. An
    answer that has been streamed in part is never generated again."""
    loops: int | None = 6
    """How often the same tokens come in a row until the answer is ended. Less than 256 tokens count
    as that many. None never ends it."""
    streaming: Streaming = "live"
    """`accumulate`: a stream holds back calls and what can be checked, so that it too can be
    repaired."""


ALL_REPAIRS = RepairPolicy()
