"""Decides what is in memory, who waits and in which order, and what is evicted."""

import math
from collections import Counter
from collections.abc import Iterable

import pytest
from hypothesis import HealthCheck, settings
from hypothesis.stateful import run_state_machine_as_test

from mlx_server.engine.messages import KvCost
from mlx_server.pool.policy import (
    TURN,
    Grant,
    LoadAction,
    NeverFits,
    Policy,
    PreemptAction,
    Refuse,
    ResumeAction,
    ShrinkCache,
    UnloadAction,
)
from mlx_server.pool.reservations import ModelFacts
from mlx_server.requests import Tier
from tests.calls import calls_of
from tests.pool.policy_machine import WAIT, PolicyMachine
from tests.tables import cases

BUDGET = 10


def policy_of(*, budget: int = BUDGET, ready: Iterable[str] = (), **facts: ModelFacts) -> Policy:
    """Models in `ready` were loaded one after the other, at 0, 1, 2 ..."""
    policy = Policy(facts, budget=budget, wait_seconds=WAIT)
    for now, model in enumerate(ready):
        assert policy.preload(model, now) == (LoadAction(model),)
        assert policy.loaded(model, facts[model].weights, now) == ()
    return policy


MANY = settings(
    max_examples=150,
    stateful_step_count=25,
    database=None,
    suppress_health_check=[HealthCheck.too_slow],
)


def test_memory_that_comes_back_is_waited_for_however_long() -> None:
    policy = policy_of(a=ModelFacts(6))
    policy.limit(5, 0.0, returning=4)
    assert policy.request(1, "a", 1, 0.0) == ()
    assert policy.request(2, "a", 4, 0.0) == (Refuse(2, NeverFits(needed=10, available=9)),)
    assert policy.tick(WAIT + 1.0) == ()
    assert policy.limit(9, WAIT + 2.0) == (LoadAction("a"),)
    assert policy.loaded("a", 6, WAIT + 3.0) == (Grant(1),)


def test_memory_that_ran_out_halves_what_is_left_beside_the_weights() -> None:
    policy = Policy({"a": ModelFacts(60)}, budget=100, wait_seconds=9.0)
    policy.preload("a", 0.0)
    policy.loaded("a", 60, 0.0)
    assert policy.lower(1.0) == ()
    assert (policy.budget, policy.lowered) == (80, 20)
    policy.request(1, "a", 25, 2.0)
    assert policy.waiting == ()  # it can never be had now
    assert Grant(2) in policy.request(2, "a", 15, 3.0)
    for _ in range(9):
        policy.lower(4.0)
    assert policy.budget == 61  # weights that are here stay


def test_an_estimate_can_be_bettered_until_the_model_is_there() -> None:
    policy = policy_of(a=ModelFacts(0))
    policy.estimate("a", 6)
    assert policy.request(1, "a", 1, 5.0) == (LoadAction("a"),)
    policy.estimate("a", 3)
    assert policy.used == 6


def test_events_out_of_turn_are_our_own_bugs() -> None:
    policy = policy_of(a=ModelFacts(6))
    with pytest.raises(AssertionError):
        policy.loaded("a", 6, 0.0)
    with pytest.raises(AssertionError):
        policy.unloaded("a", 0.0)


@pytest.mark.slow
def test_keeps_its_promises_whatever_happens() -> None:
    run_state_machine_as_test(PolicyMachine, settings=MANY)


def test_programs_of_one_address_share_the_turns_of_a_client() -> None:
    policy = policy_of(a=ModelFacts(4), ready="a")
    policy.request(0, "a", 6, 5.0, client="192.0.2.7")
    clients = [*(f"127.0.0.1 {at}" for at in range(3)), "192.0.2.7"] * 20
    for ticket, client in enumerate(clients, 1):
        policy.request(ticket, "a", 6, 5.0, client=client)
    last, turns = 0, []
    for _ in range(24):
        (grant,) = policy.release(last, 6.0)
        assert isinstance(grant, Grant)
        last = grant.ticket
        turns.append(clients[last - 1])
    counts = Counter(turns)
    assert 10 <= counts["192.0.2.7"] <= 14
    assert all(2 <= counts[f"127.0.0.1 {at}"] <= 6 for at in range(3))


