"""Computes the log probabilities of a prompt's tokens; its cache then serves as the prefill."""

from collections.abc import Generator
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from mlx_server.engine.messages import Logprobs
from mlx_server.worker.logprobs import RowLogprobs, step_logprobs
from mlx_server.worker.lora.slots import NO_ADAPTER, RowAdapter, RowAdapters, using
from mlx_server.worker.quantized_kv import make_caches

PIECE = 128
"""Tokens computed between two steps of the rows that decode."""

Scoring = Generator[None, None, tuple[list[Logprobs], list[Any]]]


def prompt_logprobs(
    model: nn.Module, prompt: list[int], top: int, row_adapter: RowAdapter = NO_ADAPTER
) -> Scoring:
    """Yields after each piece; returns the log probabilities of all tokens but the first, and the
    cache of all tokens but the last."""
    cache = make_caches(model)
    rows = RowAdapters([row_adapter])
    found: list[Logprobs] = []
    for start in range(0, len(prompt) - 1, PIECE):
        piece = prompt[start : min(start + PIECE, len(prompt) - 1)]
        with using(rows):
            logits = model(mx.array([piece]), cache=cache)[0].astype(mx.float32)
        followers = mx.array(prompt[start + 1 : start + 1 + len(piece)])
        reported = step_logprobs(logits, followers, top)
        found += [RowLogprobs(reported, (at, top)).read() for at in range(len(piece))]
        yield
    return found, cache
