"""What is kept of prompts computed before: how much, for how long, and that it stays what it is."""

import gc
from random import Random
from typing import Any

import mlx.core as mx
import pytest
from mlx_lm.models.cache import (
    ArraysCache,
    BatchKVCache,
    CacheList,
    KVCache,
    RotatingKVCache,
    make_prompt_cache,
)

from mlx_server.engine.messages import SHORTEST_STORED
from mlx_server.prompt_files.names import Ids, common_length
from mlx_server.worker.prefill import prompt_cache
from mlx_server.worker.prefill.prompt_cache import PromptCache
from tests.worker.batch_runs import a_prompt

TOKEN = 2 * 2 * 16 * 4
"""Bytes that `entry` keeps for a token: keys and values of 2 heads, 16 wide, in float32."""

Cache = list[Any]


def entry(tokens: int) -> Cache:
    cache = KVCache()
    cache.update_and_fetch(mx.ones((1, 2, tokens, 16)), mx.ones((1, 2, tokens, 16)))
    cache.keys, cache.values = map(mx.contiguous, cache.keys_and_values())  # no room to grow
    mx.eval(cache.state)
    return [cache]


def filled(cache: PromptCache, *keys: str, tokens: int = 100) -> None:
    for number, key in enumerate(keys):
        cache.store(key, a_prompt(tokens, seed=number), entry(tokens))


def known(cache: PromptCache, key: str, seed: int = 0, tokens: int = 100) -> int:
    return cache.fetch(key, a_prompt(tokens, seed))[1]


def test_it_keeps_to_its_bytes() -> None:
    cache = PromptCache(350 * TOKEN)
    for number in range(20):
        cache.store("m" if number % 3 else "n", a_prompt(100, seed=number), entry(100))
        assert cache.nbytes == min(number + 1, 3) * 100 * TOKEN
    assert known(cache, "m", seed=19) == 100
    assert known(cache, "m", seed=1) == 0


def test_the_longest_known_beginning_is_found() -> None:
    cache = PromptCache(1 << 20)
    prompt = a_prompt(100)
    cache.store("m", prompt, entry(100))
    assert known(cache, "m") == 100
    assert cache.fetch("m", [*prompt, 1, 2, 3])[1] == 100
    assert cache.fetch("m", [*prompt[:60], 999, 999])[1] == 60
    found, length = cache.fetch("m", prompt[:40])
    assert found
    assert found[0].offset == length == 40
    assert cache.fetch("m", prompt[1:]) == (None, 0)
    assert cache.fetch("n", prompt) == (None, 0)


def test_what_is_too_short_is_neither_kept_nor_found() -> None:
    cache = PromptCache(1 << 20)
    prompt = a_prompt(100)
    assert not cache.wants(prompt[: SHORTEST_STORED - 1])
    assert cache.wants(prompt[:SHORTEST_STORED])
    cache.store("m", prompt, entry(100))
    assert cache.fetch("m", prompt[: SHORTEST_STORED - 1]) == (None, 0)
    assert cache.fetch("m", [*prompt[: SHORTEST_STORED - 1], *([999] * 30)]) == (None, 0)
    assert cache.fetch("m", [*prompt[:SHORTEST_STORED], *([999] * 30)])[1] == SHORTEST_STORED


class CountedEntry(KVCache):  # type: ignore[misc]
    """Counts how often its size is asked."""

    asked = 0

    @property
    def nbytes(self) -> int:
        type(self).asked += 1
        return int(super().nbytes)


def test_a_new_prompt_costs_no_work_for_each_cached_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """Hundreds are kept, of models with dozens of layers: what is done for each of them is missing
    in the steps of all rows."""
    cache = PromptCache(1 << 30)

    def store(seed: int) -> None:
        layer = CountedEntry()
        layer.update_and_fetch(mx.ones((1, 2, 20, 16)), mx.ones((1, 2, 20, 16)))
        cache.store("m", a_prompt(20, seed), [layer])

    for seed in range(50):
        store(seed)
    compared: list[int] = []

    def common(a: Ids, b: Ids) -> int:
        compared.append(len(a))
        return common_length(a, b)

    monkeypatch.setattr(prompt_cache, "common_length", common)
    CountedEntry.asked = 0
    store(50)
    assert CountedEntry.asked <= 3
    assert cache.known("m", a_prompt(20, seed=7)) == 20
    assert len(compared) <= 2, "only with those that begin alike"


