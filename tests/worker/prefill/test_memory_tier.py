"""What is kept of prompts in memory: how much, for how long, and that it stays what it is."""

import gc
from collections import Counter
from pathlib import Path
from random import Random
from typing import Any

import mlx.core as mx
import pytest
from mlx_lm.models.cache import ArraysCache, BatchKVCache, CacheList, KVCache, RotatingKVCache

from mlx_server import limits
from mlx_server.engine.messages import (
    SHORTEST_STORED,
    CancelRows,
    LimitCache,
    PreemptRows,
    ResumeRows,
    UnloadModel,
)
from mlx_server.prompt_files import Ids, common_length
from mlx_server.worker.prefill import memory_tier
from mlx_server.worker.prefill.memory_tier import CachedPrompt, MemoryTier, Snapshot, ids_of
from tests.worker.batch_runs import a_prompt
from tests.worker.bench import TOKENS, Bench
from tests.worker.engine_runs import active_memory
from tests.worker.lora_files import network
from tests.worker.one_pass import expected

TOKEN = 2 * 2 * 16 * 4
"""Bytes that `full` keeps for a token: keys and values of 2 heads, 16 wide, in float32."""
STATE = 64 * 4
"""Bytes of `recurrent`."""
ROOM = 1 << 30
KEY = ("m",)


def full(tokens: int) -> KVCache:
    cache = KVCache()
    cache.update_and_fetch(mx.ones((1, 2, tokens, 16)), mx.ones((1, 2, tokens, 16)))
    cache.keys, cache.values = map(mx.contiguous, cache.keys_and_values())  # no room to grow
    mx.eval(cache.state)
    return cache


def recurrent(tokens: int) -> ArraysCache:
    cache = ArraysCache(1)
    cache[0] = mx.full((1, 64), tokens)
    return cache


def filled(memory: MemoryTier, *keys: str, tokens: int = 100) -> None:
    for number, key in enumerate(keys):
        memory.store((key,), a_prompt(tokens, seed=number), [full(tokens)])


def known(memory: MemoryTier, key: str, seed: int = 0, tokens: int = 100) -> int:
    return memory.fetch((key,), a_prompt(tokens, seed))[1]


def test_it_keeps_to_its_bytes_and_drops_the_least_recently_used() -> None:
    memory = MemoryTier(350 * TOKEN)
    for number in range(20):
        memory.store(("m" if number % 3 else "n",), a_prompt(100, seed=number), [full(100)])
        assert memory.nbytes == min(number + 1, 3) * 100 * TOKEN
    assert known(memory, "m", seed=17) == 100
    memory.shrink(250 * TOKEN)
    assert [known(memory, "mn"[seed % 3 == 0], seed) for seed in (17, 18, 19)] == [100, 0, 100]
    memory.shrink(0)
    assert memory.nbytes == 0


def test_a_beginning_too_short_to_be_used_makes_no_later_turn() -> None:
    memory, dropped = MemoryTier(150 * TOKEN), list[CachedPrompt]()
    memory.on_drop = dropped.append
    first, other = a_prompt(100, seed=1), a_prompt(50, seed=2)
    start = SHORTEST_STORED - 1
    memory.store(KEY, first, [full(100)], continued_from=start, disk_length=100)
    memory.store(KEY, first[:start] + other[start:], [full(50)])
    memory.shrink(50 * TOKEN)
    assert [list(prompt.tokens) for prompt in dropped] == [first]


