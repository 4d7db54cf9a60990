"""What is kept of prompts computed before: how much, for how long, and that it stays what it is."""

import gc
from collections.abc import Iterator
from operator import attrgetter
from pathlib import Path
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

from mlx_server import limits
from mlx_server.engine.messages import (
    SHORTEST_STORED,
    CancelRows,
    LimitCache,
    PreemptRows,
    ResumeRows,
    UnloadModel,
)
from mlx_server.prompt_files.names import Ids, common_length
from mlx_server.worker.prefill import prompt_cache
from mlx_server.worker.prefill.prompt_cache import (
    CachedPrompt,
    PromptCache,
    Snapshot,
    can_always_be_cut,
    ids_of,
    split,
)
from mlx_server.worker.replay_model import ReplayCache
from mlx_server.worker.row_cache import (
    MOST_SPACED,
    NEAREST,
    snapshot_places,
    with_parting,
)
from tests.worker.batch_runs import a_prompt
from tests.worker.kinds import KINDS, Kind
from tests.worker.test_kinds import Bench

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


WINDOW = 50


def full(tokens: int) -> KVCache:
    cache = KVCache()
    cache.update_and_fetch(mx.ones((1, 2, tokens, 16)), mx.ones((1, 2, tokens, 16)))
    cache.keys, cache.values = map(mx.contiguous, cache.keys_and_values())  # no room to grow
    return cache


def sliding(tokens: int) -> RotatingKVCache:
    cache = RotatingKVCache(max_size=WINDOW)
    cache.update_and_fetch(mx.ones((1, 2, tokens, 16)), mx.ones((1, 2, tokens, 16)))
    return cache


def recurrent_state(tokens: int) -> ArraysCache:
    cache = ArraysCache(1)
    cache[0] = mx.full((1, 64), tokens)
    return cache


STATE = 64 * 4


@pytest.mark.parametrize(
    ("entry", "expected"),
    [
        (KVCache(), True),
        (ReplayCache(), True),
        (CacheList(KVCache(), KVCache()), True),
        (RotatingKVCache(8), False),
        (ArraysCache(1), False),
        (CacheList(ArraysCache(1), KVCache()), False),
        (object(), False),
    ],
)
def test_which_entries_can_always_be_cut(entry: Any, expected: bool) -> None:
    assert can_always_be_cut(entry) == expected


@pytest.mark.parametrize(
    ("a", "b", "expected"),
    [
        ([], [], 0),
        ([1], [], 0),
        ([1, 2, 3], [1, 2, 3], 3),
        ([1, 2, 3], [1, 2], 2),
        ([1, 2, 3, 4], [1, 2, 5, 4], 2),
        ([7], [8], 0),
        ([1] * 64, [1] * 63 + [2], 63),
        ([1] * 65, [1] * 64 + [2], 64),
        ([1] * 600, [1] * 600, 600),
        ([1] * 600, [1] * 512 + [2] * 100, 512),
        ([1] * 5000, [1] * 4999, 4999),
    ],
)
def test_common_length(a: list[int], b: list[int], expected: int) -> None:
    assert common_length(ids_of(a), ids_of(b)) == expected


def cached(length: int, *snapshots: int, state: Any = recurrent_state) -> CachedPrompt:
    layers, _ = split([full(length), state(length)])
    kept = {n: Snapshot(n, {1: state(n)}) for n in (*snapshots, length)}
    return CachedPrompt("m", ids_of(a_prompt(length)), layers, kept)


@pytest.mark.parametrize(
    ("asked", "reached"),
    [(300, 300), (400, 300), (299, 200), (200, 200), (199, 100), (100, 100), (99, 0)],
)
def test_it_is_continued_only_at_a_snapshot(asked: int, reached: int) -> None:
    prompt = cached(300, 100, 200)
    length, snapshot = prompt.reaches(ids_of([*a_prompt(300)[:asked], 999_999]))
    assert length == reached
    if snapshot:
        whole, state = prompt.restored(length, snapshot)
        assert whole.offset == reached
        assert state[0][0, 0].item() == reached


