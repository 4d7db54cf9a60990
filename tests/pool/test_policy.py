"""Who gets into memory, who waits, who is evicted.

First the rules one by one, in numbers small enough to follow; then all at once, in any order.
"""

import pytest
from hypothesis import HealthCheck, settings
from hypothesis.stateful import run_state_machine_as_test

from mlx_server.pool.policy import (
    FailedToLoad,
    Grant,
    LoadAction,
    ModelFacts,
    NeverFits,
    Policy,
    PolicyView,
    Refuse,
    ShrinkCache,
    UnloadAction,
    WaitedTooLong,
)
from tests.pool.policies import policy_of
from tests.pool.policy_books import WAIT
from tests.pool.policy_machine import PolicyMachine

MANY = settings(
    max_examples=350,
    stateful_step_count=25,
    database=None,
    suppress_health_check=[HealthCheck.too_slow],
)


def test_loads_once_for_all_who_ask() -> None:
    policy = policy_of(a=ModelFacts(6))
    assert policy.request(1, "a", 1, 0.0) == (LoadAction("a"),)
    assert policy.request(2, "a", 1, 1.0) == ()
    assert policy.views()["a"] == PolicyView("loading", 0, 6, None)
    assert policy.loaded("a", 5, 2.0) == (Grant(1), Grant(2))
    assert policy.views()["a"] == PolicyView("ready", 2, 5, 2.0)
    assert (policy.used, policy.kv_reserved, policy.waiting) == (7, 2, ())
    assert policy.request(3, "a", 1, 3.0) == (Grant(3),)


def test_a_lease_gives_back_what_it_reserved() -> None:
    policy = policy_of(a=ModelFacts(6), ready="a")
    assert policy.request(1, "a", 3, 5.0) == (Grant(1),)
    assert policy.request(2, "a", 3, 6.0) == ()
    assert policy.release(1, 7.0) == (Grant(2),)
    assert policy.release(2, 8.0) == ()
    assert policy.used == 6
    assert policy.views()["a"] == PolicyView("ready", 0, 6, 8.0)


def test_a_leased_model_is_waited_for() -> None:
    policy = policy_of(a=ModelFacts(6), b=ModelFacts(6), ready="a")
    assert policy.request(1, "a", 1, 5.0) == (Grant(1),)
    assert policy.request(2, "b", 1, 6.0) == ()
    assert policy.release(1, 7.0) == (UnloadAction("a"),)


def test_what_never_fits_is_refused_at_once() -> None:
    policy = policy_of(a=ModelFacts(9), ready="a")
    assert policy.request(1, "a", 1, 5.0) == (Grant(1),)
    assert policy.request(2, "a", 2, 5.0) == (Refuse(2, NeverFits(needed=11, available=10)),)


def test_waits_for_a_pinned_model_to_be_asked_for_again() -> None:
    """It fitted when it came; since then a pinned model has moved in for good."""
    policy = policy_of(a=ModelFacts(6), p=ModelFacts(6, pinned=True), ready="a")
    assert policy.request(1, "a", 0, 5.0) == (Grant(1),)
    assert policy.request(2, "p", 0, 5.0) == ()
    assert policy.request(3, "a", 0, 5.0) == ()
    assert policy.release(1, 6.0) == (UnloadAction("a"),)
    assert policy.unloaded("a", 7.0) == (
        LoadAction("p"),
        Refuse(3, NeverFits(needed=6, available=4)),
    )


def test_preload_evicts_nothing_and_takes_no_room_that_is_waited_for() -> None:
    policy = policy_of(
        a=ModelFacts(6), b=ModelFacts(4), c=ModelFacts(5), d=ModelFacts(3), ready="a"
    )
    assert policy.preload("c", 1.0) == ()
    assert policy.request(1, "a", 1, 2.0) == (Grant(1),)
    assert policy.request(2, "c", 2, 3.0) == ()
    assert policy.preload("d", 4.0) == (), "2 has to wait for 1 and must not wait for d too"
    assert policy.release(1, 5.0) == (UnloadAction("a"),)
    assert policy.preload("b", 6.0) == (), "2 takes 7 of the 10 that will be free"
    assert policy.preload("d", 6.0) == (LoadAction("d"),)


