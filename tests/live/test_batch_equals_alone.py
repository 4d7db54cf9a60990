"""What is in the batch does not change an answer, beyond float noise."""

from collections.abc import Iterable, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass

import pytest
from openai import OpenAI, Stream
from openai.types.chat import ChatCompletionChunk

from tests.live.server import SHALLOW

PROMPTS = (
    "The capital of France is",
    "Three kinds of fish:",
    "Write a haiku about the moon.",
    "Gravity is",
    "'Good morning' in Spanish is",
    "17 + 25 =",
    "The planets, from the sun outwards. " * 8,
    "Hi!",
)
TOKENS = 12
NOISE = 1e-3


@dataclass(frozen=True)
class Step:
    token: str
    logprob: float
    others: dict[str, float]
    """The likeliest tokens at this place."""


def test_requests_that_run_together(client: OpenAI) -> None:
    """They join and leave at different steps."""

    def asked(prompt: str) -> Stream[ChatCompletionChunk]:
        return client.chat.completions.create(
            model=SHALLOW,
            messages=[{"role": "user", "content": prompt}],
            temperature=0,
            max_tokens=TOKENS,
            logprobs=True,
            top_logprobs=5,
            stream=True,
        )

    alone = [steps_of_stream(asked(prompt)) for prompt in PROMPTS]
    with ExitStack() as stack:
        streams = [stack.enter_context(closing(asked(prompt))) for prompt in PROMPTS]
        together = [steps_of_stream(stream) for stream in streams]
    all_the_same(alone, together)


def steps_of_stream(chunks: Iterable[ChatCompletionChunk]) -> list[Step]:
    return [
        Step(entry.token, entry.logprob, {top.token: top.logprob for top in entry.top_logprobs})
        for chunk in chunks
        for choice in chunk.choices
        if choice.logprobs
        for entry in choice.logprobs.content or []
    ]


def all_the_same(alone: list[list[Step]], together: list[list[Step]]) -> None:
    for prompt, one, other in zip(PROMPTS, alone, together, strict=True):
        assert one
        same_but_for_ties(prompt[:40], one, other)


def same_but_for_ties(prompt: str, alone: Sequence[Step], together: Sequence[Step]) -> None:
    for place, (one, other) in enumerate(zip(alone, together, strict=False)):
        if one.token != other.token:
            gap = abs(one.logprob - one.others.get(other.token, -100.0))
            assert gap <= NOISE, (
                f"{prompt!r} diverges at token {place}: alone {one.token!r}, together "
                f"{other.token!r}, which alone is less likely by {gap:.4f}"
            )
            print(f"{prompt!r}: {one.token!r} and {other.token!r} tie at token {place}")
            return
        assert other.logprob == pytest.approx(one.logprob, abs=NOISE), (
            f"{prompt!r}: the log probability of token {place}, {one.token!r}, is not the same"
        )
    assert len(alone) == len(together), f"{prompt!r}: the same tokens, but not the same end"