def test_a_window_that_is_not_full_can_be_cut() -> None:
    prompt = cached(300, 40, 200, state=sliding)
    length, snapshot = prompt.reaches(ids_of(a_prompt(300)[:30]))
    assert length == 30
    assert snapshot
    assert [entry.offset for entry in prompt.restored(30, snapshot)] == [30, 30]
    assert prompt.reaches(ids_of(a_prompt(300)[:60]))[0] == 40


def test_it_is_not_used_before_all_of_it_is_computed() -> None:
    prompt = cached(300, 100)
    prompt.layers = None
    assert prompt.reaches(ids_of(a_prompt(300))) == (0, None)


def test_snapshots_are_thinned_by_distance_and_bytes() -> None:
    most = limits.PROMPT_SNAPSHOTS
    prompt = cached(10_000, *range(100, 100 + 10 * most, 10), 9_900)
    prompt.thin(1 << 30)
    assert len(prompt.snapshots) == most
    assert {9_900, 10_000} < prompt.snapshots.keys()
    prompt.thin(3 * STATE)
    assert len(prompt.snapshots) == 3
    prompt.thin(0)
    assert list(prompt.snapshots) == [10_000]


def test_the_snapshots_with_which_other_prompts_begin_are_kept_longer() -> None:
    """As after a round of tools: the next turn parts shortly before this turn's first prompt."""
    most = limits.PROMPT_SNAPSHOTS
    places = [*range(1000, 1000 * most, 1000), 1000 * most - 40]
    prompt = cached(20_000, *places, 1000 * most, 19_000)
    prompt.shared, prompt.continued_from = 2010, 1000 * most - 30
    prompt.thin(1 << 30)
    assert len(prompt.snapshots) == most
    assert {2000, 1000 * most - 40, 19_000, 20_000} < prompt.snapshots.keys()


def test_places_of_snapshots() -> None:
    assert snapshot_places([], 1000) == ()
    assert snapshot_places([500, 600, 600, 620, 999], 1000) == (500, 600, 999)
    assert snapshot_places([NEAREST - 1, 1000, 2000], 1000) == ()
    assert snapshot_places([100, 4100], 9000) == (100, 1024, 2048, 4100, 8192)
    long = snapshot_places([50], 1_000_000)
    assert len(long) <= MOST_SPACED + 3
    assert long[0] == 50


def test_a_snapshot_is_taken_where_a_prompt_parts_from_a_cached_one() -> None:
    before = 500 - NEAREST
    assert with_parting((100, 900), 500, 100) == (100, before, 500, 900)
    assert with_parting((100, 900), 100 + NEAREST - 1, 0) == (100, 900), "the shorter serves both"
    near = 900 - NEAREST + 1
    assert with_parting((100, 900), near, 0) == (100, near - NEAREST, near)
    assert with_parting((500, 500 + NEAREST), 510, 0) == (500, 500 + NEAREST)
    assert with_parting((100, 900), 500, 500 - NEAREST + 1) == (100, 900), "hardly more than known"
    assert with_parting((100,), 100 + NEAREST, 0) == (100, 100 + NEAREST)
    assert with_parting((), NEAREST - 1, 0) == ()


class Conversations:
    """Stores prompts of a hybrid model, with the snapshots that prefill would take."""

    def __init__(self, most_bytes: int = 1 << 30) -> None:
        self.cache = PromptCache(most_bytes)

    def computed(self, tokens: list[int], *places: int, continued_from: int = 0) -> None:
        for place in places:
            self.cache.store_snapshot("m", tokens[:place], [full(place), recurrent_state(place)])
        self.cache.store(
            "m",
            tokens,
            [full(len(tokens)), recurrent_state(len(tokens))],
            continued_from=continued_from,
        )

    def known(self, tokens: list[int]) -> int:
        return self.cache.known("m", tokens)