def test_the_prompt_cache_gives_way_first() -> None:
    policy = policy_of(a=ModelFacts(3), b=ModelFacts(3), c=ModelFacts(3), ready="ab")
    assert policy.cache_bytes(3) == ()
    assert policy.request(1, "a", 2, 5.0) == (ShrinkCache(2), Grant(1))
    assert policy.request(2, "c", 0, 6.0) == (UnloadAction("b"),)
    assert policy.unloaded("b", 6.0) == (LoadAction("c"),)
    assert policy.cache == 2
    assert policy.cache_bytes(5) == (ShrinkCache(2),)


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


def test_two_models_load_side_by_side() -> None:
    policy = policy_of(a=ModelFacts(4), b=ModelFacts(4))
    assert policy.request(1, "a", 1, 5.0) == (LoadAction("a"),)
    assert policy.request(2, "b", 1, 5.0) == (LoadAction("b"),)


def test_a_load_begins_while_its_kv_cache_still_has_to_wait() -> None:
    policy = policy_of(a=ModelFacts(3), b=ModelFacts(6), ready="a")
    assert policy.request(1, "b", 3, 5.0) == (UnloadAction("a"), LoadAction("b"))
    assert policy.loaded("b", 6, 6.0) == ()
    assert policy.unloaded("a", 7.0) == (Grant(1),)


def test_two_models_and_room_for_one_take_turns() -> None:
    policy = policy_of(a=ModelFacts(6), b=ModelFacts(6), ready="a")
    assert policy.request(0, "a", 1, 5.0) == (Grant(0),)
    for ticket in range(1, 5):
        here, other = ("a", "b") if ticket % 2 else ("b", "a")
        now = 5.0 + ticket
        assert policy.request(ticket, other, 1, now) == ()
        assert policy.release(ticket - 1, now) == (UnloadAction(here),)
        assert policy.unloaded(here, now) == (LoadAction(other),)
        assert policy.loaded(other, 6, now) == (Grant(ticket),)


def test_waiting_ends_but_not_while_the_model_loads() -> None:
    policy = policy_of(a=ModelFacts(6), b=ModelFacts(6))
    assert policy.request(1, "a", 1, 5.0) == (LoadAction("a"),)
    assert policy.request(2, "b", 1, 6.0) == ()
    assert policy.next_deadline() == 6.0 + WAIT
    assert policy.tick(36.0) == (Refuse(2, WaitedTooLong(30.0)),)
    assert policy.next_deadline() is None
    assert policy.loaded("a", 6, 99.0) == (Grant(1),)


def test_an_idle_model_stays_for_one_who_waits_for_room() -> None:
    policy = policy_of(a=ModelFacts(3, ttl=10), b=ModelFacts(6), ready="ab")
    assert policy.request(1, "b", 1, 5.0) == (Grant(1),)
    assert policy.request(2, "a", 4, 6.0) == ()
    assert policy.next_deadline() == 6.0 + WAIT
    assert policy.tick(20.0) == ()


def test_a_failed_load_is_told_to_all_who_waited_for_it() -> None:
    policy = policy_of(a=ModelFacts(6), b=ModelFacts(6))
    assert policy.request(1, "a", 1, 5.0) == (LoadAction("a"),)
    assert policy.request(2, "a", 1, 5.0) == ()
    assert policy.request(3, "b", 1, 5.0) == ()
    failed = FailedToLoad("a")
    assert policy.load_failed("a", 6.0) == (Refuse(1, failed), Refuse(2, failed), LoadAction("b"))
    assert policy.request(4, "a", 1, 7.0) == ()


def test_a_model_that_turns_out_too_large_is_refused_and_goes() -> None:
    policy = policy_of(a=ModelFacts(3))
    assert policy.request(1, "a", 1, 5.0) == (LoadAction("a"),)
    assert policy.loaded("a", 11, 6.0) == (
        Refuse(1, NeverFits(needed=12, available=10)),
        UnloadAction("a"),
    )
    assert policy.unloaded("a", 7.0) == ()
    assert policy.request(2, "a", 0, 8.0) == (Refuse(2, NeverFits(needed=11, available=10)),)


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


@pytest.mark.soak
def test_keeps_its_promises_whatever_happens() -> None:
    run_state_machine_as_test(PolicyMachine, settings=MANY)
