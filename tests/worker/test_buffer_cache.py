"""Freed KV caches do not pile up while rows decode, and prefill keeps its buffers."""

from pathlib import Path

import mlx.core as mx
import pytest

from mlx_server.engine.messages import StepOutput
from mlx_server.worker import memory
from mlx_server.worker.engine import Engine
from mlx_server.worker.memory import EVERY_STEPS, FLOOR_BYTES, LEAST_STEPS, Buffers
from tests.worker.engine_runs import ask, load, of

LIMIT = 100 * FLOOR_BYTES
MUCH = LIMIT // 5


def steps_until_given_back(held: int, *, prefilling: bool = False) -> int | None:
    due = Buffers(LIMIT)
    return next((at for at in range(1, 2000) if due.should_free(held, prefilling=prefilling)), None)


def test_little_is_kept() -> None:
    assert steps_until_given_back(FLOOR_BYTES) is None


def test_more_is_given_back_as_often_as_caches_grow() -> None:
    assert steps_until_given_back(2 * FLOOR_BYTES) == EVERY_STEPS


def test_much_is_given_back_soon_but_not_with_each_step() -> None:
    assert steps_until_given_back(MUCH) == LEAST_STEPS


def test_nothing_between_the_pieces_of_a_prompt() -> None:
    assert steps_until_given_back(MUCH, prefilling=True) is None


@pytest.fixture
def kept() -> object:
    """As on a Mac, what is freed is kept up to the whole limit."""
    before = mx.set_cache_limit(1 << 30)
    mx.clear_cache()
    yield
    mx.set_cache_limit(before)
    mx.clear_cache()


@pytest.mark.soak
@pytest.mark.usefixtures("kept")
def test_a_long_decode_of_a_real_model(tiny_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    floor, tokens = 1 << 18, 600
    monkeypatch.setattr(memory, "FLOOR_BYTES", floor)
    engine = Engine(concurrency=4)
    load(engine, tiny_path)
    mx.clear_cache()
    for row in range(4):
        engine.handle(ask(row, tokens=tokens))
    held: list[int] = []
    given_back = 0

    reports = []
    while engine.pause is not None:
        reports += engine.step()
        held.append(mx.get_cache_memory())
        given_back += len(held) > 1 and held[-2] > floor > held[-1]
    steps = of(StepOutput, reports)
    assert sum(len(step.tokens) for step in steps) == 4 * tokens
    # What 256 steps leave in memory at most: 8 MB. If nothing were given back it would be 15 MB.
    assert max(held) < 40 * floor
    assert 2 <= given_back <= len(held) // EVERY_STEPS + 1
    assert max(step.buffer_bytes for step in steps) == pytest.approx(max(held), rel=0.01)
    assert steps[-1].peak_bytes >= steps[-1].active_bytes > 0