def test_another_chat_with_the_same_system_prompt() -> None:
    kept = Conversations()
    system, end = a_prompt(200), [9] * 50
    kept.computed([*system, *a_prompt(100, seed=1)], 200, 290)
    assert kept.known([*system, *a_prompt(80, seed=2)]) == 200
    kept.computed([*system, *a_prompt(80, seed=2)], 270)
    assert kept.known([*system, *a_prompt(80, seed=2)[:70], *end]) == 270
    kept.cache.shrink(kept.cache.nbytes - 1)  # drops the first conversation
    assert kept.known([*system, *a_prompt(100, seed=1)]) == 200, "its snapshot is shared"


def test_a_longer_prompt_takes_the_place_of_its_beginning() -> None:
    kept, turn = Conversations(), a_prompt(400)
    kept.computed(turn[:300], 100)
    before = kept.cache.nbytes
    kept.computed(turn)
    assert kept.cache.nbytes == before + 100 * TOKEN + STATE
    assert [kept.known(turn[:n]) for n in (99, 100, 300, 399, 400)] == [0, 100, 300, 300, 400]


def test_snapshots_of_a_prompt_that_was_never_completed_take_nobodys_place() -> None:
    kept, turn = Conversations(), a_prompt(400)
    kept.computed(turn[:300], 100)
    kept.cache.store_snapshot("m", turn[:350], [full(350), recurrent_state(350)])
    assert kept.known(turn) == 300


def test_an_earlier_turn_is_dropped_before_another_conversation() -> None:
    kept = Conversations()
    system = a_prompt(200)
    other, first = ([*system, *a_prompt(100, seed=seed)] for seed in (1, 2))
    kept.computed(other, 200, 290, continued_from=290)
    kept.computed(first, 290, continued_from=290)
    kept.computed([*first[:290], *a_prompt(200, seed=3)], continued_from=480)
    kept.cache.shrink(kept.cache.nbytes - 1)
    assert kept.known(first) == 290, "the earlier turn is gone but for what the later one shares"
    assert kept.known(other) == 300


def test_bytes_count_shared_snapshots_once_and_keep_to_the_limit() -> None:
    system = a_prompt(200)
    kept = Conversations(2500 * TOKEN)
    for seed in range(40):
        kept.computed([*system, *a_prompt(100, seed=seed)], 200, 280)
        assert kept.cache.nbytes <= 2500 * TOKEN
    assert kept.known([*system, *a_prompt(100, seed=39)]) == 300
    kept.cache.clear()
    assert kept.cache.nbytes == 0


ROOM = 1 << 30


def held(cache: PromptCache, row: int, prompt: list[int]) -> int:
    cache.hold(row, "m", prompt)
    return cache.known("m", prompt)


@pytest.fixture
def cache() -> PromptCache:
    """It has two prompts of 100 tokens."""
    cache = PromptCache(ROOM)
    for seed in range(2):
        cache.store("m", a_prompt(100, seed), entry(100))
    return cache


def test_a_prompt_that_a_row_holds_is_found_after_it_was_dropped(cache: PromptCache) -> None:
    prompt = [*a_prompt(100, 0), *a_prompt(20, 7)]
    assert held(cache, 1, prompt) == 100
    cache.limit(0)
    assert cache.nbytes == 0
    assert cache.known("m", a_prompt(100, 1)) == 0, "nobody holds it"
    found, length = cache.fetch("m", prompt)
    assert length == 100
    assert found
    assert found[0].offset == 100
    cache.release(1)
    assert cache.fetch("m", prompt) == (None, 0)


def test_only_what_the_row_continues_is_kept(cache: PromptCache) -> None:
    prompt = [*a_prompt(100, 0)[:40], *a_prompt(20, 7)]
    assert held(cache, 1, prompt) == 40
    cache.limit(0)
    (kept,) = cache._held.with_key("m")
    assert kept.nbytes == 40 * TOKEN
    assert cache.fetch("m", prompt)[1] == 40


