"""Warms a model up during its load: the first steps compile its kernels.

Artificial rows go through the same kind of batch as requests: a piece of prefill, a step of one
row, a merge, steps of several rows, greedy and sampled. Their results are discarded.
"""

import logging
import time
from collections.abc import Callable, Iterator

import mlx.core as mx

from mlx_server.engine.device_errors import device_error
from mlx_server.engine.messages import Generate
from mlx_server.requests import SamplingParams
from mlx_server.worker.batch import Batch

log = logging.getLogger("mlx_server.engine")

IS_WARM_UP_USEFUL = mx.metal.is_available()
"""A CPU has no kernels to compile, and the memory of the rows is not part of any reservation."""

METAL_PROMPT, CPU_PROMPT = 256, 32
"""Prompt tokens: as many as in the first piece of a prompt, fewer on a CPU, which is slow."""

ROWS, TOKENS = 4, 3
"""The number of rows, and of tokens that each generates (the first one generates more)."""

MOST_SECONDS = 15.0
"""The time after which no further step begins; the first request then compiles the remaining
kernels."""

SAMPLINGS = (
    SamplingParams(temperature=0),
    SamplingParams(temperature=0.7, top_p=0.9, top_k=20, seed=0, logprobs=1),
)


def warm_up(batch: Batch, rows: int, clock: Callable[[], float] = time.monotonic) -> Iterator[None]:
    """Yields after each step. batch: a separate one, without a prompt cache."""
    if batch.plays or batch.encodes or not IS_WARM_UP_USEFUL:  # it generates nothing
        return
    until = clock() + MOST_SECONDS
    try:
        for _ in _steps(batch, rows):
            yield
            if clock() > until:
                log.warning(
                    "the warm-up was stopped after %.0f seconds; the first request may be slower",
                    MOST_SECONDS,
                )
                return
    except Exception as error:
        if device_error(error):
            raise
        # If the model is broken, each request will fail with its own error.
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
    # The first row generates more tokens, so that it still decodes when the others join it.
    return Generate(
        row=row,
        model="",
        prompt=prompt,
        max_tokens=TOKENS if row else 2 * TOKENS + ROWS,
        stop_tokens=[],
        sampling=SAMPLINGS[row % 2],
    )
