"""Validates a row's parameters before it is computed together with other rows."""

import math

from mlx_server import limits
from mlx_server.engine.messages import Embed, Generate, Thinking
from mlx_server.requests import SamplingParams
from mlx_server.worker.batch import Batch
from mlx_server.worker.encoders import Encoder

LARGEST_SCALE = 4.0


def check_row(command: Generate, batch: Batch) -> None:
    """Raises ValueError for parameters that could harm other rows."""
    if batch.encodes:
        raise ValueError("an encoder generates no text")
    if not command.prompt:
        raise ValueError("the prompt is empty")
    if command.max_tokens < (0 if command.prompt_logprobs else 1):
        raise ValueError(f"the token limit is {command.max_tokens}, which is too low")
    if command.forced_tokens is not None and not (command.forced_tokens and batch.plays):
        raise ValueError("forced tokens need a replay model and must not be empty")
    if not 0 <= command.adapter_scale <= LARGEST_SCALE:
        raise ValueError(f"the adapter's scale must be between 0 and {LARGEST_SCALE:g}")
    if not 0 <= command.delay < math.inf:
        raise ValueError("the delay is out of range")
    # MLX does not check indices: an id past the end reads or overwrites other memory.
    ids = [*command.prompt, *command.grammar_prefix, *command.sampling.logit_bias]
    if command.thinking:
        _check_thinking(command.thinking)
        ids += command.thinking.end
    grammars = (command.grammar, command.thinking and command.thinking.rest)
    if max(len(grammar or "") for grammar in grammars) > limits.WHOLE_GRAMMAR_CHARACTERS:
        raise ValueError("the grammar is too long")
    for id in (min(ids), max(ids)):
        if not 0 <= id < batch.vocabulary:
            raise ValueError(f"token id {id} is outside the vocabulary of {batch.vocabulary}")
    if not _in_range(command.sampling):
        raise ValueError("a sampling parameter is out of range")


def check_texts(command: Embed, batch: Batch) -> None:
    """Raises ValueError for texts that are empty or have token ids outside the vocabulary."""
    if batch.plays:
        raise ValueError("a replay model has no hidden states")
    if not command.inputs or not all(command.inputs):
        raise ValueError("a text has no tokens")
    ids = [*command.logits_of, *(id for text in command.inputs for id in (min(text), max(text)))]
    if not 0 <= min(ids) <= max(ids) < batch.vocabulary:
        raise ValueError(f"a token id is outside the vocabulary of {batch.vocabulary}")
    if batch.encodes and command.logits_of:
        raise ValueError("an encoder has no logits of tokens")
    if isinstance(batch.model, Encoder) and max(map(len, command.inputs)) > batch.model.longest:
        raise ValueError(f"a text has more than {batch.model.longest} tokens")
    if command.scores and not getattr(batch.model, "labels", 0):
        raise ValueError("the model has no head that gives scores")
    if command.second_from and len(command.second_from) != len(command.inputs):
        raise ValueError("each pair needs the place where its second text begins")
    if command.dimensions is not None and command.dimensions < 1:
        raise ValueError("an embedding needs at least one dimension")


def _check_thinking(thinking: Thinking) -> None:
    delimiters = [*thinking.opens, *thinking.closes]
    tokens = (thinking.budget or 0, thinking.answer or 0)
    if min(tokens) < 0 or not 0 < len(thinking.end) <= limits.REASONING_DELIMITER_TOKENS:
        raise ValueError("the thinking budget or the end of reasoning is out of range")
    if len(delimiters) > limits.REASONING_DELIMITERS or not all(
        0 < len(delimiter) <= limits.REASONING_DELIMITER_TOKENS for delimiter in delimiters
    ):
        raise ValueError("the reasoning delimiters are empty, too long or too many")


def _in_range(s: SamplingParams) -> bool:
    penalties = (s.repetition_penalty, s.presence_penalty, s.frequency_penalty)
    return (
        all(map(math.isfinite, (s.temperature, *penalties, *s.logit_bias.values())))
        and s.repetition_penalty > 0
        and s.temperature >= 0
        and s.top_k >= 0
        and s.top_p > 0
        and 0 <= s.min_p <= 1
        and (s.logprobs or 0) >= 0
    )