def test_rows_count_and_newcomers_pass_nobody_for_ever() -> None:
    policy = policy_of(a=ModelFacts(4), ready="a")
    assert policy.request(0, "a", 2, 5.0, rows=3, client="many") == (Grant(0),)
    policy.request(1, "a", 6, 5.0, client="many")
    now, last, passed = 6.0, 0, 0
    for ticket in range(2, 1000):
        policy.request(ticket, "a", 6, now, client=f"newcomer {ticket}")
        (grant,) = policy.release(last, now)
        assert isinstance(grant, Grant)
        last, passed = grant.ticket, passed + 1
        if last == 1:
            break
    assert last == 1
    assert 3 < passed <= 3 * TURN + 1


def test_requests_that_wait_take_little_of_each_event() -> None:
    """A row grows each few hundred tokens, while requests for the same memory wait."""
    policy, calls = policy_of(a=ModelFacts(4), ready="a"), list[int]()
    for ticket in range(61):
        policy.request(ticket, "a", 6, 5.0)
        calls.append(calls_of(lambda: policy.resize(0, 6, 6.0)))
    assert len(policy.waiting) == 60
    assert calls[60] - calls[20] <= 40 * 80


def test_rows_that_have_not_begun_take_no_memory_from_the_prompt_cache_yet() -> None:
    policy = policy_of(a=ModelFacts(3), ready=["a"])
    policy.cache_bytes(7)
    assert policy.request(1, "a", 4, now=1, extra_bytes=1) == (ShrinkCache(2), Grant(1))
    assert (policy.used, policy.in_use) == (3 + 4 + 1 + 2, 3 + 1)
    policy.begin(1)
    assert policy.in_use == 3 + 4 + 1
    policy.release(1, now=2)
    policy.begin(1)  # it was cancelled meanwhile
    assert policy.in_use == 3


def test_what_came_to_nothing_grows_no_more() -> None:
    policy = policy_of(a=ModelFacts(4), ready="a")
    assert policy.request(1, "a", 1, 5.0, most_kv_bytes=2) == (Grant(1),)
    assert policy.resize(1, 99, 6.0) == ()
    assert policy.kv_reserved == 2
    policy.engine_lost(7.0)
    assert policy.resize(1, 2, 8.0) == ()
    assert policy.used == 0


def test_a_request_may_say_how_long_a_model_stays() -> None:
    policy = policy_of(a=ModelFacts(6, ttl=60), ready="a")
    assert policy.stale_at("a") == 60
    assert policy.keep("a", math.inf, 1.0) == ()
    assert (policy.stale_at("a"), policy.next_deadline()) == (None, None)
    assert policy.keep("a", 5, 2.0) == ()
    assert policy.next_deadline() == 5
    assert policy.tick(5.0) == (UnloadAction("a"),)
    assert policy.unloaded("a", 6.0) == ()
    policy.request(1, "a", 0, 7.0)
    policy.loaded("a", 6, 8.0)
    policy.release(1, 9.0)
    assert policy.stale_at("a") == 69, "once it is loaded again, its own time counts"
    policy.keep("a", 5, 10.0)
    policy.engine_lost(11.0)
    policy.request(2, "a", 0, 12.0)
    policy.loaded("a", 6, 13.0)
    policy.release(2, 14.0)
    assert policy.stale_at("a") == 74, "also after its engine was lost"


def test_a_model_that_is_not_kept_goes_after_its_last_lease() -> None:
    policy = policy_of(a=ModelFacts(6), b=ModelFacts(3, pinned=True), ready="ab")
    policy.request(1, "a", 0, 5.0)
    assert policy.keep("a", 0, 6.0) == ()
    assert policy.release(1, 7.0) == (UnloadAction("a"),)
    assert policy.keep("b", 0, 8.0) == (), "a pinned model stays"


def test_a_model_that_is_not_in_memory_is_not_kept() -> None:
    policy = policy_of(a=ModelFacts(6))
    assert policy.keep("a", 0, 1.0) == ()
    policy.request(1, "a", 0, 2.0)
    policy.loaded("a", 6, 3.0)
    assert policy.release(1, 4.0) == ()


def test_padding_takes_no_more_than_the_engine_says() -> None:
    policy = policy_of(budget=40, a=ModelFacts(5), ready="a")
    assert policy.request(1, "a", 1, 5.0, rows=8, padding_bytes=4) == (Grant(1),)
    assert policy.kv_reserved == 8
    assert policy.request(2, "a", 16, 5.0, padding_bytes=4) == (Grant(2),), "9 rows of 16 are 144"
    assert policy.kv_reserved == 8 + 16 + 4
    assert policy.request(3, "a", 8, 5.0, padding_bytes=4) == (), "36 of 35"