def test_prompts_with_one_beginning_are_compared_as_far_as_they_may_have_more(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As those of all chats with one system prompt."""
    cache, system = PromptCache(1 << 30), a_prompt(40)
    for number in range(50):
        cache.store("m", [*system, number, *a_prompt(20, number)], entry(61))
    compared: list[int] = []

    def common(a: Ids, b: Ids) -> int:
        compared.append(len(a))
        return common_length(a, b)

    monkeypatch.setattr(prompt_cache, "common_length", common)
    assert cache.known("m", [*system, 99, *a_prompt(20)]) == 40
    assert len(compared) == 1
    assert cache.known("m", [*system, 30, *a_prompt(20, 30), 5]) == 61
    assert len(compared) == 3


def test_a_prompt_with_one_token_more() -> None:
    cache, beginning = PromptCache(1 << 30), a_prompt(SHORTEST_STORED)
    cache.store("m", [*beginning, 1, 2], entry(SHORTEST_STORED + 2))
    cache.store("m", [*beginning, 3], entry(SHORTEST_STORED + 1))
    assert cache.known("m", [*beginning, 3, 4]) == SHORTEST_STORED + 1
    assert cache.known("m", [*beginning, 3]) == SHORTEST_STORED + 1


@pytest.mark.parametrize("seed", range(20))
def test_no_prompt_that_has_more_is_left_out(seed: int) -> None:
    random = Random(seed)
    cache, beginning = PromptCache(1 << 30), a_prompt(SHORTEST_STORED)
    prompts = [[random.randrange(2) for _ in range(random.randrange(12))] for _ in range(30)]
    for prompt in prompts:
        tokens = [*beginning, *prompt]
        cache.store("m", tokens, entry(len(tokens)))
    asked = [random.randrange(2) for _ in range(10)]
    longest = max(
        next((at for at, (a, b) in enumerate(zip(asked, prompt, strict=False)) if a != b), least)
        for prompt in prompts
        for least in [min(len(asked), len(prompt))]
    )
    assert cache.known("m", [*beginning, *asked]) == SHORTEST_STORED + longest
    assert cache.parting("m", [*beginning, *asked]) == SHORTEST_STORED + longest


def test_what_is_larger_than_the_whole_is_not_kept_and_drops_nothing() -> None:
    cache = PromptCache(150 * TOKEN)
    filled(cache, "m")
    cache.store("m", a_prompt(151, seed=7), entry(151))
    assert known(cache, "m") == 100
    assert cache.nbytes == 100 * TOKEN


def test_what_is_too_large_is_said_once(caplog: pytest.LogCaptureFixture) -> None:
    cache = PromptCache(150 * TOKEN)
    filled(cache, "m", tokens=150)
    assert not caplog.records
    cache.limit(0)
    filled(cache, "m", "n", tokens=15_000)
    (record,) = caplog.records
    assert "15000 tokens takes 3.8 MB" in record.getMessage()
    assert "room for 0.0 MB" in record.getMessage()
    assert "`prompt_cache`" in record.getMessage()


def test_none_is_kept_where_none_is_wanted() -> None:
    cache = PromptCache(0)
    assert not cache.wants(a_prompt(100))
    filled(cache, "m")
    assert cache.nbytes == 0
    assert known(cache, "m") == 0


def test_the_prompt_that_was_used_the_longest_ago_is_dropped_first() -> None:
    cache = PromptCache(1 << 20)
    filled(cache, "a", "b", "c")
    known(cache, "a")
    cache.shrink(cache.nbytes - 1)
    assert known(cache, "b", seed=1) == 0
    cache.shrink(cache.nbytes - 1)
    assert known(cache, "c", seed=2) == 0
    assert known(cache, "a") == 100


def test_of_one_key_the_oldest_is_dropped_first() -> None:
    cache = PromptCache(1 << 20)
    filled(cache, "m", "m", "m")
    cache.shrink(250 * TOKEN)
    assert [known(cache, "m", seed) for seed in range(3)] == [0, 100, 100]


def test_shrinking_goes_no_further_than_told() -> None:
    cache = PromptCache(1 << 20)
    filled(cache, "a", "b", "c", "d")
    cache.shrink(1 << 20)
    assert cache.nbytes == 400 * TOKEN
    cache.shrink(150 * TOKEN)
    assert cache.nbytes == 100 * TOKEN
    cache.shrink(0)
    assert cache.nbytes == 0
    assert [known(cache, key, seed) for seed, key in enumerate("abcd")] == [0] * 4


def active_memory() -> int:
    gc.collect()
    mx.synchronize()
    return mx.get_active_memory()


def test_of_what_is_forgotten_nothing_is_left() -> None:
    cache = PromptCache(1 << 30)
    filled(cache, "other")
    before = active_memory()
    filled(cache, *["m"] * 5, tokens=1000)
    assert active_memory() - before >= 5000 * TOKEN
    cache.forget("m")
    cache.forget("never kept")
    assert active_memory() - before < 1000
    assert cache.nbytes == 100 * TOKEN
    assert known(cache, "m", tokens=1000) == 0
    assert known(cache, "other") == 100


def answered(model: Any, cache: Cache, token: int) -> list[int]:
    tokens = []
    for _ in range(20):
        logits = model(mx.array([[token]]), cache=cache)[0, -1]
        token = int(mx.argmax(logits))
        tokens.append(token)
    return tokens


def computed(model: Any, tokens: list[int]) -> Cache:
    cache: Cache = make_prompt_cache(model)
    model(mx.array([tokens]), cache)
    return cache


@pytest.mark.parametrize(("asked", "length"), [(60, 60), (61, 60), (40, 40)])
def test_using_what_was_fetched_does_not_change_what_is_kept(
    tiny_model: Any, asked: int, length: int
) -> None:
    prompt = a_prompt(61)
    kept = PromptCache(1 << 20)
    kept.store("m", prompt[:60], computed(tiny_model, prompt[:60]))
    expected = answered(tiny_model, computed(tiny_model, prompt[:length]), 7)
    for _ in range(3):
        found, known = kept.fetch("m", prompt[:asked])
        assert found
        assert known == length
        assert answered(tiny_model, found, 7) == expected


def kv(rows: int) -> KVCache:
    cache = KVCache()
    cache.update_and_fetch(mx.ones((1, 2, 900 + rows, 64)), mx.ones((1, 2, 900 + rows, 64)))
    return cache


def rotating(rows: int) -> RotatingKVCache:
    cache = RotatingKVCache(max_size=600)
    cache.update_and_fetch(mx.ones((1, 2, 500 + rows, 64)), mx.ones((1, 2, 500 + rows, 64)))
    return cache


def recurrent(rows: int) -> ArraysCache:
    cache = ArraysCache(2)
    cache[0], cache[1] = mx.ones((1, 300, 300)), mx.ones((1, 4, 64))
    return cache


def hybrid(rows: int) -> CacheList:
    return CacheList(recurrent(rows), kv(rows))


@pytest.mark.tables
@pytest.mark.parametrize("kind", [kv, rotating, recurrent, hybrid])
def test_what_is_kept_of_a_row_does_not_keep_its_batch(kind: Any) -> None:
    kept = PromptCache(1 << 30)
    before = active_memory()
    rows = [kind(row) for row in range(8)]
    batch = type(rows[0]).merge(rows)
    del rows
    mx.eval(batch.state)
    kept.store("m", a_prompt(100), [batch.extract(3)])
    assert active_memory() - before > 6 * kept.nbytes
    del batch
    assert 0 < active_memory() - before < 1.1 * kept.nbytes


def test_a_row_that_has_ended_hands_its_memory_over() -> None:
    cache = PromptCache(1 << 30)
    cache.limit(120 * TOKEN)
    filled(cache, "m")
    cache.store("n", a_prompt(500), entry(500), handed_over=True)
    assert cache.nbytes == 600 * TOKEN, "the other one is kept, too"
    cache.limit(550 * TOKEN)  # as the server says next
    assert (known(cache, "m"), known(cache, "n", tokens=500)) == (0, 500)


def test_the_owners_bound_holds_for_what_is_handed_over() -> None:
    cache = PromptCache(350 * TOKEN)
    cache.store("n", a_prompt(500), entry(500), handed_over=True)
    assert cache.nbytes == 0


LAYERS = 16


def test_of_a_cache_that_is_handed_over_one_layer_exists_twice() -> None:
    """On top of what the row had; mlx-lm allocates it in steps, so it is cut to its length."""
    rows = [BatchKVCache([0]) for _ in range(LAYERS)]
    for row in rows:
        row.update_and_fetch(mx.ones((1, 4, 1000, 64)), mx.ones((1, 4, 1000, 64)))
    mx.eval([row.state for row in rows])
    whole = sum(int(row.nbytes) for row in rows)
    taken = [row.extract(0) for row in rows]
    rows.clear()
    cache = PromptCache(1 << 30)
    cache.limit(0)
    before = active_memory()
    mx.reset_peak_memory()
    cache.store("m", a_prompt(1000), taken, handed_over=True)
    mx.eval([entry.state for entry in taken])
    assert cache.nbytes > 0.9 * whole
    assert mx.get_peak_memory() - before < 2.5 * whole / LAYERS