@pytest.mark.parametrize("layers", [[full], [full, recurrent]])
def test_a_batchs_prompts_take_no_room_of_others(layers: list[Any]) -> None:
    memory = MemoryTier(350 * TOKEN + 10 * STATE)
    filled(memory, "a", "b")
    for seed in (5, 6):
        prompt = a_prompt(100, seed)
        memory.store_snapshot(("c",), prompt[:50], [each(50) for each in layers], gives_way=True)
        memory.store(("c",), prompt, [each(100) for each in layers], gives_way=True)
    assert [known(memory, "c", seed) for seed in (5, 6)] == [0, 100]
    assert [known(memory, *each) for each in (("a", 0), ("b", 1))] == [100, 100]
    memory.store(("d",), a_prompt(100, 3), [full(100)])
    assert [known(memory, *each) for each in (("a", 0), ("b", 1), ("d", 3), ("c", 6))] == [
        100
    ] * 3 + [0]


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
    memory, compared = MemoryTier(ROOM), list[int]()

    def common(a: Ids, b: Ids) -> int:
        compared.append(len(a))
        return common_length(a, b)

    for seed in range(50):
        layer = CountedEntry()
        layer.update_and_fetch(mx.ones((1, 2, 20, 16)), mx.ones((1, 2, 20, 16)))
        CountedEntry.asked = 0
        memory.store(KEY, a_prompt(20, seed), [layer])
    assert CountedEntry.asked <= 3
    monkeypatch.setattr(memory_tier, "common_length", common)
    assert memory.known(KEY, a_prompt(20, seed=7)) == 20
    assert len(compared) <= 2, "only with its neighbours"

    chats, system = MemoryTier(ROOM), a_prompt(40)
    for number in range(50):
        chats.store(KEY, [*system, number, *a_prompt(20, number)], [full(61)])
    compared.clear()
    assert chats.known(KEY, [*system, 99, *a_prompt(20)]) == 40
    assert len(compared) <= 2, "all but its neighbours share less, or as much"
    compared.clear()
    chats.store(KEY, [*system, 99, *a_prompt(20)], [full(61)])
    assert len(compared) <= 8, "with the neighbours of its place, each time that it is looked for"
    assert chats.known(KEY, [*system, 30, *a_prompt(20, 30), 5]) == 61


def test_prompts_with_a_state_of_one_beginning_are_not_asked_one_by_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    memory, system, asked = MemoryTier(ROOM), a_prompt(40), Counter[str]()
    for name in ("reaches", "inherit"):
        how = getattr(CachedPrompt, name)

        def counted(*given: Any, name: str = name, how: Any = how) -> Any:
            asked[name] += 1
            return how(*given)

        monkeypatch.setattr(CachedPrompt, name, counted)
    memory.store_snapshot(KEY, system, [full(40), recurrent(40)])
    for number in range(50):
        prompt = [*system, number, *a_prompt(20, number)]
        asked.clear()
        memory.store(KEY, prompt, [full(61), recurrent(61)])
        assert memory.known(KEY, [*system, 99]) == 40
        assert max(asked.values()) <= 1
    assert memory.fetch(KEY, [*system, 99])[1] == 40
    memory.shrink(61 * TOKEN + 2 * STATE)
    assert memory.known(KEY, prompt) == 61, "it is the one used most recently"
    assert memory.known(KEY, [*system, 99]) == 40, "it has the state of the others too"


@pytest.mark.parametrize("seed", range(20))
def test_no_prompt_that_has_more_is_left_out(seed: int) -> None:
    random = Random(seed)
    memory, beginning = MemoryTier(ROOM), a_prompt(SHORTEST_STORED)
    prompts = [[random.randrange(2) for _ in range(random.randrange(12))] for _ in range(30)]
    states, with_state = MemoryTier(ROOM), list[list[int]]()
    for prompt in prompts:
        memory.store(KEY, tokens := [*beginning, *prompt], [full(len(tokens))])
        part = tokens[: SHORTEST_STORED + random.randrange(len(prompt) + 1)]
        for known, keep in ((part, states.store_snapshot), (tokens, states.store)):
            keep(KEY, known, [full(len(known)), recurrent(len(known))])
            with_state.append(known)
    asked = ids_of(random.randrange(2) for _ in range(10))
    longest = max(common_length(asked, ids_of(prompt)) for prompt in prompts)
    asked_for = [*beginning, *asked.tolist()]
    assert memory.known(KEY, asked_for) == SHORTEST_STORED + longest
    assert memory.parting(KEY, asked_for) == SHORTEST_STORED + longest
    states.store_snapshot(KEY, asked_for, [full(len(asked_for)), recurrent(len(asked_for))])
    reached = [len(known) for known in with_state if asked_for[: len(known)] == known]
    assert states.known(KEY, asked_for) == max(reached, default=0)


def test_what_is_larger_than_the_whole_drops_nothing_and_is_logged_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    memory = MemoryTier(150 * TOKEN)
    filled(memory, "m")
    assert not caplog.records
    for _ in range(2):
        memory.store(KEY, a_prompt(15_000, seed=7), [full(15_000)])
    assert (known(memory, "m"), memory.nbytes) == (100, 100 * TOKEN)
    (record,) = caplog.records
    assert "15000 tokens takes 3.8 MB" in record.getMessage()
    assert "room for 0.0 MB" in record.getMessage()
    assert "`prompt_cache`" in record.getMessage()