@cases
def test_short_rows_next_to_a_long_one(
    budget: float, weights: float, per_token: int, one_batch: int, in_groups: int
) -> None:
    """worker/README.md has the first of these."""
    kv, memory, model = KvCost(per_token), int(budget * 1e9), int(weights * 1e9)
    most_padding = kv.most_padding(memory - model)
    assert most_padding is not None

    def granted(padding: int | None) -> int:
        policy = policy_of(budget=memory, a=ModelFacts(model), ready="a")
        for row in range(34):
            tokens = 300 if row else 30_000
            soon, most = kv.for_tokens(tokens + 512), kv.for_tokens(tokens + 16_384)
            done = policy.request(row, "a", soon, 5.0, most_kv_bytes=most, padding_bytes=padding)
            if Grant(row) not in done:
                return row - 1
        return 33

    assert granted(None) == one_batch
    assert granted(kv.padding_bytes(most_padding)) == in_groups


def test_room_is_kept_for_one_to_come_to_its_end() -> None:
    policy = policy_of(a=ModelFacts(4), b=ModelFacts(1), ready="a")
    assert policy.request(1, "a", 1, 5.0, most_kv_bytes=6) == (Grant(1),)
    assert policy.request(2, "b", 1, 5.0) == (), "it might need the room for b at its end"
    assert policy.cache_bytes(5) == (), "which the prompt cache may have until then"
    assert policy.resize(1, 3, 6.0) == (ShrinkCache(3),)
    assert policy.resize(1, 0, 7.0) == ()
    assert policy.release(1, 8.0) == (LoadAction("b"),)


def test_passes_one_that_is_stuck_only_if_both_fit_side_by_side() -> None:
    policy = policy_of(p=ModelFacts(1, pinned=True), a=ModelFacts(5), b=ModelFacts(6), ready="pa")
    assert policy.request(1, "a", 2, 5.0) == (Grant(1),)
    assert policy.request(2, "b", 1, 5.0) == ()
    assert policy.request(3, "a", 0, 5.0) == (), "a must go for b to come"
    assert policy.request(4, "p", 2, 5.0) == (Grant(4),)
    assert policy.request(5, "p", 1, 5.0) == (), "8 are for p and b, 2 were given to 4"
    assert policy.release(1, 6.0) == (UnloadAction("a"),)
    assert policy.unloaded("a", 7.0) == (LoadAction("b"),)
    assert policy.loaded("b", 6, 8.0) == (Grant(2),)


def test_a_pinned_model_that_is_still_to_come_is_held_against_them_too() -> None:
    policy = policy_of(
        budget=12,
        ready="abc",
        p=ModelFacts(1, pinned=True),
        a=ModelFacts(3),
        b=ModelFacts(6),
        c=ModelFacts(3),
    )
    for ticket, model in enumerate("abc"):
        assert policy.request(ticket, model, 0, 5.0) == (Grant(ticket),)
    assert policy.request(3, "p", 0, 6.0) == ()
    assert policy.request(4, "a", 3, 7.0) == ()
    assert policy.request(5, "b", 0, 8.0) == (), "p stays, and with b there are 5 left for 4"


def test_a_lower_tier_gives_its_memory_and_gets_it_back() -> None:
    policy = policy_of(ready=["m"], m=ModelFacts(weights=2))
    assert policy.request(1, "m", 6, 1.0, tier=Tier.BATCH) == (Grant(1),)
    assert policy.request(2, "m", 6, 2.0, tier=Tier.FLEX) == (PreemptAction(1), Grant(2))
    assert policy.request(3, "m", 6, 3.0, tier=Tier.FLEX) == ()
    assert policy.request(4, "m", 6, 4.0) == (PreemptAction(2), Grant(4))
    assert policy.release(4, 5.0) == (ResumeAction(2),)
    assert policy.release(2, 6.0) == (Grant(3),)
    assert policy.release(3, 7.0) == (ResumeAction(1),)


def test_a_lower_tier_waits_a_bounded_time_for_memory() -> None:
    policy = policy_of(ready=["m"], m=ModelFacts(weights=2))
    policy.tier_wait = 10.0
    assert policy.request(1, "m", 6, 0.0) == (Grant(1),)
    assert policy.request(2, "m", 6, 1.0, tier=Tier.BATCH) == ()
    assert policy.next_deadline() == 11.0
    assert policy.tick(11.0) == ()
    assert policy.request(3, "m", 6, 22.0) == ()
    assert policy.release(1, 23.0) == (Grant(2),), "it was before 3"
