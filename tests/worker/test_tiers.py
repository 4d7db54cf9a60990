"""A lower tier gets what a higher one leaves, and never nothing for long."""

from collections import Counter
from pathlib import Path

import pytest
from bench_parts.simulated.tiers import kept

from mlx_server import limits
from mlx_server.fair_queue import TierTurns
from mlx_server.requests import Tier
from tests.worker.bench import Bench
from tests.worker.prefill.disk_runs import words

ALL = (Tier.DEFAULT, Tier.FLEX, Tier.BATCH)


def served(
    turns: TierTurns, present: tuple[Tier, ...], seconds: float, now: float = 0.0
) -> Counter[Tier]:
    """Returns the seconds of each tier, whose operations take 0.1."""
    spent, until = Counter[Tier](), now + seconds
    while now < until:
        tier = turns.next(present, now)
        now += 0.1
        turns.took(tier, 0.1, now)
        spent[tier] += 1
    return Counter({tier: round(count / 10) for tier, count in spent.items()})


def test_lower_tiers_get_a_small_share_while_a_higher_one_has_work() -> None:
    spent = served(TierTurns(), ALL, 1000.0)
    assert 25 <= spent[Tier.FLEX] <= 45
    assert 1 <= spent[Tier.BATCH] <= 5, "each waits a bounded time"


def test_what_a_new_request_found_running_is_taken_off_the_share() -> None:
    turns = TierTurns()
    served(turns, (Tier.BATCH,), 50.0)
    assert served(turns, (Tier.DEFAULT, Tier.BATCH), 2.0, 50.0) == {Tier.DEFAULT: 2}


def test_a_piece_of_a_prompt_is_paid_for_before_it_begins_though_steps_are_short() -> None:
    turns, both = TierTurns(), (Tier.DEFAULT, Tier.FLEX)
    for number in range(50):
        assert turns.next([Tier.FLEX], 0.1) is Tier.FLEX
        turns.took(Tier.FLEX, 0.01 if number else 0.1, 0.1, piece=number == 0)
    assert turns.next(both, 0.1) is Tier.DEFAULT
    turns.took(Tier.DEFAULT, 1.0, 1.1)
    assert turns.next(both, 1.1, pieces=both) is Tier.DEFAULT
    assert turns.next(both, 1.1) is Tier.FLEX


@pytest.mark.parametrize("bound", [5.0, float(limits.TIER_WAIT_SECONDS)])
def test_no_tier_waits_longer_than_the_bound(bound: float) -> None:
    turns, now, last = TierTurns(bound), 0.0, dict.fromkeys(ALL, 0.0)
    for _ in range(3000):
        tier = turns.next(ALL, now)
        assert all(now - at <= bound + 1 for at in last.values())
        now, last[tier] = now + 0.1, now + 0.1
        turns.took(tier, 0.1, now)


def test_all_tiers_answer_as_alone(tiny_path: Path) -> None:
    prompts = [words(seed, 40 + 30 * seed) for seed in range(6)]
    bench = Bench(tiny_path, concurrency=4)
    alone = [bench.answer(prompt) for prompt in prompts]
    tiers = (Tier.BATCH, Tier.FLEX, Tier.DEFAULT, Tier.BATCH, Tier.PRIORITY, Tier.FLEX)
    rows = []
    answers: dict[int, list[int]] = {}
    for prompt, tier in zip(prompts, tiers, strict=True):
        rows.append(bench.begin(prompt, tier=tier))
        for row, ids in bench.step().items():
            answers.setdefault(row, []).extend(ids)
    for row, ids in bench.finish().items():
        answers.setdefault(row, []).extend(ids)
    assert [answers[row] for row in rows] == alone


def test_a_higher_tier_goes_first_though_all_places_are_taken(tiny_path: Path) -> None:
    bench = Bench(tiny_path, concurrency=2)
    lines = [bench.begin(words(seed, 20), 300, tier=Tier.BATCH) for seed in range(3)]
    for _ in range(10):
        bench.step()
    row, seen = bench.begin(words(7, 20), 100), Counter[int]()
    while row in bench.batch.rows:
        seen.update({number: len(ids) for number, ids in bench.step().items()})
    assert seen[row] == 100
    assert sum(seen[line] for line in lines) <= 20
    answers = bench.finish()
    assert {*lines} <= answers.keys()


@pytest.mark.slow
@pytest.mark.parametrize("named", ["m4-max:gpt-oss-20b", "m4-pro:30b-a3b"])
def test_a_stream_keeps_its_pace_next_to_sub_agents_and_a_batch(named: str) -> None:
    found = kept(named, asks=4)
    assert found.first_token <= 1.1
    assert found.speed >= 0.9
    assert found.batch >= 0.9
