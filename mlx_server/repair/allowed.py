"""What may be mended of a model's answers, as its owner allows it."""

from dataclasses import dataclass
from typing import Literal

Streaming = Literal["live", "accumulate"]


@dataclass(frozen=True, slots=True)
class RepairPolicy:
    names: bool = True
    """Of tools, where only one can be meant."""
    json: bool = True
    """Slips in it, and prose or fences around it."""
    coerce: bool = True
    """Arguments in the types of the tool's schema, where there is a plain way."""
    promote_reasoning: bool = True
    """Reasoning is told as the answer's text where there is nothing else."""
    retries: int = 1
    """How often a model is asked again whose answer is not what had to come. An answer of which
    something was told already is never made again."""
    continuations: int = 1
    """JSON that the owner's limit cuts short goes on for so many times as many tokens."""
    streaming: Streaming = "live"
    """`accumulate`: what can be checked is held back until it was, so that a stream too can be
    mended."""


ALL_REPAIRS = RepairPolicy()
