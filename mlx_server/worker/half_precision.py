"""The half precision in which a model computes.

M1 and M2 emulate bfloat16, and have instructions for float16. That has three more bits for each
value but less range, so a model changes only if its values stay within it.
"""

from collections import deque
from collections.abc import Generator, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor, wait
from pathlib import Path
from typing import Any, cast

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten, tree_unflatten

from mlx_server.engine.device_errors import device_error
from mlx_server.errors import public_message
from mlx_server.models.architectures import texts
from mlx_server.worker.constrained_decoding.vocabulary import Vocabulary
from mlx_server.worker.costs import this_chip
from mlx_server.worker.encoders import Encoder
from mlx_server.worker.kernels import Chip
from mlx_server.worker.kv_caches import make_caches
from mlx_server.worker.mlx_lm_internals import read_config
from mlx_server.worker.speculation.approximate_tokenizer import ApproximateTokenizer
from mlx_server.worker.weights import arrays

OVERFLOWING = frozenset(
    ["gemma2", "gemma3", "gemma3_text", "gemma3n", "gemma4", "gemma4_text", "glm4", "plamo2"]
)
"""The model types whose values are known to leave float16's range."""

TEXT = (
    "The printing press with movable type spread through Europe within fifty years. Prices of "
    "books fell, and more people could read them. 1, 2, 3, 5, 8, 13 and 21 are the next numbers; "
    "what follows? def total(values): return sum(value for value in values if value > 0)"
)
"""The text that a model reads in both precisions."""

MOST_DIVERGENCE = 0.05
"""The most nats by which the distributions of the next tokens may diverge, on average. Those of the
demo model diverge by 0.0012, nearly all of it by bfloat16's own rounding."""

WAIT_SECONDS = 0.002
"""How long a step of other models waits for the tokenizer's file."""

PIECE_BYTES = 64 << 20
"""The bytes of weights that are changed between two steps of other models."""


def may_try_float16(config: Mapping[str, Any], chip: Chip | None) -> bool:
    """Whether models of this type may compute in float16 for the chip's sake. chip: None without an
    Apple GPU."""
    types = {text.get("model_type") for text in texts(config)}
    return chip is not None and chip.emulates_bfloat16 and types.isdisjoint(OVERFLOWING)


def tries_float16(network: nn.Module, folder: Path) -> bool:
    """Whether auto compares this model with itself in float16."""
    is_in_bfloat16 = any(array.dtype == mx.bfloat16 for array in arrays(network))
    if not is_in_bfloat16 or isinstance(network, Encoder):
        return False
    return may_try_float16(read_config(folder), this_chip())


def change_to_float16(network: nn.Module, folder: Path) -> Generator[None, None, str]:
    """Changes what is in bfloat16, and reads a text before and after. Yields between the steps.
    Returns why the weights have to be read from their files again, or an empty text."""
    try:
        with ThreadPoolExecutor(1) as threads:
            reading = threads.submit(_tokens, folder)
            while not wait([reading], WAIT_SECONDS).done:
                yield
        tokens = reading.result()
        exact, nbytes = _read(network, tokens)
        yield
        for _ in _change(network):
            yield
        half, changed_nbytes = _read(network, tokens)
    except Exception as error:
        if device_error(error):
            raise
        return f"it fails: {public_message(error)}"
    if changed_nbytes > nbytes:
        return "parts of it compute in float32"
    if not mx.array_equal(mx.isfinite(exact), mx.isfinite(half)):
        return "its values leave the range of float16"
    weighted = mx.where(mx.isfinite(exact), mx.exp(exact) * (exact - half), 0.0)
    divergence = cast(float, weighted.sum(axis=-1).mean().item())
    return "" if divergence <= MOST_DIVERGENCE else f"next tokens diverge by {divergence:.2f} nats"


def _read(network: nn.Module, tokens: list[int]) -> tuple[mx.array, int]:
    """Returns the log probabilities of the next tokens, and the bytes of the caches."""
    caches = make_caches(network)
    logits = network(mx.array([tokens]), cache=caches)[0].astype(mx.float32)
    logprobs = logits - mx.logsumexp(logits, axis=-1, keepdims=True)
    mx.eval(logprobs, [cache.state for cache in caches])
    return logprobs, sum(cache.nbytes for cache in caches)


def _change(network: nn.Module) -> Iterator[None]:
    """Changes a piece at a time, so that no two copies of the weights are in memory."""
    parameters = tree_flatten(network.parameters())
    unchanged = deque((name, array) for name, array in parameters if array.dtype == mx.bfloat16)
    del parameters
    while unchanged:
        piece, nbytes = [], 0
        while unchanged and nbytes < PIECE_BYTES:
            name, array = unchanged.popleft()
            piece.append((name, array.astype(mx.float16)))
            nbytes += array.nbytes
        del array
        network.update(tree_unflatten(piece))
        mx.eval([array for _, array in piece])
        yield


def _tokens(folder: Path) -> list[int]:
    """Returns about the text's tokens; any tokens without a tokenizer.json. The tokenizers library
    would hold the GIL for up to seconds, which stops the rows of other models."""
    if not (folder / "tokenizer.json").is_file():
        return list(range(1, 65))
    ids = {text: id for id, text in enumerate(Vocabulary(folder, ()).text)}
    return ApproximateTokenizer(ids).tokens(TEXT.encode(), len(TEXT))
