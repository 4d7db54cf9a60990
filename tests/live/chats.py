"""Chat completions as OpenAI's own client asks for them, and what came of them."""

from collections.abc import Sequence
from typing import Any

from openai import OpenAI, Stream
from openai.types.chat import (
    ChatCompletion,
    ChatCompletionChunk,
    ChatCompletionMessageParam,
    ChatCompletionTokenLogprob,
)

from tests.live.server import DEMO

CAPITAL: list[ChatCompletionMessageParam] = [
    {"role": "user", "content": "What is the capital of France?"}
]
COUNT: list[ChatCompletionMessageParam] = [
    {"role": "user", "content": "Count from one to ten, in words."}
]
STORY: list[ChatCompletionMessageParam] = [{"role": "user", "content": "Tell me a story."}]
ENDLESS: dict[str, Any] = {"max_tokens": 4000, "logit_bias": {"0": -100, "2": -100}}
"""Neither of the demo model's end tokens can come."""

Answered = tuple[str, str | None]


def ask(client: OpenAI, **asked: Any) -> ChatCompletion:
    found: ChatCompletion = client.chat.completions.create(
        **{"model": DEMO, "messages": CAPITAL, "temperature": 0, **asked}
    )
    return found


def ask_streaming(client: OpenAI, **asked: Any) -> Stream[ChatCompletionChunk]:
    found: Stream[ChatCompletionChunk] = client.chat.completions.create(
        **{"model": DEMO, "messages": CAPITAL, "temperature": 0, "stream": True, **asked}
    )
    return found


def text_of(completion: ChatCompletion) -> str:
    return completion.choices[0].message.content or ""


def answered(completion: ChatCompletion) -> Answered:
    return text_of(completion), completion.choices[0].finish_reason


def answered_streaming(chunks: Sequence[ChatCompletionChunk]) -> Answered:
    choices = [choice for chunk in chunks for choice in chunk.choices]
    return "".join(c.delta.content or "" for c in choices), choices[-1].finish_reason


def logprobs_of(completion: ChatCompletion) -> list[ChatCompletionTokenLogprob]:
    logprobs = completion.choices[0].logprobs
    assert logprobs
    assert logprobs.content is not None
    return logprobs.content
