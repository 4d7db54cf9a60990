"""The first steps of a model, taken as part of its load: they compile its kernels.

Rows of no request go through the batch that requests use: a piece of prefill, a step of one row, a
merge, steps of several rows, greedy and drawn. What they compute is kept nowhere.
"""

import logging
import time
from collections.abc import Iterator

import mlx.core as mx

from mlx_server.engine.device_errors import device_error
from mlx_server.engine.messages import Generate
from mlx_server.requests import SamplingParams
from mlx_server.worker.batch import Batch

log = logging.getLogger("mlx_server.engine")

IS_WARM_UP_USEFUL = mx.metal.is_available()
"""A CPU has no kernels to compile, and what rows take is memory that nobody has set aside."""

METAL_PROMPT, CPU_PROMPT = 256, 32
"""Tokens. As long as the first piece of a prompt; a CPU has no kernels to compile, and takes its
time for each token."""

ROWS, TOKENS = 4, 3

MOST_SECONDS = 15.0
"""For steps that have not begun by then, the first request has to wait."""

SAMPLINGS = (
    SamplingParams(temperature=0),
    SamplingParams(temperature=0.7, top_p=0.9, top_k=20, seed=0, logprobs=1),
)


def warm_up(batch: Batch, rows: int) -> Iterator[None]:
    """batch: of its own, without a prompt cache. Yields after each step."""
    if batch.plays or not IS_WARM_UP_USEFUL:  # a replay model computes nothing
        return
    until = time.monotonic() + MOST_SECONDS
    try:
        for _ in _steps(batch, rows):
            yield
            if time.monotonic() > until:
                log.warning("%.0f seconds were not enough to warm up", MOST_SECONDS)
                return
    except Exception as error:
        if device_error(error):
            raise
        # requests will be told, each of its own
        log.warning("a model could not be warmed up", exc_info=True)
    finally:
        mx.clear_cache()


def _steps(batch: Batch, rows: int) -> Iterator[None]:
    tokens = METAL_PROMPT if mx.metal.is_available() else CPU_PROMPT
    batch.add(_request(0, batch, tokens))
    while batch.waiting:
        batch.step()
        yield
    for row in range(1, min(rows, ROWS)):
        batch.add(_request(row, batch, tokens // 2))
    while batch:
        batch.step()
        yield


def _request(row: int, batch: Batch, tokens: int) -> Generate:
    prompt = [(7 * row + at) % batch.vocabulary for at in range(tokens)]
    # the first row decodes until the others have joined it
    return Generate(
        row=row,
        model="",
        prompt=prompt,
        max_tokens=TOKENS if row else 2 * TOKENS + ROWS,
        stop_tokens=[],
        sampling=SAMPLINGS[row % 2],
    )
