"""Keys and values in 8 or 4 bits: a batch of such rows answers as each row alone does."""

import json
from collections.abc import Sequence
from copy import deepcopy
from pathlib import Path
from random import Random
from typing import Any

import mlx.core as mx
import pytest

from mlx_server.engine.messages import CacheMeasured, CommandFailed, MeasureCache
from mlx_server.worker.engine import Engine
from mlx_server.worker.kv_caches import cache_cost, make_caches, set_kv_bits
from mlx_server.worker.ragged_caches import QuantizedRow
from tests.worker.bench import Bench
from tests.worker.kinds import CONFIGS, SIZES
from tests.worker.lora_files import network
from tests.worker.prefill.disk_runs import words

pytestmark = pytest.mark.slow

BITS = (8, 4)
HEADS, WIDTH = 2, 32


QUANTIZED = pytest.mark.parametrize(
    "path", ["llama", "llama-4bit", "gemma3_text", "qwen3_5"], indirect=True
)


# The cache


def tokens(seed: int, count: int, rows: int = 1) -> tuple[mx.array, mx.array]:
    mx.random.seed(seed)
    keys = mx.random.normal((rows, HEADS, count, WIDTH))
    return keys, mx.random.normal((rows, HEADS, count, WIDTH))


def a_row(seed: int, count: int, bits: int = 8) -> QuantizedRow:
    row = QuantizedRow(bits)
    if count:
        row.update_and_fetch(*tokens(seed, count))
    return row


def contents(row: QuantizedRow) -> list[Any]:
    if not row.size():
        return []
    sides: Sequence[Any] = row.keys_and_values()
    return [x.tolist() for side in sides for x in side]


def test_rows_join_and_leave_in_any_order() -> None:
    random = Random(5)
    for _ in range(20):
        rows = [a_row(seed, random.choice([0, 1, 5, 255, 257])) for seed in range(4)]
        first, second = QuantizedRow.merge(rows[:2]), QuantizedRow.merge(rows[2:])
        first.extend(second)
        kept = random.sample(range(4), random.randint(1, 4))
        first.filter(kept)
        assert [contents(first.extract(at)) for at in range(len(kept))] == [
            contents(rows[at]) for at in kept
        ]


# The engine


NOISE = 0.2
"""Float noise may move a value into the next of 16 or 256 steps, so log probabilities differ by
more than noise. A wrong mask or position makes differences of 1 and more."""


def log_probabilities(network: Any, inputs: mx.array, cache: list[Any]) -> mx.array:
    logits: mx.array = network(inputs, cache=cache)[:, -1]
    return logits - mx.logsumexp(logits, axis=-1, keepdims=True)


def differences(a: mx.array, b: mx.array) -> list[float]:
    found: Any = (a - b).tolist()
    return list(found)


@QUANTIZED
@pytest.mark.parametrize("bits", BITS)
def test_rows_of_a_batch_are_computed_as_alone(path: Path, bits: int) -> None:
    net = network(path)
    set_kv_bits(net, bits)
    lengths, following = [40, 5, 70], words(7, 12)
    alone = [make_caches(net) for _ in lengths]
    for seed, (length, cache) in enumerate(zip(lengths, alone, strict=True)):
        net(mx.array([words(seed, length)]), cache=cache)
    batch = [entries[0].merge(list(entries)) for entries in deepcopy([*zip(*alone, strict=True)])]
    furthest = 0.0
    for token in following:
        together = log_probabilities(net, mx.array([[token]] * len(lengths)), batch)
        for at, cache in enumerate(alone):
            by_itself = log_probabilities(net, mx.array([[token]]), cache)[0]
            furthest = max(furthest, *map(abs, differences(together[at], by_itself)))
    assert furthest < NOISE


@QUANTIZED
def test_eight_bits_say_nearly_the_same(path: Path) -> None:
    """Random weights are the hardest: no token is much likelier than others."""
    prompt = words(3, 200)
    first, quantized = (Bench(path, kv_bits=bits).answer(prompt, 1) for bits in (None, 8))
    assert first == quantized


# What it costs


def config_of(name: str) -> dict[str, Any]:
    return {**SIZES, **CONFIGS[name], "dtype": "float32"}


def test_a_row_takes_half_the_memory_or_less() -> None:
    whole, eight, four = (cache_cost(config_of("llama"), bits) for bits in (None, 8, 4))
    assert eight.per_token < 0.55 * whole.per_token
    assert four.per_token <= 0.6 * eight.per_token
    windowed = cache_cost(config_of("gemma3_text"), 8)
    assert windowed.windowed_per_token == cache_cost(config_of("gemma3_text")).windowed_per_token


@pytest.mark.parametrize(
    ("name", "why"),
    [("gpt_oss", "attention sinks"), ("mamba2", "no effect"), ("lfm2", "multiples of 32")],
)
def test_a_model_whose_cache_has_no_such_form_is_refused(
    tmp_path: Path, name: str, why: str
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(config_of(name)))
    (found,) = Engine().handle(MeasureCache("m", str(tmp_path), 8))
    assert isinstance(found, CommandFailed)
    assert why in found.message
    assert "kv_bits: 8" in found.message
    (found,) = Engine().handle(MeasureCache("m", str(tmp_path)))
    assert isinstance(found, CacheMeasured)
