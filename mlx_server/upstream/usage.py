"""Reads the tokens that an upstream counted, whatever names the counts have."""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from mlx_server.events import TokenCounts

NUMBER = re.compile(r"-?[0-9]{1,15}")

MAX_TOKENS = 1 << 40
"""A count of tokens that is not below this bound is taken to be wrong."""

CHARACTERS_PER_TOKEN = 4
"""The characters per token by which tokens are estimated if an upstream does not count them."""

PROMPT = (
    *("prompt_tokens", "input_tokens", "promptTokens", "inputTokens", "input_token_count"),
    *("promptTokenCount", "prompt_eval_count", "prompt_n"),
)
COMPLETION = (
    *("completion_tokens", "output_tokens", "completionTokens", "outputTokens"),
    *("generated_token_count", "candidatesTokenCount", "eval_count", "predicted_n"),
)
COUNTS = (*PROMPT, *COMPLETION)

USAGE_FIELDS = ("usage", "usageMetadata", "timings")
"""Fields of a chunk that may have the counts; llama.cpp has them in `timings` too."""


@dataclass(frozen=True, slots=True)
class UpstreamUsage:
    prompt: int | None = None
    completion: int | None = None
    cached: int = 0
    reasoning: int | None = None
    is_mistyped: bool = False
    """Whether the upstream's JSON has a count that is not an integer."""


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


def usage_of(value: Mapping[str, Any], choice: Mapping[str, Any] | None) -> UpstreamUsage | None:
    """The counts in a chunk or body, or in its choice; None if there are none."""
    for name in USAGE_FIELDS:
        if (found := value.get(name)) and (usage := _usage(found)):
            return usage
    groq = value.get("x_groq")
    if isinstance(groq, Mapping) and (usage := _usage(groq.get("usage"))):
        return usage
    if "eval_count" in value:  # Ollama has the counts at the top level
        return _usage(value)
    return _usage(choice.get("usage")) if choice else None


def whole_number(value: Any) -> int | None:
    """The integer that a value means, since some servers write it as a string or a float; None for
    any other value."""
    match value:
        case bool():
            return None
        case int():
            return value
        case float() if value.is_integer():
            return int(value)
        case str() if NUMBER.fullmatch(value):
            return int(value)
        case _:
            return None


def _usage(usage: Any) -> UpstreamUsage | None:
    if not isinstance(usage, Mapping):
        return None
    prompt, completion = _count(usage, *PROMPT), _count(usage, *COMPLETION)
    if prompt is None and completion is None:
        return None
    details = _mapping(usage, "prompt_tokens_details", "input_tokens_details")
    thoughts = _mapping(usage, "completion_tokens_details", "output_tokens_details")
    cached = _count(details, "cached_tokens") or _count(usage, "prompt_cache_hit_tokens") or 0
    return UpstreamUsage(
        prompt,
        completion,
        min(cached, prompt or 0),
        _count(thoughts, "reasoning_tokens"),
        is_mistyped=any(isinstance(usage.get(name), str | float) for name in COUNTS),
    )


def _mapping(value: Mapping[str, Any], *names: str) -> Mapping[str, Any]:
    return next((found for name in names if isinstance(found := value.get(name), Mapping)), {})


def _count(value: Mapping[str, Any], *names: str) -> int | None:
    found = (whole_number(value.get(name)) for name in names)
    return next((n for n in found if n is not None and 0 <= n < MAX_TOKENS), None)
