"""What a cached prompt can restore, what it takes over from others, and what it drops."""

from typing import Any

import mlx.core as mx
import pytest
from mlx_lm.models.cache import ArraysCache, CacheList, KVCache, RotatingKVCache

from mlx_server import limits
from mlx_server.prompt_files.names import common_length
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


def recurrent(tokens: int) -> ArraysCache:
    cache = ArraysCache(1)
    cache[0] = mx.full((1, 64), tokens)
    return cache


STATE = 64 * 4
TOKEN = 2 * 2 * 16 * 4


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


def cached(length: int, *snapshots: int, state: Any = recurrent) -> CachedPrompt:
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
            self.cache.store_snapshot("m", tokens[:place], [full(place), recurrent(place)])
        self.cache.store(
            "m",
            tokens,
            [full(len(tokens)), recurrent(len(tokens))],
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
    kept.cache.store_snapshot("m", turn[:350], [full(350), recurrent(350)])
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
