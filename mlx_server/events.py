"""The steps of an answer, as `generate` yields them. Every endpoint folds these and nothing else.

Order: one `Started`, then per answer (`index`) its deltas and one `Finished`; answers interleave.
"""

from dataclasses import dataclass
from typing import Literal

FinishReason = Literal["stop", "length", "tool_calls"]


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    token: str
    bytes: bytes
    logprob: float | None
    """None for the first token of a prompt, which follows nothing."""
    top: tuple["TokenLogprob", ...] = ()
    """The likeliest tokens at this place, best first; empty inside `top` itself."""


@dataclass(frozen=True, slots=True)
class Started:
    """The engine has taken the request: from here on an error ends a running answer."""

    model: str
    prompt_tokens: int
    ignored: tuple[str, ...] = ()
    """Parameters that were set but that this model has no use for."""


@dataclass(frozen=True, slots=True)
class TextDelta:
    index: int
    text: str
    logprobs: tuple[TokenLogprob, ...] = ()
    """Of the tokens that this text came from, if asked for."""


@dataclass(frozen=True, slots=True)
class ReasoningDelta:
    index: int
    text: str


@dataclass(frozen=True, slots=True)
class Finished:
    index: int
    reason: FinishReason
    completion_tokens: int
    cached_tokens: int
    """Of the prompt, found in the prompt cache."""


Event = Started | TextDelta | ReasoningDelta | Finished
