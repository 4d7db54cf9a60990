"""What is in the batch does not change an answer, beyond float noise."""

from collections.abc import Iterable, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass

import pytest
from openai import OpenAI, Stream
from openai.types.chat import ChatCompletionChunk

from tests.live.server import DEMO, LiveServer, eventually

QUESTIONS = (
    "What is the capital of France?",
    "Name three kinds of fish.",
    "Write a haiku about the moon.",
    "Explain gravity to a child, in one sentence.",
    "Translate 'good morning' into Spanish.",
    "What is 17 + 25?",
    "List the planets, from the sun outwards. " * 20,
    "Hi!",
)
TOKENS = 24
TIE = 1e-3
NOISE = 0.02
"""In float16, between a batch of one and a batch of eight."""


@dataclass(frozen=True)
class Step:
    token: str
    logprob: float
    others: dict[str, float]
    """The likeliest tokens at this place."""


def asked(client: OpenAI, question: str) -> Stream[ChatCompletionChunk]:
    return client.chat.completions.create(
        model=DEMO,
        messages=[{"role": "user", "content": question}],
        temperature=0,
        max_tokens=TOKENS,
        logprobs=True,
        top_logprobs=5,
        stream=True,
    )


def steps(chunks: Iterable[ChatCompletionChunk]) -> list[Step]:
    return [
        Step(entry.token, entry.logprob, {top.token: top.logprob for top in entry.top_logprobs})
        for chunk in chunks
        for choice in chunk.choices
        if choice.logprobs
        for entry in choice.logprobs.content or []
    ]


def test_eight_answers_together_are_those_that_each_gets_alone(
    server: LiveServer, client: OpenAI
) -> None:
    alone = [steps(asked(client, question)) for question in QUESTIONS]
    with ExitStack() as stack:
        streams = [stack.enter_context(closing(asked(client, q))) for q in QUESTIONS]
        eventually(lambda: server.gauge("mlx_server_batch_size") == 8, "all eight run together")
        together = [steps(stream) for stream in streams]
    for question, one, other in zip(QUESTIONS, alone, together, strict=True):
        same_but_for_ties(question[:50], one, other)


def same_but_for_ties(question: str, alone: Sequence[Step], together: Sequence[Step]) -> None:
    pairs = zip(alone, together, strict=False)
    for place, (one, other) in enumerate(pairs):
        if one.token != other.token:
            gap = abs(one.logprob - one.others.get(other.token, -100.0))
            assert gap <= TIE, (
                f"{question!r} diverges at token {place}: alone {one.token!r}, together "
                f"{other.token!r}, which alone was {gap:.4f} less likely"
            )
            print(f"{question!r}: {one.token!r} and {other.token!r} tie at token {place}")
            return
        assert other.logprob == pytest.approx(one.logprob, abs=NOISE), (
            f"{question!r}: the log probability of {one.token!r}, token {place}, differs"
        )
    assert len(alone) == len(together), f"{question!r}: the same tokens, but not the same end"
