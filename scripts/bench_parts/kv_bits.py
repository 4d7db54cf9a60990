"""Measures what keys and values in fewer bits change: log probabilities, and the time of a step."""

import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import mlx.core as mx
import tokenizers

from bench_parts.tables import Row
from mlx_server.sources.demo import demo_checkpoint
from mlx_server.worker.kv_caches import make_caches, set_kv_bits
from mlx_server.worker.weights import loaded

COLUMNS = ("bits", "mean drift", "largest drift", "same first token", "bytes a token", "step, ms")

TEXT = Path(__file__).parents[2] / "README.md"
TOKENS, PIECE, STEPS = 1024, 64, 20

BITS = (None, 8, 4)


@dataclass(frozen=True)
class Drift:
    bits: int | None
    mean: float
    """The mean absolute difference of the log probabilities of a text's tokens."""
    largest: float
    same: float
    """The share of positions at which the likeliest token is the same."""
    bytes_per_token: float
    step: float
    """Seconds of a step of one row after the text."""


def drifts() -> Iterator[Drift]:
    path = demo_checkpoint(lambda *progress: None)
    network = loaded(path)
    tokenizer = tokenizers.Tokenizer.from_file(str(path / "tokenizer.json"))
    text = tokenizer.encode(TEXT.read_text("utf-8")).ids[:TOKENS]
    exact: mx.array | None = None
    for bits in BITS:
        set_kv_bits(network, bits)
        cache = make_caches(network)
        found = _log_probabilities(network, text, cache)
        exact = found if exact is None else exact
        of_text = [each[mx.arange(len(text) - 1), mx.array(text[1:])] for each in (found, exact)]
        off = mx.abs(of_text[0] - of_text[1])
        same = (found.argmax(-1) == exact.argmax(-1)).mean()
        nbytes = sum(entry.nbytes for entry in cache) / len(text)
        step = _step_seconds(network, cache)
        yield Drift(bits, _float(off.mean()), _float(off.max()), _float(same), nbytes, step)


def _float(x: mx.array) -> float:
    return cast(float, x.item())


def _log_probabilities(network: Any, text: list[int], cache: list[Any]) -> mx.array:
    """Returns those of all tokens but the first, computed in pieces that read what the cache has
    kept."""
    found = []
    for start in range(0, len(text) - 1, PIECE):
        piece = text[start : min(start + PIECE, len(text) - 1)]
        logits = network(mx.array([piece]), cache=cache)[0].astype(mx.float32)
        found.append(logits - mx.logsumexp(logits, axis=-1, keepdims=True))
        mx.eval(found[-1])
    return mx.concatenate(found)


def _step_seconds(network: Any, cache: list[Any]) -> float:
    times = []
    for _ in range(STEPS):
        began = time.perf_counter()
        mx.eval(network(mx.array([[1]]), cache=cache))
        times.append(time.perf_counter() - began)
    return sorted(times)[STEPS // 2]


def rows(found: list[Drift]) -> Iterator[Row]:
    for each in found:
        yield (
            str(each.bits or "as computed"),
            f"{each.mean:.4f}",
            f"{each.largest:.3f}",
            f"{100 * each.same:.1f} %",
            f"{each.bytes_per_token:.0f}",
            f"{1000 * each.step:.1f}",
        )
