"""What mlx-lm answers. That an answer is greedy is seen in one pass over the prompt and the answer;
to generate it takes as many passes as it has tokens."""

from typing import Any

import mlx.core as mx
from mlx_lm.generate import generate_step
from mlx_lm.models.cache import make_prompt_cache


def generated(model: Any, prompt: list[int], tokens: int) -> list[int]:
    steps = generate_step(mx.array(prompt), model, max_tokens=tokens)
    return [int(token) for token, _ in steps]


def is_greedy(model: Any, prompt: list[int], answer: list[int]) -> bool:
    """Whether each token is the likeliest after those before it."""
    logits = model(mx.array([[*prompt, *answer[:-1]]]), cache=make_prompt_cache(model))
    likeliest = mx.argmax(logits[0, len(prompt) - 1 :], axis=-1)
    return bool(mx.array_equal(likeliest, mx.array(answer)))


def expected(model: Any, prompt: list[int], answer: list[int], tokens: int) -> list[int]:
    """What mlx-lm answers, generated only where it is not known from one pass to be this answer."""
    if len(answer) == tokens and is_greedy(model, prompt, answer):
        return answer
    return generated(model, prompt, tokens)
