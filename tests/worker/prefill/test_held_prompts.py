"""What a row continues is there when it begins, however little room the prompt cache has then."""

from collections.abc import Iterator
from operator import attrgetter
from pathlib import Path

import pytest

from mlx_server.engine.messages import (
    CancelRows,
    LimitCache,
    PreemptRows,
    ResumeRows,
    UnloadModel,
)
from mlx_server.worker.prefill.prompt_cache import PromptCache
from tests.worker.batch_runs import a_prompt
from tests.worker.kinds import KINDS, Kind
from tests.worker.test_kinds import Bench

from .test_prompt_cache import TOKEN, entry

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


@pytest.mark.tables
def test_a_row_continues_what_makes_room_for_it(bench: Bench, path: Path) -> None:
    row = bench.begin(SECOND)
    bench.engine.handle(LimitCache(0))
    answers = bench.finish()
    assert bench.cached[row] >= len(FIRST) - 1
    assert answers[row] == Bench(path).answer(SECOND)


@pytest.mark.tables
def test_so_does_one_that_was_preempted(bench: Bench, path: Path) -> None:
    row = bench.begin(SECOND)
    bench.engine.handle(PreemptRows([row]))
    bench.finish()
    bench.engine.handle(ResumeRows([row]))
    bench.engine.handle(LimitCache(0))
    answers = bench.finish()
    assert bench.cached[row] >= len(FIRST) - 1
    assert answers[row] == Bench(path).answer(SECOND)


@pytest.mark.tables
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