def test_of_what_is_forgotten_nothing_is_left() -> None:
    memory = MemoryTier(ROOM)
    filled(memory, "other")
    before = active_memory()
    filled(memory, *["m"] * 5, tokens=1000)
    memory.store(("m", "adapter", 1.0, ""), a_prompt(100, seed=9), [full(100)])
    assert active_memory() - before >= 5000 * TOKEN
    memory.forget(KEY)
    memory.forget(("never kept",))
    assert active_memory() - before < 1000
    assert memory.nbytes == 100 * TOKEN
    assert (known(memory, "m", tokens=1000), known(memory, "other")) == (0, 100)


def rotating(row: int) -> RotatingKVCache:
    cache = RotatingKVCache(max_size=600)
    cache.update_and_fetch(mx.ones((1, 2, 500 + row, 64)), mx.ones((1, 2, 500 + row, 64)))
    return cache


def large_state(row: int) -> ArraysCache:
    cache = ArraysCache(2)
    cache[0], cache[1] = mx.ones((1, 300, 300)), mx.ones((1, 4, 64))
    return cache


def hybrid(row: int) -> CacheList:
    return CacheList(large_state(row), full(900 + row))


@pytest.mark.parametrize("kind", [lambda row: full(900 + row), rotating, large_state, hybrid])
def test_what_is_kept_of_a_row_does_not_keep_its_batch(kind: Any) -> None:
    memory = MemoryTier(ROOM)
    before = active_memory()
    rows = [kind(row) for row in range(8)]
    batch = type(rows[0]).merge(rows)
    del rows
    mx.eval(batch.state)
    memory.store(KEY, a_prompt(100), [batch.extract(3)])
    assert active_memory() - before > 6 * memory.nbytes
    del batch
    assert 0 < active_memory() - before < 1.1 * memory.nbytes


def test_a_row_that_has_ended_hands_its_memory_over_within_the_owners_limit() -> None:
    memory = MemoryTier(ROOM)
    memory.limit(120 * TOKEN)
    filled(memory, "m")
    memory.store(("n",), a_prompt(500), [full(500)], handed_over=True)
    assert memory.nbytes == 600 * TOKEN, "the other one is kept, too"
    memory.limit(550 * TOKEN)  # as the server says next
    assert (known(memory, "m"), known(memory, "n", tokens=500)) == (0, 500)
    small = MemoryTier(350 * TOKEN)
    small.store(("n",), a_prompt(500), [full(500)], handed_over=True)
    assert small.nbytes == 0


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
    memory = MemoryTier(ROOM)
    memory.limit(0)
    before = active_memory()
    mx.reset_peak_memory()
    memory.store(KEY, a_prompt(1000), taken, handed_over=True)
    mx.eval([entry.state for entry in taken])
    assert memory.nbytes > 0.9 * whole
    assert mx.get_peak_memory() - before < 2.5 * whole / LAYERS


def cached(length: int, *snapshots: int, state: Any = recurrent) -> CachedPrompt:
    kept = {n: Snapshot(n, {1: state(n)}) for n in (*snapshots, length)}
    return CachedPrompt(KEY, ids_of(a_prompt(length)), {0: full(length)}, kept)


@pytest.mark.parametrize(
    ("asked", "reached"),
    [(300, 300), (400, 300), (299, 200), (200, 200), (199, 100), (100, 100), (99, 0)],
)
def test_it_is_continued_only_at_a_snapshot(asked: int, reached: int) -> None:
    prompt = cached(300, 100, 200)
    length, snapshot = prompt.reaches(min(asked, 300))
    assert length == reached
    if snapshot:
        whole, state = prompt.restored(length, snapshot)
        assert whole.offset == reached
        assert state[0][0, 0].item() == reached
    prompt.layers = None
    assert prompt.reaches(300) == (0, None), "not all of it is computed"


def test_snapshots_are_thinned_by_distance_and_bytes() -> None:
    """Those with which other prompts begin are kept longer. As after a round of tools: the next
    turn parts shortly before this turn's first prompt."""
    most = limits.PROMPT_SNAPSHOTS
    places = [*range(1000, 1000 * most, 1000), 1000 * most - 40]
    prompt = cached(20_000, *places, 1000 * most, 19_000)
    prompt.shared, prompt.continued_from = 2010, 1000 * most - 30
    prompt.thin(ROOM)
    assert len(prompt.snapshots) == most
    assert {2000, 1000 * most - 40, 19_000, 20_000} < prompt.snapshots.keys()
    prompt.thin(3 * STATE)
    assert len(prompt.snapshots) == 3
    prompt.thin(0)
    assert list(prompt.snapshots) == [20_000]


@pytest.fixture
def memory() -> MemoryTier:
    """It has two prompts of 100 tokens."""
    memory = MemoryTier(ROOM)
    filled(memory, "m", "m")
    return memory


