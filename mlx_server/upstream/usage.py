"""Reads the tokens that an upstream counted, and estimates those that it did not."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from mlx_server.events import TokenCounts

MAX_TOKENS = 1 << 40
"""A count of tokens that is not below this bound is taken to be wrong."""

CHARACTERS_PER_TOKEN = 4
"""The characters per token by which tokens are estimated if an upstream does not count them."""


@dataclass(frozen=True, slots=True)
class UpstreamUsage:
    prompt: int | None = None
    completion: int | None = None
    cached: int = 0
    reasoning: int | None = None


@dataclass(frozen=True, slots=True)
class SpokenCharacters:
    """The size of an answer, by which tokens are estimated that the upstream did not count."""

    all: int
    reasoning: int
    text: int
    has_calls: bool


def is_counted(usage: UpstreamUsage | None, characters: int) -> bool:
    """Whether the upstream's count of tokens is plausible: 0 is not for an answer with text."""
    completion = usage.completion if usage else None
    return completion is not None and (completion > 0 or not characters)


def token_counts(
    found: UpstreamUsage | None, spoken: SpokenCharacters, *, bills_prompt: bool
) -> TokenCounts:
    usage = found or UpstreamUsage()
    completion = usage.completion
    if completion is None or not is_counted(usage, spoken.all):
        completion = -(-spoken.all // CHARACTERS_PER_TOKEN)
    reasoning, both = usage.reasoning, spoken.reasoning + spoken.text
    if reasoning is None:
        reasoning = round(completion * spoken.reasoning / both) if both else 0
    reasoning = min(reasoning, completion)
    return TokenCounts(
        completion_tokens=completion,
        cached_tokens=usage.cached if bills_prompt else 0,
        reasoning_tokens=reasoning,
        text_tokens=0 if spoken.has_calls or not spoken.text else completion - reasoning,
        further_prompt_tokens=(usage.prompt or 0) if bills_prompt else 0,
    )


def usage_of(value: Mapping[str, Any]) -> UpstreamUsage | None:
    """The counts in a chunk or body; None if there are none."""
    usage = value.get("usage")
    if not isinstance(usage, Mapping):
        return None
    prompt, completion = _count(usage, "prompt_tokens"), _count(usage, "completion_tokens")
    if prompt is None and completion is None:
        return None
    cached = _count(usage.get("prompt_tokens_details"), "cached_tokens") or 0
    reasoning = _count(usage.get("completion_tokens_details"), "reasoning_tokens")
    return UpstreamUsage(prompt, completion, min(cached, prompt or 0), reasoning)


def _count(value: object, name: str) -> int | None:
    count = value.get(name) if isinstance(value, Mapping) else None
    return count if type(count) is int and 0 <= count < MAX_TOKENS else None
