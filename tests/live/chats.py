"""Chat completions as OpenAI's own client asks for them, and what came of them."""

from collections.abc import Iterable
from typing import Any

from openai import OpenAI, Stream
from openai.types.chat import (
    ChatCompletion,
    ChatCompletionChunk,
    ChatCompletionMessageParam,
    ChatCompletionTokenLogprob,
)

from tests.contract.answers import Answer, streamed, whole
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


def logprobs_of(completion: ChatCompletion) -> list[ChatCompletionTokenLogprob]:
    logprobs = completion.choices[0].logprobs
    assert logprobs
    assert logprobs.content is not None
    return logprobs.content


def answer_of(found: ChatCompletion | Iterable[ChatCompletionChunk]) -> Answer:
    """The only answer of a completion, or of the chunks of a stream."""
    if isinstance(found, ChatCompletion):
        completion = whole(found.to_dict())
    else:
        completion = streamed([chunk.to_dict() for chunk in found], 1, logprobs=False)
    (answer,) = completion.answers
    return answer


def answered(found: ChatCompletion | Iterable[ChatCompletionChunk]) -> tuple[str, str | None]:
    answer = answer_of(found)
    return answer.text, answer.finish