def test_rows_share_what_they_hold(cache: PromptCache) -> None:
    long, short = a_prompt(100, 0)[:80], a_prompt(100, 0)[:40]
    assert (held(cache, 1, long), held(cache, 2, short)) == (80, 40)
    cache.limit(0)
    assert {kept.nbytes for kept in cache._held.with_key("m")} == {80 * TOKEN}
    cache.release(1)
    assert cache.fetch("m", short)[1] == 40


def test_a_prompt_that_was_replaced_by_a_longer_one_is_not_kept_next_to_it(
    cache: PromptCache,
) -> None:
    prompt = a_prompt(100, 0)
    held(cache, 1, prompt)
    cache.store("m", [*prompt, 1, 2, 3], entry(103))
    cache.limit(0)
    assert [kept.nbytes for kept in cache._held.with_key("m")] == [100 * TOKEN]
    assert cache.fetch("m", prompt)[1] == 100


def test_what_was_forgotten_is_not_held(cache: PromptCache) -> None:
    prompt = a_prompt(100, 0)
    held(cache, 1, prompt)
    cache.forget("m")
    assert cache.known("m", prompt) == 0
    cache.store("m", prompt, entry(100))
    held(cache, 1, prompt)
    cache.clear()
    assert cache.known("m", prompt) == 0


SOME = [kind for kind in KINDS if kind.name in ("llama", "gpt-oss", "lfm2", "mamba2", "deepseek")]


NAME = attrgetter("name")


@pytest.fixture(scope="module", params=SOME, ids=NAME)
def path(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    kind: Kind = request.param
    return kind.save(tmp_path_factory.mktemp("held") / kind.name)


@pytest.fixture
def bench(path: Path) -> Iterator[Bench]:
    """An engine that has the first turn in its prompt cache."""
    bench = Bench(path, cache_bytes=ROOM)
    bench.answer(FIRST)
    yield bench
    assert not bench.engine._cache._held._holds, "no row waits any more"


FIRST = a_prompt(500, seed=1)
SECOND = [*FIRST, *a_prompt(30, seed=2)]


def test_a_row_continues_what_makes_room_for_it(bench: Bench, path: Path) -> None:
    row = bench.begin(SECOND)
    bench.engine.handle(LimitCache(0))
    answers = bench.finish()
    assert bench.cached[row] >= len(FIRST) - 1
    assert answers[row] == Bench(path).answer(SECOND)


def test_so_does_one_that_was_preempted(bench: Bench, path: Path) -> None:
    row = bench.begin(SECOND)
    bench.engine.handle(PreemptRows([row]))
    bench.finish()
    bench.engine.handle(ResumeRows([row]))
    bench.engine.handle(LimitCache(0))
    answers = bench.finish()
    assert bench.cached[row] >= len(FIRST) - 1
    assert answers[row] == Bench(path).answer(SECOND)


def test_a_row_that_leaves_holds_nothing(bench: Bench) -> None:
    bench.engine.handle(CancelRows([bench.begin(SECOND)]))
    bench.engine.handle(PreemptRows([bench.begin(SECOND)]))
    assert not bench.engine._cache._held._holds
    bench.begin(SECOND)
    bench.engine.handle(UnloadModel("m"))


SMALL = [kind for kind in SOME if kind.name in ("llama", "lfm2", "deepseek")]
"""Those whose snapshots take a small part of a prompt's memory."""


@pytest.mark.parametrize("path", SMALL, indirect=True, ids=NAME)
def test_the_next_turn_finds_the_snapshots_too(bench: Bench) -> None:
    """Of the layers that can't be cut, though the prompt that had them was dropped."""
    row = bench.begin(SECOND)
    bench.engine.handle(LimitCache(bench.engine._cache.nbytes - 1))
    bench.finish()
    assert bench.cached[row] >= len(FIRST) - 1
    again = bench.begin([*FIRST, *a_prompt(30, seed=3)])
    bench.finish()
    assert bench.cached[again] >= len(FIRST) - 1
