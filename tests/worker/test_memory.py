"""What a row's caches will cost, held against what they take, and the device's limits."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest

from mlx_server.engine.messages import (
    STEP,
    CacheMeasured,
    CommandFailed,
    KvCost,
    MeasureCache,
    StepOutput,
)
from mlx_server.worker import kernels
from mlx_server.worker.engine import EVERY_STEPS, MOST_FREED, Engine, limit_memory
from mlx_server.worker.kv_caches import cache_cost, why_alone
from mlx_server.worker.mlx_lm_internals import ArraysCache, make_prompt_cache
from mlx_server.worker.ragged_caches import leaves, ragged
from mlx_server.worker.speculation.gate import MOST_DRAFTED
from mlx_server.worker.weights import model_classes
from tests.tables import cases
from tests.worker.engine_runs import ask, load, of
from tests.worker.kinds import ARCHITECTURES, CONFIGS, SIZES

LAYERS = SIZES["num_hidden_layers"]
TOKENS = (1, STEP, 300, 2 * STEP + 3)

LOOSE = {"llama4", "deepseek_v41"}
"""Their caches give up tokens in their own ways; they are counted as if they kept all of them."""


def config_of(name: str) -> dict[str, Any]:
    config: dict[str, Any] = json.loads(json.dumps({**SIZES, **CONFIGS[name]}))
    return config


def real_bytes(config: dict[str, Any], tokens: int) -> tuple[int, int]:
    """After a prefill in pieces and the decoding of some tokens one by one, and after a further
    pass with a draft, with the states before it. Shapes tell the bytes: no value is computed unless
    the model looks at it."""
    model_class, arguments = model_classes(config)
    model = model_class(arguments.from_dict(config)).eval()
    model.set_dtype(mx.float32)
    cache = make_prompt_cache(model)
    steps = min(tokens, 3)
    prompt = tokens - steps
    for step in [min(128, prompt - done) for done in range(0, prompt, 128)] + [1] * steps:
        model(mx.zeros((1, step), mx.int32), cache=cache)
    return sum(layer.nbytes for layer in cache), _drafted_bytes(model, cache)


def _drafted_bytes(model: Any, cache: list[Any]) -> int:
    if why_alone(model):
        return 0
    drafted = [ragged(layer.merge([layer])) for layer in cache]
    before = sum(leaf.nbytes for leaf in leaves(drafted) if isinstance(leaf, ArraysCache))
    model(mx.zeros((1, MOST_DRAFTED), mx.int32), cache=drafted)
    return int(before + sum(leaf.nbytes for leaf in leaves(drafted)))


@pytest.mark.slow
@pytest.mark.parametrize("name", [kind.name for kind in ARCHITECTURES])
def test_it_is_never_below_and_at_most_twice_the_truth(name: str) -> None:
    cost = cache_cost({**config_of(name), "dtype": "float32"})
    for tokens in TOKENS:
        real, drafted = real_bytes(config_of(name), tokens)
        assert real <= cost.for_tokens(tokens)
        assert drafted <= cost.for_tokens(tokens + MOST_DRAFTED)
        most = 2.05 * max(real, drafted)
        assert tokens < STEP or name in LOOSE or cost.for_tokens(tokens) <= most


def test_an_nvidia_gpu_has_most_of_its_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mlx.core.cuda.is_available", lambda: True)
    monkeypatch.setattr("mlx.core.device_info", lambda: {"total_memory": 80 * 10**9})
    assert (kernels.device(), kernels.recommended_bytes()) == ("cuda", 72 * 10**9)
    assert cache_cost(config_of("llama")) == KvCost(LAYERS * 2 * 2 * 32 * 2), "in half precision"


@cases
def test_values_have_the_size_of_what_the_model_computes_in(
    monkeypatch: pytest.MonkeyPatch, metal: bool, named: dict[str, Any], factor: int
) -> None:
    monkeypatch.setattr("mlx.core.metal.is_available", lambda: metal)
    assert cache_cost({**config_of("llama"), **named}) == KvCost(factor * LAYERS * 2 * 2 * 32 * 2)


@pytest.mark.parametrize("named", [{}, {"num_hidden_layers": "4"}, {"vocab_size": -1}])
def test_a_config_that_mlx_lm_does_not_take_is_reported(
    tmp_path: Path, named: dict[str, Any]
) -> None:
    config = {**config_of("llama"), **named} if named else {"model_type": "llama"}
    (tmp_path / "config.json").write_text(json.dumps(config))
    [report] = Engine().handle(MeasureCache("m", str(tmp_path)))
    assert isinstance(report, CommandFailed)
    assert (report.model, bool(report.message)) == ("m", True)


def test_the_engine_measures_what_it_has_not_loaded(tiny_path: Path) -> None:
    engine = Engine()
    [report] = engine.handle(MeasureCache("m", str(tiny_path)))
    assert report == CacheMeasured("m", KvCost(2 * 2 * 2 * 16 * 4))
    assert engine.doing == "idle"


GB = 1 << 30


@pytest.fixture(autouse=True)
def _as_before() -> Iterator[None]:
    memory, cache = mx.set_memory_limit(GB), mx.set_cache_limit(GB)
    yield
    mx.set_memory_limit(memory)
    mx.set_cache_limit(cache)


@pytest.mark.skipif(mx.metal.is_available(), reason="with Metal, the limit includes them")
@pytest.mark.parametrize(
    ("limit", "freed"),
    [(0, 0), (99, 0), (GB, GB // 100), (100 * GB, MOST_FREED), (1 << 50, MOST_FREED)],
)
def test_freed_buffers_are_a_share_of_the_limit_and_never_many(limit: int, freed: int) -> None:
    limit_memory(limit)
    assert mx.set_cache_limit(GB) == freed
    assert mx.set_memory_limit(GB) == limit


@pytest.fixture
def kept() -> object:
    """As on a Mac, what is freed is kept up to the whole limit."""
    before = mx.set_cache_limit(1 << 30)
    mx.clear_cache()
    yield
    mx.set_cache_limit(before)
    mx.clear_cache()


@pytest.mark.slow
@pytest.mark.usefixtures("kept")
def test_a_long_decode_of_a_real_model(tiny_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    floor, tokens = 1 << 18, 600
    monkeypatch.setattr("mlx_server.worker.engine.FLOOR_BYTES", floor)
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