def held(memory: MemoryTier, row: int, prompt: list[int]) -> int:
    memory.hold(row, KEY, prompt)
    return memory.known(KEY, prompt)


def test_rows_share_what_they_hold_and_only_what_they_continue_is_kept() -> None:
    before = active_memory()
    memory = MemoryTier(ROOM)
    filled(memory, "m", tokens=1000)
    long, short = a_prompt(1000)[:800], a_prompt(1000)[:400]
    assert (held(memory, 1, long), held(memory, 2, short)) == (800, 400)
    memory.limit(0)
    assert 800 * TOKEN <= active_memory() - before < 900 * TOKEN
    memory.release(1)
    assert memory.fetch(KEY, short)[1] == 400


def test_a_prompt_that_was_replaced_by_a_longer_one_is_not_kept_next_to_it() -> None:
    before = active_memory()
    memory, prompt = MemoryTier(ROOM), a_prompt(1000)
    filled(memory, "m", tokens=1000)
    held(memory, 1, prompt)
    memory.store(KEY, [*prompt, 1, 2, 3], [full(1003)])
    memory.limit(0)
    assert active_memory() - before < 1100 * TOKEN
    assert memory.fetch(KEY, prompt)[1] == 1000


FIRST = a_prompt(500, seed=1)
SECOND = [*FIRST, *a_prompt(30, seed=2)]


@pytest.fixture
def bench(path: Path) -> Bench:
    """An engine that has the first turn in its prompt cache."""
    bench = Bench(path, cache_bytes=ROOM)
    bench.answer(FIRST)
    return bench


def assert_nothing_is_held(bench: Bench) -> None:
    bench.engine.handle(LimitCache(0))
    gc.collect()
    assert bench.engine.prompts.memory.known(("m", None, 1.0, ""), FIRST) == 0


@pytest.mark.slow
@pytest.mark.parametrize("preempted", [False, True])
def test_a_row_continues_what_makes_room_for_it(bench: Bench, path: Path, preempted: bool) -> None:
    row = bench.begin(SECOND)
    if preempted:
        bench.engine.handle(PreemptRows([row]))
        bench.finish()
        bench.engine.handle(ResumeRows([row]))
    bench.engine.handle(LimitCache(0))
    answers = bench.finish()
    assert bench.cached[row] >= len(FIRST) - 1
    assert answers[row] == Bench(path).answer(SECOND)
    assert_nothing_is_held(bench)


@pytest.mark.slow
def test_a_row_that_leaves_holds_nothing(bench: Bench) -> None:
    bench.engine.handle(CancelRows([bench.begin(SECOND)]))
    bench.engine.handle(PreemptRows([bench.begin(SECOND)]))
    assert_nothing_is_held(bench)
    bench.begin(SECOND)
    bench.engine.handle(UnloadModel("m"))
    assert_nothing_is_held(bench)


@pytest.mark.parametrize("path", ["llama", "lfm2"], indirect=True)
def test_the_next_turn_finds_the_snapshots_too(bench: Bench) -> None:
    """Of the layers that can't be cut, though the prompt that had them was dropped, where snapshots
    take a small part of a prompt's memory."""
    row = bench.begin(SECOND)
    bench.engine.handle(LimitCache(bench.engine.prompts.memory.nbytes - 1))
    bench.finish()
    assert bench.cached[row] >= len(FIRST) - 1
    again = bench.begin([*FIRST, *a_prompt(30, seed=3)])
    bench.finish()
    assert bench.cached[again] >= len(FIRST) - 1


@pytest.mark.slow
def test_a_place_where_prompts_have_parted_is_known_the_next_time(path: Path) -> None:
    bench, model, shared = Bench(path, cache_bytes=ROOM), network(path), a_prompt(250, seed=1)
    for number in range(4):
        prompt = [*shared, *a_prompt(60, seed=2 + number)]
        answer = bench.answer(prompt)
        assert answer == expected(model, prompt, answer, TOKENS)
    assert all(250 <= known < 255 for known in [*bench.cached.values()][2:])


@pytest.mark.slow
def test_a_prompt_whose_client_left_goes_on_where_it_was(path: Path) -> None:
    bench, prompt = Bench(path, cache_bytes=ROOM), a_prompt(600, seed=4)
    row = bench.begin(prompt)
    while not bench.cached:
        bench.step()
    bench.handle(CancelRows([row]))
    answer = bench.answer(prompt)
    assert bench.cached[row + 1] > 0
    assert answer == expected(network(path), prompt, answer, TOKENS)
